"""Shared parts of figures, and the tree that pages are tested by."""

from __future__ import annotations

import pytest

from solo_ext.lab.evaluation.svg import nice_ticks, tick_labels
from tests.page_tree import parse


@pytest.mark.parametrize(
    ("low", "high", "ticks", "labels"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (1.0, 38.0, [0.0, 10.0, 20.0, 30.0, 40.0], ["0", "10", "20", "30", "40"]),
        (-3.0, 4.0, [-4.0, -2.0, 0.0, 2.0, 4.0], ["-4", "-2", "0", "2", "4"]),
        (8e5, 1.2e6, [8e5, 9e5, 1e6, 1.1e6, 1.2e6], ["8.0e5", "9.0e5", "1.0e6", "1.1e6", "1.2e6"]),
    ],
)
def test_ticks_are_round_numbers(
    low: float, high: float, ticks: list[float], labels: list[str]
) -> None:
    found = nice_ticks(low, high)
    assert found == pytest.approx(ticks)
    assert tick_labels(found) == labels


def test_epoch_ticks_are_whole() -> None:
    assert nice_ticks(1, 2, whole=True) == [1.0, 2.0]
    assert nice_ticks(1, 2) == pytest.approx([1.0, 1.2, 1.4, 1.6, 1.8, 2.0])


def test_tree_refuses_broken_pages() -> None:
    for broken in ("<p><b></p></b>", "<p>", "</p>", '<p a="1" a="2"></p>'):
        with pytest.raises(AssertionError):
            parse(broken)
