"""Contenders of the benchmark: ways to compute a plain gradient, or a sum of clipped per-sample gradients.

All private contenders have the same weights, batch and clip norm. The weights never change, so the k evaluation points
are equal. All must compute the same clipped sum; its norm is recorded to check this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pmlf import PrivateStep, methods
from pmlf.bench.case import Batch, losses, sample_losses
from pmlf.mechanism.sampling import LogicalBatch
from pmlf.methods import Method

CLIP_NORM = 1.0
_TINY_NOISE = 1e-9  # takes as long to draw as any noise, and leaves the clipped sum readable
_MICRO_BATCHES = 4  # of the logical batch that a micro-batch is taken to be of: one sample of it is watched


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A contender with its model. `gradient` and `release` are timed. They return the clipped sum, over `divisor`, if
    they have it."""

    gradient: Callable[[], Sequence[Tensor]]
    release: Callable[[], Sequence[Tensor]] | None = None
    divisor: int = 1
    clear: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to compute a gradient: prepare(model, batch, micro-batches per step)."""

    name: str
    prepare: Callable[[nn.Module, Batch, int], Runner]
    images_only: bool = False
    imports: tuple[str, ...] = ()


def _plain(model: nn.Module, batch: Batch, micro_batches: int) -> Runner:
    def gradient() -> Sequence[Tensor]:
        losses(model, batch).mean().backward()
        return ()

    return Runner(gradient=gradient, clear=lambda: model.zero_grad(set_to_none=True))


def _plain_channels_last(model: nn.Module, batch: Batch, micro_batches: int) -> Runner:
    inputs, classes = batch
    layout = torch.channels_last
    model.to(memory_format=layout)  # type: ignore[call-overload]  # missing in torch's stubs
    return _plain(model, (inputs.contiguous(memory_format=layout), classes), micro_batches)


def _without_in_place(model: nn.Module) -> nn.Module:
    """The model without in-place activations, which the hooks of Opacus refuse."""
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model


def _opacus(model: nn.Module, batch: Batch, micro_batches: int) -> Runner:
    """Opacus with hooks: grad_sample of every parameter, then clipping and summing by DPOptimizer."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    samples = len(batch[1])
    module = GradSampleModule(_without_in_place(model), strict=False)  # strict mode refuses RoBERTa's buffers
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=samples,
    )

    def gradient() -> Sequence[Tensor]:
        losses(module, batch).mean().backward()
        optimizer.clip_and_accumulate()
        return [parameter.summed_grad for parameter in optimizer.params]

    return Runner(gradient=gradient, clear=lambda: optimizer.zero_grad(set_to_none=True))


class _SampleLoss(nn.Module):
    """Losses of the samples, as Opacus asks for them: a module with a `reduction`, which it sets to "none"."""

    reduction = "mean"

    def forward(self, logits: Tensor, classes: Tensor) -> Tensor:
        return sample_losses(logits, classes)


def _opacus_ghost(model: nn.Module, batch: Batch, micro_batches: int) -> Runner:
    """Opacus with ghost clipping: one backward pass for the norms, one for the gradient of the rescaled losses."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    inputs, classes = batch
    module = GradSampleModuleFastGradientClipping(_without_in_place(model), strict=False, max_grad_norm=CLIP_NORM)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=len(classes),
    )
    criterion = DPLossFastGradientClipping(module, optimizer, _SampleLoss())

    def gradient() -> Sequence[Tensor]:
        criterion(module(inputs), classes).backward()
        return [parameter.grad for parameter in optimizer.params]

    return Runner(gradient=gradient, clear=lambda: optimizer.zero_grad(set_to_none=True))


def _vmap(model: nn.Module, batch: Batch, micro_batches: int) -> Runner:
    """torch.func: all per-sample gradients by vmap, in memory at once."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, Tensor], example: Tensor, target: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, parameters, (example[None],))
        return sample_losses(logits, target[None]).sum()

    # vmap treats dropout with probability 0 as random
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different")

    def gradient() -> Sequence[Tensor]:
        gradients = list(per_sample(parameters, *batch).values())
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients]).norm(dim=0)
        scale = CLIP_NORM / norms.clamp(min=CLIP_NORM)
        return [torch.tensordot(scale, each, dims=1) for each in gradients]

    return Runner(gradient=gradient)


def _pmlf(method: Method, *, whole_step: bool = False) -> Callable[[nn.Module, Batch, int], Runner]:
    """pmlf: one micro-batch and its release, or a whole step with realistic noise."""

    def prepare(model: nn.Module, batch: Batch, micro_batches: int) -> Runner:
        repeats = micro_batches if whole_step else 1
        expected = len(batch[1]) * (micro_batches if whole_step else _MICRO_BATCHES)
        step = PrivateStep(
            model,
            losses,
            method=method,
            clip_norm=CLIP_NORM,
            noise_multiplier=1.0 if whole_step else _TINY_NOISE,
            expected_batch_size=expected,
            cycle=method.noise.bands,
        )

        def batch_of(samples: int) -> LogicalBatch:
            return LogicalBatch.whole(step.releases, samples=samples, cycle=method.noise.bands)

        for _ in range(method.points.depth):  # releases of empty batches, until all past iterates exist
            step.release(batch_of(0))
        model.zero_grad(set_to_none=True)

        def gradient() -> Sequence[Tensor]:
            for _ in range(repeats):
                step.accumulate(batch)
            return ()

        def release() -> Sequence[Tensor]:
            step.release(batch_of(repeats * len(batch[1])))
            if whole_step:  # not the clipped sum, but noisy and filtered
                return ()
            return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

        clear = partial(model.zero_grad, set_to_none=True)
        return Runner(gradient=gradient, release=release, divisor=expected, clear=clear)

    return prepare


def _momentum(k: int) -> Contender:
    return Contender(name=f"pmlf-k{k}", prepare=_pmlf(methods.dp_pmlf_without_lf(k=k)))


PLAIN = ("plain", "plain-channels-last")
OPACUS = ("opacus", "opacus-ghost")
STEP = "pmlf-step"  # a whole step, whose time is not that of one batch
_OPACUS_MODULES = ("opacus.grad_sample", "opacus.optimizers", "opacus.utils.fast_gradient_clipping_utils")
CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(name="plain", prepare=_plain),
        Contender(name="plain-channels-last", prepare=_plain_channels_last, images_only=True),
        Contender(name="opacus", prepare=_opacus, imports=_OPACUS_MODULES),
        Contender(name="opacus-ghost", prepare=_opacus_ghost, imports=_OPACUS_MODULES),
        Contender(name="vmap", prepare=_vmap),
        _momentum(1),
        _momentum(2),
        _momentum(4),
        Contender(name=STEP, prepare=_pmlf(methods.dp_pmlf(k=2), whole_step=True)),
    )
}
_GROWTH_ONLY = {"pmlf-k8": _momentum(8)}


def find(name: str) -> Contender:
    """The contender with this name. Raises ValueError if there is none."""
    known = {**CONTENDERS, **_GROWTH_ONLY}
    if name not in known:
        raise ValueError(f"unknown contender {name!r}: give one of {', '.join(CONTENDERS)}")
    return known[name]
