"""Layer rules against Opacus and the memory forms against each other."""

from __future__ import annotations

import copy
import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pmlf import PrivateStep
from pmlf.engine import arithmetic, layers, strategy
from pmlf.engine.anatomy import Anatomy
from pmlf.engine.capture import capture
from pmlf.engine.factors import Window
from pmlf.engine.layers import rule_for
from pmlf.engine.passes import Pass
from pmlf.engine.plan import Plan
from reference import single_gradient
from zoo import CASES, classify, make

pytestmark = [
    pytest.mark.filterwarnings("ignore:(noise_multiplier=0|no loss depends on .unused)"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn5", "resnet"])
def test_one_point_without_filter_agrees_with_opacus_clipped_gradients(name: str) -> None:
    case, model, size, clip_norm = CASES[name], make(name), 6, 0.7
    batch = case.batch(size)
    step = PrivateStep(
        model, case.loss, method="dpsgd", clip_norm=clip_norm, noise_multiplier=0.0, expected_batch_size=float(size)
    )
    step.accumulate(batch)
    step.release()
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # Opacus' backward hooks cannot stand in-place activations
    theirs = GradSampleModule(model, loss_reduction="sum")
    theirs.zero_grad()
    case.loss(theirs, batch).sum().backward()
    samples: list[Tensor] = [p.grad_sample.flatten(1) for p in model.parameters()]  # type: ignore[attr-defined]
    norms = torch.cat(samples, 1).norm(dim=1)
    assert bool((norms > clip_norm).any())
    scale = (clip_norm / norms).clamp(max=1.0)
    for parameter, sample in zip(step.trained, samples, strict=True):
        expected = (scale[:, None] * sample).sum(0).view_as(parameter) / size
        ours = step_gradient(parameter)
        assert float((ours - expected).norm()) <= 1e-4 * float(expected.norm()) + 1e-8


def step_gradient(parameter: nn.Parameter) -> Tensor:
    # .grad was overwritten by Opacus' own backward pass: the released one was stored before
    stored: Tensor = parameter._released  # type: ignore[attr-defined]
    return stored


@pytest.fixture(autouse=True)
def _keep_released(monkeypatch: pytest.MonkeyPatch) -> None:
    release = PrivateStep.release

    def and_keep(self: PrivateStep) -> None:
        release(self)
        for parameter in self.trained:
            parameter._released = parameter.grad.clone()  # type: ignore[attr-defined, union-attr]

    monkeypatch.setattr(PrivateStep, "release", and_keep)


def released_twice(name: str, chosen: strategy.Strategy) -> list[Tensor]:
    model, loss = make(name), CASES[name].loss
    step = PrivateStep(model, loss, method="dp-pmlf", noise_multiplier=0.0, expected_batch_size=1.0, strategy=chosen)
    for _ in range(2):
        step.accumulate(CASES[name].batch(5))
        step.release()
    return [step_gradient(p) for p in step.trained]


@lru_cache
def released_the_cheapest_way(name: str) -> list[Tensor]:
    return released_twice(name, strategy.Cheapest())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["held at once", "held late", "gram", "root", "dropped"])
@pytest.mark.parametrize("name", ["cnn5", "tied", "convolutions", "unusual", "gpt2"])
def test_all_ways_to_norms_and_sums_give_the_same_sum(
    name: str, way: strategy.Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients held from the start or formed late, Gram matrices, gradients formed for their norm and dropped."""
    expected = released_the_cheapest_way(name)
    monkeypatch.setattr(arithmetic, "CHUNK_BYTES", 1)  # one sample at a time
    monkeypatch.setattr(arithmetic, "_LARGEST_BLOCK", 1)
    for ours, reference in zip(released_twice(name, strategy.Fixed(way)), expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)


def test_a_subclass_with_its_own_forward_has_no_rule() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Renamed(nn.Linear):
        pass

    assert rule_for(Doubled(2, 2)) is None
    assert rule_for(Renamed(2, 2)) is rule_for(nn.Linear(2, 2)) is not None
    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x  # type: ignore[method-assign, assignment]
    assert rule_for(patched) is None


def test_a_subclass_with_its_own_forward_is_still_exact() -> None:
    """Through vmap: LoRA-like layers and scaled linears are not mistaken for plain ones."""

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    import pmlf

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Doubled(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    batch: Any = (torch.randn(3, 6), torch.tensor([0, 1, 2]))
    assert pmlf.check(Model(), classify, batch).parameters == 2


@pytest.mark.parametrize(("space", "kernel"), [((7,), (3,)), ((6, 5), (3, 2)), ((4, 5, 4), (2, 3, 1))])
def test_products_of_patches_are_sums_of_shifted_products_of_pixels(
    space: tuple[int, ...], kernel: tuple[int, ...]
) -> None:
    pixels = torch.randn(2, *space, 3, dtype=torch.float64)
    flat = pixels.flatten(1, -2).unsqueeze(1)
    patches = pixels
    for axis, taps in enumerate(kernel, 1):
        patches = patches.unfold(axis, taps, 1)
    tokens = math.prod(size - taps + 1 for size, taps in zip(space, kernel, strict=True))
    rows = patches.reshape(2, 1, tokens, -1)
    found = Window(space=space, kernel=kernel).patch_products(flat @ flat.mT)
    torch.testing.assert_close(found, rows @ rows.mT)


class _Grouped(nn.Module):
    """A GroupNorm whose output is changed in place, on several windows of a sample."""

    def __init__(self, checkpointed: bool, offset: float) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)
        self.checkpointed = checkpointed
        self.offset = offset
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        windows = (x + self.offset).flatten(0, 1)
        normal = checkpoint(self.norm, windows, use_reentrant=False) if self.checkpointed else self.norm(windows)
        return normal.relu_().flatten(1).square().sum(1).view(len(x), -1).sum(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("shape", [(3, 1, 8, 5), (3, 2, 8, 4, 3), (3, 2, 8, 3, 2, 2), (1, 1, 8, 6)], ids=str)
def test_group_norm_gives_each_sample_its_own_gradient_by_the_statistics_of_the_forward_pass(
    shape: tuple[int, ...], offset: float, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(*_: Any) -> Any:
        raise AssertionError("normalised again, though the statistics are there")

    if not checkpointed:  # a checkpoint keeps what is saved to itself
        monkeypatch.setattr(layers, "_affine", again)
    model, x = _Grouped(checkpointed, offset), torch.randn(shape)
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        result: Tensor = model(batch[0])
        return result

    found = dict(capture(Pass(Anatomy(model), Plan.of(model), loss, values, (x,), shape[0])))
    for sample in range(shape[0]):
        expected = single_gradient(copy.deepcopy(model).double(), loss, (x[sample : sample + 1].double(),))
        for name, one in zip(values, expected, strict=True):
            ours = found[name]
            assert isinstance(ours, Tensor)
            assert float((ours[sample].double() - one).norm()) <= 1e-4 * float(one.norm()), name


def test_one_sample_behind_instance_norm_has_its_own_gradient() -> None:
    """torch 2.13's InstanceNorm is wrong there if convolutions run in channels-last order."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.Tanh(), nn.Conv2d(8, 4, 3), nn.Flatten())
    model, batch = nn.Sequential(*layers), (torch.randn(1, 3, 8, 8), torch.tensor([5]))
    step = PrivateStep(model, classify, method="dpsgd", clip_norm=1e6, noise_multiplier=0.0, expected_batch_size=1.0)
    step.accumulate(batch)
    step.release()
    exact = copy.deepcopy(model).double()
    expected = torch.autograd.grad(classify(exact, (batch[0].double(), batch[1])).sum(), list(exact.parameters()))
    for parameter, wanted in zip(step.trained, expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), wanted, rtol=1e-4, atol=1e-6)
