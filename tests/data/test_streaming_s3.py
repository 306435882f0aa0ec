"""Shards on a server of S3, moto's, which ``uv tool install 'moto[server]'`` makes a command.

Its requirements do not go with those of omegaconf, so that it is no package of ours. It keeps its
files in memory: they are uploaded again where it is started again.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from torchvision.transforms import ToTensor

from solo_ext.core.errors import ConfigError
from solo_ext.data.convert import convert
from solo_ext.data.images import open_images
from solo_ext.data.loaders import FixedLoader
from solo_ext.data.reading import StorageAway, UnreadableImage
from solo_ext.data.views import FixedViews
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain, resume
from tests.data.making import section, write_tars
from tests.lab.training.resumable import config_of
from tests.lab.training.same_run import assert_same_run, train

MOTO = shutil.which("moto_server")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MOTO is None, reason="there is no command moto_server"),
]
MakeConfig = Callable[..., dict[str, Any]]
ADDRESS = "s3://bucket/images"
RETRY = {"download_retry": 1, "download_timeout": 5.0}


class Server:
    """A process of moto, which can be killed and started again."""

    def __init__(self, files: Path, port: int) -> None:
        self.files, self.port = files, port

    def start(self, *but: str) -> None:
        """Serves all files but some."""
        words = [str(MOTO), "-p", str(self.port)]
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(words, stdout=null, stderr=null)
        for _ in range(600):
            with socket.socket() as tried:
                if not tried.connect_ex(("127.0.0.1", self.port)):
                    break
            time.sleep(0.1)
        from pyarrow import fs

        address = f"http://127.0.0.1:{self.port}"
        storage = fs.S3FileSystem(
            endpoint_override=address, allow_bucket_creation=True, allow_delayed_open=True
        )
        storage.create_dir("bucket")
        for file in self.files.iterdir():
            if file.name not in but and not file.name.startswith("."):
                with storage.open_output_stream(f"bucket/images/{file.name}") as sent:
                    sent.write(file.read_bytes())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def shards(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards")
    convert(open_images(section(images), "train"), out, 6000)
    assert len(list(out.glob("*.mds"))) > 6
    return out


@pytest.fixture(scope="module")
def tars(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folders = open_images(section(images), "train")
    return write_tars(tmp_path_factory.mktemp("tars"), folders, 8)


@pytest.fixture
def server(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    yield from started(shards, tmp_path, monkeypatch)


@pytest.fixture
def tar_server(tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    yield from started(tars, tmp_path, monkeypatch)


def started(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("SOLO_EXT_CACHE", str(tmp_path / "cache"))
    server = Server(files, port)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def data(**given: Any) -> Any:
    return section(ADDRESS, format="streaming", streaming=RETRY, **given)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_started_in_any_way(method: str, server: Server, shards: Path) -> None:
    # A fork server that an earlier test started has its environment, without this server's address.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    images, here = (
        open_images(data(), "train"),
        open_images(section(shards, format="streaming"), "train"),
    )
    # So that a connection is open when a worker is forked.
    images[0]
    loader = FixedLoader(FixedViews(images, ToTensor()), 8, 2, method)
    expected = FixedLoader(FixedViews(here, ToTensor()), 8)
    for (views, targets), (others, labels) in zip(loader, expected, strict=True):
        assert views.equal(others)
        assert targets.equal(labels)


def of_tars(place: Path | str, **given: Any) -> Any:
    settings = {"shuffle_shards": 2, **RETRY}
    return open_images(section(place, format="webdataset", streaming=settings, **given), "train")


def test_tars(tar_server: Server, tars: Path, tmp_path: Path) -> None:
    """Of a folder or by their names, read by workers; their copies stay when the server is gone."""
    last = len(list(tars.iterdir())) - 1
    expected = FixedLoader(FixedViews(of_tars(tars), ToTensor()), 8)
    for address in (ADDRESS, f"{ADDRESS}/train-{{000..{last:03}}}.tar"):
        images = of_tars(address)
        loader = FixedLoader(FixedViews(images, ToTensor()), 8, 2, "spawn")
        for (views, targets), (others, labels) in zip(loader, expected, strict=True):
            assert views.equal(others)
            assert targets.equal(labels)
    with pytest.raises(ConfigError, match=rf"'train-{last + 1:03}.tar' is not there"):
        of_tars(f"{ADDRESS}/train-{{000..{last + 1:03}}}.tar")
    with pytest.raises(ConfigError, match=r"no such folder; give a folder of \.tar files"):
        of_tars("s3://bucket/other")
    tar_server.kill()
    assert images[len(images) - 1]
    with pytest.raises(ConfigError, match=r"NETWORK_CONNECTION.*; look at the address"):
        of_tars(ADDRESS)


@pytest.mark.fault
def test_what_is_not_there_is_named(server: Server) -> None:
    for address in ("s3://bucket/other", "s3://other/images"):
        with pytest.raises(ConfigError, match=r"no index.json there"):
            open_images(section(address, format="streaming", streaming=RETRY), "train")
    server.kill()
    with pytest.raises(ConfigError, match=r"NETWORK_CONNECTION.*; look at the address") as caught:
        open_images(data(), "train")
    assert str(caught.value).startswith(f"data.train_path='{ADDRESS}': ")
    server.start("shard.00002.mds")
    images = open_images(data(), "train")
    first = int(images.shard_starts[2])  # type: ignore[attr-defined]
    with pytest.raises(UnreadableImage, match=r"the shard is not there .tried 2 times.") as lost:
        images[first]
    assert lost.value.what == f"{ADDRESS}/shard.00002.mds, sample 0"


@pytest.mark.fault
def test_a_server_that_comes_back_within_the_tries(server: Server) -> None:
    images = open_images(
        section(ADDRESS, format="streaming", streaming={"download_retry": 6}), "train"
    )
    images[0]
    server.kill()
    threading.Timer(3, server.start).start()
    assert all(images[i] for i in range(len(images)))


class KillServer:
    """A callback's part: kills the server before a step."""

    def __new__(cls, server: Server, step: int) -> Any:
        from lightning.pytorch.callbacks import Callback

        class Killing(Callback):
            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                if trainer.fit_loop.epoch_loop.total_batch_idx == step:
                    server.kill()

        return Killing()


@pytest.mark.fault
def test_a_server_that_is_killed_while_workers_read(server: Server) -> None:
    """They have a few batches more than are served."""
    images = open_images(data(unreadable="skip"), "train")
    batches = iter(FixedLoader(FixedViews(images, ToTensor()), 1, 2))
    next(batches)
    server.kill()
    with pytest.raises(StorageAway, match=r"shard.0000\d.mds: .* .tried 2 times.") as caught:
        list(batches)
    assert "\n" not in str(caught.value)
    server.start()
    assert len(list(FixedLoader(FixedViews(images, ToTensor()), 1, 2))) == len(images)


@pytest.mark.fault
def test_a_server_that_is_killed_while_it_serves(
    server: Server, shards: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The run ends in one line, and resumed as if nothing had been: PCL, with its E-step."""
    sizes = [file.stat().st_size for file in shards.glob("*.mds")]
    more = {"cache_dir": str(tmp_path / "copies"), "shuffle_shards": 2, **RETRY}
    source = {"format": "streaming", "train_path": ADDRESS}
    config = config_of(make_config, "pcl", data={**source, "streaming": more})
    train(config, tmp_path / "whole")
    assert len(list((tmp_path / "copies").rglob("*.mds"))) == len(sizes)
    # Without the copies, and before the E-step has asked for all.
    more = {**more, "cache_dir": str(tmp_path / "others")}
    again = config_of(make_config, "pcl", data={**source, "streaming": more})
    with pytest.raises(StorageAway) as caught:
        pretrain(
            prepare(again),
            run_dir=tmp_path / "parts",
            show_progress=False,
            callbacks=[KillServer(server, 2)],
        )
    assert "\n" not in str(caught.value)
    server.start()
    resume(tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def _read(images: Any, own: list[int], found: Any) -> None:
    found.put([(i, images[i][1]) for i in own])


def test_processes_have_their_own_shares(server: Server, tmp_path: Path) -> None:
    """Two forks of a process that has read, one folder of copies."""
    from solo_ext.data.views import EpochSampler, shard_starts

    images = open_images(data(), "train")
    starts, size = shard_starts(images), len(images)
    shares = [[k.sample for k in EpochSampler(size, 5, 2, rank, starts, 3)] for rank in (0, 1)]
    context = multiprocessing.get_context("fork")
    found: Any = context.Queue()
    processes = [context.Process(target=_read, args=(images, own, found)) for own in shares]
    for process in processes:
        process.start()
    read = sorted(pair for _ in processes for pair in found.get(timeout=60))
    for process in processes:
        process.join(60)
    assert read == [(i, int(t)) for i, t in enumerate(images.targets)]  # type: ignore[attr-defined]
