"""Shaped noise step by step: shape^-1 w exactly, its covariance, and a memory that never leaves the process."""

from __future__ import annotations

import copy
import os
import pickle

import numpy as np
import pytest
import torch
from scipy import linalg, signal

from pmlf.mechanism.noise import Randomness, SecureRandomness, SeededRandomness
from pmlf.mechanism.noise_memory import NoiseMemory
from pmlf.shapes import NoiseShape, banded

SHAPE = NoiseShape((0.6, 0.5, 0.3, -0.1))
SIZES = (5, 1, 7)


def released(memory: NoiseMemory, releases: range, std: float = 1.0, hardened: bool = False) -> np.ndarray:
    """The noise of some releases: a row each, over three parameters."""
    rows = []
    for release in releases:
        values = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
        memory.add_(values, std, release=release, hardened=hardened)
        rows.append(torch.cat(values).numpy())
    return np.stack(rows)


def white(seed: int, releases: int) -> np.ndarray:
    return released(NoiseMemory(NoiseShape.white(), SeededRandomness(seed)), range(releases))


@pytest.mark.parametrize("bands", [1, 2, 4, 8])
def test_shaped_noise_solves_the_triangular_system(bands: int) -> None:
    shape = banded(bands, 50)
    found = released(NoiseMemory(shape, SeededRandomness(3)), range(30))
    np.testing.assert_allclose(found, linalg.solve_triangular(shape.matrix(30), white(3, 30), lower=True), atol=1e-5)
    np.testing.assert_allclose(found, signal.lfilter([1.0], shape.coefficients, white(3, 30), axis=0), atol=1e-5)


def test_hardened_noise_is_shaped_in_float64() -> None:
    found = released(NoiseMemory(SHAPE, SeededRandomness(3)), range(20), hardened=True)
    plain = released(NoiseMemory(NoiseShape.white(), SeededRandomness(3)), range(20), hardened=True)
    np.testing.assert_allclose(found, linalg.solve_triangular(SHAPE.matrix(20), plain, lower=True), atol=1e-12)


def test_the_covariance_over_many_draws_is_that_of_the_inverse() -> None:
    memory, draws = NoiseMemory(SHAPE, SecureRandomness()), 100_000
    rows = []
    for release in range(6):
        value = torch.zeros(draws)
        memory.add_([value], 2.0, release=release)
        rows.append(value.double().numpy())
    inverse = np.linalg.inv(SHAPE.matrix(6))
    expected = 4.0 * inverse @ inverse.T
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.max(np.abs(np.cov(np.stack(rows)) - expected) / scale) < 6 / np.sqrt(draws) * 1.5


def test_a_seeded_memory_is_computed_again_bit_by_bit() -> None:
    memory = NoiseMemory(SHAPE, SeededRandomness(1))
    whole = released(memory, range(12))
    again = NoiseMemory(SHAPE, SeededRandomness(1))
    assert np.array_equal(released(again, range(7, 12)), whole[7:])


class Recorded(SecureRandomness):
    """Unseeded randomness whose streams can be looked at: release t has the stream of SeededRandomness(9)."""

    def stream(self, purpose: str, *numbers: int):  # type: ignore[no-untyped-def]
        return SeededRandomness(9).stream(purpose, *numbers)


def test_an_unseeded_memory_starts_empty_after_a_restart() -> None:
    found = released(NoiseMemory(SHAPE, Recorded()), range(7, 12))
    block = linalg.solve_triangular(SHAPE.matrix(5), white(9, 12)[7:], lower=True)
    np.testing.assert_allclose(found, block, atol=1e-5)


def test_the_matrix_of_an_interrupted_run_has_short_columns_that_are_orthogonal_bands_apart() -> None:
    """Restarts at any steps, with some done again: what the proof in NoiseMemory says of block-diagonal matrices."""
    executed = [*range(10), *range(8, 13), *range(11, 24)]  # restarts at 8 and at 11
    matrix = linalg.block_diag(SHAPE.matrix(10), SHAPE.matrix(5), SHAPE.matrix(13))
    assert np.linalg.norm(matrix, axis=0).max() <= 1 + 1e-12
    for group in range(SHAPE.bands):
        columns = matrix[:, [place for place, step in enumerate(executed) if step % SHAPE.bands == group]]
        gram = columns.T @ columns
        assert np.array_equal(gram, np.diag(np.diag(gram)))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda memory: pickle.loads(pickle.dumps(memory))])
@pytest.mark.parametrize("randomness", [SecureRandomness(), SeededRandomness(2)])
def test_a_copy_has_no_noise_of_the_original(duplicate, randomness: Randomness) -> None:  # type: ignore[no-untyped-def]
    memory = NoiseMemory(SHAPE, randomness)
    released(memory, range(5))
    assert memory.vectors == 3 and duplicate(memory).vectors == 0


def test_a_forked_process_starts_with_an_empty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = NoiseMemory(SHAPE, Recorded())
    released(memory, range(7))
    monkeypatch.setattr(os, "getpid", lambda: -1)  # parent and child would both take back the noise of release 6
    block = linalg.solve_triangular(SHAPE.matrix(5), white(9, 12)[7:], lower=True)
    np.testing.assert_allclose(released(memory, range(7, 12)), block, atol=1e-5)


def test_no_noise_keeps_no_memory() -> None:
    memory = NoiseMemory(SHAPE, SeededRandomness(0))
    assert not released(memory, range(3), std=0.0).any() and memory.vectors == 0


def test_white_noise_is_the_streams_own() -> None:
    found, expected = white(4, 3), np.zeros((3, sum(SIZES)))
    for release in range(3):
        stream, values = SeededRandomness(4).stream("noise", release), [torch.zeros(size).double() for size in SIZES]
        for value in values:
            stream.add_gaussian_(value, 1.0)
        expected[release] = torch.cat(values).numpy()
    assert np.array_equal(found, expected)
