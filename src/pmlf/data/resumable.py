"""A cached array that is computed in chunks: after an interruption, only the missing chunks are computed.

The array grows in a temporary folder of the cache. A chunk is marked as done after its rows are on the disk, and the
folder becomes the entry after the last chunk. Several processes may fill the same entry: they write the same rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pmlf.basics.files import new_file, new_folder, remove_flat
from pmlf.data.cache import CONTENTS, IncompleteEntry, read_entry
from pmlf.data.cache_folder import open_folder, unwritable_cache

_ROWS, _DONE = "rows", "done"
_ONE_FOR_ALL = "0" * 16  # temporary folders have random names, but this one is to be found again


def resumable(
    key: str,
    *,
    shape: tuple[int, int],
    dtype: DTypeLike,
    compute: Callable[[slice], NDArray[Any]],
    chunk: int = 256,
    threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> NDArray[Any]:
    """The rows of `key`, memory-mapped. Missing chunks are computed first.

    Args:
        key: As for `cached`.
        shape: Rows and columns.
        dtype: The type of a number.
        compute: Returns the rows of a slice. Called from `threads` threads at once.
        chunk: Rows per call of `compute`.
        threads: The number of threads.
        progress: Called with the rows done and the rows in all, from the calling thread.

    Raises:
        ValueError: If the cache folder cannot be used.
    """
    folder = open_folder()
    entry = folder.entry(key)
    with suppress(IncompleteEntry):
        return read_entry(entry)[_ROWS]
    remove_flat(entry)
    folder.remove_abandoned()
    growing = entry.with_name(f"{entry.name}.{_ONE_FOR_ALL}.partial")
    form = np.dtype(dtype)
    try:
        with _opened(growing, shape[0] * shape[1] * form.itemsize, -(-shape[0] // chunk)) as (rows, done):
            _fill(rows, done, shape, form, compute, chunk, threads, progress or _no_display)
        _finish(growing, entry, shape, form)
    except OSError as error:
        raise unwritable_cache(error) from error
    return read_entry(entry)[_ROWS]


def _fill(
    rows: int,
    done: int,
    shape: tuple[int, int],
    form: np.dtype[Any],
    compute: Callable[[slice], NDArray[Any]],
    chunk: int,
    threads: int,
    progress: Callable[[int, int], None],
) -> None:
    """Compute the chunks whose mark in the file `done` is 0, and write their rows."""

    def fill(number: int) -> int:
        part = slice(number * chunk, min((number + 1) * chunk, shape[0]))
        found = np.ascontiguousarray(compute(part))
        assert found.dtype == form and found.shape == (part.stop - part.start, shape[1])
        _write(rows, found.tobytes(), part.start * shape[1] * form.itemsize)
        os.fsync(rows)
        _write(done, b"\1", number)
        return len(found)

    marks = os.pread(done, -(-shape[0] // chunk), 0)
    missing = [number for number, mark in enumerate(marks) if not mark]
    finished = shape[0] - sum(min(chunk, shape[0] - number * chunk) for number in missing)
    progress(finished, shape[0])
    with ThreadPoolExecutor(threads) as pool:
        try:
            for future in as_completed([pool.submit(fill, number) for number in missing]):
                finished += future.result()
                progress(finished, shape[0])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _opened(growing: Path, size: int, chunks: int) -> Iterator[tuple[int, int]]:
    """Descriptors of the files of rows and of marks, created if they are missing or of another size."""
    sizes = {_ROWS: size, _DONE: chunks}
    if any(not (growing / name).is_file() or (growing / name).stat().st_size != sizes[name] for name in sizes):
        remove_flat(growing)
        with suppress(FileExistsError):
            new_folder(growing)
        for name in sizes:  # marks last: rows without marks are started again
            with suppress(FileExistsError), new_file(growing / name) as file:
                file.truncate(sizes[name])
    opened = [os.open(growing / name, os.O_RDWR | os.O_NOFOLLOW) for name in sizes]
    try:
        yield opened[0], opened[1]
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _finish(growing: Path, entry: Path, shape: tuple[int, int], form: np.dtype[Any]) -> None:
    try:
        (growing / CONTENTS).unlink(missing_ok=True)
        with new_file(growing / CONTENTS) as description:
            description.write(json.dumps({_ROWS: {"dtype": form.str, "shape": list(shape)}}).encode())
        (growing / _DONE).unlink(missing_ok=True)
        growing.rename(entry)
    except OSError:  # another process was faster: its entry is the same
        if not os.path.lexists(entry):
            raise


def _write(descriptor: int, content: bytes, offset: int) -> None:
    written = 0
    while written < len(content):
        written += os.pwrite(descriptor, content[written:], offset + written)


def _no_display(done: int, rows: int) -> None:
    """Show nothing."""
