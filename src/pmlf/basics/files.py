"""Files that are there whole or not at all, and who may read them.

A file is written beside its place, forced to the disk and renamed into it.

What derives from private records before the noise is for the user alone: files have the mode 0600 and folders 0700 from
the moment they exist, whatever the umask. This is the default, so that nothing is shown by being forgotten. It covers

- checkpoints: a digest of the records with its key, by which anybody could test guesses of a record;
- the cache: decoded records, and the key under which its names are digests of them (`pmlf.data.cache_folder`);
- diagnostics.json, and a report that shows diagnostics;
- metrics.jsonl, result.json, comparison.json: scores of records that no noise protects, on demand the training loss;
- spec.json: a seed in it undoes the noise;
- the folder of a run, which holds these.

`released=True` leaves a file to the umask. It is for what epsilon covers and what is made to be shown: weights,
certificates, the record of a reproduction. Reports without diagnostics, pictures and benchmarks are written as the
umask says, too: they hold nothing else.
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
    """What a file of this name is called until it is whole; a stopped `write_atomically` leaves it."""
    return f".{name}{_PARTIAL}"


def write_json(path: Path, document: Mapping[str, Any], *, released: bool = False) -> None:
    write_atomically(path, json.dumps(document, indent=2).encode() + b"\n", released=released)


def write_atomically(path: Path, content: bytes, *, released: bool = False) -> None:
    """The whole file or none of it, also after a loss of power; what was there before stays until then.

    The file is a new one, with its own permissions, whatever those of the file that it replaces were.
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
        with suppress(OSError):  # what went wrong first is what to tell
            partial.unlink(missing_ok=True)
        raise unwritable(path, error) from error


def new_file(path: Path, *, released: bool = False) -> BinaryIO:
    """A file to write to that was not there before: nothing planted in its place, a link say, is opened."""
    return path.open("xb") if released else open(path, "xb", opener=_for_the_user)


def _for_the_user(path: str, flags: int) -> int:
    return os.open(path, flags, _USER_FILE)


def new_folder(path: Path) -> None:
    """A folder for the user alone, in one that is there; what has its name already is an error."""
    os.mkdir(path, _USER_FOLDER)


def remove_flat(folder: Path) -> None:
    """Remove a folder of plain files. Whatever else is in it, a folder or a link, stays, and the folder with it."""
    with suppress(OSError):
        if folder.is_symlink():
            return
        for entry in list(os.scandir(folder)):
            if entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)
        folder.rmdir()


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk: a renamed or new file is safe only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(path: Path, error: OSError) -> OSError:
    """One sentence for a full disk, a read-only folder and the like; the class of the error stays."""
    sentence = f"{str(path)!r} cannot be written ({error.strerror}): make room or another place for it"
    return type(error)(f"{sentence}; what was there before is unchanged")
