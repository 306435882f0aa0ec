"""Foundations of every other part of the plugin; nothing here imports another part.

``errors`` (what a user is told), ``registry`` (names to methods and losses),
``files`` (atomic writes, lines of JSON, locks), ``distributed`` (gathering over ranks, ending
together), ``precision`` (fp32 under autocast), ``draws`` (random numbers from seeds alone),
``types`` (ranges of values in settings).
"""
