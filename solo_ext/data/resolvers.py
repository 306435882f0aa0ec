"""OmegaConf resolvers that the shipped configs use."""

from __future__ import annotations

from omegaconf import OmegaConf


def add_resolvers() -> None:
    """Registers ``${solo_ext.digits:<split>}``: folder of the digits, written on first use."""
    if not OmegaConf.has_resolver("solo_ext.digits"):
        OmegaConf.register_new_resolver("solo_ext.digits", _digits)


def _digits(split: str) -> str:
    from solo_ext.data.digits import digits_folder

    return str(digits_folder(split))
