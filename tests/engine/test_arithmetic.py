"""Rows of numbers: their lengths, and how many are taken at a time."""

from __future__ import annotations

import math

import pytest
import torch

from pmlf.engine import arithmetic


def test_squared_norms_are_exact_over_many_equal_numbers() -> None:
    """Equal numbers make float32 rounding errors of one sign add up; blocks keep them small."""
    equal = torch.full((2, 3_000_001), 0.1)
    exact = 3_000_001 * float(torch.tensor(0.1)) ** 2
    for value in arithmetic.squared_norms(equal).tolist():
        assert value == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("size", [5, 784, 1024, 2048, 3000])
def test_squared_norms_of_tiny_rows_are_exact_whatever_stands_in_the_others(size: int) -> None:
    """A NaN must not hide a row whose squares float32 cannot hold: it would count as nothing, and pass unclipped."""
    rows = torch.full((4, size), 1e-25)
    rows[1], rows[2], rows[3] = float("nan"), 1.0, 0.0
    found = arithmetic.squared_norms(rows).tolist()
    assert found[0] == pytest.approx(size * float(torch.tensor(1e-25)) ** 2, rel=1e-6)
    assert math.isnan(found[1]) and found[2] == pytest.approx(size, rel=1e-5) and found[3] == 0.0


@pytest.mark.parametrize(("bytes_each", "expected"), [(1 << 20, 6), (3 << 20, 3), (12 << 20, 2), (1 << 30, 1), (0, 50)])
def test_blocks_have_as_many_samples_for_every_thread(
    bytes_each: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that none is idle; but a block of large samples is no larger than some 32 MB."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    blocks = list(arithmetic.blocks(slice(0, 50), bytes_each, like=torch.zeros(1)))
    assert blocks[0] == slice(0, expected)
    assert [i for block in blocks for i in range(block.start, block.stop)] == list(range(50))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("tokens", "rows", "cols"), [(1000, 10, 784), (1001, 784, 10), (1024, 1, 512), (7, 3, 5)])
@pytest.mark.parametrize("add", [False, True])
def test_a_product_is_the_same_however_its_tokens_are_shared_out(
    threads: int, tokens: int, rows: int, cols: int, add: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many tokens with a narrow side; tokens that are left over, the wide side first, and what was there count."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    left, right, out = torch.randn(tokens, rows), torch.randn(tokens, cols), torch.randn(rows, cols)
    expected = left.double().mT @ right.double() + (out.double() if add else 0.0)
    if not add:
        out.fill_(float("nan"))  # what is there is not read
    arithmetic.add_product(left, right, out, add=add)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
