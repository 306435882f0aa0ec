"""Shards on disk, and copies of shards from a storage that is stood in for by a folder.

What both kinds of shards do alike; ``test_webdataset.py`` has what is of tars alone.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision.transforms import ToTensor

from solo_ext.config.schema import Augmentation
from solo_ext.core.draws import derive_seed, permutation
from solo_ext.data import shards as sharded
from solo_ext.data.convert import convert
from solo_ext.data.images import class_names, images_fingerprint, open_images
from solo_ext.data.loaders import FixedLoader, pretrain_loader
from solo_ext.data.reading import (
    SkipUnreadable,
    StorageUnavailable,
    UnreadableImage,
    name_of,
    read_sample,
    targets_of,
)
from solo_ext.data.views import EpochSampler, FixedViews, shard_order, shard_starts
from tests.data import making

COUNT, EACH = 60, 10
"""Images, and those of a shard."""
OF_MOSAICML = Path(__file__).parent / "mosaicml_shards"
"""Written by mosaicml-streaming 0.13.0: columns img (png), name and cls (str), sha1 and xxh64."""
ADDRESS = "s3://bucket/images"
Opened = Callable[..., Any]
opened_mds = functools.partial(making.opened, format="streaming")
refused_mds = functools.partial(making.refused, format="streaming")


@pytest.fixture(params=["streaming", "webdataset"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def of_kinds(other: str, *given: tuple[str, Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by pairs of a kind and another value: both kinds copy and serve alike."""
    return pytest.mark.parametrize(("kind", other), given, indirect=["kind"])


@pytest.fixture
def opened(kind: str) -> Opened:
    """Opens images of this kind."""
    return functools.partial(making.opened, format=kind)


def name(kind: str, number: int) -> str:
    return f"shard.{number:05}.{END[kind]}"


END = {"streaming": "mds", "webdataset": "tar"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six shards of ten images each, of three classes, and tars of the same."""
    root = tmp_path_factory.mktemp("written")
    folder = making.write_folder(root / "folder", list(map(making.png, range(COUNT))), "abc")
    images = making.opened(folder)
    size = len(making.png(0)) + 4 + 8 + 4
    # Some for the header, and fewer than would hold another image.
    convert(images, root / "streaming", EACH * size + 250)
    shards = opened_mds(root / "streaming")
    samples = [
        {"png": shards.encoded(i), "json": b'{"label": "%s"}' % b"abc"[target : target + 1]}
        for i, target in enumerate(shards.targets)
    ]
    for number in range(COUNT // EACH):
        own = samples[number * EACH : (number + 1) * EACH]
        making.write_tar(root / "webdataset" / name("webdataset", number), own)
    return root


@pytest.fixture
def shards(written: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(written / "streaming", tmp_path / "shards"))


@pytest.fixture
def of_both(kind: str, written: Path, tmp_path: Path) -> Path:
    """Likewise, of either kind."""
    return Path(shutil.copytree(written / kind, tmp_path / "shards"))


def pixel(image: Any) -> int:
    return int(image.getpixel((0, 0))[0])


def test_the_same_images_as_before(kind: str, opened: Opened, written: Path) -> None:
    images = opened(written / kind)
    assert np.diff(shard_starts(images)).tolist() == [EACH] * 6  # type: ignore[arg-type]
    assert class_names(images) == ["a", "b", "c"]
    levels = [pixel(images[i][0]) for i in range(COUNT)]
    assert sorted(levels) == list(range(COUNT))
    # The classes are mixed, because a batch is of few shards.
    assert levels != sorted(levels)
    assert targets_of(images) == [level // 20 for level in levels]
    assert [images[i][1] for i in range(COUNT)] == targets_of(images)
    assert name_of(images, 23) == f"{written}/{kind}/{name(kind, 2)}, sample 3"
    assert images.encoded(23) == making.png(levels[23])  # type: ignore[attr-defined]
    with pytest.raises(IndexError):
        images[COUNT]


def test_shards_of_mosaicml(monkeypatch: pytest.MonkeyPatch) -> None:
    images = opened_mds(OF_MOSAICML)
    assert [pixel(images[i][0]) for i in range(7)] == [20 * i for i in range(7)]
    with monkeypatch.context() as patch:
        # The second time they are not read for their labels.
        patch.setattr(sharded.ShardedImages, "value", None)
        again = opened_mds(OF_MOSAICML)
        with pytest.raises(TypeError):
            again[0]
    for found in (images, again):
        assert targets_of(found) == [0, 1, 0, 1, 0, 1, 0]
        assert class_names(found) == ["a", "b"]
    named = opened_mds(OF_MOSAICML, streaming={"image": "img", "label": "name"})
    assert class_names(named) == [f"n{i}" for i in range(7)]
    unlabelled = opened_mds(OF_MOSAICML, no_labels=True)
    assert set(targets_of(unlabelled)) == {-1}


def test_a_column_named_as_a_path(tmp_path: Path) -> None:
    """Nothing is written outside of the cache folder."""
    shards = Path(shutil.copytree(OF_MOSAICML, tmp_path / "shards"))
    index = shards / "index.json"
    index.write_text(index.read_text().replace('"cls"', json.dumps(str(tmp_path / "elsewhere"))))
    images = opened_mds(shards, streaming={"label": str(tmp_path / "elsewhere")})
    assert class_names(images) == ["a", "b"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cache", "shards"]


@pytest.mark.parametrize(
    ("column", "name", "problem"),
    [
        ("image", "none", "no columns of images; name one of bytes, jpeg, png"),
        ("image", "cls", "no columns of images"),
        ("label", "img", "no columns of labels.*no_labels=true; columns: cls .str., img .png."),
    ],
)
def test_other_columns(column: str, name: str, problem: str) -> None:
    error = refused_mds(problem, OF_MOSAICML, streaming={column: name})
    assert error.key == f"data.streaming.{column}"


@pytest.mark.slow
def test_mosaicml_reads_ours(written: Path) -> None:
    theirs: Any = pytest.importorskip("streaming")
    ours = opened_mds(written / "streaming")
    read = theirs.StreamingDataset(
        local=str(written / "streaming"), batch_size=1, validate_hash="sha256"
    )
    assert len(read) == COUNT
    for index in range(COUNT):
        assert read[index]["image"] == ours.encoded(index)
        assert read[index]["label"] == ours.targets[index]


# The order.


def test_every_sample_once_for_any_number_of_ranks(
    kind: str, opened: Opened, written: Path
) -> None:
    """Of parts too; any 3 in a row are of 3 shards or more, and 15 of fewer than all."""
    for fraction in (-1, 0.5):
        images = opened(written / kind, fraction=fraction)
        starts = shard_starts(images)
        assert starts is not None
        size = len(images)
        assert starts[-1] == size == (COUNT if fraction < 0 else COUNT // 2)

        def order(epoch: int, ranks: int, rank: int, starts: Any = starts) -> list[int]:
            sampler = EpochSampler(int(starts[-1]), 5, ranks, rank, starts, 3)
            sampler.set_epoch(epoch)
            return [key.sample for key in sampler]

        alone = order(0, 1, 0)
        assert sorted(alone) == list(range(size))
        assert alone != order(1, 1, 0)
        pairs = zip(order(0, 2, 0), order(0, 2, 1), strict=True)
        assert [sample for pair in pairs for sample in pair] == alone
        held = np.searchsorted(starts, alone, side="right") - 1
        counts = [len(set(held[i : i + 6].tolist())) for i in range(size - 6)]
        assert max(counts) <= 5 < 6 == len(set(held.tolist()))
        assert min(counts) >= 2


@pytest.mark.parametrize("at_once", [1, 2, 3, 9])
def test_the_order_is_that_of_lanes(at_once: int) -> None:
    """Against a loop; the numbers of images do not divide, and a shard is empty."""
    samples, seed = [[0, 1, 2], [], [3, 4, 5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15]], 11
    starts = np.cumsum([0, *map(len, samples)])
    held = [np.array(shard) for shard in samples if shard]
    size, count = 16, len(held)
    sequence: list[int] = []
    for number in permutation(count, seed)(np.arange(count)).tolist():
        within = permutation(len(held[number]), derive_seed(seed, number))(
            np.arange(len(held[number]))
        )
        sequence += held[number][within].tolist()
    lanes = min(at_once, count)
    cut: list[list[int]] = []
    for lane in range(lanes):
        length = len(range(lane, size, lanes))
        own, sequence = sequence[:length], sequence[length:]
        late = lane * (size // count) // lanes
        cut.append(own[late:] + own[:late])
    expected = [cut[place % lanes][place // lanes] for place in range(size)]
    order = shard_order(starts, seed, at_once)
    assert order(np.arange(size)).tolist() == expected
    assert order(np.array([7, 2])).tolist() == [expected[7], expected[2]]


def test_shards_come_one_after_another_and_once() -> None:
    """With room for as many as are shuffled and two, each is fetched once, lanes apart."""
    starts = np.arange(0, 100 * 50 + 1, 50)
    at_once, size = 8, 5000
    sampler = EpochSampler(size, 3, 1, 0, starts, at_once)
    held: dict[int, None] = {}
    fetched: list[int] = []
    for place, key in enumerate(sampler):
        shard = key.sample // 50
        if shard in held:
            held.pop(shard)
        else:
            fetched.append(place)
            if len(held) == at_once + 2:
                held.pop(next(iter(held)))
        held[shard] = None
    # A shard that is cut, or begun late, comes twice.
    assert 100 <= len(fetched) <= 100 + 2 * at_once
    between = Counter(place // 200 for place in fetched[at_once:])
    assert max(between.values()) <= 8


# Faults on disk.


def damage(shards: Path, how: str, shard: int = 2) -> None:
    """Of a shard, by default that of the samples 20 to 29."""
    (file,) = shards.glob(f"shard.{shard:05}.*")
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "short":
        file.write_bytes(content[:-5])
    elif how == "a pipe":
        file.unlink()
        os.mkfifo(file)
    elif how == "empty" and file.suffix == ".mds":
        # The fourth sample ends where it begins.
        content[20:24] = content[16:20]
        file.write_bytes(content)
    else:
        # Of tars the headers.
        end = 4 + 44 if file.suffix == ".mds" else len(content)
        content[4:end] = b"\xff" * (end - 4)
        file.write_bytes(content)


HOW = {
    "missing": "the shard is not there",
    "short": "bytes, and .* in the index",
    "offsets": "a sample lies outside of it|it is not as it was indexed .bad checksum.",
    "empty": "shorter than the sizes of its columns|it is not as it was indexed .bad checksum.",
    "a pipe": "no regular file",
}


@pytest.mark.fault
@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", HOW)
def test_a_damaged_shard_is_named(how: str, kind: str, opened: Opened, of_both: Path) -> None:
    images = opened(of_both)
    damage(of_both, how)
    with pytest.raises(UnreadableImage, match=HOW[how]) as caught:
        images[23]
    assert caught.value.what == f"{of_both}/{name(kind, 2)}, sample 3"
    assert images[19]
    assert images[30]


@pytest.mark.fault
@of_kinds("workers", ("streaming", 0), ("streaming", 2), ("webdataset", 0))
def test_a_damaged_shard_is_left_out(workers: int, kind: str, of_both: Path) -> None:
    """Each of its samples is stood in for by one of the next shard, by another for each."""
    given: dict[str, Any] = {"num_workers": workers, "streaming": {"shuffle_shards": 2}}
    data = making.section(of_both, format=kind, unreadable="skip", **given)
    augmentation = Augmentation(crop_size=8, num_crops=1)
    run = making.run_of(data, 6, augmentation)
    images = open_images(data, "train")
    damage(of_both, "missing")
    assert [read_sample(images, i)[0] for i in range(18, 32)] == [18, 19, *range(30, 40), 30, 31]
    loader = pretrain_loader(run, images)
    served = Counter(int(i) for indices, _, _ in loader for i in indices)
    lost, stood_in = range(20, 30), range(30, 40)
    assert served == {i: 1 + (i in stood_in) for i in range(COUNT) if i not in lost}
    assert sorted(loader.skipped) == list(lost)
    loader._iterator = None
    fixed = FixedLoader(FixedViews(images, ToTensor()), 8, workers)
    assert sum(len(targets) for _, targets in fixed) == COUNT - 10
    assert fixed.skipped == list(lost)


@pytest.mark.fault
def test_a_sample_of_the_only_shard_is_left_out(shards: Path, tmp_path: Path) -> None:
    convert(opened_mds(shards), tmp_path / "one", 10**9)
    damage(tmp_path / "one", "empty", 0)
    data = making.section(tmp_path / "one", format="streaming", unreadable="skip")
    assert read_sample(open_images(data, "train"), 3)[0] == 4


@pytest.mark.fault
def test_more_samples_in_a_row_than_files_may_be_lost(
    opened: Opened, of_both: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard is one file of many samples."""
    monkeypatch.setattr("solo_ext.data.reading.MAX_CONSECUTIVE_UNREADABLE", 4)
    images = opened(of_both, unreadable="skip")
    damage(of_both, "missing")
    fixed = FixedLoader(FixedViews(images, ToTensor()), 8)
    assert sum(len(targets) for _, targets in fixed) == COUNT - 10
    for file in of_both.glob("shard.*"):
        file.unlink()
    with pytest.raises(UnreadableImage, match="none of 4 images in a row can be read"):
        read_sample(images, 0)


def change(key: str, value: Any) -> Callable[[Path], None]:
    def make(shards: Path) -> None:
        index = json.loads((shards / "index.json").read_text())
        for entry in index["shards"]:
            entry[key] = value
        (shards / "index.json").write_text(json.dumps(index))

    return make


def named(name: str) -> Callable[[Path], None]:
    return change("raw_data", {"basename": name, "bytes": 9, "hashes": {}})


@pytest.mark.fault
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda s: (s / "index.json").unlink(), "no index.json there; give a folder of shards"),
        (lambda s: (s / "index.json").write_text("{"), "damaged, or of another kind"),
        (lambda s: (s / "index.json").write_text("[]"), "damaged, or of another kind"),
        (lambda s: (s / "index.json").write_text('{"shards": []}'), "no sample in its shards"),
        (change("version", 1), "not MDS of version 2"),
        (change("format", "jsonl"), "not MDS of version 2"),
        (change("compression", "zstd"), "shards are compressed .zstd."),
        (change("samples", "many"), "damaged"),
        (change("samples", -1), "damaged"),
        (change("column_sizes", []), "damaged"),
        (named("../secret"), "'../secret' is no shard in this folder"),
        (named("/etc/passwd"), "is no shard in this folder"),
        (lambda s: (s / "targets.npy").unlink(), "its targets.npy cannot be read"),
        (lambda s: np.save(s / "targets.npy", np.zeros(3, np.int32)), "not of these shards"),
        (
            lambda s: np.save(s / "targets.npy", np.array([{}]), allow_pickle=True),
            "its targets.npy cannot be read",
        ),
    ],
)
def test_an_index_of_another_kind(make: Any, problem: str, shards: Path) -> None:
    make(shards)
    error = refused_mds(problem, shards, split="val")
    assert (error.key, error.value) == ("data.val_path", str(shards))


# A storage.


class Remote:
    """A folder in the place of a storage, which can lose, damage or refuse files."""

    def __init__(self, root: Path) -> None:
        self.root, self.asked, self.faults = root, Counter[str](), dict[str, list[Any]]()

    def get_file_info(self, selector: Any) -> Any:
        assert selector.base_dir == "bucket/images"
        from pyarrow import fs

        return fs.LocalFileSystem().get_file_info(fs.FileSelector(str(self.root)))

    def open_input_stream(self, path: str) -> Any:
        name = path.removeprefix("bucket/images/")
        with (self.root / "asked").open("a") as log:
            log.write(f"{name}\n")
        self.asked[name] += 1
        fault = self.faults.get(name, [])
        now = fault.pop(0) if fault else None
        if isinstance(now, Exception):
            raise now
        content = (self.root / name).read_bytes()
        file = self.root / f"{name}.damaged"
        file.write_bytes(content[:-1] + b"?")
        return (file if now == "damaged" else self.root / name).open("rb")


def stand_in(root: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    pytest.importorskip("pyarrow")
    storage = Remote(root)
    monkeypatch.setattr(sharded, "_file_system", lambda root, settings: storage)
    return storage


@pytest.fixture
def remote(
    kind: str, opened: Opened, of_both: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Remote:
    """Shards of either kind, nothing of which is here; the images of tars have been found."""
    storage = stand_in(of_both, monkeypatch)
    if kind == "webdataset":
        opened(ADDRESS)
        for copy in copies(cache):
            copy.unlink()
        storage.asked.clear()
        (of_both / "asked").unlink()
    return storage


def copies(cache: Path) -> list[Path]:
    return sorted(cache.rglob("shard.*.*"))


def test_each_shard_is_copied_once(
    remote: Remote, kind: str, opened: Opened, written: Path, cache: Path
) -> None:
    images = opened(ADDRESS)
    here = opened(written / kind)
    assert copies(cache) == []
    assert name_of(images, 23) == f"{ADDRESS}/{name(kind, 2)}, sample 3"
    for _ in range(2):
        assert all(images[i][0].tobytes() == here[i][0].tobytes() for i in range(COUNT))
    assert targets_of(images) == targets_of(here)
    assert images_fingerprint(images) == images_fingerprint(here) is not None
    again = opened(ADDRESS)
    assert again[5][1] == here[5][1]
    assert len(copies(cache)) == 6
    assert remote.asked.pop("index.json", 2) == 2
    assert set(remote.asked.values()) == {1}


def test_shards_are_copied_at_the_same_time(
    remote: Remote, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader waits for a shard that it needs and not for others."""
    images = opened(ADDRESS)
    both, stream = threading.Barrier(2), remote.open_input_stream

    def meet(path: str) -> Any:
        both.wait(timeout=20)
        return stream(path)

    monkeypatch.setattr(remote, "open_input_stream", meet)
    with ThreadPoolExecutor(2) as pool:
        for level, (_, target) in zip(
            (0, EACH), pool.map(images.__getitem__, (0, EACH)), strict=True
        ):
            assert target == images.targets[level]


def _read_all(images: Any) -> None:
    for index in range(COUNT):
        images[EACH * index % COUNT + index * EACH // COUNT]


@of_kinds("room", ("streaming", None), ("webdataset", 4))
def test_processes_share_the_copies(
    room: int | None, remote: Remote, opened: Opened, of_both: Path
) -> None:
    """Also if one removes copies that others are about to read."""
    size = max(file.stat().st_size for file in of_both.glob("shard.*"))
    limit = None if room is None else room * size
    images = opened(ADDRESS, streaming={"cache_limit": limit, "shuffle_shards": 2})
    images[0]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_read_all, args=(images,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    asked = Counter((of_both / "asked").read_text().split())
    held = [n for name, n in asked.items() if name.startswith("shard.")]
    assert len(held) == 6
    assert (max(held) == 1) == (room is None)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("damaged", "its sha256 is not that in the index"),
        (FileNotFoundError(2, "not there"), "the shard is not there"),
    ],
)
def test_a_lost_shard_is_asked_for_once(
    fault: Any, problem: str, remote: Remote, kind: str, opened: Opened
) -> None:
    remote.faults[name(kind, 2)] = [fault]
    images = opened(ADDRESS, unreadable="skip")
    for _ in range(2):
        with pytest.raises(UnreadableImage, match=problem) as caught:
            images[23]
    assert caught.value.what == f"{ADDRESS}/{name(kind, 2)}, sample 3"
    assert remote.asked[name(kind, 2)] == 1
    assert read_sample(images, 23)[0] == 33


@pytest.mark.fault
@of_kinds("workers", ("streaming", 0), ("webdataset", 0), ("webdataset", 2))
def test_a_storage_that_does_not_answer_ends_the_run(
    workers: int, remote: Remote, kind: str, opened: Opened
) -> None:
    """Though unreadable images are skipped: nothing is left out that is there."""
    remote.faults[name(kind, 2)] = [OSError("AWS Error NETWORK_CONNECTION: no route")] * 99
    images = opened(ADDRESS, unreadable="skip")
    assert isinstance(images, SkipUnreadable)
    loader = FixedLoader(FixedViews(images, ToTensor()), 8, workers)
    with pytest.raises(StorageUnavailable, match=rf"^{ADDRESS}/{name(kind, 2)}: AWS Error.*") as e:
        list(loader)
    assert "\n" not in str(e.value)
    assert e.value.exit_code == 1
    # Nothing is remembered: it may be back.
    remote.faults.clear()
    assert len(list(FixedLoader(FixedViews(images, ToTensor()), 8, 0))) == 8


@pytest.mark.fault
def test_errors_at_the_start(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = stand_in(shards, monkeypatch)
    remote.faults["index.json"] = [OSError("AWS Error ACCESS_DENIED: who are you?")]
    assert refused_mds(r"ACCESS_DENIED.*credentials", ADDRESS).key == "data.train_path"
    (shards / "index.json").unlink()
    refused_mds(r"no index.json there", ADDRESS)


@pytest.mark.fault
def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    """The shards are not at fault: their labels are read once, and kept in the cache folder."""
    cache.write_text("a file")
    error = refused_mds("cannot be written: Not a directory; name a folder", OF_MOSAICML)
    assert error.key == "data.streaming.cache_dir"


def test_another_scheme(kind: str) -> None:
    making.refused(r"only s3:// and gs://", "ftp://bucket/images", format=kind)


def test_without_pyarrow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    making.refused(r"pip install 'solo-ext\[streaming\]'", ADDRESS, format=kind)


# Copies.


def test_room_for_some(remote: Remote, kind: str, opened: Opened, cache: Path) -> None:
    """Those that were not read for longest make room; nothing is lost."""
    size = max(file.stat().st_size for file in remote.root.glob("shard.*"))
    settings = {"cache_limit": 4 * size, "shuffle_shards": 2, "cache_dir": str(cache / "shards")}
    images = opened(ADDRESS, streaming=settings)
    for index in range(COUNT):
        assert images[index]
        # The first is read all the time.
        assert images[0]
        assert len(copies(cache)) <= 4
    assert remote.asked[name(kind, 0)] == 1
    assert [file.name[9:11] for file in copies(cache)] == ["00", "03", "04", "05"]
    more = {**settings, "shuffle_shards": 3}
    problem = "raise the limit, or shuffle fewer shards"
    error = making.refused(problem, ADDRESS, format=kind, streaming=more)
    assert error.key == "data.streaming.cache_limit"


def test_copies_of_an_earlier_index_make_room(
    remote: Remote, kind: str, opened: Opened, cache: Path
) -> None:
    """They are from the same address, and counted with those of its index of today."""
    size = max(file.stat().st_size for file in remote.root.glob("shard.*"))
    settings = {"cache_limit": 4 * size, "shuffle_shards": 2}
    before = opened(ADDRESS, streaming=settings)
    for index in range(0, COUNT, 10):
        before[index]
    if kind == "streaming":
        index = remote.root / "index.json"
        index.write_text(f"{index.read_text()} ")
    else:
        os.utime(remote.root / name(kind, 0), (1, 1))
    after = opened(ADDRESS, streaming=settings)
    assert after.storage.folder != before.storage.folder
    for index in range(0, COUNT, 10):
        after[index]
        assert len(copies(cache)) <= 4


def test_a_limit_is_of_copies_alone(opened: Opened, of_both: Path, cache: Path) -> None:
    """Shards of a folder are no copies: they are not touched, whatever the limit."""
    files = sorted(of_both.iterdir())
    for file in files:
        os.utime(file, (1, 1))
    images = opened(of_both, streaming={"cache_limit": "1mb"})
    assert len([images[i] for i in range(COUNT)]) == COUNT
    assert [file.stat().st_mtime for file in files] == [1] * len(files)


@pytest.mark.fault
def test_copies_that_a_killed_process_left(remote: Remote, kind: str, opened: Opened) -> None:
    """Half a download is removed, and half a copy downloaded anew."""
    images = opened(ADDRESS)
    images[23], images[33]
    folder = images.storage.folder
    left = folder / f".{name(kind, 4)}.elsewhere-1.saving"
    left.write_bytes(b"half")
    copy = folder / name(kind, 2)
    copy.write_bytes(copy.read_bytes()[:100])
    assert images[23]
    assert images[43]
    assert not left.exists()
    assert remote.asked[name(kind, 2)] == 2


def test_another_index_at_the_same_address(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(shards, monkeypatch)
    before = opened_mds(ADDRESS)
    first, target = name_of(before, 0), before[0][1]
    folder = making.write_folder(shards.parent / "new", list(map(making.png, range(100, 104))))
    shutil.rmtree(shards)
    convert(making.opened(folder), shards)
    after = opened_mds(ADDRESS)
    assert name_of(after, 0) == first
    assert sorted(pixel(after[i][0]) for i in range(4)) == [100, 101, 102, 103]
    assert before[0][1] == target
