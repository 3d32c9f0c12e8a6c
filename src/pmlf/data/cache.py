"""Arrays made once and memory-mapped ever after, in a folder keyed by what they were made of.

An entry is made in a folder of its own beside its place and renamed into it, so it is there whole or not at all,
whoever is killed and however many start at once. What it holds is as private as what it was made of: `cache_folder`
keeps it for the user alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from pmlf.basics.files import new_file, remove_flat
from pmlf.data.cache_folder import CacheFolder, open_folder, unwritable_cache

FORMAT = 1  # a new number leaves entries of an older form alone
_CONTENTS = "contents.json"
_READ_BYTES = 1 << 20


def digest(files: Iterable[Path], *also: Any) -> str:
    """A name for what is made of these files' contents and of the constants `also`; never to be written anywhere.

    Who sees it can test guesses of the files. The cache writes its digest under a key instead.
    """
    found = hashlib.blake2b(repr((FORMAT, also)).encode(), digest_size=16)
    for path in files:
        found.update(repr((path.name, path.stat().st_size)).encode())
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                found.update(block)
    return found.hexdigest()


class Arrays:
    """Arrays that grow by rows, each in a file of its own: what is made never has to fit in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._contents: dict[str, dict[str, Any]] = {}

    def append(self, name: str, rows: NDArray[Any]) -> None:
        """Rows of the dtype and shape that the first ones had."""
        if name not in self._files:
            self._files[name] = new_file(self._folder / name)
            self._contents[name] = {"dtype": rows.dtype.str, "shape": [0, *rows.shape[1:]]}
        assert self._contents[name]["dtype"] == rows.dtype.str
        assert self._contents[name]["shape"][1:] == list(rows.shape[1:])
        self._contents[name]["shape"][0] += len(rows)
        self._files[name].write(np.ascontiguousarray(rows).data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            if kind is None:
                file.flush()
                os.fsync(file.fileno())
            file.close()
        if kind is None:
            with new_file(self._folder / _CONTENTS) as description:
                description.write(json.dumps(self._contents).encode())


def cached(key: str, make: Callable[[Arrays], None]) -> Mapping[str, NDArray[Any]]:
    """The arrays of `key`, memory-mapped; made first if they are not there, or not whole."""
    folder = open_folder()
    entry = folder.entry(key)
    try:
        return _mapped(entry)
    except _NotWhole:
        remove_flat(entry)
    folder.remove_abandoned()
    _make(folder, entry, make)
    try:
        return _mapped(entry)
    except _NotWhole as error:
        raise ValueError(f"{str(entry)!r} holds what pmlf has not put there: move it away") from error


def _make(folder: CacheFolder, entry: Path, make: Callable[[Arrays], None]) -> None:
    try:
        made = folder.scratch(entry)
    except OSError as error:
        raise unwritable_cache(error) from error
    try:
        with Arrays(made) as arrays:
            make(arrays)
        try:
            made.rename(entry)
        except OSError:  # somebody else was faster: theirs is the same
            if not os.path.lexists(entry):
                raise
    finally:
        remove_flat(made)


class _NotWhole(Exception):
    """An entry is not there, or is not as it was written."""


def _mapped(entry: Path) -> dict[str, NDArray[Any]]:
    """Copy-on-write: torch takes no array that it may not write to, and nothing written reaches the file."""
    arrays: dict[str, NDArray[Any]] = {}
    try:
        contents = json.loads((entry / _CONTENTS).read_text())
        for name, form in contents.items():
            dtype, shape = np.dtype(form["dtype"]), tuple(form["shape"])
            if (entry / name).stat().st_size != dtype.itemsize * int(np.prod(shape)):
                raise ValueError("another size than its description says")
            empty = 0 in shape  # which cannot be mapped
            arrays[name] = np.empty(shape, dtype) if empty else np.memmap(entry / name, dtype, "c", shape=shape)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _NotWhole from error
    except OSError:  # too many open files, say: what is there may well be whole
        raise
    except Exception as error:  # whatever a damaged description may raise
        raise _NotWhole from error
    return arrays
