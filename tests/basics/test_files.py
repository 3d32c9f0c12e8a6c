"""Files that are there whole or not at all, and that nobody else can read unless they are released."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from pmlf.basics import files


@pytest.fixture
def open_umask() -> Iterator[None]:
    """New files are for everybody, unless who makes them says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write_atomically(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError("full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="cannot be written"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("open_umask")
def test_a_file_is_for_the_user_alone_while_it_is_written_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "file", []
    path.write_bytes(b"old")  # for everybody
    fsync = os.fsync

    def look(descriptor: int) -> None:
        seen.extend(mode(each) for each in tmp_path.iterdir() if each != path)
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", look)
    files.write_atomically(path, b"new")
    assert seen == [0o600] and mode(path) == 0o600 and path.read_bytes() == b"new"


def test_what_is_released_is_left_to_the_umask(tmp_path: Path) -> None:
    for umask, expected in ((0o022, 0o644), (0o077, 0o600), (0, 0o666)):
        before = os.umask(umask)
        try:
            files.write_atomically(tmp_path / "file", b"released", released=True)
        finally:
            os.umask(before)
        assert mode(tmp_path / "file") == expected


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / ".file.partial").symlink_to(tmp_path / "elsewhere")
    files.write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert not (tmp_path / "file").is_symlink() and (tmp_path / "file").read_bytes() == b"new"


def test_removing_a_flat_folder_leaves_folders_and_links(tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "flat")
    files.remove_flat(tmp_path / "link")
    assert (tmp_path / "flat" / "file").exists()
    (tmp_path / "flat" / "folder").mkdir()
    (tmp_path / "flat" / "folder" / "file").touch()
    files.remove_flat(tmp_path / "flat")
    assert (tmp_path / "flat" / "folder" / "file").exists()
    files.remove_flat(tmp_path / "flat" / "folder")
    files.remove_flat(tmp_path / "flat")
    assert not (tmp_path / "flat").exists()
