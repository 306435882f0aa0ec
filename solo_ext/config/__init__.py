"""Configs: composing them with Hydra, checking them, filling in what follows from them."""
