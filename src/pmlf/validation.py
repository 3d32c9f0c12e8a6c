"""What cannot be private, said before training starts; and whether factors and plain autograd agree on real samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import register_module_forward_hook

from pmlf.batches import batch_size, first_repeated, select, tensors_of, to_device, to_dtype
from pmlf.capture import LossFunction, Plan, capture, per_sample_loss, rewritten_by_forward, same_bits
from pmlf.factors import Factors
from pmlf.gradients import SumBuffers, Workspace, squared_norms
from pmlf.half_precision import deadly_bfloat16_refused
from pmlf.momentum import SampleMomentum, clip_factors
from pmlf.noise import SeededRandomness, torch_seeded

_FIX = "pmlf.fix_model(model) replaces it"
_MIXING_SEEDS = 6  # a random exchange of two samples goes unseen by all of them once in 64 times


def refuse_unsafe_model(model: nn.Module) -> None:
    """Raise ValueError naming the first layer that mixes samples, keeps statistics of the data, or hides gradients."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: a torch.nn.Module is needed")
    for name, module in model.named_modules():
        reason = _unsafe(module)
        if reason is not None:
            raise ValueError(f"layer {name!r} ({type(module).__name__}) {reason}")


def _unsafe(module: nn.Module) -> str | None:
    if isinstance(module, _BatchNorm):
        return f"mixes the samples of a batch and saves their statistics without noise: {_FIX} by GroupNorm"
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return f"saves running statistics of the data without noise: set track_running_stats=False, or {_FIX}"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        if module.max_norm is not None:
            return "rewrites its weights in the forward pass (max_norm), without noise: build it without max_norm"
        if module.scale_grad_by_freq:
            return "scales a sample's gradient by the other samples (scale_grad_by_freq): build it without"
        if module.sparse:
            return "asks for sparse gradients, and noise is dense: build it with sparse=False"
    if isinstance(module, nn.MultiheadAttention) and any(p.requires_grad for p in module.parameters()):
        return f"keeps its projections where per-sample gradients cannot be taken: {_FIX} by Linear layers with SDPA"
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module._parameters.values()):
        return "is not initialised yet (lazy): run the model once on public or synthetic inputs first"
    return None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is checked: the clipped gradients of a loss at a model's present parameters, each point with its weight."""

    model: nn.Module
    plan: Plan
    loss_fn: LossFunction
    clip_norm: float
    weights: Sequence[float] = (1.0,)

    def in_double(self) -> Subject:
        """The same with a copy of the model in float64."""
        return replace(self, model=copy.deepcopy(self.model).double())


def check_samples(subject: Subject, batch: Any) -> bool:
    """Compare norm and clipped sum with plain autograd, one sample at a time, on all samples of a small batch.

    Both at the present parameters and at others near them: behind a head of zeros every gradient is zero and hides what
    is wrong. Dropout is off. A model that is otherwise the same in training and in eval mode is looked at in eval mode
    alone; one that is random in training mode is seen there by its losses.

    Returns whether all samples told something, a gradient that is finite and not zero: where not, look at others.
    """
    told = False
    modes = modes_to_check(subject, batch)
    for nearby in (False, True):
        with _moved(subject.model) if nearby else nullcontext():
            for training in modes:
                told |= _check_samples(subject, batch, training)
    if subject.model.training and len(modes) == 1:
        _refuse_mixed_losses(subject, batch)
    return told


def modes_to_check(subject: Subject, batch: Any) -> tuple[bool, ...]:
    """(False,) for eval mode; also True where training mode computes something else, and the same each time.

    Samples may be mixed in training mode only, as BatchNorm does. Randomness other than by dropout layers hides that
    from a comparison of gradients.
    """

    def losses(training: bool, seed: int) -> Tensor:
        with undisturbed(subject.model, training=training, seed=seed):
            parts = list(tensors_of(subject.loss_fn(subject.model, batch)))
            return torch.cat([part.detach().flatten().double().cpu() for part in parts]) if parts else torch.zeros(0)

    if not subject.model.training:
        return (False,)
    evaluated, trained, again = losses(False, 0), losses(True, 0), losses(True, 1)
    if torch.equal(evaluated, trained) or not torch.equal(trained, again):
        return (False,)
    return (False, True)


def _refuse_mixed_losses(subject: Subject, batch: Any) -> None:
    """In training mode: with the same draws the first sample's loss must not move when the others change."""
    samples = batch_size(batch)

    def first_loss(of: Any, seed: int) -> tuple[float, bool]:
        with undisturbed(subject.model, training=True, seed=seed), _half_precision_seen() as half, torch.no_grad():
            parts = list(tensors_of(subject.loss_fn(subject.model, of)))
            return float(sum(part.reshape(samples, -1)[0].double().sum() for part in parts)), bool(half)

    for seed in range(_MIXING_SEEDS if samples > 1 else 0):
        (among_others, half), (among_itself, _) = first_loss(batch, seed), first_loss(first_repeated(batch), seed)
        tolerance = (_HALF_PRECISION if half else _FULL_PRECISION).relative
        if abs(among_others - among_itself) > tolerance * (abs(among_others) + abs(among_itself)) + 1e-6:
            raise ValueError(
                "a sample's loss depends on the other samples of its batch, in training mode: look for statistics over "
                "axis 0, or for samples mixed at random (mixup) in the model or in loss_fn"
            )


def check_collation(subject: Subject, records: Sequence[Any], collate: Callable[[list[Any]], Any]) -> None:
    """Padding, which follows from the longest record of a batch, must not change the gradients of the others.

    The records that come out shortest and longest are compared: each alone, and both in one batch.
    """
    device = next(subject.model.parameters()).device
    alone = [to_device(collate([record]), device) for record in records]
    sizes = [sum(tensor[0].numel() for tensor in tensors_of(single)) for single in alone]
    short, long = sizes.index(min(sizes)), sizes.index(max(sizes))
    if sizes[short] == sizes[long]:
        return
    pair = to_device(collate([records[short], records[long]]), device)
    check_samples(subject, pair)
    apart = [alone[short], alone[long]]
    with _moved(subject.model):
        with undisturbed(subject.model, training=False):
            if _compared(subject, pair, apart).agree:
                return
        exact = subject.in_double()
        with undisturbed(exact.model, training=False):
            pair, *apart = (to_dtype(batch, torch.float64) for batch in (pair, *apart))
            if _compared(exact, pair, apart).agree:
                return
    raise ValueError(
        "a record's gradient changes with the padding that longer records of its batch bring, so that one record moves "
        "the others' gradients: mask the padding in the model and in loss_fn, or have collate_fn pad to a fixed length"
    )


def check_augmentation(function: Callable[[Any, Tensor], Any], batch: Any, uniforms: Tensor) -> None:
    """An augmented sample must not depend on the others."""
    together = function(batch, uniforms)
    for index, single in enumerate(singles(batch)):
        chosen = slice(index, index + 1)
        pairs = zip(tensors_of(select(together, chosen)), tensors_of(function(single, uniforms[chosen])), strict=True)
        if not all(one.shape == other.shape and torch.allclose(one, other, equal_nan=True) for one, other in pairs):
            raise ValueError(
                "the augmentation makes a sample depend on the other samples of its batch, or draws chance of its own: "
                "change each sample by its own uniforms alone"
            )


def _check_samples(subject: Subject, batch: Any, training: bool) -> bool:
    with undisturbed(subject.model, training=training):
        found = _compared(subject, batch, singles(batch))
    if found.agree:
        return found.told
    # Rounding may put an activation on the other side of a kink (ReLU, max-pool), which is not a fault of the model:
    # only what remains in float64 is.
    exact = subject.in_double()
    batch = to_dtype(batch, torch.float64)
    with undisturbed(exact.model, training=training):
        try:
            found = _compared(exact, batch, singles(batch))
        except RuntimeError:  # a loss that cannot be taken in float64
            exact = subject
        if found.agree:
            return found.told
        alone = [_compared(exact, single, [single]).agree for single in singles(batch)]
    where = "randomness in training mode" if training else "randomness in eval mode"
    wrong = found.worst
    if len(alone) > 1 and all(alone):
        raise ValueError(
            f"a sample's gradient depends on the other samples of its batch (seen at parameter {wrong!r}): look for an "
            f"operation across axis 0, a layer that puts the batch second (batch_first), or {where}"
        )
    raise ValueError(
        f"the gradient of parameter {wrong!r} does not come through its own layer's forward pass: look for a penalty "
        "on weights inside loss_fn (use the optimizer's weight_decay), a weight used outside its layer "
        f"(F.linear(x, other.weight)), or {where}"
    )


@dataclass(frozen=True, kw_only=True)
class _Tolerance:
    """What rounding may do: relative to the result, and relative to the terms that were added to get it."""

    relative: float
    of_spread: float


_FULL_PRECISION = _Tolerance(relative=1e-3, of_spread=1e-5)
_HALF_PRECISION = _Tolerance(relative=5e-2, of_spread=2e-3)


@dataclass(frozen=True, kw_only=True)
class _Compared:
    agree: bool
    worst: str  # the parameter where they differ most
    told: bool  # whether all gradients were finite and not zero: two zeros agree about nothing


def _compared(subject: Subject, batch: Any, alone: Sequence[Any]) -> _Compared:
    """The samples of a batch by factors, and each alone by plain autograd."""
    sums = SumBuffers().other_than(None, trained(subject.model))
    with _half_precision_seen() as half:
        norms, spread = clipped_sum(subject, batch, sums)
        references = [subtract_plain(subject, single, sums) for single in alone]
    tolerance = _HALF_PRECISION if half else _FULL_PRECISION
    expected = torch.tensor(references, dtype=torch.float64)
    finite = norms.isfinite() & expected.isfinite()
    allowed = tolerance.relative * expected + tolerance.of_spread * spread + 1e-12
    norms_agree = bool((((norms - expected).abs() <= allowed) | ~finite).all())
    factors = clip_factors(norms, subject.clip_norm, "flat")
    largest = tolerance.relative * factors * expected + tolerance.of_spread * factors * spread
    left_over = {name: float(value.norm()) for name, value in sums.items()}
    worst = max(left_over, key=lambda name: left_over[name])
    sums_agree = left_over[worst] <= float(largest[finite].sum()) + 1e-12
    same = bool((norms.isfinite() == expected.isfinite()).all())
    return _Compared(
        agree=same and norms_agree and sums_agree, worst=worst, told=bool((finite & (expected > 0.0)).all())
    )


def clipped_sum(subject: Subject, batch: Any, sums: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Write the clipped sum; return each sample's norm and spread (what was added up, however much cancelled)."""
    samples = batch_size(batch)
    momentum = SampleMomentum(subject.plan, samples, len(subject.weights), Workspace())
    values = trained(subject.model)
    spread = torch.zeros(samples, dtype=torch.float64)
    for weight in subject.weights:
        for name, contribution in capture(subject.model, subject.plan, values, subject.loss_fn, batch, samples, weight):
            if isinstance(contribution, Factors):
                spread += contribution.spread(slice(0, samples)).cpu()
            momentum.add(name, contribution)
    return momentum.write_clipped_sum(subject.clip_norm, "flat", None, sums), spread


def subtract_plain(subject: Subject, single: Any, sums: dict[str, Tensor]) -> float:
    """Take one sample's clipped gradient, by plain autograd, away from the sum; return its norm.

    So nothing but one gradient is kept beside the sum: the check needs little more memory than a training step.
    """
    parameters = {name: p for name, p in subject.model.named_parameters() if p.requires_grad}
    weight = sum(subject.weights)
    loss = per_sample_loss(subject.loss_fn(subject.model, single), 1)
    found = torch.autograd.grad(loss.sum(), list(parameters.values()), allow_unused=True)
    grads = {name: g for name, g in zip(parameters, found, strict=True) if g is not None}
    norm = weight * torch.stack([squared_norms(g.reshape(1, -1)).cpu() for g in grads.values()]).sum().sqrt()
    if bool(norm.isfinite()):
        factor = float(clip_factors(norm, subject.clip_norm, "flat"))
        for name, grad in grads.items():
            sums[name].sub_(grad, alpha=weight * factor)
    return float(norm)


def singles(batch: Any) -> list[Any]:
    return [select(batch, slice(i, i + 1)) for i in range(batch_size(batch))]


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@contextmanager
def _moved(model: nn.Module) -> Iterator[None]:
    """The model at other parameters near its own, by fixed chance; its own are put back."""
    saved = [(p, p.detach().clone()) for p in model.parameters() if p.requires_grad]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    padding = {module.weight: module.padding_idx for module in embeddings if module.padding_idx is not None}
    generator = torch.Generator().manual_seed(0)
    try:
        for parameter, value in saved:
            scale = 0.02 + 0.3 * value.float().square().mean().sqrt()
            noise = torch.randn(value.shape, generator=generator).to(value)
            if parameter in padding:
                noise[padding[parameter]] = 0.0  # that row is never trained, and models rely on it
            parameter.data.copy_(value + scale.to(value) * noise)
        yield
    finally:
        for parameter, value in saved:
            parameter.data.copy_(value)


@contextmanager
def undisturbed(model: nn.Module, *, training: bool, seed: int = 0) -> Iterator[None]:
    """Eval mode, or as in training without dropout; gradients on. Modes, buffers and generators are put back.

    So are frozen parameters, and one that was changed is refused; buffers `capture` looks at.
    """
    device = next(model.parameters()).device
    modes = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    frozen = [(name, p, p.detach().clone()) for name, p in model.named_parameters() if not p.requires_grad]
    changed = []
    for module in modes:
        module.training = training and modes[module] and not isinstance(module, _DropoutNd)
    try:
        with (
            torch.enable_grad(),
            torch_seeded(SeededRandomness(seed).stream("check"), device),
            deadly_bfloat16_refused(),
        ):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for module, name, buffer, saved in buffers:
            module._buffers[name] = buffer
            if not same_bits(buffer, saved):
                buffer.data.copy_(saved)
        for name, parameter, saved in frozen:
            if not same_bits(parameter, saved):
                parameter.data.copy_(saved)
                changed.append(name)
    if changed:
        raise rewritten_by_forward(changed[0])


@contextmanager
def _half_precision_seen() -> Iterator[list[bool]]:
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
