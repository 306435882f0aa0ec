"""Writes the tested versions into pyproject.toml and requirements.lock.

Run it after `uv lock --upgrade` and a green test suite: `uv run python scripts/pin.py`.
uv's own lock file is not committed because it names the index that it was made from.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXPORT = [
    "uv",
    "export",
    "--quiet",
    "--no-hashes",
    "--no-emit-project",
    "--no-header",
    "--no-annotate",
    "--all-groups",
]
# torch pins its CUDA libraries itself, and they differ by platform.
FOLLOWS_TORCH = re.compile(r"^(nvidia-(?!dali)|cuda-|triton==)")


def main() -> None:
    """Exports the lock and rewrites both files."""
    lines = subprocess.run(EXPORT, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    pins = [line.strip() for line in lines.splitlines() if "==" in line]
    (ROOT / "requirements.lock").write_text("\n".join(pins) + "\n")
    kept = [pin for pin in pins if not FOLLOWS_TORCH.match(pin)]
    block = "".join(f'    "{pin}",\n' for pin in kept)
    file = ROOT / "pyproject.toml"
    text, count = re.subn(
        r"constraint-dependencies = \[\n.*?\n?\]\n",
        lambda _: f"constraint-dependencies = [\n{block}]\n",
        file.read_text(),
        flags=re.DOTALL,
    )
    assert count == 1, "pyproject.toml has no constraint-dependencies"
    file.write_text(text)
    print(f"{len(pins)} versions in requirements.lock, {len(kept)} in pyproject.toml")


if __name__ == "__main__":
    main()
