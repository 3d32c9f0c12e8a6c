"""Adaptive clipping: sensitivity of sum and count together, accounting, state, certificate and refusals."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting import rdp
from scipy import stats

from pmlf import AdaptiveClipping, PrivateStep, accounting, checkpoint, methods
from pmlf.basics.batches import select
from pmlf.engine.clipper import counted_within
from pmlf.evidence.certificate import examined, sealed
from pmlf.evidence.certificate_page import page
from pmlf.mechanism.adaptive_clipping import ClipNorm
from pmlf.mechanism.noise import SecureRandomness, SeededRandomness
from small_runs import dataset, finish, loss, private, small, weights

ADAPTIVE = AdaptiveClipping(quantile=0.3, count_noise=3.0)


def step(noise_multiplier: float = 0.0, clip_norm: float = 0.5, **options: Any) -> PrivateStep:
    return PrivateStep(
        small(), loss, method="dpsgd", clip_norm=clip_norm, noise_multiplier=noise_multiplier, expected_batch_size=20.0,
        adaptive_clipping=ADAPTIVE, **options,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_one_sample_moves_sum_and_count_together_by_what_is_accounted_for(scale: float) -> None:
    z, size = 0.8, 12
    batch = tuple(tensor[:size] for tensor in dataset().tensors)
    private_step = PrivateStep(
        small(), lambda m, b: scale * loss(m, b), method=methods.dp_pmlf(k=2), clip_norm=0.5, noise_multiplier=0.0,
        expected_batch_size=20.0, adaptive_clipping=ADAPTIVE,
    )  # fmt: skip
    z_sum = ADAPTIVE.sum_multiplier(z, expected_batch_size=20.0)

    def released(*parts: Any) -> tuple[torch.Tensor, float]:
        for part in parts:
            if len(part[0]):
                private_step.accumulate(part)
        total = private_step.sensitive_sum()
        assert total is not None and total.sensitivity == 0.5
        private_step.discard()
        return torch.cat([value.flatten().double() for value in total.values.values()]), total.within

    whole, counted = released(batch)
    for i in range(size):
        others, fewer = released(select(batch, slice(0, i)), select(batch, slice(i + 1, size)))
        in_deviations = math.hypot(float((whole - others).norm()) / (z_sum * 0.5), (counted - fewer) / 3.0)
        assert in_deviations <= (1 + 1e-4) / z


def test_sum_and_count_cost_one_gaussian_by_an_independent_accountant() -> None:
    z, rate, steps = 0.9, 0.05, 200
    z_sum = ADAPTIVE.sum_multiplier(z, expected_batch_size=20.0)
    both = dp_accounting.ComposedDpEvent(
        [dp_accounting.GaussianDpEvent(z_sum), dp_accounting.GaussianDpEvent(3.0 / 0.5)]
    )
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(rate, both), steps))
    ours = accounting.epsilon(noise_multiplier=z, sample_rate=rate, steps=steps, delta=1e-5, accountant="rdp")
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6) and z_sum > z


@pytest.mark.slow
def test_the_noise_of_sum_and_count_is_what_is_accounted_for() -> None:
    z, clip = 2.0, 0.5
    private_step = step(z, clip)
    private_step.release()
    noise = torch.cat([p.grad.flatten() for p in private_step.trained if p.grad is not None]).double() * 20.0
    expected = ADAPTIVE.sum_multiplier(z, expected_batch_size=20.0) * clip
    assert stats.chi2(len(noise)).sf(float((noise / expected).square().sum())) > 1e-6
    moves = []
    for release in range(2000):
        norm = ClipNorm(1.0, ADAPTIVE, expected_batch_size=20.0)
        moves.append(-math.log(norm.after(0.0, SecureRandomness(), release)) / ADAPTIVE.rate + ADAPTIVE.quantile - 0.5)
    assert float(torch.tensor(moves).std()) == pytest.approx(3.0 / 20.0, rel=0.1)


def test_the_clip_norm_settles_at_the_quantile_of_the_norms() -> None:
    norms = torch.linspace(1.0, 3.0, 2001)
    norm, value = ClipNorm(50.0, AdaptiveClipping(quantile=0.3), expected_batch_size=2001.0), 50.0
    for t in range(200):
        value = norm.after(counted_within(norms, value), SeededRandomness(0), t)
    assert value == pytest.approx(1.6, rel=0.05)


def test_rounding_of_norms_at_the_clip_norm_does_not_move_the_count_by_a_sample() -> None:
    norms = torch.full((1000,), 1.0, dtype=torch.float64)
    assert abs(counted_within(norms, 1.0) - counted_within(norms * (1 + 1e-7), 1.0)) < 0.1


@pytest.mark.slow
def test_a_seeded_run_resumes_with_the_same_bits_and_clip_norm(tmp_path: Any) -> None:
    whole = finish(private(seed=1, adaptive_clipping=AdaptiveClipping()))
    checkpoint.save(tmp_path / "state", finish(private(seed=1, adaptive_clipping=AdaptiveClipping()), 3).state_dict())
    resumed = private(seed=1, adaptive_clipping=AdaptiveClipping())
    resumed.load_state_dict(checkpoint.load(tmp_path / "state"))
    finish(resumed)
    assert torch.equal(weights(whole.model), weights(resumed.model))
    state = whole.private_step.state_dict()
    assert state["clip_norm"] == resumed.private_step.state_dict()["clip_norm"] != 1.0
    with pytest.raises(ValueError, match="adaptive_clipping"):
        private(seed=1).load_state_dict(whole.state_dict())


def test_a_certificate_tells_both_releases_and_refuses_less_noise() -> None:
    run = finish(private(adaptive_clipping=ADAPTIVE))
    document = run.certificate()
    z = run.private_step.settings.noise_multiplier
    assert examined(document)[1] is None and run.epsilon() <= 2.0
    assert document["adaptive_clipping"]["sum_noise_multiplier"] > z == document["noise_multiplier"]
    assert "count" in document["mechanism"] and "0.3 quantile" in page(document)
    for name, value in (("sum_noise_multiplier", z), ("count_noise", 0.1)):
        less = sealed({**document, "adaptive_clipping": {**document["adaptive_clipping"], name: value}})
        assert "adaptive_clipping" in str(examined(less)[1])
    with pytest.raises(ValueError, match="mechanism"):
        examined(sealed({**document, "mechanism": "other"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clipping": "automatic"}, "with adaptive clipping"),
        ({"clipping": "per-layer"}, "with adaptive clipping"),
        ({"method": methods.dp_pmlf(bands=2)}, "shapes its noise"),
        ({"adaptive_clipping": 0.5}, "AdaptiveClipping"),
        ({"adaptive_clipping": AdaptiveClipping(count_noise=0.01)}, "count_noise"),
    ],
)
def test_what_is_not_argued_is_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        private(**{"adaptive_clipping": AdaptiveClipping(), **options})


@pytest.mark.parametrize("values", [{"quantile": 0.0}, {"quantile": 1.0}, {"rate": 0.0}, {"count_noise": -1.0}])
def test_values_out_of_range_are_refused(values: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        AdaptiveClipping(**values)
