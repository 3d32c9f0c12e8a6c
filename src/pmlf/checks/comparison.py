"""Clipped sums compared with plain autograd, one sample at a time, on a few samples; the model stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook

from pmlf.basics.batches import batch_size, identical, same_bits, select
from pmlf.engine.anatomy import Anatomy
from pmlf.engine.arithmetic import squared_norms
from pmlf.engine.clipper import Clipper
from pmlf.engine.factors import Factors
from pmlf.engine.fingerprint import bit_digest
from pmlf.engine.half_precision import deadly_bfloat16_refused
from pmlf.engine.losses import checked_losses
from pmlf.engine.momentum import SampleMomentum, contributions, finite_factors
from pmlf.engine.passes import LossFunction, Pass
from pmlf.engine.plan import Plan
from pmlf.engine.swap import plain_values, swapped
from pmlf.mechanism.noise import SeededRandomness, torch_seeded


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is checked: the clipped gradients of a loss at a model's present parameters, each point with its weight."""

    model: nn.Module
    plan: Plan
    loss_fn: LossFunction
    clip_norm: float
    weights: Sequence[float] = (1.0,)
    originals: Originals | None = None  # the parameters to restore, where the model is moved away from them

    def at_once(self, batch: Any) -> Any:
        """The part of a batch that the model may see in one call: one sample, if each sample has a pass of its own."""
        return batch if self.plan.gradients == "ghost" else select(batch, slice(0, 1))

    def in_double(self) -> Subject:
        """The same with a copy of the model in float64."""
        return replace(self, model=copy.deepcopy(self.model).double(), originals=None)

    def undisturbed(self, *, training: bool, seed: int = 0, dropout: bool = False) -> AbstractContextManager[None]:
        """`undisturbed` of the model, with its originals."""
        return undisturbed(self.model, training=training, seed=seed, dropout=dropout, originals=self.originals)


class Originals:
    """A copy of a model's parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.saved = [(parameter, parameter.detach().clone()) for parameter in parameters]

    def restore(self) -> None:
        for parameter, value in self.saved:
            if not same_bits(parameter, value):
                parameter.data.copy_(value)


@dataclass(frozen=True, kw_only=True)
class _Tolerance:
    """Allowed rounding, relative to the result, and relative to the terms that are added to get it."""

    relative: float
    of_spread: float


_DOUBLE_PRECISION = _Tolerance(relative=3e-5, of_spread=1e-6)  # models may well compute a part in float32
_FULL_PRECISION = _Tolerance(relative=1e-3, of_spread=1e-5)
_HALF_PRECISION = _Tolerance(relative=5e-2, of_spread=2e-3)


def tolerance_for(half_precision: bool, model: nn.Module) -> _Tolerance:
    if half_precision:
        return _HALF_PRECISION
    in_double = all(p.dtype == torch.float64 for p in model.parameters() if p.requires_grad)
    return _DOUBLE_PRECISION if in_double else _FULL_PRECISION


@dataclass(frozen=True, kw_only=True)
class Compared:
    agree: bool
    worst: str  # the parameter where they differ most
    conclusive: bool  # whether every gradient was finite and nonzero: two zeros agree about nothing


def compared(subject: Subject, batch: Any, alone: Sequence[Any]) -> Compared:
    """The samples of a batch by factors, and each alone by plain autograd."""
    with half_precision_seen() as half:
        sums, norms, spread = clipped_sum(subject, batch)
        references = [subtract_plain(subject, single, sums) for single in alone]
    tolerance = tolerance_for(bool(half), subject.model)
    expected = torch.tensor(references, dtype=torch.float64)
    finite = norms.isfinite() & expected.isfinite()
    allowed = tolerance.relative * expected + tolerance.of_spread * spread + 1e-12
    norms_agree = bool((((norms - expected).abs() <= allowed) | ~finite).all())
    factors, refused = finite_factors(norms, subject.clip_norm, "flat")
    largest = tolerance.relative * factors * expected + tolerance.of_spread * factors * spread
    left_over = {name: float(value.norm()) for name, value in sums.items()}
    worst = max(left_over, key=lambda name: left_over[name])
    sums_agree = left_over[worst] <= float(largest[finite].sum()) + 1e-12
    same = bool((norms.isfinite() == expected.isfinite()).all())
    return Compared(
        agree=same and norms_agree and sums_agree,
        worst=worst,
        conclusive=refused is None and bool((finite & (expected > 0.0)).all()),
    )


def clipped_sum(subject: Subject, batch: Any) -> tuple[Mapping[str, Tensor], Tensor, Tensor]:
    """The clipped sum of a batch's samples, and each one's norm and spread (what is added up, however much cancels)."""
    plan, values, samples = subject.plan, trained(subject.model), batch_size(batch)
    anatomy, spread = Anatomy(subject.model), torch.zeros(samples, dtype=torch.float64)
    clipper = Clipper(plan.parameters, clip_norm=subject.clip_norm)

    def momenta() -> Iterator[SampleMomentum]:
        for part in plan.passes(samples):
            one = Pass(anatomy, plan, subject.loss_fn, values, select(batch, part), part.stop - part.start)
            momentum = clipper.momentum(one.samples, len(subject.weights))
            for weight in subject.weights:
                for name, contribution in contributions(one._replace(weight=weight)):
                    if isinstance(contribution, Factors):
                        spread[part] += contribution.spread(slice(0, one.samples)).cpu()
                    momentum.add(name, contribution)
            yield momentum

    total, norms = clipper.add(momenta(), None, values)
    return total.values, torch.cat(norms).cpu(), spread


def subtract_plain(subject: Subject, single: Any, sums: Mapping[str, Tensor]) -> float:
    """Subtract one sample's clipped gradient, by plain autograd, from the sum; return its norm.

    Only one gradient is kept beside the sum, so the check needs little more memory than a training step.
    """
    parameters = {name: p for name, p in subject.model.named_parameters() if p.requires_grad}
    weight = sum(subject.weights)
    loss = checked_losses(subject.loss_fn(subject.model, single), 1)
    found = torch.autograd.grad(loss.sum(), list(parameters.values()), allow_unused=True)
    grads = {name: g for name, g in zip(parameters, found, strict=True) if g is not None}
    norm = weight * torch.stack([squared_norms(g.reshape(1, -1)).cpu() for g in grads.values()]).sum().sqrt()
    factor, refused = finite_factors(norm, subject.clip_norm, "flat")
    if refused is None:
        for name, grad in grads.items():
            sums[name].sub_(grad, alpha=weight * float(factor))
    return float(norm)


def singles(batch: Any) -> list[Any]:
    return [select(batch, slice(i, i + 1)) for i in range(batch_size(batch))]


def are_singles(alone: Sequence[Any], batch: Any) -> bool:
    """Whether batches of one sample are the samples of a batch, bit by bit."""
    return all(map(identical, alone, singles(batch)))


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@contextmanager
def moved(subject: Subject, seed: int = 0) -> Iterator[Subject]:
    """The subject at other parameters near its own, by a fixed seed; its own are restored afterwards."""
    originals = Originals(subject.model.parameters())
    embeddings = [module for module in subject.model.modules() if isinstance(module, nn.Embedding)]
    padding = {module.weight: module.padding_idx for module in embeddings if module.padding_idx is not None}
    generator = torch.Generator().manual_seed(seed)
    try:
        for parameter, value in originals.saved:
            if not parameter.requires_grad:
                continue
            scale = 0.02 + 0.3 * value.float().square().mean().sqrt()
            noise = torch.randn(value.shape, generator=generator).to(value)
            if parameter in padding:
                noise[padding[parameter]] = 0.0  # that row is never trained, and models rely on it
            parameter.data.copy_(value + scale.to(value) * noise)
        yield replace(subject, originals=originals)
    finally:
        originals.restore()


@contextmanager
def undisturbed(
    model: nn.Module, *, training: bool, seed: int = 0, dropout: bool = False, originals: Originals | None = None
) -> Iterator[None]:
    """Run in eval mode, or in the modes of training, with gradients; restore modes, generators and the model.

    Dropout layers are off unless `dropout` is set. A pass that writes into the model, its parameters included, is an
    error, and nothing that it wrote is left. `originals` are the parameters to restore then, if they are not the
    present ones: one copy is enough.
    """
    anatomy = Anatomy(model)
    modes = {module: module.training for module in anatomy.modules.values()}
    parameters = anatomy.parameters
    device = next(iter(parameters.values())).device
    originals = originals or Originals(parameters.values())
    bits = {name: bit_digest(parameter.detach()) for name, parameter in parameters.items()}
    buffers = {id(buffer): buffer.clone() for buffer in anatomy.buffers.values()}
    values = [(vars(module), plain_values(module)) for module in modes]  # counters and flags: put back afterwards
    for module in modes:
        module.training = training and modes[module] and (dropout or not isinstance(module, _DropoutNd))
    try:
        with (
            torch.enable_grad(),
            torch_seeded(SeededRandomness(seed).seed_for("check"), device),
            deadly_bfloat16_refused(),
            swapped(anatomy, buffers) as swap,
        ):
            yield
    finally:
        for attributes, before in values:
            attributes.update(before)
        for module, mode in modes.items():
            module.training = mode
        changed = [name for name, parameter in parameters.items() if bit_digest(parameter.detach()) != bits[name]]
        if changed:
            originals.restore()
    swap.written += changed
    swap.refuse_written()


@contextmanager
def half_precision_seen() -> Iterator[list[bool]]:
    """A list that is not empty once some layer has returned half precision (autocast inside `loss_fn`)."""
    seen: list[bool] = []

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dtype in (torch.bfloat16, torch.float16) and not seen:
            seen.append(True)

    handle = register_module_forward_hook(look)
    try:
        yield seen
    finally:
        handle.remove()
