"""A cache of arrays: computed once, then memory-mapped, under a key that depends on their source files.

An entry is written to a temporary folder and then renamed, so it is complete or absent, also after a kill and with
several processes at once. Entries are as private as their sources: `cache_folder` makes them readable by their owner
only.
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

FORMAT = 1  # part of every key: increase it if the content of entries changes
CONTENTS = "contents.json"
_READ_BYTES = 1 << 20


def digest(files: Iterable[Path], *also: Any) -> str:
    """A digest of the files' contents and the constants `also`.

    Never write it anywhere: it allows others to test guesses of the files. The cache writes a keyed hash of it.
    """
    found = hashlib.blake2b(repr((FORMAT, also)).encode(), digest_size=16)
    for path in files:
        found.update(repr((path.name, path.stat().st_size)).encode())
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                found.update(block)
    return found.hexdigest()


class Arrays:
    """Arrays that grow by rows, each in its own file, so that they need not fit into memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._contents: dict[str, dict[str, Any]] = {}

    def append(self, name: str, rows: NDArray[Any]) -> None:
        """Append rows. All rows of an array have the same dtype and shape."""
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
            with new_file(self._folder / CONTENTS) as description:
                description.write(json.dumps(self._contents).encode())


def cached(key: str, make: Callable[[Arrays], None]) -> Mapping[str, NDArray[Any]]:
    """The arrays of `key`, memory-mapped. If the entry is missing or damaged, `make` writes them first.

    Raises:
        ValueError: If the cache folder cannot be used.
    """
    folder = open_folder()
    entry = folder.entry(key)
    try:
        return read_entry(entry)
    except IncompleteEntry:
        remove_flat(entry)
    folder.remove_abandoned()
    _make(folder, entry, make)
    try:
        return read_entry(entry)
    except IncompleteEntry as error:
        raise ValueError(f"{str(entry)!r} holds files that pmlf did not write: move them away") from error


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
        except OSError:  # another process was faster: its entry is the same
            if not os.path.lexists(entry):
                raise
    finally:
        remove_flat(made)


class IncompleteEntry(Exception):
    """The entry is missing or damaged."""


def read_entry(entry: Path) -> dict[str, NDArray[Any]]:
    """Map an entry copy-on-write: torch needs writable arrays, and nothing written reaches the file."""
    arrays: dict[str, NDArray[Any]] = {}
    try:
        contents = json.loads((entry / CONTENTS).read_text())
        for name, form in contents.items():
            dtype, shape = np.dtype(form["dtype"]), tuple(form["shape"])
            if (entry / name).stat().st_size != dtype.itemsize * int(np.prod(shape)):
                raise ValueError("the size of the file is wrong")
            empty = 0 in shape  # an empty file cannot be mapped
            arrays[name] = np.empty(shape, dtype) if empty else np.memmap(entry / name, dtype, "c", shape=shape)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise IncompleteEntry from error
    except OSError:  # for example too many open files: the entry may be fine
        raise
    except Exception as error:  # a damaged description can raise anything
        raise IncompleteEntry from error
    return arrays
