"""Shards on disk, and copies of shards from a storage that is stood in for by a folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision.transforms import ToTensor

from solo_ext.config.schema import Augmentation, Batch, Images, RunConfig
from solo_ext.core.draws import mix, permutation
from solo_ext.core.errors import ConfigError
from solo_ext.data import shards as sharded
from solo_ext.data.convert import convert
from solo_ext.data.images import class_names, images_fingerprint, open_images
from solo_ext.data.loaders import FixedLoader, pretrain_loader
from solo_ext.data.reading import (
    Skipping,
    StorageAway,
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


def section(path: Path | str, **given: Any) -> Images:
    return making.section(path, format="streaming", **given)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six shards of ten images each, of three classes."""
    root = tmp_path_factory.mktemp("written")
    for index in range(COUNT):
        place = root / "folder" / "abc"[index // 20] / f"{index:02d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(making.png(index))
    images = open_images(making.section(root / "folder"), "train")
    size = len(making.png(0)) + 4 + 8 + 4
    # Some for the header, and fewer than would hold another image.
    convert(images, root / "shards", EACH * size + 250)
    return root


@pytest.fixture
def shards(written: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(written / "shards", tmp_path / "shards"))


def pixel(image: Any) -> int:
    return int(image.getpixel((0, 0))[0])


def test_the_same_images_as_before(written: Path) -> None:
    images = open_images(section(written / "shards"), "train")
    assert np.diff(shard_starts(images)).tolist() == [EACH] * 6  # type: ignore[arg-type]
    assert class_names(images) == ["a", "b", "c"]
    levels = [pixel(images[i][0]) for i in range(COUNT)]
    assert sorted(levels) == list(range(COUNT))
    # The classes are mixed, because a batch is of few shards.
    assert levels != sorted(levels)
    assert targets_of(images) == [level // 20 for level in levels]
    assert [images[i][1] for i in range(COUNT)] == targets_of(images)
    assert name_of(images, 23) == f"{written}/shards/shard.00002.mds, sample 3"
    assert images.encoded(23) == making.png(levels[23])  # type: ignore[attr-defined]
    with pytest.raises(IndexError):
        images[COUNT]


def test_shards_of_mosaicml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOLO_EXT_CACHE", str(tmp_path))
    for _ in range(2):
        images = open_images(section(OF_MOSAICML), "train")
        assert [pixel(images[i][0]) for i in range(7)] == [20 * i for i in range(7)]
        assert targets_of(images) == [0, 1, 0, 1, 0, 1, 0]
        assert class_names(images) == ["a", "b"]
        # The second time they are not read for their labels.
        monkeypatch.setattr(sharded.StreamingImages, "value", None)
        with pytest.raises(TypeError):
            images[0]
        monkeypatch.undo()
        monkeypatch.setenv("SOLO_EXT_CACHE", str(tmp_path))
    named = section(OF_MOSAICML, streaming={"image": "img", "label": "name"})
    assert class_names(open_images(named, "train")) == [f"n{i}" for i in range(7)]
    unlabelled = open_images(section(OF_MOSAICML, no_labels=True), "train")
    assert set(targets_of(unlabelled)) == {-1}


def test_a_column_named_as_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written outside of the cache folder."""
    monkeypatch.setenv("SOLO_EXT_CACHE", str(tmp_path / "cache"))
    shards = Path(shutil.copytree(OF_MOSAICML, tmp_path / "shards"))
    index = shards / "index.json"
    index.write_text(index.read_text().replace('"cls"', json.dumps(str(tmp_path / "elsewhere"))))
    named = section(shards, streaming={"label": str(tmp_path / "elsewhere")})
    assert class_names(open_images(named, "train")) == ["a", "b"]
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
    with pytest.raises(ConfigError, match=problem) as caught:
        open_images(section(OF_MOSAICML, streaming={column: name}), "train")
    assert caught.value.key == f"data.streaming.{column}"


@pytest.mark.slow
def test_mosaicml_reads_ours(written: Path) -> None:
    theirs: Any = pytest.importorskip("streaming")
    ours: Any = open_images(section(written / "shards"), "train")
    read = theirs.StreamingDataset(
        local=str(written / "shards"), batch_size=1, validate_hash="sha256"
    )
    assert len(read) == COUNT
    for index in range(COUNT):
        assert read[index]["image"] == ours.encoded(index)
        assert read[index]["label"] == ours.targets[index]


# The order.


def test_every_sample_once_for_any_number_of_ranks(written: Path) -> None:
    """Of parts too; any 3 in a row are of 3 shards or more, and 15 of fewer than all."""
    for fraction in (-1, 0.5):
        images = open_images(section(written / "shards", fraction=fraction), "train")
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
        opened = [len(set(held[i : i + 6].tolist())) for i in range(size - 6)]
        assert max(opened) <= 5 < 6 == len(set(held.tolist()))
        assert min(opened) >= 2


@pytest.mark.parametrize("at_once", [1, 2, 3, 9])
def test_the_order_is_that_of_lanes(at_once: int) -> None:
    """Against a loop; the numbers of images do not divide, and a shard is empty."""
    samples, seed = [[0, 1, 2], [], [3, 4, 5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15]], 11
    starts = np.cumsum([0, *map(len, samples)])
    held = [np.array(shard) for shard in samples if shard]
    size, count = 16, len(held)
    sequence: list[int] = []
    for number in permutation(count, seed)(np.arange(count)).tolist():
        within = permutation(len(held[number]), mix(seed, number))(np.arange(len(held[number])))
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


def test_a_resumed_epoch_goes_on_with_the_next_sample(written: Path) -> None:
    starts = shard_starts(open_images(section(written / "shards"), "train"))
    whole, part = (EpochSampler(COUNT, 5, 1, 0, starts, 3) for _ in range(2))
    part.start = 17
    assert list(part) == list(whole)[17:]


# Faults on disk.


def damage(shards: Path, how: str) -> None:
    """Of the shard of the samples 20 to 29."""
    file = shards / "shard.00002.mds"
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "short":
        file.write_bytes(content[:-5])
    elif how == "a pipe":
        file.unlink()
        os.mkfifo(file)
    else:
        content[4 : 4 + 44] = b"\xff" * 44
        file.write_bytes(content)


HOW = {
    "missing": "the shard is not there",
    "short": "bytes, and .* in the index",
    "offsets": "a sample lies outside of it",
    "a pipe": "no regular file",
}


@pytest.mark.fault
@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", HOW)
def test_a_damaged_shard_is_named(how: str, shards: Path) -> None:
    damage(shards, how)
    images = open_images(section(shards), "train")
    with pytest.raises(UnreadableImage, match=HOW[how]) as caught:
        images[23]
    assert caught.value.what == f"{shards}/shard.00002.mds, sample 3"
    assert images[19]
    assert images[30]


@pytest.mark.fault
@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_shard_is_left_out(workers: int, shards: Path) -> None:
    """Each of its samples is stood in for by one of the next shard, by another for each."""
    damage(shards, "missing")
    data = section(shards, unreadable="skip", num_workers=workers, streaming={"shuffle_shards": 2})
    augmentation = Augmentation(crop_size=8, num_crops=1)
    run = RunConfig.model_construct(
        seed=5, data=data, optimizer=Batch(batch_size=6), augmentations=[augmentation]
    )
    images = open_images(data, "train")
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
def test_more_samples_in_a_row_than_files_may_be_lost(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard is one file of many samples."""
    monkeypatch.setattr("solo_ext.data.reading.MOST_IN_A_ROW", 4)
    damage(shards, "missing")
    images = open_images(section(shards, unreadable="skip"), "train")
    fixed = FixedLoader(FixedViews(images, ToTensor()), 8)
    assert sum(len(targets) for _, targets in fixed) == COUNT - 10
    for file in shards.glob("*.mds"):
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
    with pytest.raises(ConfigError, match=problem) as caught:
        open_images(section(shards), "val")
    assert (caught.value.key, caught.value.value) == ("data.val_path", str(shards))


# A storage.


class Remote:
    """A folder in the place of a storage, which can lose, damage or refuse files."""

    def __init__(self, root: Path) -> None:
        self.root, self.asked, self.faults = root, Counter[str](), dict[str, list[Any]]()

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


@pytest.fixture
def remote(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    storage = Remote(shards)
    monkeypatch.setattr(sharded, "_file_system", lambda root, timeout: storage)
    monkeypatch.setattr(sharded.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("SOLO_EXT_CACHE", str(tmp_path / "cache"))
    return storage


def copies(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.mds"))


def test_each_shard_is_copied_once(remote: Remote, written: Path, tmp_path: Path) -> None:
    images = open_images(section(ADDRESS), "train")
    here = open_images(section(written / "shards"), "train")
    assert copies(tmp_path) == []
    assert name_of(images, 23) == f"{ADDRESS}/shard.00002.mds, sample 3"
    for _ in range(2):
        assert all(images[i][0].tobytes() == here[i][0].tobytes() for i in range(COUNT))
    assert targets_of(images) == targets_of(here)
    assert images_fingerprint(images) == images_fingerprint(here) is not None
    again = open_images(section(ADDRESS), "train")
    assert again[5][1] == here[5][1]
    assert len(copies(tmp_path)) == 6
    assert remote.asked.pop("index.json") == 2
    assert set(remote.asked.values()) == {1}


def _read_all(images: Any) -> None:
    for index in range(COUNT):
        images[index]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_share_the_copies(method: str, remote: Remote, shards: Path) -> None:
    if method == "spawn":
        pytest.skip("the storage of this test is not in a new process")
    images = open_images(section(ADDRESS), "train")
    images[0]
    context: Any = multiprocessing.get_context(method)
    processes = [context.Process(target=_read_all, args=(images,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    asked = Counter((shards / "asked").read_text().split())
    assert {n for name, n in asked.items() if name.endswith(".mds")} == {1}
    assert len(asked) == 8


@pytest.mark.fault
@pytest.mark.parametrize(
    "fault", ["damaged", FileNotFoundError(2, "not there"), OSError("AWS Error NETWORK_CONNECTION")]
)
def test_tries_again(fault: Any, remote: Remote) -> None:
    remote.faults["shard.00002.mds"] = [fault] * 3
    images = open_images(section(ADDRESS), "train")
    assert images[23]
    assert remote.asked["shard.00002.mds"] == 4


@pytest.mark.fault
@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("damaged", "its sha256 is not that in the index .tried 4 times."),
        (FileNotFoundError(2, "not there"), "the shard is not there .tried 4 times."),
    ],
)
def test_gives_a_shard_up_once(fault: Any, problem: str, remote: Remote) -> None:
    remote.faults["shard.00002.mds"] = [fault] * 9
    images = open_images(section(ADDRESS, unreadable="skip"), "train")
    for _ in range(2):
        with pytest.raises(UnreadableImage, match=problem) as caught:
            images[23]
    assert caught.value.what == f"{ADDRESS}/shard.00002.mds, sample 3"
    assert remote.asked["shard.00002.mds"] == 4
    assert read_sample(images, 23)[0] == 33


@pytest.mark.fault
@pytest.mark.parametrize("workers", [0, 2])
def test_a_storage_that_does_not_answer_ends_the_run(workers: int, remote: Remote) -> None:
    """Though unreadable images are skipped: nothing is left out that is there."""
    remote.faults["shard.00002.mds"] = [OSError("AWS Error NETWORK_CONNECTION: no route")] * 99
    data = section(ADDRESS, unreadable="skip")
    images = open_images(data, "train")
    assert isinstance(images, Skipping)
    loader = FixedLoader(FixedViews(images, ToTensor()), 8, workers)
    with pytest.raises(StorageAway, match=r"^s3://bucket/images/shard.00002.mds: AWS Error.*") as e:
        list(loader)
    assert "\n" not in str(e.value)
    assert "tried 4 times" in str(e.value)
    assert e.value.exit_code == 1
    # Nothing is remembered: it may be back.
    remote.faults.clear()
    assert len(list(FixedLoader(FixedViews(images, ToTensor()), 8, 0))) == 8


@pytest.mark.fault
def test_errors_at_the_start(remote: Remote, shards: Path) -> None:
    remote.faults["index.json"] = [OSError("AWS Error ACCESS_DENIED: who are you?")]
    with pytest.raises(ConfigError, match=r"ACCESS_DENIED.*credentials") as caught:
        open_images(section(ADDRESS), "train")
    assert caught.value.key == "data.train_path"
    (shards / "index.json").unlink()
    with pytest.raises(ConfigError, match=r"no index.json there"):
        open_images(section(ADDRESS), "train")


def test_another_scheme() -> None:
    with pytest.raises(ConfigError, match=r"only s3:// and gs://"):
        open_images(section("ftp://bucket/images"), "train")


def test_without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'solo-ext\[streaming\]'"):
        open_images(section(ADDRESS), "train")


# Copies.


def test_room_for_some(remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were not read for longest make room; nothing is lost."""
    size = max(file.stat().st_size for file in remote.root.glob("*.mds"))
    monkeypatch.setitem(sharded._UNITS, "mb", 4 * size)
    settings = {"cache_limit": "1mb", "shuffle_shards": 2, "cache_dir": str(tmp_path / "cache")}
    images = open_images(section(ADDRESS, streaming=settings), "train")
    for index in range(COUNT):
        assert images[index]
        # The first is read all the time.
        assert images[0]
        assert len(copies(tmp_path)) <= 4
    assert remote.asked["shard.00000.mds"] == 1
    assert [file.name[9:11] for file in copies(tmp_path)] == ["00", "03", "04", "05"]
    with pytest.raises(ConfigError, match="raise the limit, or shuffle fewer shards") as caught:
        open_images(section(ADDRESS, streaming={**settings, "shuffle_shards": 3}), "train")
    assert caught.value.key == "data.streaming.cache_limit"


@pytest.mark.fault
def test_copies_that_a_killed_process_left(remote: Remote, tmp_path: Path) -> None:
    """Half a download is removed, and half a copy downloaded anew."""
    images: Any = open_images(section(ADDRESS), "train")
    images[23], images[33]
    folder = images.storage.folder
    left = folder / ".shard.00004.mds.elsewhere-1.saving"
    left.write_bytes(b"half")
    copy = folder / "shard.00002.mds"
    copy.write_bytes(copy.read_bytes()[:100])
    assert images[23]
    assert images[43]
    assert not left.exists()
    assert remote.asked["shard.00002.mds"] == 2


def test_another_index_at_the_same_address(remote: Remote, shards: Path) -> None:
    before = open_images(section(ADDRESS), "train")
    name, target = name_of(before, 0), before[0][1]
    folder = making.section(shards.parent / "folder")
    for index in range(4):
        place = shards.parent / "folder" / "new" / f"{index}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(making.png(100 + index))
    shutil.rmtree(shards)
    convert(open_images(folder, "train"), shards)
    after = open_images(section(ADDRESS), "train")
    assert name_of(after, 0) == name
    assert sorted(pixel(after[i][0]) for i in range(4)) == [100, 101, 102, 103]
    assert before[0][1] == target
