"""What an image file becomes, kind by kind, and what is said of one that cannot be read."""

from __future__ import annotations

import errno
import io
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from torch._utils import ExceptionWrapper
from torchvision.datasets.folder import pil_loader

from solo_ext.data.reading import UnreadableImage, _to_rgb, decode_image, read_file

SIDE = 16
GREY = np.linspace(0, 65535, SIDE * SIDE).reshape(SIDE, SIDE).astype(np.uint16)
RGB = np.stack([GREY, GREY[::-1], GREY.T], axis=-1)
EIGHT = np.round(RGB / 257).astype(np.uint8)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Returns an image file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


PHOTO = Image.fromarray(EIGHT)
JPEG = saved(PHOTO, "JPEG", quality=95)
GREY_LEVELS = np.repeat(np.round(GREY / 257).astype(np.uint8)[..., None], 3, axis=2)
ROTATED = Image.Exif()
ROTATED[0x0112] = 6

SIXTEEN_BITS: dict[str, tuple[bytes, NDArray[np.uint8]]] = {
    "grey PNG": (saved(Image.fromarray(GREY), "PNG"), GREY_LEVELS),
    "grey TIFF": (saved(Image.fromarray(GREY), "TIFF"), GREY_LEVELS),
    "grey PGM": (b"P5 16 16 65535\n" + GREY.astype(">u2").tobytes(), GREY_LEVELS),
    "RGB PPM": (b"P6 16 16 65535\n" + RGB.astype(">u2").tobytes(), EIGHT),
}
AS_TORCHVISION: dict[str, bytes] = {
    "RGB JPEG": JPEG,
    "RGB PNG": saved(PHOTO, "PNG"),
    "grey JPEG": saved(PHOTO.convert("L"), "JPEG"),
    "grey PNG": saved(PHOTO.convert("L"), "PNG"),
    "two levels": saved(PHOTO.convert("1"), "PNG"),
    "CMYK JPEG": saved(PHOTO.convert("CMYK"), "JPEG"),
    "palette": saved(PHOTO.quantize(16), "PNG"),
    "palette, one colour transparent": saved(PHOTO.quantize(16), "PNG", transparency=3),
    "palette with transparency": saved(PHOTO.quantize(16), "PNG", transparency=b"\0\xff" * 8),
    "RGBA": saved(Image.fromarray(np.dstack([EIGHT, EIGHT[..., 0]])), "PNG"),
    "grey with transparency": saved(PHOTO.convert("LA"), "PNG"),
    "EXIF says rotated": saved(PHOTO.resize((SIDE, SIDE // 2)), "JPEG", exif=ROTATED),
    "a colour profile": saved(PHOTO, "PNG", icc_profile=b"a profile"),
    "WebP": saved(PHOTO, "WEBP"),
    "BMP": saved(PHOTO, "BMP"),
}


def load_image(path: Path) -> Image.Image:
    return decode_image(read_file(path), lambda: str(path))


def written(folder: Path, content: bytes) -> Path:
    (folder / "image").write_bytes(content)
    return folder / "image"


@pytest.mark.parametrize("kind", SIXTEEN_BITS)
def test_sixteen_bits_are_scaled(kind: str, tmp_path: Path) -> None:
    content, expected = SIXTEEN_BITS[kind]
    image = load_image(written(tmp_path, content))
    found = np.asarray(image).astype(int)
    assert (image.mode, found.shape) == ("RGB", (SIDE, SIDE, 3))
    # PIL takes the upper byte of 16-bit colours; grey levels are rounded.
    assert np.abs(found - expected).max() <= ("RGB" in kind)


def test_bits_that_a_tiff_states() -> None:
    image: Any = Image.fromarray(GREY >> 4)
    image.tag_v2 = {258: (12,)}
    assert np.array_equal(np.asarray(_to_rgb(image)), GREY_LEVELS)


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("kind", AS_TORCHVISION)
def test_eight_bits_are_as_torchvision_reads_them(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path, AS_TORCHVISION[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load_image(path), decode_image(AS_TORCHVISION[kind], lambda: "x")
    for image in found:
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), np.asarray(pil_loader(str(path))))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut short": (lambda p: p.write_bytes(JPEG[:-20]), "truncated"),
    "cut short PNG": (lambda p: p.write_bytes(AS_TORCHVISION["RGB PNG"][:55]), "runcated"),
    "cut short 16 bits": (lambda p: p.write_bytes(SIXTEEN_BITS["grey PNG"][0][:60]), "runcated"),
    "head alone": (lambda p: p.write_bytes(JPEG[:20]), "no image of BMP, GIF, JPEG,"),
    "empty": (lambda p: p.write_bytes(b""), "it is empty"),
    "text": (lambda p: p.write_text("no image"), "no image of BMP, GIF, JPEG,"),
    "noise in the middle": (
        lambda p: p.write_bytes(
            AS_TORCHVISION["RGB PNG"][:60] + b"\xff" * 20 + AS_TORCHVISION["RGB PNG"][80:]
        ),
        "",
    ),
    "floating point": (
        lambda p: p.write_bytes(saved(Image.fromarray(GREY.astype(np.float32)), "TIFF")),
        "floating-point",
    ),
    "32 bits": (
        lambda p: p.write_bytes(saved(Image.fromarray(GREY.astype(np.int32) * 9), "TIFF")),
        "beyond 16 bits",
    ),
    "32 bits, of small values": (
        lambda p: p.write_bytes(saved(Image.fromarray(GREY.astype(np.int32)), "TIFF")),
        "beyond 16 bits",
    ),
    "not there": (lambda p: None, "it is not there"),
    "dangling link": (lambda p: p.symlink_to("nowhere"), "a link to a file that is not there"),
    "circular link": (lambda p: p.symlink_to(p.name), "symbolic link"),
    "folder": (lambda p: p.mkdir(), "Is a directory"),
    "pipe": (os.mkfifo, "it is no file"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_read_is_named(kind: str, tmp_path: Path) -> None:
    make, reason = BROKEN[kind]
    path = tmp_path / "image.jpg"
    make(path)
    with pytest.raises(UnreadableImage) as caught:
        load_image(path)
    assert (caught.value.what, "\n" in str(caught.value)) == (str(path), False)
    assert reason in caught.value.reason
    assert str(caught.value).startswith(f"image {str(path)!r} cannot be read: ")
    assert "data.unreadable=skip" in str(caught.value)
    # Nothing of this process, so that two runs say the same.
    assert "0x" not in str(caught.value)


def test_a_number_is_no_open_file(tmp_path: Path) -> None:
    wrong: Any = os.open(written(tmp_path, JPEG), os.O_RDONLY)
    with pytest.raises(UnreadableImage, match="neither a path nor an encoded image"):
        decode_image(wrong, lambda: "a row")
    os.close(wrong)


def test_decompression_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", SIDE * SIDE // 4)
    with pytest.raises(UnreadableImage, match="decompression bomb"):
        load_image(written(tmp_path, JPEG))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_what_the_machine_lacks_is_no_fault_of_the_image(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lack(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    # The superuser may read any file.
    monkeypatch.setattr("solo_ext.data.reading.os.open", lack)
    kind = UnreadableImage if number == errno.EACCES else OSError
    with pytest.raises(kind, match=os.strerror(number)):
        load_image(written(tmp_path, JPEG))


def test_the_line_survives_a_worker() -> None:
    def wrapped(error: UnreadableImage) -> UnreadableImage:
        try:
            raise error
        except UnreadableImage:
            made = ExceptionWrapper(where="in DataLoader worker process 0")
        with pytest.raises(UnreadableImage) as caught:
            made.reraise()
        return caught.value

    for error in (
        UnreadableImage("a/b: UnreadableImage: c\n.jpg", "two\nlines"),
        UnreadableImage("100 images in a row"),
    ):
        assert str(wrapped(error)) == str(error)
        assert str(wrapped(wrapped(error))) == str(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
