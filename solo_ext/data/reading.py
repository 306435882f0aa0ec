"""One way to read an image, whatever it is kept in; and what is said of one that is no image."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from solo_ext.core.errors import UserError

_SIXTEEN = 16
_BITS_PER_SAMPLE = 258
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""What is decoded, whatever a file is called: PIL knows more, and has PostScript run."""
NOT_THE_IMAGES_FAULT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Numbers of errors that say nothing about a file: too many are open, memory is used up."""


class UnreadableImage(UserError):
    """An image that cannot be read; the one line survives a worker process.

    Args:
        what: a path, or where else the image is kept. Without ``reason`` a whole message: a
            loader makes an error of its worker's again, out of that error's type and traceback.
        reason: what is wrong with it.
    """

    def __init__(self, what: str, reason: str | None = None) -> None:
        if reason is None:
            if what.startswith(f"Caught {type(self).__name__} in "):
                # The last line of a traceback is `<module>.<type>: <message>`.
                what = what.strip().splitlines()[-1].partition(f"{type(self).__name__}: ")[2]
            super().__init__(what)
            return
        self.what, self.reason = what, " ".join(reason.split())
        super().__init__(
            f"image {what!r} cannot be read: {self.reason}; mend or remove it, or leave out what "
            "cannot be read with data.unreadable=skip"
        )


def load_image(path: str | os.PathLike[str]) -> Image.Image:
    """Reads an image file as RGB.

    Raises:
        UnreadableImage: it is not there, not permitted, empty, cut short, no image, or too large.
    """
    return _read(Path(path), os.fspath(path))


def decode_image(encoded: bytes, name: str) -> Image.Image:
    """Decodes an image file that is held in memory as RGB.

    Args:
        encoded: the file's content.
        name: where it was, for the error.

    Raises:
        UnreadableImage: as :func:`load_image`.
    """
    return _read(encoded, name)


def to_rgb(image: Image.Image) -> Image.Image:
    """Decodes an opened image to 8-bit RGB.

    Grey levels of up to 16 bits are scaled to 8, where PIL's own conversion clips at 255.
    Transparency is dropped, the colours below it stay. A rotation that only EXIF states is not
    applied.

    Raises:
        ValueError: grey levels whose range nothing states (floating point, or beyond 16 bits).
    """
    if image.mode == "I" or image.mode.startswith("I;16"):
        return Image.fromarray(_eight_bits(np.asarray(image), _bits(image))).convert("RGB")
    if image.mode == "F":
        raise ValueError("its grey levels are floating-point numbers, of no stated range")
    if image.mode == "P" and "transparency" in image.info:
        # The same colours as without the detour, which PIL asks for in a warning.
        image = image.convert("RGBA")
    return image.convert("RGB")


def _bits(image: Image.Image) -> int:
    """Bits per sample that a TIFF states; 16 for what else has more than 8."""
    stated = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, _SIXTEEN)
    return int(stated[0] if isinstance(stated, tuple) else stated)


def _eight_bits(grey: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    highest = 2**bits - 1
    if bits > _SIXTEEN or (grey.size and (grey.min() < 0 or grey.max() > highest)):
        raise ValueError(
            f"its grey levels go beyond {min(bits, _SIXTEEN)} bits, of no stated range"
        )
    # Rounded to the nearest.
    scaled: NDArray[np.uint32] = (510 * grey.astype(np.uint32) + highest) // (2 * highest)
    return scaled.astype(np.uint8)


def _read(source: Path | bytes, name: str) -> Image.Image:
    try:
        encoded = source if isinstance(source, bytes) else _content(source)
        if not encoded:
            raise EOFError("it is empty")
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            return to_rgb(image)
    except MemoryError:
        raise
    except Exception as error:
        # Damaged files make PIL raise errors of most kinds.
        if isinstance(error, OSError) and error.errno in NOT_THE_IMAGES_FAULT:
            raise
        raise UnreadableImage(name, _reason(error, source)) from None


def _content(path: Path) -> bytes:
    # A pipe would be waited for without end.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _AT_ONCE)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no file")
        return file.read()


def _reason(error: Exception, source: Path | bytes) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"it is no image of {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
    if isinstance(error, FileNotFoundError):
        dangling = isinstance(source, Path) and source.is_symlink()
        return "it is a link to a file that is not there" if dangling else "it is not there"
    if isinstance(error, PermissionError):
        return "there is no permission to read it"
    if isinstance(error, IsADirectoryError):
        return "it is a folder"
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
