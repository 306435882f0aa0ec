"""The advisories that set the lowest versions in ``pyproject.toml``.

``scripts/audit.py --floors`` asks whether there are more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from packaging.version import Version


class Advisory(NamedTuple):
    """A defect of a package that breaks a guarantee of this one.

    Attributes:
        package: name of the distribution.
        id: number of the advisory.
        fixed: first version without the defect.
        effect: what earlier versions do.
    """

    package: str
    id: str
    fixed: str
    effect: str


_STEALS = "was a malicious upload that steals credentials"
_RUNS = "can run code that a checkpoint names"
ADVISORIES = (
    *(
        Advisory(p, "GHSA-qqmf-gpg7-g8gw", "2.6.6", _RUNS)
        for p in ("lightning", "pytorch-lightning")
    ),
    Advisory("torch", "CVE-2025-32434", "2.6.0", "runs code in a checkpoint, weights_only or not"),
    Advisory("torch", "CVE-2026-24747", "2.10.0", "runs code in a checkpoint, weights_only or not"),
    Advisory("pillow", "CVE-2026-25990", "12.1.1", "writes out of bounds on a crafted image"),
    Advisory("filelock", "CVE-2025-68146", "3.20.1", "truncates what a lock that is a link names"),
    Advisory("filelock", "CVE-2026-22701", "3.20.3", "locks what a lock that is a link names"),
    Advisory("tqdm", "CVE-2024-34062", "4.66.3", "runs code in an argument of its command"),
    Advisory("scikit-learn", "CVE-2024-5206", "1.5.0", "keeps words of training in a vectoriser"),
)
MALICIOUS = {
    (package, version): Advisory(package, "GHSA-w37p-236h-pfx3", "2.6.4", _STEALS)
    for package in ("lightning", "pytorch-lightning")
    for version in ("2.6.2", "2.6.3")
}
"""Malicious releases, which were not published by the packages' own authors."""


def known_bad(versions: Mapping[str, str | None]) -> list[str]:
    """Known defects of the installed packages, one line each; empty if there are none.

    Args:
        versions: by the name of the distribution; ``None`` if it is not installed.
    """
    found = []
    for name, held in versions.items():
        known = [a for a in ADVISORIES if a.package == name]
        if held is None or not known:
            continue
        worst = max(known, key=lambda a: Version(a.fixed))
        remedy = f"pip install --upgrade '{name}>={worst.fixed}'"
        stolen = MALICIOUS.get((name, held))
        if stolen is not None:
            found.append(
                f"{name} {held} {stolen.effect} ({stolen.id}): {remedy}, and renew every secret "
                "of this machine"
            )
        elif Version(held) < Version(worst.fixed):
            found.append(f"{name} {held} {worst.effect} ({worst.id}): {remedy}")
    return found
