"""Shards on a server of GCS, that of ``uv tool install gcp-storage-emulator``.

It asks nobody for credentials, and pyarrow gets none for it.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from solo_ext.core.errors import ConfigError
from solo_ext.data.convert import convert
from solo_ext.data.images import open_images
from tests.data.making import section, write_tars

EMULATOR = shutil.which("gcp-storage-emulator")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(EMULATOR is None, reason="there is no command gcp-storage-emulator"),
]
ADDRESS = "gs://bucket/images"
KINDS = {"streaming": "streaming", "webdataset": "tars"}


@pytest.fixture(scope="module")
def files(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``streaming`` and ``tars`` of the same images."""
    out = tmp_path_factory.mktemp("files")
    folders = open_images(section(images), "train")
    convert(folders, out / "streaming", 6000)
    write_tars(out / "tars", folders, 8)
    return out


@pytest.fixture
def server(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from pyarrow import fs

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("SOLO_EXT_CACHE", str(tmp_path / "cache"))
    words = [str(EMULATOR), "start", f"--port={port}", "--in-memory", "--default-bucket=bucket"]
    null = subprocess.DEVNULL
    with subprocess.Popen(words, stdout=null, stderr=null) as process:
        try:
            for _ in range(600):
                with socket.socket() as tried:
                    if not tried.connect_ex(("127.0.0.1", port)):
                        break
                time.sleep(0.1)
            storage = fs.GcsFileSystem(anonymous=True)
            for file in files.glob("*/[!.]*"):
                place = f"bucket/images/{file.parent.name}/{file.name}"
                with storage.open_output_stream(place) as sent:
                    sent.write(file.read_bytes())
            yield
        finally:
            process.kill()


def opened(path: Path | str, kind: str) -> Any:
    settings = {"anonymous": True, "download_retry": 0, "download_timeout": 5.0}
    return open_images(section(path, format=kind, streaming=settings), "train")


@pytest.mark.parametrize("kind", KINDS)
def test_the_images_of_a_folder(kind: str, server: None, files: Path) -> None:
    images, here = opened(f"{ADDRESS}/{KINDS[kind]}", kind), opened(files / KINDS[kind], kind)
    assert len(images) == len(here) > 8
    assert images.targets.tolist() == here.targets.tolist()
    for index in range(len(here)):
        assert images[index][0].tobytes() == here[index][0].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_there_is_named(kind: str, server: None) -> None:
    with pytest.raises(ConfigError, match=r"data\.train_path='gs://bucket/nowhere'"):
        opened("gs://bucket/nowhere", kind)
