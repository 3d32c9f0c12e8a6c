"""Streams of randomness: exact probabilities, the right distribution, nothing repeated."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import scipy.stats
import torch

from pmlf.mechanism.noise import (
    SecureRandomness,
    SeededRandomness,
    Stream,
    keyed_uniforms,
    randomness_from,
    torch_seeded,
)


def gaussians(stream: Stream, count: int, std: float, *, hardened: bool = False) -> torch.Tensor:
    tensor = torch.zeros(count)
    stream.add_gaussian_(tensor, std, hardened=hardened)
    return tensor


def test_noise_is_normal_with_the_given_deviation() -> None:
    noise = gaussians(SeededRandomness(1).stream("noise", 0), 1_000_000, 2.5).double().numpy()
    assert abs(noise.std() / 2.5 - 1) < 0.01
    assert abs(noise.mean()) < 5 * 2.5 / 1e3
    assert scipy.stats.kstest(noise / 2.5, "norm").pvalue > 1e-3
    assert scipy.stats.normaltest(noise).pvalue > 1e-3
    # the tail is there: 1e6 draws go past 4.3 deviations and not past 7
    assert 4.3 < np.abs(noise / 2.5).max() < 7
    # halves of a Box-Muller pair are not correlated, nor are neighbours
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.01


def test_hardened_noise_is_half_the_sum_of_four_in_float64() -> None:
    plain, hardened = Stream(bytes(32)), Stream(bytes(32))
    count, std = 100_001, 0.7
    target = torch.linspace(-3.0, 3.0, count)
    total = torch.zeros(count, dtype=torch.float64)
    for _ in range(4):
        plain.add_gaussian_(total, 1.0)
    expected = target.double() + total * (std / 2)
    hardened.add_gaussian_(target, std, hardened=True)
    assert torch.equal(target, expected.float())
    noise = gaussians(SeededRandomness(1).stream("noise", 0), 1_000_000, 2.5, hardened=True).double().numpy()
    assert abs(noise.std() / 2.5 - 1) < 0.01
    assert scipy.stats.kstest(noise / 2.5, "norm").pvalue > 1e-3
    assert scipy.stats.normaltest(noise).pvalue > 1e-3


def test_noise_is_added_in_place_across_chunks_and_odd_sizes() -> None:
    base = torch.full(((1 << 17) + 3,), 7.0)
    Stream(bytes(32)).add_gaussian_(base, 1e-3)
    assert base.shape == ((1 << 17) + 3,) and (base - 7).abs().max() < 0.01 and (base != 7).float().mean() > 0.99


def test_noise_refuses_a_tensor_it_would_not_reach() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        Stream(bytes(32)).add_gaussian_(torch.zeros(4, 4).t()[:, :2], 1.0)


def test_key_stream_is_aes_256_in_counter_mode() -> None:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = bytes(range(32))
    blocks = b"".join(i.to_bytes(16, "big") for i in range(4))
    expected = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(blocks)
    assert Stream(key).words(8).tobytes() == expected


def test_seeded_streams_differ_by_seed_purpose_and_number_and_nothing_else() -> None:
    def first(seed: int, purpose: str, *numbers: int) -> int:
        return SeededRandomness(seed).stream(purpose, *numbers).seed()

    streams = [
        (1, "noise", 0),
        (2, "noise", 0),
        (1, "sampling", 0),
        (1, "noise", 1),
        (1, "noise", 1, 0),
        (11, "noise", 0),
    ]
    seeds = [first(*s) for s in streams]  # type: ignore[arg-type]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [first(*s) for s in streams]  # type: ignore[arg-type]


def test_secure_randomness_never_repeats_even_when_copied() -> None:
    source = SecureRandomness()
    draws = {s.stream("noise", 0).seed() for s in (source, source, copy.deepcopy(source), SecureRandomness())}
    assert len(draws) == 4
    assert vars(source) == {}  # no key to copy, save or fork


def test_a_torch_generator_gives_a_reproducible_seed_once() -> None:
    one, again = (randomness_from(torch.Generator().manual_seed(1)).stream("noise", 0).seed() for _ in range(2))
    assert one == again
    generator = torch.Generator().manual_seed(1)
    first, second = randomness_from(generator), randomness_from(generator)
    assert first.stream("noise", 0).seed() != second.stream("noise", 0).seed()
    with pytest.raises(ValueError, match="generator is a int"):
        randomness_from(7)  # type: ignore[arg-type]


def test_poisson_draws_are_binomial_and_independent_of_each_other() -> None:
    population, rate, draws = 1000, 0.03, 4000
    randomness = SeededRandomness(3)
    sizes, counts = [], np.zeros(population)
    for step in range(draws):
        chosen = randomness.stream("sampling", step).chosen(population, rate)
        assert (np.diff(chosen) > 0).all()
        sizes.append(len(chosen))
        counts[chosen] += 1
    # sizes against binomial(n, q), in bins that hold enough
    edges = [-1, 22, 25, 27, 29, 31, 33, 35, 38, population]
    observed = np.histogram(sizes, bins=np.array(edges) + 0.5)[0]
    expected = np.diff(scipy.stats.binom.cdf(edges, population, rate)) * draws
    assert scipy.stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3
    # how often each index was drawn: binomial(draws, q) as well
    assert abs(counts.var() / (draws * rate * (1 - rate)) - 1) < 0.2


@pytest.mark.parametrize(("rate", "least", "most"), [(1.0, 50, 50), (1e-12, 0, 0), (1.0 - 1e-12, 50, 50)])
def test_extreme_rates(rate: float, least: int, most: int) -> None:
    assert least <= len(Stream(bytes(32)).chosen(50, rate)) <= most


def test_keyed_uniforms_depend_on_the_sample_alone() -> None:
    stream = SeededRandomness(5)
    whole = keyed_uniforms(stream.stream("augmentation", 0, 0), torch.arange(1000), 3)
    part = keyed_uniforms(stream.stream("augmentation", 0, 0), torch.tensor([17, 3]), 3)
    assert torch.equal(part, whole[[17, 3]])
    assert not torch.equal(whole, keyed_uniforms(stream.stream("augmentation", 0, 1), torch.arange(1000), 3))
    assert whole.min() >= 0 and whole.max() < 1
    for column in whole.T:
        assert scipy.stats.kstest(column.numpy(), "uniform").pvalue > 1e-3
    assert abs(torch.corrcoef(whole.T)[0, 1]) < 0.1


def test_torch_generator_is_seeded_inside_and_restored_outside() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch_seeded(SeededRandomness(1).seed_for("dropout", 0, 0, 0), torch.device("cpu")):
        inside = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with torch_seeded(SeededRandomness(1).seed_for("dropout", 0, 0, 0), torch.device("cpu")):
        assert torch.equal(torch.rand(3), inside)
