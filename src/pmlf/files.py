"""Files that are there whole or not at all: written beside their place, forced to the disk, renamed into it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PARTIAL = ".partial"


def is_partial(path: Path) -> bool:
    """Whether this is what a stopped `write_atomically` has left."""
    return path.name.startswith(".") and path.name.endswith(_PARTIAL)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(document, indent=2).encode() + b"\n")


def write_atomically(path: Path, content: bytes) -> None:
    """The whole file or none of it, also after a loss of power; what was there before stays until then."""
    partial = path.with_name(f".{path.name}{_PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise unwritable(path, error) from error


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
