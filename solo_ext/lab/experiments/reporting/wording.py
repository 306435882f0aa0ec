"""How reports write numbers; what is not there is a dash."""

from __future__ import annotations

from solo_ext.lab.experiments.reporting.statistics import Estimate

DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


def signed(value: float) -> str:
    """Such as ``+1.20``."""
    return f"{value:+.2f}".replace("-", MINUS)


def mean_and_deviation(found: Estimate | None, of: int | None = None) -> str:
    """Such as ``47.90 ± 1.20``, and the count where it is not the one that readers expect.

    Args:
        found: over seeds.
        of: seeds of the row.
    """
    if found is None:
        return DASH
    text = f"{found.mean:.2f}"
    if found.deviation is not None:
        text += f" ± {found.deviation:.2f}"
    return text if of is None or found.count == of else f"{text} (n = {found.count})"


def mean_and_interval(found: Estimate | None, of: int | None = None) -> str:
    """Such as ``+1.20 (+0.30 to +2.10)``: a difference and its 95 % interval."""
    if found is None:
        return DASH
    text = signed(found.mean)
    if found.low is not None and found.high is not None:
        text += f" ({signed(found.low)} to {signed(found.high)})"
    return text if of is None or found.count == of else f"{text} (n = {found.count})"


def whole(value: float | None) -> str:
    """Such as ``1,234``; small numbers keep a decimal."""
    if value is None:
        return DASH
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def gibibytes(value: int | None) -> str:
    """Such as ``1.25 GiB``."""
    return DASH if value is None else f"{value / 2**30:.2f} GiB"


def p_value(value: float | None) -> str:
    """Such as ``0.012``; below a thousandth it is written so."""
    if value is None:
        return DASH
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def counted(count: int, one: str, many: str) -> str:
    """Such as ``1 record`` or ``2 records``."""
    return f"{count} {one if count == 1 else many}"
