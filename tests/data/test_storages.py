"""Shards on servers of S3 and GCS, which keep their files in memory.

``uv tool install 'moto[server]'`` makes the command of the first: its requirements do not go with
those of omegaconf, so that it is no package of ours. ``uv tool install gcp-storage-emulator`` makes
that of the second, which asks nobody for credentials, and pyarrow gets none for it.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from torchvision.transforms import ToTensor

from solo_ext.data.convert import convert
from solo_ext.data.loaders import FixedLoader
from solo_ext.data.reading import StorageUnavailable, UnreadableImage
from solo_ext.data.views import FixedViews
from solo_ext.lab.training.pretrain import resume
from tests.data.making import opened, refused, write_tars
from tests.lab.training.resumable import config_of
from tests.lab.training.same_run import assert_same_run, train

MOTO, EMULATOR = shutil.which("moto_server"), shutil.which("gcp-storage-emulator")
pytestmark = pytest.mark.slow
needs_s3 = pytest.mark.skipif(MOTO is None, reason="there is no command moto_server")
needs_gcs = pytest.mark.skipif(EMULATOR is None, reason="there is no command gcp-storage-emulator")
MakeConfig = Callable[..., dict[str, Any]]
ADDRESS, ON_GCS = "s3://bucket/images", "gs://bucket/images"
RETRY = {"download_retry": 1, "download_timeout": 5.0}
SHARDS: dict[str, Any] = {"format": "streaming", "streaming": RETRY}
TARS: dict[str, Any] = {"format": "webdataset", "streaming": {"shuffle_shards": 2, **RETRY}}


class Server:
    """A process that serves files; it can be killed and started again.

    Args:
        port: that it listens to.
        words: that start it.
        storage: makes pyarrow's client of it.
    """

    def __init__(self, port: int, words: list[str], storage: Callable[[], Any]) -> None:
        self.port, self.words, self.storage = port, words, storage
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, files: Path, *but: str) -> Server:
        """Serves all files of a folder but some."""
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(self.words, stdout=null, stderr=null)
        for _ in range(600):
            with socket.socket() as tried:
                if not tried.connect_ex(("127.0.0.1", self.port)):
                    break
            time.sleep(0.1)
        storage = self.storage()
        for file in files.iterdir():
            if file.name not in but and not file.name.startswith("."):
                with storage.open_output_stream(f"bucket/images/{file.name}") as sent:
                    sent.write(file.read_bytes())
        return self

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def shards(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards")
    convert(opened(images), out, 6000)
    assert len(list(out.glob("*.mds"))) > 6
    return out


@pytest.fixture(scope="module")
def tars(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tars(tmp_path_factory.mktemp("tars"), opened(images), 8)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def s3_server() -> Iterator[Server]:
    """One that nobody has started yet, in the environment where pyarrow finds it."""
    from pyarrow import fs

    port = free_port()
    address = f"http://127.0.0.1:{port}"

    def storage() -> fs.FileSystem:
        found = fs.S3FileSystem(
            endpoint_override=address, allow_bucket_creation=True, allow_delayed_open=True
        )
        found.create_dir("bucket")
        return found

    server = Server(port, [str(MOTO), "-p", str(port)], storage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_ENDPOINT_URL", address)
        try:
            yield server
        finally:
            server.kill()


@pytest.fixture
def s3() -> Iterator[Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    from pyarrow import fs

    port = free_port()
    monkeypatch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", f"http://127.0.0.1:{port}")
    words = [str(EMULATOR), "start", f"--port={port}", "--in-memory", "--default-bucket=bucket"]
    server = Server(port, words, lambda: fs.GcsFileSystem(anonymous=True))
    yield server
    server.kill()


@pytest.fixture
def server(s3: Server, shards: Path) -> Server:
    """One of S3, with shards."""
    return s3.start(shards)


@pytest.fixture(scope="module")
def kept(shards: Path) -> Iterator[Server]:
    """Likewise, which no test kills: it takes seconds to start."""
    with s3_server() as server:
        yield server.start(shards)


def assert_alike(one: FixedLoader, other: FixedLoader) -> None:
    for (views, targets), (others, labels) in zip(one, other, strict=True):
        assert views.equal(others)
        assert targets.equal(labels)


@needs_s3
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("forkserver", 1)])
def test_workers_started_in_any_way(method: str, workers: int, shards: Path) -> None:
    """Spawned ones read tars below."""
    # A fork server that an earlier test started has its environment, without this server's address.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    images = opened(ADDRESS, **SHARDS)
    # So that a connection is open when a worker is forked.
    images[0]
    loader = FixedLoader(FixedViews(images, ToTensor()), 8, workers, method)
    here = opened(shards, format="streaming")
    assert_alike(loader, FixedLoader(FixedViews(here, ToTensor()), 8))


@needs_s3
def test_tars(s3: Server, tars: Path) -> None:
    """Of a folder or by their names; their copies stay when the server is gone."""
    s3.start(tars)
    last = len(list(tars.iterdir())) - 1
    expected = FixedLoader(FixedViews(opened(tars, **TARS), ToTensor()), 8)
    for address, workers in ((ADDRESS, 1), (f"{ADDRESS}/train-{{000..{last:03}}}.tar", 0)):
        images = opened(address, **TARS)
        assert_alike(FixedLoader(FixedViews(images, ToTensor()), 8, workers, "spawn"), expected)
    names = f"{ADDRESS}/train-{{000..{last + 1:03}}}.tar"
    refused(rf"'train-{last + 1:03}.tar' is not there", names, **TARS)
    refused(r"no such folder; give a folder of \.tar files", "s3://bucket/other", **TARS)
    s3.kill()
    assert images[len(images) - 1]
    refused(r"NETWORK_CONNECTION.*; look at the address", ADDRESS, **TARS)


@needs_gcs
@pytest.mark.parametrize("settings", [SHARDS, TARS], ids=["streaming", "webdataset"])
def test_gcs(settings: dict[str, Any], gcs: Server, request: pytest.FixtureRequest) -> None:
    """The images of a folder, and a folder that is not there."""
    files = request.getfixturevalue("shards" if settings is SHARDS else "tars")
    gcs.start(files)
    anonymous = {"anonymous": True, "download_retry": 0, "download_timeout": 5.0}
    given = {**settings, "streaming": anonymous}
    images, here = opened(ON_GCS, **given), opened(files, **given)
    assert len(images) == len(here) > 8
    assert images.targets.tolist() == here.targets.tolist()
    for index in range(len(here)):
        assert images[index][0].tobytes() == here[index][0].tobytes()
    refused(r"data\.train_path='gs://bucket/nowhere'", "gs://bucket/nowhere", **given)


@needs_s3
@pytest.mark.fault
def test_what_is_not_there_is_named(server: Server, shards: Path) -> None:
    for address in ("s3://bucket/other", "s3://other/images"):
        refused(r"no index.json there", address, **SHARDS)
    server.kill()
    error = refused(r"NETWORK_CONNECTION.*; look at the address", ADDRESS, **SHARDS)
    assert str(error).startswith(f"data.train_path='{ADDRESS}': ")
    server.start(shards, "shard.00002.mds")
    images = opened(ADDRESS, **SHARDS)
    first = int(images.shard_starts[2])
    with pytest.raises(UnreadableImage, match="the shard is not there") as lost:
        images[first]
    assert lost.value.what == f"{ADDRESS}/shard.00002.mds, sample 0"


@needs_s3
@pytest.mark.fault
def test_a_server_that_answers_within_the_tries(kept: Server) -> None:
    retry = {"download_retry": 6, "download_timeout": 1.0}
    images = opened(ADDRESS, format="streaming", streaming=retry)
    images[0]
    assert kept.process is not None
    kept.process.send_signal(signal.SIGSTOP)
    threading.Timer(3, kept.process.send_signal, [signal.SIGCONT]).start()
    assert all(images[i] for i in range(len(images)))


@needs_s3
@pytest.mark.fault
def test_a_server_that_is_killed_while_workers_read(server: Server, shards: Path) -> None:
    """They have a few batches more than are served."""
    images = opened(ADDRESS, **SHARDS, unreadable="skip")
    batches = iter(FixedLoader(FixedViews(images, ToTensor()), 1, 2))
    next(batches)
    server.kill()
    with pytest.raises(StorageUnavailable, match=r"shard.0000\d.mds: .*NETWORK_CONN") as caught:
        list(batches)
    assert "\n" not in str(caught.value)
    server.start(shards)
    assert len(list(FixedLoader(FixedViews(images, ToTensor()), 1, 2))) == len(images)


@needs_s3
@pytest.mark.fault
def test_a_server_that_is_killed_while_it_serves(
    server: Server, shards: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The run ends in one line, and resumed as if nothing had been: PCL, with its E-step."""

    def config(cache: str) -> dict[str, Any]:
        more = {"cache_dir": str(tmp_path / cache), "shuffle_shards": 2, **RETRY}
        data = {"format": "streaming", "train_path": ADDRESS, "streaming": more}
        return config_of(make_config, "pcl", data=data)

    def kill(trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == 2:
            server.kill()

    train(config("copies"), tmp_path / "whole")
    assert len(list((tmp_path / "copies").rglob("*.mds"))) == len(list(shards.glob("*.mds")))
    # Without the copies, and before the E-step has asked for all.
    killing = LambdaCallback(on_train_batch_start=kill)
    with pytest.raises(StorageUnavailable) as caught:
        train(config("others"), tmp_path / "parts", callbacks=[killing])
    assert "\n" not in str(caught.value)
    server.start(shards)
    resume(tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
