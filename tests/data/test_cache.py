"""The cache: entries are made once and are complete or absent, also after kills and with several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pmlf.data import cache
from pmlf.data.cache import Arrays, cached, digest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PMLF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(folder: Path) -> list[Path]:
    """The folders in the cache: complete entries and others."""
    return [path for path in (folder / "pmlf-arrays").iterdir() if path.is_dir()]


def make(arrays: Arrays) -> None:
    for start in (0, 3):
        arrays.append("numbers", np.arange(start, start + 3, dtype=np.int32))
        arrays.append("pictures", np.full((3, 2, 2), start, dtype=np.uint8))
    arrays.append("nothing", np.empty((0, 4), dtype=np.float32))


def refuse(arrays: Arrays) -> None:
    raise AssertionError("made again")


def check(arrays: Mapping[str, NDArray[np.generic]]) -> None:
    assert arrays["numbers"].tolist() == [0, 1, 2, 3, 4, 5]
    assert arrays["pictures"].shape == (6, 2, 2) and arrays["pictures"].dtype == np.uint8
    assert arrays["pictures"][4, 0, 0] == 3
    assert arrays["nothing"].shape == (0, 4)


def test_arrays_are_made_once_and_then_mapped(folder: Path) -> None:
    check(cached("key", make))
    again = cached("key", refuse)
    check(again)
    assert isinstance(again["numbers"], np.memmap)
    assert len(entries(folder)) == 1


def test_what_is_written_to_an_array_does_not_reach_the_file() -> None:
    first = cached("key", make)
    first["numbers"][0] = 99
    check(cached("key", refuse))


def test_an_error_while_making_leaves_nothing(folder: Path) -> None:
    def fail(arrays: Arrays) -> None:
        arrays.append("numbers", np.arange(3))
        raise ValueError("broken record")

    with pytest.raises(ValueError, match="broken record"):
        cached("key", fail)
    assert entries(folder) == []
    check(cached("key", make))


KILLED = """
import sys, time
import numpy as np
from pmlf.data.cache import cached
def make(arrays):
    arrays.append("numbers", np.arange(100_000, dtype=np.int32))
    print("writing", flush=True)
    time.sleep(60)
cached("key", make)
"""


@pytest.mark.slow
def test_killed_while_making_the_next_start_works(folder: Path) -> None:
    source = str(Path(cache.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": source}
    )
    assert process.stdout is not None and process.stdout.readline() == b"writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (left,) = entries(folder)  # a killed process cannot clean up
    check(cached("key", make))
    long_ago = time.time() - 2 * 24 * 3600
    os.utime(left, (long_ago, long_ago))
    cached("another", make)
    assert left in entries(folder)  # written just now: another process may be at work
    for path in (*left.iterdir(), left):
        os.utime(path, (long_ago, long_ago))
    cached("a third", make)
    assert left not in entries(folder) and len(entries(folder)) == 3


def test_a_second_process_uses_the_entry_of_the_first(folder: Path) -> None:
    def overtaken(arrays: Arrays) -> None:
        cached("key", make)
        make(arrays)

    check(cached("key", overtaken))
    assert len(entries(folder)) == 1


@pytest.mark.parametrize("damage", ["shorten", "remove", "{", '{"numbers": 1}'])
def test_a_damaged_entry_is_made_again(damage: str, folder: Path) -> None:
    cached("key", make)
    (entry,) = entries(folder)
    file = entry / "numbers"
    if damage == "shorten":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "remove":
        file.unlink()
    else:
        (entry / "contents.json").write_text(damage)
    check(cached("key", make))
    check(cached("key", refuse))


def test_an_entry_that_cannot_be_read_now_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached("key", make)

    def fail(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(cache.np, "memmap", fail)
        with pytest.raises(OSError, match="Too many open files"):
            cached("key", make)
    check(cached("key", refuse))


def test_a_folder_that_cannot_be_written_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PMLF_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot be written .*: set PMLF_CACHE"):
        cached("key", make)


def test_the_key_follows_names_contents_and_constants(tmp_path: Path) -> None:
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).write_text(text)
    a, b, c = (tmp_path / name for name in "abc")
    assert digest([a]) == digest([a])
    assert len({digest([a]), digest([b]), digest([c]), digest([a, b]), digest([b, a]), digest([a], "other")}) == 6
