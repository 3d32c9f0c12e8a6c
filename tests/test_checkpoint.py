"""Checkpoints: a state is restored bit by bit, and a damaged file is refused."""

from __future__ import annotations

import os
import random
import resource
import stat
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from pmlf import checkpoint

STATE = {
    "numbers": [1, -2, 0.1, float("inf"), True, None, "text"],
    "pair": (1, (2.5, "x")),
    7: {"nested": {}},
    "milestones": Counter({3: 2}),
    "weights": OrderedDict({"0.weight": torch.randn(3, 4), "0": {"weight": torch.arange(5)}}),
    "tensors": [
        torch.tensor(3.5, dtype=torch.float64),
        torch.zeros(0, 3),
        torch.ones(3, dtype=torch.bfloat16) / 3,
        torch.tensor([True, False]),
        torch.tensor([float("nan"), -0.0]),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 3).T,
    ],
}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def test_a_state_comes_back_bit_by_bit(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", STATE)
    loaded = checkpoint.load(tmp_path / "c")
    assert equal(STATE, loaded)
    assert isinstance(loaded["milestones"], Counter)
    assert loaded["tensors"][5].is_contiguous(memory_format=torch.channels_last)


def test_a_checkpoint_is_for_the_user_alone(tmp_path: Path) -> None:
    (tmp_path / "c").touch(0o644)  # as one that a copy has left
    before = os.umask(0)
    try:
        checkpoint.save(tmp_path / "c", STATE)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o600


def test_a_loaded_state_does_not_change_with_the_file(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", STATE)
    loaded = checkpoint.load(tmp_path / "c")
    os.truncate(tmp_path / "c", 0)  # tensors mapped from the file would now end the process
    assert equal(loaded, STATE)


def test_tied_tensors_are_saved_each(tmp_path: Path) -> None:
    tied = torch.randn(3)
    checkpoint.save(tmp_path / "c", {"a": tied, "b": tied, "part": tied[:2]})
    assert equal(checkpoint.load(tmp_path / "c"), {"a": tied, "b": tied, "part": tied[:2]})


def test_what_cannot_be_held_is_refused_by_name(tmp_path: Path) -> None:
    for wrong, said in [
        ({"a": {"b": object()}}, r"state\.a\.b has type object"),
        ({"a": [print]}, r"state\.a\.0 has type builtin"),
        ({"a": {1.5: 2}}, r"state\.a has a key of type float"),
        ({"a": b"bytes"}, r"state\.a has type bytes"),
    ]:
        with pytest.raises(ValueError, match=said):
            checkpoint.save(tmp_path / "c", wrong)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_thousand_mutations_are_refused_or_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, STATE)
    content, rng, refused = path.read_bytes(), random.Random(0), 0
    for trial in range(1000):
        mutated = bytearray(content)
        where = rng.randrange(len(mutated))
        match trial % 4:
            case 0:
                mutated[where] ^= 1 << rng.randrange(8)
            case 1:
                mutated[where:where] = bytes([rng.randrange(256)])
            case 2:
                del mutated[where]
            case _:
                del mutated[where:]
        path.write_bytes(mutated)
        try:
            assert equal(checkpoint.load(path), STATE)
        except ValueError as error:
            assert "is damaged or not a checkpoint" in str(error) and "\n" not in str(error)
            refused += 1
    assert refused > 950


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "exploded").touch, ())

    torch.save({"state": Bomb()}, tmp_path / "c")
    with pytest.raises(ValueError, match="not a checkpoint"):
        checkpoint.load(tmp_path / "c")
    assert not (tmp_path / "exploded").exists()


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", STATE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot be written \(File too large\).* is unchanged"):
            checkpoint.save(tmp_path / "c", {"other": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert equal(checkpoint.load(tmp_path / "c"), STATE) and list(tmp_path.iterdir()) == [tmp_path / "c"]


def test_the_digest_of_records_tells_every_change_and_needs_its_key() -> None:
    x, y = torch.randn(2500, 3), torch.arange(2500)
    digest = checkpoint.records_digest(TensorDataset(x, y), None, b"key")
    assert checkpoint.records_digest(TensorDataset(x.clone(), y), None, b"key") == digest
    assert checkpoint.records_digest(TensorDataset(x, y), None, b"other") != digest
    swapped = torch.randperm(2500)
    for other in (TensorDataset(x[swapped], y[swapped]), TensorDataset(x[1:], y[1:]), TensorDataset(x, y.int())):
        assert checkpoint.records_digest(other, None, b"key") != digest
    assert len({checkpoint.records_digest([{"a": 1, "b": text}], None, b"key") for text in ("x", "y")}) == 2
