"""Arrays made once and memory-mapped ever after, in a folder keyed by what they were made of.

An entry is made in a folder of its own beside its place and renamed into it, so it is there whole or not at all,
whoever is killed and however many start at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

CACHE_VARIABLE = "PMLF_CACHE"
FORMAT = 1  # a new number leaves entries of an older form alone
_CONTENTS = "contents.json"
_ABANDONED_SECONDS = 24 * 3600.0  # an unfinished entry of this age has nobody working on it any more
_READ_BYTES = 1 << 20


def cache_folder() -> Path:
    """PMLF_CACHE, or `pmlf` in the user's cache folder."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pmlf"


def digest(files: Iterable[Path], *also: Any) -> str:
    """A name for what is made of these files' contents and of the constants `also`."""
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
            self._files[name] = (self._folder / name).open("wb")
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
            (self._folder / _CONTENTS).write_text(json.dumps(self._contents))


def cached(key: str, make: Callable[[Arrays], None]) -> Mapping[str, NDArray[Any]]:
    """The arrays of `key`, memory-mapped; made first if they are not there, or not whole."""
    root = cache_folder()
    entry = root / key
    try:
        return _mapped(entry)
    except (OSError, ValueError, KeyError):
        shutil.rmtree(entry, ignore_errors=True)
    try:
        root.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=root))
    except OSError as error:
        raise ValueError(
            f"the cache folder {str(root)!r} cannot be written ({error.strerror}): set {CACHE_VARIABLE} to one that can"
        ) from error
    try:
        _remove_abandoned(root)
        with Arrays(made) as arrays:
            make(arrays)
        try:
            made.rename(entry)
        except OSError:  # somebody else was faster: theirs is the same
            if not entry.is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return _mapped(entry)


def _mapped(entry: Path) -> dict[str, NDArray[Any]]:
    """Copy-on-write: torch takes no array that it may not write to, and nothing written reaches the file."""
    contents: dict[str, dict[str, Any]] = json.loads((entry / _CONTENTS).read_text())
    arrays: dict[str, NDArray[Any]] = {}
    for name, form in contents.items():
        dtype, shape = np.dtype(form["dtype"]), tuple(form["shape"])
        if (entry / name).stat().st_size != dtype.itemsize * int(np.prod(shape)):
            raise ValueError(f"{str(entry / name)!r} has another size than its description says")
        empty = 0 in shape  # which cannot be mapped
        arrays[name] = np.empty(shape, dtype) if empty else np.memmap(entry / name, dtype, "c", shape=shape)
    return arrays


def _remove_abandoned(root: Path) -> None:
    for path in root.glob(".*.*"):
        try:
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:  # finished, or removed by another, in the meantime
            continue
