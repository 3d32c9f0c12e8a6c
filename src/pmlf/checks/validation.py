"""What cannot be private, found before training starts: unsafe layers, and samples that influence each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm

from pmlf.basics.batches import batch_size, first_repeated, same_batches, select, tensors_of, to_device, to_dtype
from pmlf.basics.generators import other_libraries_watched
from pmlf.checks.comparison import (
    Compared,
    Subject,
    are_singles,
    clipped_sum,
    compared,
    half_precision_seen,
    moved,
    singles,
    tolerance_for,
    trained,
)
from pmlf.checks.draws import Unknown, constant_draws, refuse_unseeded
from pmlf.checks.fixes import REPLACED_BATCH_NORMS
from pmlf.engine.anatomy import Anatomy
from pmlf.engine.layers import UnsupportedModel, VmapUnsupported
from pmlf.engine.momentum import contributions
from pmlf.engine.passes import Pass

_FIX = "pmlf.fix_model(model) replaces it"
_COLLATED_PAIRS = 8  # pairs of records to try: gradients may be zero
_IN_DOUBLE = 16  # samples: convolutions are slow in it
_MOST_IN_DOUBLE = 200_000_000  # parameters: a copy of 1.6 GB
_MIXING_SEEDS = 6  # all of them miss a random exchange of two samples once in 64 times


def refuse_unsafe_model(model: nn.Module) -> None:
    """Raise ValueError naming the first layer that mixes samples, keeps statistics of the data, or hides gradients."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: a torch.nn.Module is needed")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta":
            raise ValueError(
                f"{name!r} is on the meta device and has no numbers yet: load the weights first, or build the model "
                "without torch.device('meta') (init_empty_weights, low_cpu_mem_usage)"
            )
    for name, module in model.named_modules():
        reason = _unsafe(module)
        if reason is not None:
            where = f"layer {name!r}" if name else "the model"
            raise ValueError(f"{where} ({type(module).__name__}) {reason}")


def _unsafe(module: nn.Module) -> str | None:
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "adds up gradients of several copies before they are clipped: give the model inside it (its .module)"
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if "FullyShardedDataParallel" in kinds:
        return "is sharded by FSDP, where a sample's gradient cannot be seen: give the model as it was before"
    if "FSDPModule" in kinds:
        return (
            "is sharded by fully_shard, where each rank holds a part of every parameter: `pmlf.make_private` trains it "
            "with its process group; everything else takes the model as it was before"
        )
    for name, parameter in module._parameters.items():
        if type(parameter).__name__ == "DTensor":
            return f"has a parameter {name!r} that is spread over devices (DTensor): give the model as it was before"
    if isinstance(module, torch.jit.ScriptModule):
        return "is compiled by torch.jit, where the layers cannot be seen: give the model as it was before"
    # In eval mode, with its own statistics, it mixes nothing; in training mode every step would refuse their change.
    fixed = isinstance(module, (_BatchNorm, _InstanceNorm)) and module.track_running_stats and not module.training
    if isinstance(module, _BatchNorm) and not fixed:
        way = f"{_FIX} by GroupNorm" if type(module) in REPLACED_BATCH_NORMS else "build the model with GroupNorm"
        return (
            "mixes the samples of a batch and saves their statistics without noise: put it in eval mode, with the "
            f"statistics that it has, or {way}"
        )
    if isinstance(module, _SpectralNorm) and "_u" in module._buffers and module.training:
        return (
            "writes the vectors of its power iteration in every pass: put it in eval mode, with the vectors that it "
            f"has, or {_FIX} by one that writes nothing"
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats and not fixed:
        return f"saves running statistics of the data without noise: set track_running_stats=False, or {_FIX}"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        if module.max_norm is not None:
            return "rewrites its weights in the forward pass (max_norm), without noise: build it without max_norm"
        if module.scale_grad_by_freq:
            return "scales a sample's gradient by the other samples (scale_grad_by_freq): build it without"
        if module.sparse:
            return "asks for sparse gradients, and noise is dense: build it with sparse=False"
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module._parameters.values()):
        return "is not initialised yet (lazy): run the model once on public or synthetic inputs first"
    return None


def check_samples(subject: Subject, batch: Any, *, proven: bool = False) -> bool:
    """Compare norm and clipped sum with plain autograd, one sample at a time, on all samples of a small batch.

    Both at the present parameters and at others near them: behind a head of zeros every gradient is zero and hides what
    is wrong. Dropout is off. A model that is otherwise the same in training and in eval mode is checked in eval mode
    only. A model that is random in training mode is checked there by its losses, unless its samples are proven
    independent.

    Returns:
        Whether every gradient was finite and nonzero. If not, the comparison proves nothing: check other samples.
    """
    conclusive = False
    modes = modes_to_check(subject, batch)
    for training in modes:
        conclusive |= _check_samples(subject, batch, training)
    with moved(subject) as elsewhere:
        for training in modes if _runs(elsewhere, batch, modes[0]) else ():
            conclusive |= _check_samples(elsewhere, batch, training)
    if subject.model.training and len(modes) == 1 and not proven:
        _refuse_mixed_losses(subject, subject.at_once(batch))
    return conclusive


def modes_to_check(subject: Subject, batch: Any) -> tuple[bool, ...]:
    """(False,) for eval mode; also True if training mode computes something else, and the same each time.

    A model may mix samples in training mode only, as BatchNorm does. Randomness other than dropout layers hides this
    from a comparison of gradients. (True,) alone for a loss that fails in eval mode.
    """
    batch = subject.at_once(batch)
    if subject.plan.gradients == "vmap":  # before a plain pass could leave something of these samples behind
        _refuse_unmapped(subject, batch)

    drew = False  # the losses of two seeds may happen to be alike

    def losses(training: bool, seed: int) -> Tensor:
        nonlocal drew
        with subject.undisturbed(training=training, seed=seed):
            before = torch.default_generator.get_state()
            parts = tensors_of(subject.loss_fn(subject.model, batch))
            drew |= training and not torch.equal(before, torch.default_generator.get_state())
            return torch.cat([part.detach().flatten().double().cpu() for part in parts]) if parts else torch.zeros(0)

    if subject.model.training and not _runs(subject, batch, training=False):
        return (True,)
    evaluated = losses(False, 0)
    if not _same(evaluated, losses(False, 1)):
        raise ValueError(
            "the loss is random in eval mode, so it cannot be checked: draw random numbers only if model.training is "
            "set, or draw them with the records and put them into the batch"
        )
    if not subject.model.training:
        return (False,)
    in_training, again = losses(True, 0), losses(True, 1)
    random = drew or not _same(in_training, again)
    return (False,) if random or _same(evaluated, in_training) else (False, True)


def _refuse_unmapped(subject: Subject, batch: Any) -> None:
    """Raise VmapUnsupported if vmap cannot run the loss, or if something made under it is kept."""
    with subject.undisturbed(training=subject.model.training):
        clipped_sum(subject, batch)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def _runs(subject: Subject, batch: Any, training: bool) -> bool:
    """Whether the loss runs at all: some fail in eval mode, or at other parameters."""
    try:
        with subject.undisturbed(training=training), torch.no_grad():
            subject.loss_fn(subject.model, subject.at_once(batch))
    except Exception:
        return False
    return True


def _refuse_mixed_losses(subject: Subject, batch: Any) -> None:
    """Raise ValueError if, in training mode and with the same draws, the first sample's loss moves with the others."""
    samples = batch_size(batch)

    def losses(of: Any, seed: int) -> tuple[Tensor, bool]:
        with subject.undisturbed(training=True, seed=seed), half_precision_seen() as half, torch.no_grad():
            parts = tensors_of(subject.loss_fn(subject.model, of))
            each = [part.reshape(samples, -1).double().sum(1) for part in parts]
            return torch.stack(each).sum(0).cpu(), bool(half)

    with other_libraries_watched() as drawn_from:
        once, again = losses(batch, 0)[0], losses(batch, 0)[0]
    # a new head hides nearly all of it
    if not torch.allclose(once, again, rtol=1e-6 if drawn_from else 1e-4, atol=0.0, equal_nan=True):
        refuse_unseeded(drawn_from)
    for seed in range(_MIXING_SEEDS if samples > 1 else 0):
        (with_others, half), (repeated, _) = losses(batch, seed), losses(first_repeated(batch), seed)
        among_others, among_itself = float(with_others[0]), float(repeated[0])
        tolerance = tolerance_for(half, subject.model).relative
        if abs(among_others - among_itself) > tolerance * (abs(among_others) + abs(among_itself)) + 1e-6:
            raise ValueError(
                "a sample's loss depends on the other samples of its batch, in training mode: look for statistics over "
                "axis 0, or for samples mixed at random (mixup) in the model or in loss_fn"
            )


def _in_double(subject: Subject, wide: Any, training: bool) -> Subject | None:
    """The subject in float64, like the batch; None if the model is too large to copy or does not run in float64."""
    if sum(parameter.numel() for parameter in subject.model.parameters()) > _MOST_IN_DOUBLE:
        return None
    try:
        exact = subject.in_double()
    except Exception:  # a model that cannot be copied
        return None
    return exact if _runs(exact, wide, training) else None


def check_losses(subject: Subject, batch: Any) -> None:
    """A sample's loss must be the same in a whole micro-batch and in a part of it, and every layer's rows its own.

    A model may mix three samples and not two, so whole micro-batches are compared. This is done in every mode in which
    the model runs, with random draws made constant, at the present parameters and at others near them: behind a head of
    zeros every loss is the same. The first samples are compared in float64 too, if the model runs in it.
    """
    modes = [mode for mode in (False, subject.model.training) if _runs(subject, batch, mode)]
    for training in sorted(set(modes or [True])):
        _refuse_rows_of_others(subject, batch, training)
        _refuse_shared_losses(subject, batch, training)
        with moved(subject) as elsewhere:
            if _runs(elsewhere, batch, training):
                _refuse_rows_of_others(elsewhere, batch, training)
                _refuse_shared_losses(elsewhere, batch, training)


def _refuse_rows_of_others(subject: Subject, batch: Any, training: bool) -> None:
    with subject.undisturbed(training=training):
        anatomy, values, samples = Anatomy(subject.model), trained(subject.model), batch_size(batch)
        for _ in contributions(Pass(anatomy, subject.plan, subject.loss_fn, values, batch, samples, rows="marked")):
            pass


def _refuse_shared_losses(subject: Subject, batch: Any, training: bool) -> None:
    few = to_dtype(select(batch, slice(0, _IN_DOUBLE)), torch.float64)
    exact = _in_double(subject, few, training)
    try:
        alike = _losses_agree(subject, batch, training)
        if exact is not None:
            # rounding may choose another expert or maximum in float32: then the whole batch is looked at in float64
            alike = _losses_agree(exact, few if alike else to_dtype(batch, torch.float64), training)
    except Unknown:  # randomness that cannot be made constant: the watch makes the same draws again
        return
    if not alike:
        raise ValueError(
            "a sample's loss depends on the other samples of its batch where there are more than two: look for an "
            "operation across axis 0 in the model or in loss_fn"
        )


def _losses_agree(subject: Subject, batch: Any, training: bool) -> bool:
    """Whether samples have the same losses together and in two parts, of odd sizes: groups of samples may be mixed."""

    def losses(some: Any) -> tuple[Tensor, bool]:
        with (
            subject.undisturbed(training=training),
            half_precision_seen() as half_precision,
            torch.no_grad(),
            constant_draws(),
        ):
            parts = tensors_of(subject.loss_fn(subject.model, some))
            each = [part.double().reshape(batch_size(some), -1).sum(1) for part in parts]
            return torch.stack(each).sum(0).cpu(), bool(half_precision)

    first = max(1, batch_size(batch) // 3) | 1
    together, half_precision = losses(batch)
    apart = [losses(select(batch, part))[0] for part in (slice(0, first), slice(first, None))]
    tolerance = tolerance_for(half_precision, subject.model).relative
    return torch.allclose(together, torch.cat(apart), rtol=2 * tolerance, atol=1e-6, equal_nan=True)


def check_collation(subject: Subject, indices: Sequence[int], batch_of: Callable[[list[int]], Any]) -> None:
    """A record must come out of `batch_of` the same alone and with others, except for padding that changes no gradient.

    The longest record is collated with short ones, until the gradients of a pair are finite and nonzero.
    """
    device = next(subject.model.parameters()).device
    alone = {index: to_device(batch_of([index]), device) for index in indices}
    shapes = {index: [tuple(tensor.shape[1:]) for tensor in tensors_of(single)] for index, single in alone.items()}
    order = sorted(indices, key=lambda i: (sum(map(math.prod, shapes[i])), shapes[i], i))
    some = sorted({order[0], *order[len(order) // 3 :: max(1, len(order) // 4)], order[-1]})
    if len(some) > 2:  # what mixes no two may mix more
        _collates(subject, batch_of, alone, some)
    for short in order[:_COLLATED_PAIRS]:
        if short != order[-1] and _collates(subject, batch_of, alone, [short, order[-1]]):
            return


def _collates(
    subject: Subject, batch_of: Callable[[list[int]], Any], alone: Mapping[int, Any], indices: list[int]
) -> bool:
    """Whether the gradients of some records were finite and nonzero; raises if they differ together and apart."""
    device = next(subject.model.parameters()).device
    pair = to_device(batch_of(indices), device)
    conclusive = check_samples(subject, pair)
    apart = [alone[index] for index in indices]
    if not same_batches(pair, to_device(batch_of(indices), device)):
        raise ValueError(
            "collate_fn makes another batch of the same records each time, so it cannot be checked: draw random "
            "numbers in loss_fn, where model.training is set"
        )
    if are_singles(apart, pair):  # check_samples has compared just these
        return conclusive
    agree = True
    for training in modes_to_check(subject, pair):
        agree &= _settled(subject, pair, apart, training).found.agree
        with moved(subject) as elsewhere:
            if _runs(elsewhere, pair, training):
                agree &= _settled(elsewhere, pair, apart, training).found.agree
    if agree:
        return conclusive
    raise ValueError(
        "a record's gradient changes with the records that it is collated with, by padding or otherwise, so one record "
        "moves the others' gradients: mask the padding in the model and in loss_fn, or pad to a fixed length; "
        "mix no records in collate_fn or in the dataset"
    )


def check_augmentation(function: Callable[[Any, Tensor], Any], batch: Any, uniforms: Tensor) -> None:
    """Raise ValueError if an augmented sample depends on the others."""
    together = function(batch, uniforms)
    for index, single in enumerate(singles(batch)):
        chosen = slice(index, index + 1)
        pairs = zip(tensors_of(select(together, chosen)), tensors_of(function(single, uniforms[chosen])), strict=True)
        if not all(one.shape == other.shape and torch.allclose(one, other, equal_nan=True) for one, other in pairs):
            raise ValueError(
                "the augmentation makes a sample depend on the other samples of its batch, or draws random numbers of "
                "its own: change each sample by its own uniforms alone"
            )


@dataclass(frozen=True, kw_only=True)
class _Settled:
    """A comparison, and what it was made with at the end."""

    found: Compared
    subject: Subject
    alone: Sequence[Any]


def _settled(subject: Subject, batch: Any, alone: Sequence[Any], training: bool) -> _Settled:
    """Compare, and compare again in float64 if there is a difference.

    Rounding may put an activation on the other side of a kink (ReLU, max-pool), which is no fault of the model. A
    difference that remains in float64 is a fault. If the model does not run in float64, a difference at two other sets
    of parameters is one.
    """
    with subject.undisturbed(training=training):
        found = compared(subject, batch, alone)
    if found.agree:
        return _Settled(found=found, subject=subject, alone=alone)
    try:
        exact, wide = subject.in_double(), [to_dtype(part, torch.float64) for part in (batch, *alone)]
        with exact.undisturbed(training=training):
            return _Settled(found=compared(exact, wide[0], wide[1:]), subject=exact, alone=wide[1:])
    except Exception:  # a model that cannot be copied, a loss that cannot be taken in float64
        for seed in (1, 2):
            with moved(subject, seed) as elsewhere, elsewhere.undisturbed(training=training):
                found_there = compared(elsewhere, batch, alone)
            if found_there.agree:
                return _Settled(found=found_there, subject=subject, alone=alone)
        return _Settled(found=found, subject=subject, alone=alone)


def _check_samples(subject: Subject, batch: Any, training: bool) -> bool:
    settled = _settled(subject, batch, singles(batch), training)
    found = settled.found
    if found.agree:
        return found.conclusive
    with settled.subject.undisturbed(training=training):
        alone = [compared(settled.subject, single, [single]).agree for single in settled.alone]
    where = "randomness in training mode" if training else "randomness in eval mode"
    wrong = found.worst
    if len(alone) > 1 and all(alone):
        raise UnsupportedModel(
            f"a sample's gradient depends on the other samples of its batch (seen at parameter {wrong!r}): look for an "
            "operation across axis 0, a layer that puts the batch second (batch_first), positions without a batch axis "
            "(give them a leading axis of size one), rows that are not grouped by sample (of two views in one "
            f"pass, those of a sample must follow each other), or {where}"
        )
    if subject.plan.gradients == "vmap":
        raise VmapUnsupported(
            f"the gradient of parameter {wrong!r} under vmap differs from plain autograd's: look for random numbers "
            "that torch's functions do not draw (or draw with a generator), a hook on a parameter, a weight used "
            f"outside its module, or {where}"
        )
    raise UnsupportedModel(
        f"the gradient of parameter {wrong!r} does not come through its own layer's forward pass: look for a penalty "
        "on weights inside loss_fn (use the optimizer's weight_decay), a weight used outside its layer "
        f"(F.linear(x, other.weight)), a gradient taken inside loss_fn, or {where}"
    )
