"""The folder that the cache has for itself: made, marked and keyed by the library, and for the user alone.

PMLF_CACHE may be any folder, the home folder too. Nothing in it is the library's but `pmlf-arrays`, which appears whole
by a rename, with a key in it. A folder of that name without a key is not the library's work and is refused; so is one
that another user owns or can look into. Names in it are digests under the key: without it nobody can compare them with
digests of guesses.

Nothing is removed but plain files in folders of `pmlf-arrays` that have a name which `entry` or `scratch` gives.
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
_ABANDONED_SECONDS = 24 * 3600.0  # scratch that nobody has written to for so long is nobody's any more
_TAG = b"""Signature: 8a477f597d28d172789f06886806bc55
# This folder is the cache of pmlf; backups leave it out (https://bford.info/cachedir). Remove it whenever you like.
"""


@dataclass(frozen=True, kw_only=True)
class CacheFolder:
    """The library's own folder in a cache folder, and the key of its names."""

    path: Path
    key: bytes

    def entry(self, name: str) -> Path:
        """Where what has this name is kept."""
        digest = hashlib.blake2b(name.encode(), key=self.key, digest_size=_NAME_BYTES)
        return self.path / digest.hexdigest()

    def scratch(self, entry: Path) -> Path:
        """A new folder in which an entry is made until it is whole."""
        path = entry.with_name(f"{entry.name}.{secrets.token_hex(8)}.partial")
        new_folder(path)
        return path

    def remove_abandoned(self) -> None:
        """Remove what those who were killed have left."""
        for path in self.path.iterdir():
            if _SCRATCH.fullmatch(path.name) and time.time() - _last_written(path) > _ABANDONED_SECONDS:
                remove_flat(path)


def cache_folder() -> Path:
    """PMLF_CACHE, or `pmlf` in the user's cache folder."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pmlf"


def open_folder() -> CacheFolder:
    """The library's folder in `cache_folder()`, made if it is not there, however many start at once.

    Raises:
        ValueError: it cannot be made, or what is there is not for this user alone; the sentence says what to do.
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
    return ValueError(
        f"the cache folder {str(cache_folder())!r} cannot be written ({error.strerror}): set {CACHE_VARIABLE} to one "
        "that can"
    )


def _make(path: Path) -> None:
    """Made elsewhere and renamed: of several who do so at once the first is the one that all use."""
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
    """Where everybody may rename everything, a folder that was checked is another one a moment later."""
    mode = root.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ValueError(
            f"every user can rename what is in the cache folder {str(root)!r}: type `chmod o-w {_quoted(root)}`, or "
            f"set {CACHE_VARIABLE} to a folder of your own"
        )


def _checked_key(path: Path) -> bytes:
    """The key of a folder that this library made and that nobody else can look into."""
    folder = os.lstat(path)
    if stat.S_ISDIR(folder.st_mode) and folder.st_uid != os.geteuid():
        raise ValueError(
            f"the cache in {str(path)!r} belongs to another user, and holds what only its owner may read: set "
            f"{CACHE_VARIABLE} to a folder of your own"
        )
    found = _read_key(path / KEY_NAME) if stat.S_ISDIR(folder.st_mode) else None
    if found is None:
        raise ValueError(
            f"{str(path)!r} is not a folder that pmlf has made, for it has no key in {KEY_NAME!r}: move it away, or "
            f"set {CACHE_VARIABLE} to another folder"
        )
    key, status = found
    if (folder.st_mode | status.st_mode) & 0o077 or status.st_uid != os.geteuid():
        raise ValueError(
            f"other users can look into the cache {str(path)!r}, so they may know its key: remove it by "
            f"`rm -r {_quoted(path)}`, it is made again; where files cannot be kept from others, set {CACHE_VARIABLE} "
            "to a folder where they can"
        )
    return key


def _read_key(path: Path) -> tuple[bytes, os.stat_result] | None:
    """A key and whose it is, read from one and the same file."""
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
    """When anything in a folder was written last; now if it is gone."""
    try:
        return max(
            [folder.lstat().st_mtime, *(entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(folder))]
        )
    except OSError:  # finished, or removed by another, in the meantime
        return time.time()


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
