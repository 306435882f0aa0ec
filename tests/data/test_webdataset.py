"""Tars of WebDataset: which of their files are samples, and what is noted of them.

How their samples are read and ordered, and how tars are copied, is in ``test_streaming.py``.
"""

from __future__ import annotations

import functools
import gzip
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from solo_ext.data import shards as sharded
from solo_ext.data import webdataset
from solo_ext.data.images import class_names, images_fingerprint
from solo_ext.data.reading import SkipUnreadable, targets_of
from tests.data import making
from tests.data.test_streaming import ADDRESS, Remote, stand_in
from tests.mounts import fill, small_disk

EACH = 4
NAMES = [f"train-{number:03}.tar" for number in range(3)]


opened = functools.partial(making.opened, format="webdataset")
refused = functools.partial(making.refused, format="webdataset")


def sample(level: int) -> dict[str, bytes]:
    return {"png": making.png(level), "cls": b"%d" % (level % 3)}


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Three tars with the levels 0 to 11, which are the numbers of the samples."""
    for number, name in enumerate(NAMES):
        own = range(number * EACH, (number + 1) * EACH)
        making.write_tar(tmp_path / "tars" / name, list(map(sample, own)))
    return tmp_path / "tars"


def levels(images: Any) -> list[int]:
    return [images[i][0].getpixel((0, 0))[0] for i in range(len(images))]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("", range(12)),
        ("train-001.tar", range(4, 8)),
        ("train-{000..002}.tar", range(12)),
        ("train-{001..002}.tar", range(4, 12)),
        ("train-0{0..0}{1..2}.tar", range(4, 12)),
    ],
)
def test_paths(name: str, found: range, tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tars / "val-000.txt").write_text("no tar")
    (tars / "._train-000.tar").write_text("of a Mac")
    assert levels(opened(tars / name)) == list(found)
    monkeypatch.chdir(tars)
    assert levels(opened(name or ".")) == list(found)


# Which files are samples.


def test_files_of_a_sample(tmp_path: Path) -> None:
    """As WebDataset groups them: by the name up to the first dot, one after another."""
    path = making.tar_of(
        tmp_path / "one.tar",
        ("README", b"no extension"),
        ("._a.jpg", b"of a Mac"),
        ("x.y/a.json", b'{"label": 2}'),
        ("x.y/a.seg.png", making.png(90)),
        ("x.y/a.PNG", making.png(0)),
        ("b.png", making.png(1)),
        ("b.cls", b" 5\n"),
        ("b.json", b'{"label": 3}'),
        ("nothing.cls", b"7"),
        ("a.png", making.png(2)),
        ("c.cls", b"0"),
        ("c.webp", b"another"),
        ("c.jpg", making.png(3)),
        ("d.jpeg", making.png(4)),
        ("d.json", b'["label"]'),
        ("e.jpg", making.png(5)),
        ("e.json", b"{"),
        ("f.jpg", making.png(6)),
        ("f.json", b'{"label": [1]}'),
    )
    images = opened(path)
    assert levels(images) == list(range(7))
    assert images.targets.tolist() == [2, 5, -1, 0, -1, -1, -1]
    assert class_names(images) == [str(i) for i in range(6)]


def test_chosen_files(tmp_path: Path) -> None:
    path = making.tar_of(
        tmp_path / "one.tar",
        ("a.png", making.png(90)),
        ("a.small.png", making.png(0)),
        ("a.json", b'{"label": 0, "kind": "dog"}'),
        ("a.fine.txt", b"7"),
        ("b.small.png", making.png(1)),
        ("b.json", b'{"label": 1, "kind": "ant"}'),
    )

    def of(**chosen: str) -> tuple[list[int], list[int], list[str]]:
        images = opened(path, streaming=chosen)
        return levels(images), images.targets.tolist(), class_names(images)

    assert of() == ([90], [0], ["0"])
    assert of(image="small.png") == ([0, 1], [0, 1], ["0", "1"])
    assert of(image="SMALL.png", label="kind") == ([0, 1], [1, 0], ["ant", "dog"])
    assert of(label="fine.txt")[1:] == ([7], [str(i) for i in range(8)])


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        ({}, "no sample of its tars has a label; name an extension or a key of .json, or set data"),
        ({"cls": b"\xff"}, "no sample of its tars has a label"),
        ({"json": b'{"other": 1}'}, "no sample of its tars has a label"),
        ({"json": b"[" * 100_000}, "no sample of its tars has a label"),
        ({"cls": b"01"}, "label '01' is neither a number up to 999999 without leading zeros nor a"),
        ({"json": b'{"label": 0.5}'}, "label '0.5' is neither"),
    ],
)
def test_without_labels(label: dict[str, bytes], problem: str, tmp_path: Path) -> None:
    making.write_tar(tmp_path / "tars" / "one.tar", [{"png": making.png(5), **label}])
    assert refused(problem, tmp_path / "tars").key == "data.streaming.label"
    images = opened(tmp_path / "tars", no_labels=True)
    assert (levels(images), targets_of(images)) == ([5], [-1])


def test_no_image(tmp_path: Path) -> None:
    making.write_tar(tmp_path / "tars" / "one.tar", [{"txt": b"a"}])
    refused(r"no image in the tars of .*; name one of jpg, jpeg", tmp_path / "tars")


# Files from elsewhere.


def test_what_is_no_file_is_passed_over(tmp_path: Path) -> None:
    """Links, devices and folders; names are not paths, and pickles are not read."""
    (tmp_path / "secret.png").write_bytes(making.png(90))
    files = [
        (f"{name}.{kind}", content)
        for index, name in enumerate(("../../up", "/etc/passwd", "x" * 5000, "\udcff"))
        for kind, content in (sample(index) | {"pyd": pickle.dumps(Path), "pth": b"\x80"}).items()
    ]
    making.tar_of(tmp_path / "tars" / "one.tar", *files)
    with tarfile.open(tmp_path / "tars" / "one.tar", "a") as tar:
        for number, kind in enumerate(
            (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE)
        ):
            member = tarfile.TarInfo(f"{number}.png")
            member.type, member.linkname = kind, str(tmp_path / "secret.png")
            tar.addfile(member)
    before = sorted(tmp_path.rglob("*"))
    assert levels(opened(tmp_path / "tars")) == [0, 1, 2, 3]
    left = {p for p in tmp_path.rglob("*") if p.relative_to(tmp_path).parts[0] != "cache"}
    assert sorted(left) == before


def cut(end: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:end]


def at(place: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:place] + new + content[place + len(new) :]


def size_below_zero() -> bytes:
    """A header that states -512 bytes, and whose checksum is right: tarfile reads it for ever."""
    member = tarfile.TarInfo("a.png")
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 10 + b"\xfe\x00"
    header[148:156] = b" " * 8
    header[148:155] = b"%06o\0" % sum(header)
    return bytes(header)


HEADERS = 4 * 512
"""Bytes of a sample: a header, less than 512 of an image, a header, and a digit."""
DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str, int]] = {
    "cut within an image": (cut(HEADERS + 560), "a file in it goes beyond its end", 0),
    "cut within a header": (cut(HEADERS + 100), "at byte 2048 is neither a file nor the end", 0),
    "cut between samples": (cut(2 * HEADERS), "at byte 4096 is neither a file nor the end", 1),
    "cut before the label": (cut(HEADERS + 1024), "at byte 3072 is neither a file nor the end", 1),
    "another header": (at(HEADERS, b"?"), "at byte 2048 is neither a file nor the end", 0),
    "a size below zero": (
        at(2 * HEADERS, size_below_zero()),
        "a file in it goes beyond its end",
        1,
    ),
    "empty": (cut(0), "empty file", 0),
    "no tar": (lambda content: b"x" * len(content), "invalid header|bad checksum", 0),
    "compressed": (gzip.compress, "invalid header|bad checksum|truncated", 0),
    "twice": (lambda content: content[:512] * 4 + content, "has .png twice|beyond its end", 0),
}


@pytest.mark.fault
@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_tar(how: str, tars: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Refused by its name, or what is whole of it is read; mended it is read again."""
    make, problem, left = DAMAGES[how]
    file = tars / NAMES[1]
    content = file.read_bytes()
    file.write_bytes(make(content))
    refused(f"a tar cannot be read: {NAMES[1]}, .*({problem}).*skip", tars)
    for _ in range(2):
        images = opened(tars, unreadable="skip")
        assert isinstance(images, SkipUnreadable)
        held = levels(images)
        # A sample before the damage may have had more files.
        assert held == [*range(4), *range(4, 4 + left), *range(8, 12)]
        assert targets_of(images) == [level % 3 for level in held]
        assert NAMES[1] in caplog.text
        caplog.clear()
    refused(problem, tars)
    file.write_bytes(content)
    assert levels(opened(tars)) == list(range(12))
    assert not caplog.text


@pytest.mark.fault
def test_a_tar_that_is_not_there(tars: Path) -> None:
    path = tars / "train-{000..003}.tar"
    (tars / NAMES[0]).write_bytes(b"")
    # Said before the others are gone through: the first of these is damaged.
    absent = r"'train-003.tar' is not there .1 of 4 tars are not.; give a folder .*unreadable=skip"
    refused(absent, path)
    assert levels(opened(path, unreadable="skip")) == list(range(4, 12))
    (tars / "train-003.tar").symlink_to("nowhere")
    refused(absent, tars)


FOLDER = "give a folder of .tar files, or `[^`]*`"


@pytest.mark.parametrize("unreadable", ["refuse", "skip"])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none", f"no such folder; {FOLDER}$"),
        # A file is no folder of tars.
        ("list.txt", f"no such folder; {FOLDER}$"),
        ("empty", f"no .tar in it; {FOLDER}$"),
        # A pattern of another kind counts as a name.
        ("train-*.tar", rf"'train-\*.tar' is not there .*; {FOLDER}$"),
        # Their names alone would fill the memory.
        ("{0..999999}-{0..999999}.tar", "1,000,000,000,000 tars are named"),
    ],
)
def test_mistakes(name: str, problem: str, unreadable: str, tars: Path) -> None:
    (tars / "list.txt").write_text("train-000.tar")
    (tars / "empty").mkdir()
    refused(problem, tars / name, unreadable=unreadable)


@pytest.mark.parametrize("name", ["train.tar.gz", "train.tgz", "train.tar.zst"])
def test_compressed_tars(name: str, tars: Path) -> None:
    (tars / name).write_bytes(b"packed")
    for path in (tars, tars / name):
        refused(f"'{name}' is compressed as a whole.*plain .tar", path)
    assert levels(opened(tars / "train-{000..002}.tar")) == list(range(12))


# The index.


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tars that are gone through."""
    found: list[str] = []
    through = webdataset._members

    def note(file: Any, end: int) -> Any:
        found.append(Path(f"/proc/self/fd/{file.fileno()}").resolve().name)
        return through(file, end)

    monkeypatch.setattr(webdataset, "_members", note)
    return found


def test_tars_are_gone_through_once(tars: Path, seen: list[str], cache: Path) -> None:
    images = opened(tars)
    assert seen == NAMES
    assert levels(opened(tars, split="val")) == levels(images)
    assert levels(opened(tars, no_labels=True)) == levels(images)
    assert seen == NAMES
    kept = sorted(file.name for file in cache.rglob("*.*"))
    assert kept == ["about.json", "index.lock", "places.npy", "targets.npy"]
    # Another tar of the same name and size, and one more.
    shutil.copy(tars / NAMES[0], tars / NAMES[1])
    making.write_tar(tars / "train-003.tar", [sample(20)])
    assert levels(opened(tars)) == [*range(4), *range(4), *range(8, 12), 20]
    assert seen == [*NAMES, *NAMES, "train-003.tar"]


@pytest.mark.parametrize("name", ["about.json", "places.npy", "targets.npy"])
def test_an_index_that_is_not_whole(name: str, tars: Path, seen: list[str], cache: Path) -> None:
    opened(tars)
    (file,) = cache.rglob(name)
    file.write_bytes(file.read_bytes()[:-3])
    assert levels(opened(tars)) == list(range(12))
    assert seen == 2 * NAMES


@pytest.mark.fault
def test_no_tar_is_whole(tars: Path) -> None:
    for name in NAMES:
        (tars / name).write_bytes(b"no tar")
    refused(f"no tar can be read; the first: {NAMES[0]}", tars, unreadable="skip")


@pytest.mark.fault
def test_a_cache_that_cannot_be_written(tars: Path, cache: Path) -> None:
    """It is not the tars that are at fault."""
    cache.write_text("a file")
    errors = [refused("cannot be written: Not a directory; name a", tars)]
    with small_disk(tars.parent / "disk", "size=4k") as disk:
        fill(disk)
        settings = {"cache_dir": str(disk)}
        errors.append(refused("cannot be written: No space left", tars, streaming=settings))
    assert {error.key for error in errors} == {"data.streaming.cache_dir"}


@pytest.mark.fault
def test_an_index_that_is_removed_while_a_run_trains(tars: Path, cache: Path) -> None:
    """As a new worker finds it."""
    images = opened(tars)
    shutil.rmtree(cache)
    with pytest.raises(
        sharded.StorageUnavailable, match="the index of the tars is gone; the next start"
    ):
        images[0]


def test_fingerprints(tars: Path, tmp_path: Path) -> None:
    """Of the images, their order and labels; wherever they are."""
    images = opened(tars)
    elsewhere = shutil.copytree(tars, tmp_path / "elsewhere", copy_function=shutil.copyfile)
    other = opened(elsewhere)
    assert images_fingerprint(images) == images_fingerprint(other) is not None
    assert images_fingerprint(images, by_name=True) == images_fingerprint(other, by_name=True)
    file = elsewhere / NAMES[0]
    content = bytearray(file.read_bytes())
    # The label of the first.
    assert content[1536:1537] == b"0"
    content[1536:1537] = b"1"
    file.write_bytes(content)
    changed = opened(elsewhere)
    assert images_fingerprint(changed, by_name=True) != images_fingerprint(images, by_name=True)


def test_what_a_process_is_sent_does_not_grow_with_the_images(tmp_path: Path) -> None:
    sizes = []
    for count in (10, 1000):
        path = tmp_path / str(count) / "one.tar"
        making.write_tar(path, [sample(i % 256) for i in range(count)])
        images = opened(path.parent)
        images[3]
        sent = pickle.dumps(images)
        sizes.append(len(sent))
        assert levels(pickle.loads(sent))[:9] == list(range(9))
    assert sizes[1] - sizes[0] < 20


def test_another_tar_while_it_is_read(tars: Path) -> None:
    """Of the same bytes, whose images are elsewhere."""
    images = opened(tars)
    making.write_tar(tars / NAMES[0], [{"cls": b"0", "png": making.png(1)}] * EACH)
    with pytest.raises(Exception, match="it is not as it was indexed"):
        images[1]
    assert images[4]


# A storage.


@pytest.fixture
def remote(tars: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    return stand_in(tars, monkeypatch)


def test_tars_of_a_storage_are_downloaded_once(
    remote: Remote, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path, cache):
        # Wherever a run is started.
        monkeypatch.chdir(folder)
        assert levels(opened(ADDRESS)) == list(range(12))
    assert remote.asked == dict.fromkeys(NAMES, 1)
    names = f"{ADDRESS}/train-{{001..002}}.tar"
    assert levels(opened(names)) == list(range(4, 12))


def test_with_less_room_than_all_take(remote: Remote, cache: Path) -> None:
    for number in range(3, 6):
        making.write_tar(remote.root / f"train-{number:03}.tar", [sample(4 * number)])
    settings = {"cache_limit": 3 * 10240, "shuffle_shards": 1}
    images = opened(ADDRESS, streaming=settings)
    assert len(list(cache.rglob("train-*.tar"))) == 3
    assert levels(images) == [*range(13), 16, 20]


@pytest.mark.fault
def test_goes_on_when_the_storage_is_back(remote: Remote) -> None:
    remote.faults[NAMES[2]] = [OSError("AWS Error NETWORK_CONNECTION")]
    with pytest.raises(sharded.StorageUnavailable, match=r"train-002.tar: AWS Error"):
        opened(ADDRESS, unreadable="skip")
    assert levels(opened(ADDRESS)) == list(range(12))
    assert remote.asked == {NAMES[0]: 1, NAMES[1]: 1, NAMES[2]: 2}


@pytest.mark.fault
def test_a_tar_that_its_storage_has_lost(remote: Remote) -> None:
    remote.faults[NAMES[1]] = [FileNotFoundError(2, "not there")] * 2
    refused(r"train-001.tar, the shard is not there", ADDRESS)
    images = opened(ADDRESS, unreadable="skip")
    assert levels(images) == [*range(4), *range(8, 12)]
    assert remote.asked == {NAMES[0]: 1, NAMES[1]: 2, NAMES[2]: 1}
    # It is there again.
    assert levels(opened(ADDRESS)) == list(range(12))
