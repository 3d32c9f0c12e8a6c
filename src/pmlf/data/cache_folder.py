"""The cache's own folder, readable by its owner only.

PMLF_CACHE may be any folder, even the home folder. The library uses only the folder `pmlf-arrays` in it, which it
creates complete, by a rename, with a secret key inside. A folder of that name without a key is refused, and so is one
that another user owns or can read. Entry names are keyed hashes: without the key nobody can compare them with hashes of
guesses.

The library removes only regular files, in folders of `pmlf-arrays` whose names `entry` or `scratch` made.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shlex
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from pmlf.basics.files import new_folder, remove_flat, write_atomically

CACHE_VARIABLE = "PMLF_CACHE"
FOLDER_NAME = "pmlf-arrays"
KEY_NAME = "pmlf-key"
_KEY_BYTES = 32
_NAME_BYTES = 16
_SCRATCH = re.compile(rf"[0-9a-f]{{{2 * _NAME_BYTES}}}\.[0-9a-f]{{16}}\.partial")
_ABANDONED_SECONDS = 24 * 3600.0  # after this time without a write, a temporary folder is abandoned
_TAG = b"""Signature: 8a477f597d28d172789f06886806bc55
# This folder is the cache of pmlf; backups leave it out (https://bford.info/cachedir). Remove it whenever you like.
"""


@dataclass(frozen=True, kw_only=True)
class CacheFolder:
    """The library's folder within the cache folder, and the key of its entry names."""

    path: Path
    key: bytes

    def entry(self, name: str) -> Path:
        """The path of the entry with this name."""
        digest = hashlib.blake2b(name.encode(), key=self.key, digest_size=_NAME_BYTES)
        return self.path / digest.hexdigest()

    def scratch(self, entry: Path) -> Path:
        """A new temporary folder to write an entry in."""
        path = entry.with_name(f"{entry.name}.{secrets.token_hex(8)}.partial")
        new_folder(path)
        return path

    def remove_abandoned(self) -> None:
        """Remove temporary folders of killed processes."""
        for path in self.path.iterdir():
            if _SCRATCH.fullmatch(path.name) and time.time() - _last_written(path) > _ABANDONED_SECONDS:
                remove_flat(path)


def cache_folder() -> Path:
    """The folder in PMLF_CACHE, or `pmlf` in the user's cache folder."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pmlf"


def open_folder() -> CacheFolder:
    """Open the library's folder in `cache_folder()`, and create it if necessary. Several processes may do so at once.

    Raises:
        ValueError: If it cannot be created, or other users can access it. The message says what to do.
    """
    root = cache_folder()
    path = root / FOLDER_NAME
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_open_to_all(root)
        if not os.path.lexists(path):
            _make(path)
        return CacheFolder(path=path, key=_checked_key(path))
    except OSError as error:
        raise unwritable_cache(error) from error


def unwritable_cache(error: OSError) -> ValueError:
    """The error to raise if the cache cannot be written."""
    return ValueError(
        f"the cache folder {str(cache_folder())!r} cannot be written ({error.strerror}): set {CACHE_VARIABLE} to a "
        "writable folder"
    )


def _make(path: Path) -> None:
    """Create the folder under another name and rename it. If several processes do so, all use the first."""
    made = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    new_folder(made)
    try:
        write_atomically(made / KEY_NAME, os.urandom(_KEY_BYTES))
        write_atomically(made / "CACHEDIR.TAG", _TAG)
        made.rename(path)
    except OSError:
        if not os.path.lexists(path):
            raise
    finally:
        remove_flat(made)


def _refuse_open_to_all(root: Path) -> None:
    """Raise ValueError if every user can rename what is in `root`: a checked folder could then be swapped."""
    mode = root.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ValueError(
            f"every user can rename files in the cache folder {str(root)!r}: run `chmod o-w {_quoted(root)}`, or set "
            f"{CACHE_VARIABLE} to a folder of your own"
        )


def _checked_key(path: Path) -> bytes:
    """The key in a folder that this library created and that only its owner can read."""
    folder = os.lstat(path)
    if stat.S_ISDIR(folder.st_mode) and folder.st_uid != os.geteuid():
        raise ValueError(
            f"the cache {str(path)!r} belongs to another user: set {CACHE_VARIABLE} to a folder of your own"
        )
    found = _read_key(path / KEY_NAME) if stat.S_ISDIR(folder.st_mode) else None
    if found is None:
        raise ValueError(
            f"{str(path)!r} was not created by pmlf, because it has no key in {KEY_NAME!r}: move it away, or set "
            f"{CACHE_VARIABLE} to another folder"
        )
    key, status = found
    if (folder.st_mode | status.st_mode) & 0o077 or status.st_uid != os.geteuid():
        raise ValueError(
            f"other users can read the cache {str(path)!r} and its key: remove it with `rm -r {_quoted(path)}` (it is "
            f"created again), or set {CACHE_VARIABLE} to a folder on a file system with permissions"
        )
    return key


def _read_key(path: Path) -> tuple[bytes, os.stat_result] | None:
    """The key and the status of its file, both from one open file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != _KEY_BYTES:
            return None
        return file.read(), status


def _last_written(folder: Path) -> float:
    """The time of the last write in a folder; now if the folder is gone."""
    try:
        return max(
            [folder.lstat().st_mtime, *(entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(folder))]
        )
    except OSError:  # renamed or removed by another process in the meantime
        return time.time()


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
