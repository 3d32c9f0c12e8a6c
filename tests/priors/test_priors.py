"""A record's features depend on that record and on the spec alone."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pmlf import priors
from pmlf.experiments.linear_features import recipe
from pmlf.priors import ColourSpec, ImagePrior, PatchSpec, PriorSpec, ScatteringSpec, extraction
from pmlf.probe import PrivateProbe

BLOCKS = (
    PatchSpec(name="patches", weight=0.6, filters=6, grid=4),
    PatchSpec(name="half-size patches", weight=0.3, shrink=2, filters=5, grid=2),
    ColourSpec(name="colours", weight=0.1, colours=7, grid=3),
    ScatteringSpec(name="scattering", weight=0.1, angles=2),
)
SPEC = PriorSpec(image_size=32, images=40, blocks=BLOCKS, seed=3)


@pytest.fixture(scope="module")
def prior() -> ImagePrior:
    return ImagePrior.make(SPEC)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PMLF_CACHE", str(tmp_path))
    return tmp_path


def records(count: int, *, side: int = 32, channels: int = 3) -> NDArray[np.uint8]:
    return np.random.default_rng(5).integers(0, 256, (count, channels, side, side), dtype=np.uint8)


@pytest.mark.slow
def test_features_are_the_same_alone_and_in_any_batch(prior: ImagePrior) -> None:
    images = records(9)
    together = prior(images)
    for index in range(9):
        assert np.array_equal(prior(images[index : index + 1])[0], together[index])
    assert np.array_equal(prior(images[::-1]), together[::-1])


def test_features_are_the_same_on_any_number_of_threads(prior: ImagePrior) -> None:
    images = records(4)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(prior(images))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=0, atol=1e-6)


def test_another_record_does_not_change_a_records_features(prior: ImagePrior) -> None:
    images, others = records(5), records(5)
    others[2] = 255
    same = [0, 1, 3, 4]
    assert np.array_equal(prior(images)[same], prior(others)[same])
    assert not np.array_equal(prior(images)[2], prior(others)[2])


def test_each_block_of_a_record_has_norm_at_most_one(prior: ImagePrior) -> None:
    images = np.concatenate([records(3), np.zeros((1, 3, 32, 32), np.uint8), np.full((1, 3, 32, 32), 255, np.uint8)])
    features = prior(images).astype(np.float64)
    assert np.isfinite(features).all()
    for block in prior.blocks:
        norms = np.linalg.norm(features[:, block.columns], axis=1)
        assert (norms <= 1 + 1e-3).all()
        assert (norms[:3] >= 1 - 1e-3).all()


def test_blocks_cover_all_columns_in_order(prior: ImagePrior) -> None:
    assert [block.name for block in prior.blocks] == ["patches", "half-size patches", "colours", "scattering"]
    widths = [12 * 16, 10 * 4, 7 * 9, 3 * (1 + 2 * 2 + 2**2) * 8**2]
    assert [block.columns.start for block in prior.blocks] == [sum(widths[:place]) for place in range(4)]
    assert prior.dimensions == sum(widths)
    assert all(len(block.eigenvalues) == block.columns.stop - block.columns.start for block in prior.blocks)
    assert all((block.eigenvalues > 0).all() for block in prior.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("mirrors", [True, False])
def test_a_mirror_image_has_the_same_features_only_if_the_spec_says_so(mirrors: bool) -> None:
    prior = ImagePrior.make(replace(SPEC, mirrors=mirrors))
    images = records(2)
    close = np.allclose(prior(images), prior(np.ascontiguousarray(images[..., ::-1])), rtol=0, atol=1e-3)
    assert close == mirrors


@pytest.mark.slow
def test_equal_specs_make_equal_priors_and_seeds_differ(prior: ImagePrior) -> None:
    images = records(2)
    assert np.array_equal(ImagePrior.make(SPEC)(images), prior(images))
    assert not np.array_equal(ImagePrior.make(replace(SPEC, seed=4))(images), prior(images))
    assert replace(SPEC, seed=4).digest() != SPEC.digest()


@pytest.mark.slow
def test_a_prior_from_the_cache_is_the_prior_that_was_made(prior: ImagePrior) -> None:
    images = records(2)
    made = ImagePrior.load(SPEC)
    read = ImagePrior.load(SPEC)
    assert np.array_equal(made(images), prior(images))
    assert np.array_equal(read(images), prior(images))


@pytest.mark.slow
@pytest.mark.parametrize(("side", "channels"), [(28, 1), (28, 3), (96, 3), (224, 1)])
def test_a_prior_takes_images_of_any_size_and_channels(side: int, channels: int) -> None:
    blocks = tuple(block for block in BLOCKS if channels == 3 or not isinstance(block, ColourSpec))
    prior = ImagePrior.make(PriorSpec(image_size=side, channels=channels, images=12, blocks=blocks))
    features = prior(records(2, side=side, channels=channels))
    assert features.shape == (2, prior.dimensions)
    assert np.isfinite(features).all()


def test_whitened_features_of_synthetic_images_have_comparable_variances(prior: ImagePrior) -> None:
    # whitening is fitted on synthetic images: there no coordinate dominates, unlike before it
    images = priors.synthetic_images(60, seed=8).round().to(torch.uint8).numpy()
    features = prior(images).astype(np.float64)
    columns = prior.blocks[0].columns
    variances = features[:, columns].var(axis=0)
    eigenvalues = prior.blocks[0].eigenvalues
    assert variances.max() / np.median(variances) < 0.2 * eigenvalues.max() / np.median(eigenvalues)


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((2, 1, 32, 32), np.uint8),
        np.zeros((2, 3, 28, 28), np.uint8),
        np.zeros((2, 3, 32, 32), np.float32),
        np.zeros((3, 32, 32), np.uint8),
    ],
)
def test_images_that_do_not_fit_are_refused(prior: ImagePrior, images: NDArray[np.uint8]) -> None:
    with pytest.raises(ValueError, match=r"give uint8 of shape \(N, 3, 32, 32\)"):
        priors.extract(prior, images)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"image_size": 27}, "image_size"), ({"channels": 2}, "channels"), ({"images": 1}, "images")],
)
def test_a_spec_out_of_range_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PriorSpec(**{"image_size": 32, **changes})


@pytest.mark.slow
def test_extraction_equals_the_prior_and_is_done_once(prior: ImagePrior, monkeypatch: pytest.MonkeyPatch) -> None:
    images = records(258)
    seen: list[tuple[int, int]] = []
    features = priors.extract(prior, images, progress=lambda done, of: seen.append((done, of)))
    assert seen[0] == (0, 258) and seen[-1] == (258, 258)
    assert np.array_equal(features[[0, 255, 257]], prior(images[[0, 255, 257]]))
    monkeypatch.setattr(ImagePrior, "_features", None)
    assert np.array_equal(priors.extract(prior, images), features)


def test_extraction_continues_after_an_interruption(prior: ImagePrior, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "_RECORDS_PER_CHUNK", 20)
    images = records(50)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    real, computed = ImagePrior._features, []

    def interrupted(self: ImagePrior, image: torch.Tensor) -> torch.Tensor:
        if len(computed) == 30:
            raise KeyboardInterrupt
        computed.append(image)
        return real(self, image)

    try:
        monkeypatch.setattr(ImagePrior, "_features", interrupted)
        with pytest.raises(KeyboardInterrupt):
            priors.extract(prior, images)
        computed.clear()
        monkeypatch.setattr(ImagePrior, "_features", lambda self, image: computed.append(image) or real(self, image))
        features = priors.extract(prior, images)
    finally:
        torch.set_num_threads(before)
    assert len(computed) == 50 - 20  # the first chunk was complete
    assert np.array_equal(features, prior(images))


def test_cached_features_are_readable_by_their_owner_only(prior: ImagePrior, cache: Path) -> None:
    priors.extract(prior, records(3))
    for folder, _, files in os.walk(cache / "pmlf-arrays"):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        for name in files:
            assert stat.S_IMODE(os.stat(Path(folder) / name).st_mode) & 0o077 == 0


def test_a_block_with_directions_without_variance_can_be_trained_on() -> None:
    # the histograms of an image and of its mirror image are averaged, so half of the cells repeat the other half
    spec = replace(SPEC, blocks=(ColourSpec(name="colours", weight=1.0, colours=5, grid=4),))
    prior = ImagePrior.make(spec)
    (block,) = prior.blocks
    assert np.linalg.matrix_rank(prior(records(60)).astype(np.float64), tol=1e-2) <= 5 * 8
    assert len(block.eigenvalues) == 5 * 16 and (block.eigenvalues > 0).all()
    images = priors.synthetic_images(60, seed=8).round().to(torch.uint8).numpy()
    probe = PrivateProbe(classes=2, epsilon=8.0, delta=1e-3, random_state=0, **recipe(prior, 8.0))
    assert probe.fit(prior(images), np.arange(60) % 2).epsilon_ <= 8.0


@pytest.mark.parametrize(
    ("channels", "mirrors", "names"),
    [
        (3, True, ["patches", "half-size patches", "colours", "scattering"]),
        (1, True, ["patches", "half-size patches"]),
        (1, False, ["scattering"]),
    ],
)
def test_the_standard_blocks_follow_from_channels_and_mirrors(channels: int, mirrors: bool, names: list[str]) -> None:
    spec = PriorSpec(image_size=28, channels=channels, mirrors=mirrors)
    assert [block.name for block in spec.all_blocks] == names
