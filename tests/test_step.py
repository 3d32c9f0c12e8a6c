"""PrivateStep: noise once per logical batch, all-or-nothing accumulation, state, copies, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmlf import Augmentation, PrivateStep, methods
from pmlf.basics.batches import select
from zoo import Checkpointed, classify, images

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(model: nn.Module, loss: Any = classify, **options: Any) -> PrivateStep:
    options = {"method": "dpsgd", "noise_multiplier": 0.0, "expected_batch_size": 4.0, **options}
    return PrivateStep(model, loss, **options)


def grads(step: PrivateStep) -> Tensor:
    return torch.cat([p.grad.flatten().clone() for p in step.trained if p.grad is not None])


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


class Wide(nn.Module):
    """A million coordinates and a loss without gradient in them: what is released is noise alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1000, 1000, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 0.0


def wide_loss(model: Any, batch: Any) -> Tensor:
    result: Tensor = model(batch).sum(1)
    return result


@pytest.mark.parametrize("micro_batches", [0, 1, 3])
def test_noise_has_deviation_zc_over_b_once_per_logical_batch(micro_batches: int) -> None:
    step = build(Wide(), wide_loss, clip_norm=2.0, noise_multiplier=1.5, expected_batch_size=10.0)
    for _ in range(micro_batches):
        step.accumulate(torch.ones(2, 1000))
    step.release()
    noise = grads(step).double()
    assert noise.numel() == 1_000_000
    assert abs(float(noise.std()) / (1.5 * 2.0 / 10.0) - 1) < 0.01
    assert scipy.stats.kstest((noise / 0.3).numpy(), "norm").pvalue > 1e-4


def test_noise_differs_between_steps_and_runs_and_repeats_with_the_seed() -> None:
    def two_releases(generator: torch.Generator | None) -> list[Tensor]:
        step = build(small(), noise_multiplier=1.0, generator=generator)
        found = []
        for _ in range(2):
            step.release()
            found.append(grads(step))
        return found

    first, again, other = two_releases(seeded(1)), two_releases(seeded(1)), two_releases(seeded(2))
    free, freer = two_releases(None), two_releases(None)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    released = [*first, *other, *free, *freer]
    for i, one in enumerate(released):
        for two in released[:i]:
            assert not torch.allclose(one, two, atol=1e-3)


def test_noise_does_not_depend_on_torchs_global_generator() -> None:
    found = []
    for _ in range(2):
        step = build(small(), noise_multiplier=1.0)
        torch.manual_seed(0)
        step.release()
        found.append(grads(step))
    assert not torch.equal(*found)


def test_a_deep_copy_is_independent_and_draws_its_own_noise() -> None:
    model = small()
    step = build(model, method="dp-pmlf", noise_multiplier=1.0)
    step.accumulate(images(6)(5))
    step.release()
    other_model, other = copy.deepcopy((model, step))
    assert other.model is other_model and other_model is not model
    for one in (step, other):
        one.accumulate(images(6)(5))
        one.release()
    assert not torch.allclose(grads(step), grads(other), atol=1e-3)
    assert step.releases == other.releases == 2
    with torch.no_grad():
        next(other_model.parameters()).zero_()
    assert bool(next(model.parameters()).any())


def test_a_sum_is_never_written_where_a_released_gradient_was_seen() -> None:
    """p.grad, and whatever the caller kept of it, holds released values only."""
    model = small()
    step = build(model, method="dp-pmlf", noise_multiplier=1.0)
    kept: list[tuple[Tensor, Tensor]] = []
    for _ in range(3):
        for _ in range(3):
            step.accumulate(images(6)(5))
        assert all(torch.equal(tensor, value) for tensor, value in kept)
        step.release()
        kept += [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
        model.zero_grad()


def test_hooks_and_state_leave_nothing_on_the_model() -> None:
    model = small()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    step = build(model, method="dp-pmlf")
    step.accumulate(images(6)(5))
    step.release()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert all(not module._forward_hooks for module in model.modules())
    assert all(not vars(p) for p in model.parameters())


def test_a_failing_accumulate_changes_nothing() -> None:
    fail = False

    def loss(model: Any, batch: Any) -> Tensor:
        result = classify(model, batch)
        if fail:
            raise KeyboardInterrupt
        return result

    model, batch = small(), images(6)(5)
    step, expected = build(model, loss), build(copy.deepcopy(model))
    step.accumulate(select(batch, slice(0, 3)))
    fail = True
    with pytest.raises(KeyboardInterrupt):
        step.accumulate(select(batch, slice(3, 5)))
    fail = False
    assert all(not module._forward_hooks for module in model.modules())
    step.accumulate(select(batch, slice(3, 5)))
    step.release()
    expected.accumulate(batch)
    expected.release()
    torch.testing.assert_close(grads(step), grads(expected))


def test_state_round_trip_continues_identically() -> None:
    model, batch = small(), images(6)(5)
    method = methods.dp_pmlf(k=3, beta=0.5, a=(-0.7, -0.2), b=(0.05, 0.05))
    step = build(model, method=method, noise_multiplier=0.5, generator=seeded(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def advance(step: PrivateStep, optimizer: torch.optim.Optimizer) -> None:
        step.accumulate(batch)
        step.release()
        optimizer.step()

    for _ in range(4):
        advance(step, optimizer)
    saved, weights = step.state_dict(), copy.deepcopy(model.state_dict())
    for _ in range(3):
        advance(step, optimizer)
    resumed_model = small()
    resumed_model.load_state_dict(weights)
    resumed = build(resumed_model, method=method, noise_multiplier=0.5, generator=seeded(4))
    resumed.load_state_dict(saved)
    assert resumed.releases == 4
    for _ in range(3):
        advance(resumed, torch.optim.SGD(resumed_model.parameters(), lr=0.3))
    for one, two in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("forget", ["discard", "load"])
def test_state_is_refused_while_a_sum_is_pending_and_discard_or_a_loaded_state_forgets_it(forget: str) -> None:
    step = build(small())
    saved = step.state_dict()
    step.accumulate(images(6)(5))
    with pytest.raises(RuntimeError, match="a sum is pending"):
        step.state_dict()
    if forget == "discard":
        step.discard()
    else:
        step.load_state_dict(saved)
    step.release()
    assert float(grads(step).abs().max()) == 0.0


def test_state_of_another_method_or_model_is_refused() -> None:
    step = build(small(), method="dp-pmlf")
    step.release()
    state = step.state_dict()
    with pytest.raises(ValueError, match="the state is of method 'dp-pmlf'"):
        build(small()).load_state_dict(state)
    with pytest.raises(ValueError, match="do not have the shapes"):
        build(nn.Linear(6, 4), method="dp-pmlf").load_state_dict(state)
    with pytest.raises(ValueError, match="releases=-1"):
        build(small(), method="dp-pmlf").load_state_dict({**state, "releases": -1})


@pytest.mark.parametrize("through_data", [False, True])
def test_parameters_changed_before_release_are_an_error(through_data: bool) -> None:
    model = small()
    step = build(model)
    step.accumulate(images(6)(5))
    weight = next(model.parameters())
    if through_data:
        weight.data[0, 0] += 1e-6  # does not show in the tensor's version
    else:
        with torch.no_grad():
            weight.add_(1.0)
    for action in (step.release, lambda: step.accumulate(images(6)(5))):
        with pytest.raises(RuntimeError, match="parameters changed between accumulate and release"):
            action()


def test_a_changed_set_of_trainable_parameters_is_an_error() -> None:
    model = small()
    step = build(model)
    model[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"trainable parameters changed since the step was built \(0.weight\)"):
        step.accumulate(images(6)(5))


def test_an_interrupted_release_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    step = build(small(), noise_multiplier=1.0)

    def interrupted(values: Any, scale: float) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(step._filter, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step.release()
    for action in (step.release, step.state_dict, step.discard, lambda: step.accumulate(images(6)(5))):
        with pytest.raises(RuntimeError, match="interrupted halfway"):
            action()


def test_frozen_parameters_get_no_gradient_and_need_no_rule() -> None:
    model = small()
    model[0].weight.requires_grad_(False)
    step = build(model)
    step.accumulate(images(6)(5))
    step.release()
    assert model[0].weight.grad is None
    assert all(p.grad is not None for p in step.trained)


def dropout_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 4))


def test_dropout_is_keyed_by_seed_and_step_and_leaves_torchs_generator_alone() -> None:
    def two(seed: int) -> list[Tensor]:
        step = build(dropout_model(), method="dp-pmlf-without-lf", generator=seeded(seed))
        found = []
        for _ in range(2):
            torch.manual_seed(99)
            before = torch.get_rng_state()
            step.accumulate(images(6)(5))
            assert torch.equal(torch.get_rng_state(), before)
            step.release()
            found.append(grads(step))
        return found

    one, again, other = two(1), two(1), two(2)
    assert torch.equal(one[0], again[0]) and torch.equal(one[1], again[1])
    assert not torch.equal(one[0], other[0]) and not torch.equal(one[0], one[1])


@pytest.mark.parametrize("per_point", [False, True])
def test_augmentation_does_not_depend_on_micro_batching(per_point: bool) -> None:
    seen: list[Tensor] = []

    def shift(batch: Any, uniforms: Tensor) -> Any:
        seen.append(uniforms)
        return batch[0] + uniforms.to(batch[0].dtype), batch[1]

    def run(physical: int) -> Tensor:
        augmentation = Augmentation(function=shift, draws=6, per_point=per_point)
        step = build(small(), method="dp-pmlf-without-lf", generator=seeded(3), augmentation=augmentation)
        batch = images(6)(6)
        for _ in range(2):
            for start in range(0, 6, physical):
                step.accumulate(select(batch, slice(start, start + physical)))
            step.release()
        return grads(step)

    torch.testing.assert_close(run(2), run(6))
    last = seen[-1], seen[-2]
    assert torch.equal(*last) is False  # at the second step: another point, or another step than the first


def test_adam_and_a_scheduler_work_after_release() -> None:
    model = small()
    step = build(model, method="dp-pmlf", noise_multiplier=0.1, generator=seeded(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        step.accumulate(images(6)(5))
        step.release()
        optimizer.step()
        scheduler.step()
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_batches_may_be_tensors_tuples_or_mappings_and_losses_several() -> None:
    x, y = images(6)(5)
    forms: list[tuple[Any, Any]] = [
        ((x, y), classify),
        ({"x": x, "y": y}, lambda m, b: F.cross_entropy(m(b["x"]), b["y"], reduction="none")),
        ([x, {"y": y}], lambda m, b: F.cross_entropy(m(b[0]), b[1]["y"], reduction="none")),
        ((x, y), lambda m, b: (0.25 * classify(m, b), 0.75 * classify(m, b))),
        ((x, y), lambda m, b: {"a": 0.5 * classify(m, b), "b": 0.5 * classify(m, b)}),
    ]
    results = []
    for batch, loss in forms:
        step = build(small(), loss)
        step.accumulate(batch)
        step.release()
        results.append(grads(step))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_reentrant_checkpointing_is_refused() -> None:
    step = build(Checkpointed(reentrant=True))
    with pytest.raises(ValueError, match=r"reentrant checkpointing.*use_reentrant=False"):
        step.accumulate(images(6)(5))


def test_a_model_in_half_precision_autocast_sums_in_float32() -> None:
    def autocast_loss(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return classify(model, batch)

    linear = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    step, exact = build(linear, autocast_loss, method="dp-pmlf"), build(copy.deepcopy(linear), method="dp-pmlf")
    for one in (step, exact):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=one is step):  # outer autocast: its cache is kept out
            one.accumulate(images(3, 8, 8)(6))
        one.release()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in step.trained)
    torch.testing.assert_close(grads(step), grads(exact), rtol=0.05, atol=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm=0.0 is not positive"),
        ({"clip_norm": float("inf")}, "clip_norm=inf is not positive and finite"),
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0 is not positive"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier=nan is not positive"),
        ({"expected_batch_size": 0}, "expected_batch_size=0 is not positive"),
        ({"clipping": "global"}, "clipping='global' is not known"),
        ({"method": "sgd"}, "method='sgd' is not known"),
        ({"generator": 3}, "generator is a int"),
    ],
)
def test_bad_settings_are_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(small(), **options)


@pytest.mark.filterwarnings("default:noise_multiplier=0")
def test_no_noise_warns() -> None:
    with pytest.warns(UserWarning, match="nothing is private"):
        build(small())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: F.cross_entropy(m(b[0]), b[1]), "loss_fn returned a scalar.*one loss a sample.*Hugging Face"),
        (lambda m, b: m(b[0]), "loss_fn returned a tensor with 2 axes that is not one loss a sample"),
        (lambda m, b: classify(m, b)[:1], "loss_fn returned a tensor with 1 axes that is not one loss a sample"),
        (lambda m, b: classify(m, b).tolist(), "loss_fn returned a float"),
        (lambda m, b: classify(m, b).detach(), "the loss does not depend on any trainable parameter"),
        (lambda m, b: [], "loss_fn returned no loss"),
    ],
)
def test_a_bad_loss_is_refused_with_the_way_out(loss: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(small(), loss).accumulate(images(6)(5))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(3, 6), torch.zeros(2)), "have different lengths"),
        (("a", "b"), "holds no tensor"),
        ((torch.zeros(3, 6), torch.tensor(1.0)), "axis 0 of each must count samples"),
    ],
)
def test_a_bad_batch_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(small()).accumulate(batch)


def test_history_holds_released_iterates_and_nothing_else() -> None:
    model = small()
    step = build(model, method=methods.dp_pmlf(k=3), noise_multiplier=1.0, generator=seeded(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    released: list[list[Tensor]] = []

    def remembered() -> list[list[Tensor]]:
        iterates: list[list[Tensor]] = step.state_dict()["history"]["iterates"]
        return iterates

    for index in range(4):
        released.insert(0, [p.detach().clone() for p in model.parameters()])
        before = remembered()
        step.accumulate(images(6)(2))
        step.discard()  # what was looked at and not released leaves no trace
        for kept, same in zip(before, remembered(), strict=True):
            assert all(map(torch.equal, kept, same))
        step.accumulate(images(6)(2))
        step.release()
        optimizer.step()
        assert len(remembered()) == min(index + 1, 2)
        for kept, iterate in zip(remembered(), released, strict=False):
            assert all(map(torch.equal, kept, iterate))
