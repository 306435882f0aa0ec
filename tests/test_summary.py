"""What a test run says of the tests that it skipped."""

from __future__ import annotations

from types import SimpleNamespace

from tests.conftest import pytest_terminal_summary


def test_skipped_tests_are_counted_by_reason() -> None:
    lines: list[str] = []
    reports = [
        SimpleNamespace(longrepr=("file.py", 3, f"Skipped: {reason}"))
        for reason in ("needs a CUDA device", "no pandas", "needs a CUDA device")
    ]
    pytest_terminal_summary(SimpleNamespace(stats={"skipped": reports}, write_line=lines.append))
    assert lines == ["skipped (-rs names each): 2 needs a CUDA device; 1 no pandas"]
    pytest_terminal_summary(SimpleNamespace(stats={}, write_line=lines.append))
    assert len(lines) == 1
