"""Atomic writes, and who may read a file.

A file is written under a temporary name, forced to the disk, and renamed. Readers see the whole file or none.

By default only the user can read what is written: files have mode 0600 and folders 0700 from the moment they exist,
whatever the umask. This covers everything that depends on private records without noise:

- checkpoints: they hold a keyed digest of the records and its key, which let anyone test a guess of a record;
- the cache: decoded records, and the key of the digests in its names (`pmlf.data.cache_folder`);
- diagnostics.json, and a report that shows diagnostics;
- metrics.jsonl, result.json and comparison.json: scores on unprotected records and, on demand, the training loss;
- spec.json: with a seed, the noise can be subtracted;
- the run folder, which holds these.

`released=True` applies the umask instead. It is for what epsilon covers and for what is meant to be shown: weights,
certificates, the record of a reproduction. Reports without diagnostics, pictures and benchmarks follow the umask too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

_PARTIAL = ".partial"
_USER_FILE, _USER_FOLDER = 0o600, 0o700


def partial_name(name: str) -> str:
    """The temporary name of a file; an interrupted `write_atomically` may leave a file of this name.

    >>> partial_name("result.json")
    '.result.json.partial'
    """
    return f".{name}{_PARTIAL}"


def write_json(path: Path, document: Mapping[str, Any], *, released: bool = False) -> None:
    """Write a JSON document atomically; see `write_atomically`."""
    write_atomically(path, json.dumps(document, indent=2).encode() + b"\n", released=released)


def write_atomically(path: Path, content: bytes, *, released: bool = False) -> None:
    """Write a file completely or not at all, also across a power loss; until then, the old file stays.

    Args:
        path: The file to write or replace.
        content: Its content.
        released: False gives the file mode 0600, True the mode that the umask allows. The mode of a file that is
            replaced does not matter.

    Raises:
        OSError: The file cannot be written; an existing file is unchanged.
    """
    partial = path.with_name(partial_name(path.name))
    try:
        partial.unlink(missing_ok=True)
        with new_file(partial, released=released) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # the first error is the one to report
            partial.unlink(missing_ok=True)
        raise unwritable(path, error) from error


def new_file(path: Path, *, released: bool = False) -> BinaryIO:
    """Create a file and open it for writing; an existing file or symbolic link is an error, never followed."""
    return path.open("xb") if released else open(path, "xb", opener=_for_the_user)


def _for_the_user(path: str, flags: int) -> int:
    return os.open(path, flags, _USER_FILE)


def new_folder(path: Path) -> None:
    """Create a folder that only the user can read; its parent must exist, and the folder must not."""
    os.mkdir(path, _USER_FOLDER)


def remove_flat(folder: Path) -> None:
    """Remove a folder of plain files. Folders and links in it stay, and so does the folder then."""
    with suppress(OSError):
        if folder.is_symlink():
            return
        for entry in list(os.scandir(folder)):
            if entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)
        folder.rmdir()


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk: only then does a new or renamed file survive a power loss."""
    if os.name == "nt":  # Windows opens no folders, and keeps their entries by itself
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(path: Path, error: OSError) -> OSError:
    """An error of the same class that says in one sentence which file cannot be written, and why."""
    sentence = f"{str(path)!r} cannot be written ({error.strerror}): free disk space or choose another folder"
    return type(error)(f"{sentence}; an existing file is unchanged")
