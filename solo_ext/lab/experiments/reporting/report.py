"""``solo-ext benchmark report``: records as Markdown, CSV and one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from solo_ext.core.errors import UserError
from solo_ext.core.files import write_text
from solo_ext.lab.experiments.reporting.blocks import Block, Heading
from solo_ext.lab.experiments.reporting.markdown import render_markdown
from solo_ext.lab.experiments.reporting.numbers import render_csv
from solo_ext.lab.experiments.reporting.page import render_page
from solo_ext.lab.experiments.reporting.results import Results, read_results
from solo_ext.lab.experiments.reporting.sections import benchmark_blocks

_SEVERAL = "Accuracy benchmarks"


def write_report(folders: Sequence[Path], out: Path | None = None) -> list[Path]:
    """Writes ``report.md``, ``report.csv`` and ``report.html``, the same tables in each.

    Args:
        folders: that ``solo-ext benchmark run`` wrote; each becomes a part of the report.
        out: where to; null: the first folder.

    Returns:
        The three files.

    Raises:
        UserError: no folder, or one without settings or records.
        ConfigError: settings that are not valid.
    """
    if not folders:
        raise UserError("report: no folder; name those that `solo-ext benchmark run` wrote")
    found = [(folder.resolve().name, read_results(folder)) for folder in folders]
    title, blocks = _whole(found)
    place = folders[0] if out is None else out
    place.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.md": render_markdown(blocks),
        "report.csv": render_csv(found),
        "report.html": render_page(title, blocks),
    }
    for name, text in texts.items():
        write_text(place / name, text)
    return [place / name for name in texts]


def _whole(found: Sequence[tuple[str, Results]]) -> tuple[str, list[Block]]:
    """The title and all blocks; several benchmarks move down by a level each."""
    if len(found) == 1:
        (_, results) = found[0]
        return results.settings.title, [
            Heading(1, results.settings.title),
            *benchmark_blocks(results),
        ]
    blocks: list[Block] = [Heading(1, _SEVERAL)]
    for _, results in found:
        blocks.append(Heading(2, results.settings.title))
        blocks += [
            Heading(block.level + 1, block.text) if isinstance(block, Heading) else block
            for block in benchmark_blocks(results)
        ]
    return _SEVERAL, blocks
