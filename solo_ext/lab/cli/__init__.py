"""The command ``solo-ext``."""
