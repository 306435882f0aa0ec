"""Configs, from YAML to a checked mapping with every default written out.

``schema`` has every key as pydantic models, with the value types of ``core.types``; ``compose``
makes a mapping of YAML files and overrides with Hydra; ``check`` validates it and says in one line
what is wrong; ``hardware`` asks Lightning and the machine about devices. ``untrusted`` refuses what
a config of somebody else could do.
"""
