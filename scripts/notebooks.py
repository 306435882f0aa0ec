"""Runs the documentation's notebooks anew, which keep what their cells show.

``uv run python scripts/notebooks.py`` runs all of them, and names of files those alone.
"""

from __future__ import annotations

import base64
import io
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs").glob("*/*.ipynb"))
WIDTH, COLORS = 800, 64
"""Of a picture that is kept, at most; it shows the same in a third of the bytes."""


def run(file: Path, folder: Path, quick: bool = False) -> NotebookNode:
    """Runs every cell.

    Args:
        file: the notebook, which is left as it is.
        folder: working directory, which data and runs are written to.
        quick: whether every number in the cell that is tagged ``parameters`` becomes 1.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(file, as_version=4)
    if quick:
        (cell,) = (c for c in notebook.cells if "parameters" in c.metadata.get("tags", ()))
        cell.source = re.sub(r"\d+", "1", cell.source)
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, kernel_name="python3", record_timing=False, resources=where)
    return client.execute()


def main() -> None:
    """Runs notebooks and writes them with what they show."""
    for file in map(Path, sys.argv[1:] or NOTEBOOKS):
        with TemporaryDirectory() as folder:
            notebook = run(file, Path(folder))
        for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
            # Warnings are of the machine that ran it.
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "image/png" in output.get("data", ()):
                    output.data["image/png"] = _smaller(output.data["image/png"])
        # Which version ran it is of no interest.
        notebook.metadata.language_info = {"name": "python"}
        nbformat.write(notebook, file)
        print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB")


def _smaller(png: str) -> str:
    """The same picture with fewer pixels and colours; both in base64."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.thumbnail((WIDTH, picture.height))
    written = io.BytesIO()
    picture.quantize(COLORS).save(written, "png", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


if __name__ == "__main__":
    main()
