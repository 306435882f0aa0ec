"""Configs, from YAML to a checked ``RunConfig`` with every default written out.

``schema`` defines every key as pydantic models, with the value types of ``core.types``; ``compose``
builds a mapping from YAML files and overrides with Hydra; ``check`` makes it a ``RunConfig`` and
reports a mistake in one line. ``untrusted`` refuses dangerous content in other people's configs.
"""
