"""Foundations of every other part of the plugin; nothing here imports another part.

``errors`` (messages to users), ``registry`` (names to methods and losses), ``files`` (atomic
writes, lines of JSON, locks), ``distributed`` (gathering over ranks, errors on one rank),
``precision`` (fp32 under autocast), ``draws`` (random numbers from seeds alone), ``types`` (of
configuration fields).
"""
