"""Files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from pmlf import files


def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write_atomically(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError("full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="cannot be written"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
