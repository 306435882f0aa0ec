"""A Parquet file that is written over hours: in parts that survive a kill, joined at the end."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from solo_ext.core.errors import UserError
from solo_ext.core.files import atomic_write, locked, open_regular

if TYPE_CHECKING:
    import pyarrow as pa

ROWS = 8192
"""Most rows of a row group."""
BYTES = 8 << 20
"""Most bytes of a row group's values: some ten copies of them are held at a time."""
SECONDS = 30.0
"""Time after which rows are written though they fill no row group: a kill loses no more."""
METADATA = b"solo_ext"
"""Key of the file's metadata, whose value is JSON."""
Integers = NDArray[np.int64]
Values = NDArray[np.float32]
MakeTable = Callable[[Integers, Values], "pa.Table"]
"""Makes the table of some samples from their indices (n,) and values (n, W)."""
_PART = re.compile(r"(\d+)-(\d+)\.parquet")


class Span(NamedTuple):
    """What a file holds of its samples: the number of rows, and the indices that have none.

    >>> Span(3, [2])
    Span(rows=3, missing=[2])
    """

    rows: int
    missing: list[int]


class PartsWriter:
    """Writes one row per sample; a call that was killed is continued by the next one.

    Rows first go to small files in ``<out>.parts/<key>``, each of which is written whole or not at
    all. ``close`` joins them to row groups of equal size, of up to 8,192 rows and 8 MB; memory
    holds a few row groups, whatever their number. A writer of another ``key`` does not see these
    parts.

    Args:
        out: the file.
        key: digest of everything that the rows depend on.
        metadata: JSON values, which the file holds beside ``key``.
        table: makes a table; its index column is named ``index``.
        count: number of samples; those without a row are ``missing``.
        width: W, the number of values of a row.

    >>> import tempfile
    >>> import pyarrow as pa
    >>> def table(indices, values):
    ...     return pa.table({"index": indices, "x": values[:, 0]})
    >>> out = Path(tempfile.mkdtemp()) / "x.parquet"
    >>> with PartsWriter(out, "some key", {}, table, count=3, width=1) as writer:
    ...     writer.add(np.array([0, 2]), np.ones((2, 1), np.float32))
    ...     writer.close()
    Span(rows=2, missing=[1])
    >>> PartsWriter(out, "some key", {}, table, count=3, width=1).finished()
    Span(rows=2, missing=[1])
    """

    def __init__(
        self,
        out: Path,
        key: str,
        metadata: Mapping[str, Any],
        table: MakeTable,
        count: int,
        width: int,
    ) -> None:
        self.out, self.key, self.count = out, key, count
        self._rows = max(1, min(ROWS, BYTES // (4 * width)))
        self.metadata = {**metadata, "key": key, "samples": count}
        self.folder = out.with_name(f"{out.name}.parts")
        self._parts, self._table = self.folder / key, table
        self._waiting: list[tuple[Integers, Values]] = []
        self._held, self._since = 0, time.monotonic()
        self._stack = contextlib.ExitStack()
        self._writing: Future[None] | None = None

    def finished(self) -> Span | None:
        """What the file holds, if it is there and of this key."""
        about = written_metadata(self.out)
        if about is None or about.get("key") != self.key:
            return None
        import pyarrow.parquet as pq

        return self._span(pq.read_table(self.out, columns=["index"]))

    def __enter__(self) -> Self:
        """Finds the parts of an earlier call: ``start`` is the first sample that they lack.

        Raises:
            UserError: another process writes the file.
        """
        self._parts.mkdir(parents=True, exist_ok=True)
        self._stack.enter_context(locked(self.folder / ".lock", 0))
        # Writing a part takes longer than some batches, and needs no GPU.
        self._thread = self._stack.enter_context(ThreadPoolExecutor(1))
        self.start = self._stop = self._place = max([0, *(stop for _, stop in self._chain())])
        self._since = time.monotonic()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._stack:
            if error is not None and self._held:
                # Keep what is computed. If the disk is full, the first error says so.
                with contextlib.suppress(Exception):
                    self._flush(self._place)
                    self._wait()

    def add(self, indices: Integers, values: Values) -> None:
        """Adds rows of samples behind all earlier ones: indices (n,), ascending, values (n, W)."""
        self._waiting.append((indices, values))
        self._held += len(indices)
        self._place = int(indices[-1]) + 1
        if self._held >= self._rows or time.monotonic() - self._since > SECONDS:
            self._flush(self._place)

    def close(self) -> Span:
        """Writes the last rows and joins all parts to the file.

        Raises:
            UserError: a part is damaged; it is removed, and the next call makes it again.
        """
        if self._stop < self.count:
            self._flush(self.count)
        self._wait()
        atomic_write(self.out, self._join)
        found = self.finished()
        assert found is not None
        shutil.rmtree(self.folder, ignore_errors=True)
        return found

    def _flush(self, stop: int) -> None:
        """Hands the waiting rows to the thread, as the part up to the sample ``stop``."""
        self._wait()
        start, rows = self._stop, self._waiting
        self._stop, self._waiting, self._held = stop, [], 0
        self._writing = self._thread.submit(self._write, start, stop, rows)
        self._since = time.monotonic()

    def _wait(self) -> None:
        if self._writing is not None:
            pending, self._writing = self._writing, None
            pending.result()

    def _write(self, start: int, stop: int, rows: list[tuple[Integers, Values]]) -> None:
        import pyarrow.parquet as pq

        file = self._parts / f"{start:012d}-{stop:012d}.parquet"
        if not rows:
            # The last images cannot be read.
            atomic_write(file, Path.touch)
            return
        indices, values = (np.concatenate(column) for column in zip(*rows, strict=True))
        table = self._table(indices, values)
        options = {**_OPTIONS, "compression": "none"}
        atomic_write(file, lambda path: pq.write_table(table, path, **options))

    def _chain(self) -> Iterator[tuple[Path, int]]:
        """The parts from the first sample on, each beginning where the one before it ends."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        found = {}
        for file in sorted(self._parts.iterdir()):
            if match := _PART.fullmatch(file.name):
                found[int(match[1])] = file, int(match[2])
        stop = 0
        while stop in found:
            file, stop = found[stop]
            try:
                with open_regular(file) as opened:
                    if file.stat().st_size:
                        pq.read_metadata(opened)
            except (pa.ArrowException, OSError):
                file.unlink()
                return
            yield file, stop

    def _join(self, scratch: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        writer, held = None, 0
        waiting: list[pa.Table] = []
        try:
            for file, _ in self._chain():
                if not file.stat().st_size:
                    continue
                try:
                    table = pq.ParquetFile(file, page_checksum_verification=True).read()
                except (pa.ArrowException, OSError) as error:
                    file.unlink(missing_ok=True)
                    raise UserError(
                        f"{str(file)!r} was damaged ({error}) and is removed; the same command "
                        "makes it again"
                    ) from None
                if writer is None:
                    about = {METADATA: json.dumps(self.metadata).encode()}
                    schema = table.schema.with_metadata(about)
                    writer = pq.ParquetWriter(scratch, schema, **_OPTIONS)
                waiting, held = [*waiting, table], held + len(table)
                while held >= self._rows:
                    joined = pa.concat_tables(waiting)
                    writer.write_table(joined.slice(0, self._rows), self._rows)
                    waiting, held = [joined.slice(self._rows)], held - self._rows
            if writer is None:
                raise UserError(f"none of {self.count} images could be read")
            if held:
                writer.write_table(pa.concat_tables(waiting), self._rows)
        finally:
            if writer is not None:
                writer.close()

    def _span(self, table: pa.Table) -> Span:
        there = np.zeros(self.count, bool)
        there[table["index"].to_numpy()] = True
        return Span(len(table), np.flatnonzero(~there).tolist())


_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    # Features repeat nothing: a dictionary of them would be tried and given up in every row group.
    "use_dictionary": ["label"],
    "write_page_checksum": True,
}


def written_metadata(file: Path) -> dict[str, Any] | None:
    """What :class:`PartsWriter` wrote into a file's metadata; ``None`` if there is no file.

    Raises:
        UserError: something else wrote the file.

    >>> written_metadata(Path("nothing.parquet"))
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_regular(file) as opened:
            held = (pq.read_metadata(opened).metadata or {}).get(METADATA)
        about: Any = json.loads(held) if held is not None else None
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError, ValueError):
        about = None
    if not isinstance(about, dict):
        raise UserError(
            f"{str(file)!r} exists and was not written by solo-ext embed; remove it, or name "
            "another file"
        )
    return about
