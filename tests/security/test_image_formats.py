"""What stands behind the name of an image runs no other program."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import EpsImagePlugin, Image

from solo_ext.data.reading import UnreadableImage, decode_image, read_file
from solo_ext.lab.evaluation.evaluate import evaluate
from tests.lab.training.same_run import train

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n"


@pytest.fixture
def ghostscript(mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``gs`` that leaves the mark of code that was run."""
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch '{mark}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    # PIL looks for it once.
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)


@pytest.mark.usefixtures("ghostscript")
def test_pil_would_start_it(mark: Path) -> None:
    with contextlib.suppress(Exception), Image.open(io.BytesIO(POSTSCRIPT)) as image:
        image.load()
    assert mark.is_file()
    mark.unlink()


@pytest.mark.usefixtures("ghostscript")
def test_postscript_under_the_name_of_an_image(
    make_config: Callable[..., dict[str, Any]], images: Path, tmp_path: Path
) -> None:
    """In folders of training and of evaluation, and in files that hold images."""
    run, folder = tmp_path / "run", tmp_path / "images"
    for label in "012":
        (folder / label).mkdir(parents=True)
        for number in range(24):
            (folder / label / f"{number}.png").write_bytes(POSTSCRIPT)
    with pytest.raises(UnreadableImage, match="it is no image of BMP"):
        decode_image(read_file(folder / "0" / "0.png"), lambda: "0.png")
    with pytest.raises(UnreadableImage, match="it is no image of BMP"):
        decode_image(POSTSCRIPT, lambda: "in.h5:0/0")
    config = make_config("simclr", data={"train_path": str(folder)})
    with pytest.raises(UnreadableImage, match="it is no image of BMP"):
        train(config, tmp_path / "other")
    train(make_config("simclr"), run)
    with pytest.raises(UnreadableImage, match="it is no image of BMP"):
        evaluate(
            run, "knn", {"data": {"train_path": str(images), "val_path": str(folder)}, "k": [1]}
        )
