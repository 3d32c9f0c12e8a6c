"""What cannot be private, said before training starts: unsafe layers, and samples that influence each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from pmlf.batches import batch_size, first_repeated, select, tensors_of, to_device, to_dtype
from pmlf.comparison import Subject, compared, half_precision_seen, moved, singles, tolerance_for, undisturbed

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
        with moved(subject.model) if nearby else nullcontext():
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
        with undisturbed(subject.model, training=True, seed=seed), half_precision_seen() as half, torch.no_grad():
            parts = list(tensors_of(subject.loss_fn(subject.model, of)))
            return float(sum(part.reshape(samples, -1)[0].double().sum() for part in parts)), bool(half)

    for seed in range(_MIXING_SEEDS if samples > 1 else 0):
        (among_others, half), (among_itself, _) = first_loss(batch, seed), first_loss(first_repeated(batch), seed)
        tolerance = tolerance_for(half).relative
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
    with moved(subject.model):
        with undisturbed(subject.model, training=False):
            if compared(subject, pair, apart).agree:
                return
        exact = subject.in_double()
        with undisturbed(exact.model, training=False):
            pair, *apart = (to_dtype(batch, torch.float64) for batch in (pair, *apart))
            if compared(exact, pair, apart).agree:
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
        found = compared(subject, batch, singles(batch))
    if found.agree:
        return found.told
    # Rounding may put an activation on the other side of a kink (ReLU, max-pool), which is not a fault of the model:
    # only what remains in float64 is.
    exact = subject.in_double()
    batch = to_dtype(batch, torch.float64)
    with undisturbed(exact.model, training=training):
        try:
            found = compared(exact, batch, singles(batch))
        except RuntimeError:  # a loss that cannot be taken in float64
            exact = subject
        if found.agree:
            return found.told
        alone = [compared(exact, single, [single]).agree for single in singles(batch)]
    where = "randomness in training mode" if training else "randomness in eval mode"
    wrong = found.worst
    if len(alone) > 1 and all(alone):
        raise ValueError(
            f"a sample's gradient depends on the other samples of its batch (seen at parameter {wrong!r}): look for an "
            "operation across axis 0, a layer that puts the batch second (batch_first), positions without a batch axis "
            f"(give them a leading axis of 1), or {where}"
        )
    raise ValueError(
        f"the gradient of parameter {wrong!r} does not come through its own layer's forward pass: look for a penalty "
        "on weights inside loss_fn (use the optimizer's weight_decay), a weight used outside its layer "
        f"(F.linear(x, other.weight)), or {where}"
    )
