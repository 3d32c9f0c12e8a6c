"""Parameters that were changed have another fingerprint, however they were changed."""

from __future__ import annotations

import pytest
import torch

from pmlf.engine.fingerprint import bit_digest, fingerprint


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 3, 7, 2042, 5000])
def test_any_number_changed_by_one_bit_is_seen(dtype: torch.dtype, size: int) -> None:
    values = torch.randn(size).to(dtype)
    before = fingerprint([values])
    for index in {0, size // 2, size - 1}:
        changed = values.clone()
        changed[index] = torch.nextafter(changed[index], torch.tensor(torch.inf, dtype=dtype))
        assert bit_digest(changed) != int(before.digests[0])
        values.data[index] = changed[index]  # without a new version
        assert before.changed(fingerprint([values])).tolist() == [True]
        assert before.versions == fingerprint([values]).versions
        before = fingerprint([values])


def test_a_view_from_the_middle_of_a_word_is_taken_like_any_other() -> None:
    values = torch.randn(9)
    assert bit_digest(values[1:]) == bit_digest(values[1:].clone())


def test_complex_and_sparse_parameters_have_one_too() -> None:
    values = torch.randn(5, 3, dtype=torch.complex128)
    assert bit_digest(values) != bit_digest(values * 2)
    sparse = torch.eye(4).to_sparse()
    assert bit_digest(sparse) != bit_digest(sparse * 2)


@pytest.mark.parametrize("shape", [(6, 4), (300, 300)])
def test_rows_that_change_places_change_the_digest(shape: tuple[int, int]) -> None:
    values = torch.randn(shape)
    assert bit_digest(values.flip(0)) != bit_digest(values)
    assert bit_digest(values.flip(1)) != bit_digest(values)
    assert bit_digest(values.roll(1, 0)) != bit_digest(values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_numbers_that_change_their_signs_change_the_digest(dtype: torch.dtype) -> None:
    values = torch.randn(64, 64).to(dtype)
    assert bit_digest(-values) != bit_digest(values)
