"""Foundations of every other part of the plugin; nothing here imports another part.

``errors`` (errors and messages for users), ``registry`` (tables of methods and losses by name),
``files`` (atomic writes, JSON Lines, locks), ``distributed`` (collectives over ranks, errors that
end all ranks), ``precision`` (fp32 under autocast), ``draws`` (random numbers that depend on seeds
alone), ``types`` (types of settings with their allowed ranges).
"""
