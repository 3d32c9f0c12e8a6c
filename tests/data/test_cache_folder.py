"""The cache's own folder: other files stay untouched, and other users learn nothing from it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pmlf
from pmlf.data.cache import Arrays, cached, digest

LONG_AGO = time.time() - 30 * 24 * 3600
HEX = "0123456789abcdef"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PMLF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def open_umask() -> Iterator[None]:
    """New files are readable by everyone unless their creator restricts them."""
    before = os.umask(0)
    yield
    os.umask(before)


def make(arrays: Arrays) -> None:
    arrays.append("numbers", np.arange(3))


def of_the_user(folder: Path) -> Path:
    """A folder with a file and a folder in it, all written long ago."""
    (folder / "papers").mkdir(parents=True)
    for path in (folder / "thesis.txt", folder / "papers" / "first.txt"):
        path.write_text("years of work")
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (LONG_AGO, LONG_AGO))
    return folder


def is_whole(folder: Path) -> bool:
    return [(folder / name).read_text() for name in ("thesis.txt", "papers/first.txt")] == ["years of work"] * 2


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


NAMES = (".emacs.d", ".key.abcdefgh", f".{HEX}{HEX}.abcdefgh", f"{HEX}{HEX}", f"{HEX}{HEX}.{HEX}.partial", "key")


def test_nothing_of_the_users_is_removed_where_the_cache_is_the_home_folder(folder: Path) -> None:
    kept = [of_the_user(folder / name) for name in NAMES]
    for key in ("key", "another", f"{HEX}{HEX}"):
        cached(key, make)
        cached(key, make)
    assert all(map(is_whole, kept))


def test_nothing_of_the_users_is_removed_in_the_caches_own_folder(folder: Path) -> None:
    cached("key", make)
    own = folder / "pmlf-arrays"
    kept = [of_the_user(own / name) for name in (".emacs.d", ".key.abcdefgh", f"{HEX}{HEX}", f"{HEX}{HEX}.partial")]
    (own / f"{HEX}{HEX}.{HEX}.partial").symlink_to(of_the_user(folder / "elsewhere"))
    cached("another", make)
    assert all(map(is_whole, kept)) and is_whole(folder / "elsewhere")


def test_what_lies_in_a_damaged_entry_is_not_removed(folder: Path) -> None:
    cached("key", make)
    (entry,) = (path for path in (folder / "pmlf-arrays").iterdir() if path.is_dir())
    (entry / "contents.json").write_text("{")
    kept = of_the_user(entry / "mine")
    (entry / "link").symlink_to(of_the_user(folder / "elsewhere"))
    with pytest.raises(ValueError, match="holds files that pmlf did not write: move them away"):
        cached("key", make)
    assert is_whole(kept) and is_whole(folder / "elsewhere") and (entry / "link").is_symlink()


@pytest.mark.parametrize("kind", ["folder", "with a key too short", "link", "file"])
def test_what_has_the_name_of_the_caches_folder_and_is_not_is_refused_and_left(kind: str, folder: Path) -> None:
    own, elsewhere = folder / "pmlf-arrays", of_the_user(folder / "elsewhere")
    if kind == "link":
        own.symlink_to(elsewhere)
    elif kind == "file":
        own.write_text("mine")
    else:
        of_the_user(own)
    if kind == "with a key too short":
        (own / "pmlf-key").write_bytes(b"key")
    before = sorted(str(path) for path in folder.rglob("*"))
    with pytest.raises(ValueError, match=r"was not created by pmlf.*: move it away, or set PMLF_CACHE"):
        cached("key", make)
    assert sorted(str(path) for path in folder.rglob("*")) == before and is_whole(elsewhere)


@pytest.mark.usefixtures("open_umask")
def test_only_the_owner_can_read_the_cache_at_any_time(folder: Path) -> None:
    seen: list[tuple[bool, int]] = []

    def look(arrays: Arrays) -> None:
        make(arrays)
        seen.extend((path.is_dir(), mode(path)) for path in folder.rglob("*"))

    cached("key", look)
    seen.extend((path.is_dir(), mode(path)) for path in folder.rglob("*"))
    assert set(seen) == {(True, 0o700), (False, 0o600)}


def test_names_say_nothing_about_the_files_without_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "records.csv").write_text("a guess")
    name = digest([tmp_path / "records.csv"])
    entries = []
    for cache_folder in ("first", "second"):
        monkeypatch.setenv("PMLF_CACHE", str(tmp_path / cache_folder))
        cached(name, make)
        everything = {path.name for path in (tmp_path / cache_folder).rglob("*")}
        assert not any(name in found for found in everything)
        entries.append(everything)
    assert entries[0] & entries[1] == {"pmlf-arrays", "pmlf-key", "CACHEDIR.TAG", "contents.json", "numbers"}


MANY = """
import sys, time
import numpy as np
from pmlf.data.cache import cached
print("ready", flush=True)
sys.stdin.readline()
cached("key", lambda arrays: arrays.append("numbers", np.arange(3)))
"""


@pytest.mark.slow
def test_processes_that_start_at_once_share_one_key(folder: Path) -> None:
    source = str(Path(pmlf.__file__).parents[1])
    pipe = subprocess.PIPE
    variables = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", MANY], stdin=pipe, stdout=pipe, text=True, env=variables)
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        process.communicate("go\n", timeout=120)
    assert all(process.returncode == 0 for process in processes)
    assert [path.name for path in folder.iterdir()] == ["pmlf-arrays"]
    assert sorted(path.is_dir() for path in (folder / "pmlf-arrays").iterdir()) == [False, False, True]


@pytest.mark.parametrize("made", ["pmlf-arrays", "pmlf-arrays/pmlf-key"])
def test_a_cache_that_others_can_read_is_refused(made: str, folder: Path) -> None:
    cached("key", make)
    (folder / made).chmod(0o755 if (folder / made).is_dir() else 0o644)
    with pytest.raises(ValueError, match=r"other users can read the cache .*: remove it with `rm -r .*pmlf-arrays`"):
        cached("key", make)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_cache_of_another_user_is_refused(folder: Path) -> None:
    cached("key", make)
    os.chown(folder / "pmlf-arrays", 12345, 12345)
    with pytest.raises(ValueError, match=r"belongs to another user.*: set PMLF_CACHE to a folder of your own"):
        cached("key", make)


def test_a_cache_folder_in_which_everyone_can_rename_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match=r"every user can rename files in the cache folder .*: run `chmod o-w "):
        cached("key", make)
    assert list(folder.iterdir()) == []
    folder.chmod(0o1777)  # like /tmp: only the owner can rename
    cached("key", make)


def test_without_the_variable_it_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PMLF_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    cached("key", make)
    assert (tmp_path / "home" / ".cache" / "pmlf" / "pmlf-arrays").is_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    cached("key", make)
    assert (tmp_path / "xdg" / "pmlf" / "pmlf-arrays").is_dir()
