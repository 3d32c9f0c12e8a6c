"""`check`: a model and its loss tried on a small batch, and a report of what was measured."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pmlf.basics.arguments import require_positive
from pmlf.basics.batches import batch_size, to_dtype, without
from pmlf.checks.comparison import Subject, clipped_sum, singles, subtract_plain, trained, undisturbed
from pmlf.checks.finding import Finding
from pmlf.checks.first_look import by_layers_or_operations, choose_capture, proof
from pmlf.checks.validation import check_samples, modes_to_check, refuse_unsafe_model
from pmlf.engine.anatomy import Anatomy
from pmlf.engine.clipper import Clipper
from pmlf.engine.criteria import as_per_sample
from pmlf.engine.momentum import contributions
from pmlf.engine.operations.looking import operations_of
from pmlf.engine.passes import LossFunction, Pass
from pmlf.engine.plan import Gradients, Plan, RuledLayer, require_known
from pmlf.methods import Method, resolve

LARGEST_SENSITIVITY = 1.0 + 1e-4  # over the clip norm: what rounding may add to one sample's part


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """How a layer's per-sample gradients are taken, and how long its share of a step took on this batch."""

    layer: str
    kind: str
    rule: str
    parameters: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What `check` measured; it raises where something does not hold. `str()` is a readable page.

    The numbers are computed from the batch without noise. Do not show those of private records to anybody.
    """

    samples: int
    parameters: int
    points: int
    modes: tuple[str, ...]
    independence: str  # of the samples: proven, or what stopped the proof
    sensitivity: float  # the most that leaving one sample out moved the clipped sum, over the clip norm
    dependence: float  # the most that a sample's norm changed with the others in its batch, relative
    disagreement: float  # the largest difference of a clipped gradient from plain autograd's, relative
    all_zero: bool  # whether every gradient is exactly zero: then nothing was compared
    layers: tuple[LayerCost, ...]

    def __str__(self) -> str:
        facts = [
            (
                "checked",
                f"{self.samples} samples, {self.parameters} trained parameters, {self.points} points, dropout off",
            ),
            ("modes", " and ".join(self.modes)),
            ("sensitivity", f"{self.sensitivity:.6f} clip norms: the most that one sample moved the sum"),
            (
                "independence",
                f"{self.dependence:.1e}: the most that a norm changed with the rest of the batch, relative",
            ),
            ("", self.independence),
            ("agreement", f"{self.disagreement:.1e}: the largest difference from plain autograd, relative"),
        ]
        if self.all_zero:
            zero = (
                "every gradient is exactly zero on this batch, so nothing was compared: give another batch or weights"
            )
            facts.append(("gradients", zero))
        lines = [f"{name:<14}{value}" for name, value in facts]
        total = sum(layer.seconds for layer in self.layers) or 1.0
        rows = [("layer", "type", "rule", "parameters", "time", "share")] + [
            (
                c.layer,
                c.kind,
                c.rule,
                f"{c.parameters:,}",
                f"{1e3 * c.seconds:.2f} ms",
                f"{100 * c.seconds / total:.0f} %",
            )
            for c in self.layers
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        for row in rows:
            texts = [row[i].ljust(widths[i]) if i < 3 else row[i].rjust(widths[i]) for i in range(6)]
            lines.append("  ".join(texts).rstrip())
        return "\n".join(lines)


def check(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    method: Method | str = "dp-pmlf",
    clip_norm: float = 1.0,
    gradients: Gradients = "ghost",
) -> Checked:
    """Verify a model and its loss on a small batch, changing neither; raise ValueError naming what fails.

    Verified: every layer can be private; `loss_fn` gives one loss a sample; a sample's gradient does not depend on the
    others; norms and clipped sum from the layers' factors agree with plain autograd, one sample at a time; leaving a
    sample out moves the sum by at most the clip norm. In eval mode, and in training mode too where that differs and is
    not random.

    Args:
        model: The model to train.
        loss_fn: A function of (model, batch) that returns one loss per sample, or a criterion of `torch.nn`.
        batch: A few samples, better three or more. Give public or synthetic ones: the report shows numbers computed
            from them without noise. An error never quotes such numbers.
        method: A method of `pmlf.methods`, or the name of a preset.
        clip_norm: The clip norm C.
        gradients: How per-sample gradients are computed, as in `PrivateStep`.

    Returns:
        What was measured. Print it.

    Raises:
        ValueError: The model or the loss cannot be private. The error says what to change.

    >>> report = check(nn.Linear(3, 1), lambda model, batch: model(batch).square().sum(1), torch.randn(4, 3))
    >>> report.samples, report.independence
    (4, 'proven: no data flow between samples on the executed path')
    """
    require_known(gradients)
    refuse_unsafe_model(model)
    require_positive("clip_norm", clip_norm, "it bounds one sample's part in the sum; the paper uses 1.0")
    clip_norm = float(clip_norm)
    points = resolve(method).points
    weights = [point.weight for point in points.at(points.depth)]
    plan = Plan.of(model, gradients)
    loss_fn = as_per_sample(loss_fn)
    subject = Subject(model=model, plan=plan, loss_fn=loss_fn, clip_norm=clip_norm, weights=weights)
    samples = batch_size(batch)
    if samples == 0:
        raise ValueError("the batch is empty: give at least one sample, better three or more")
    modes = modes_to_check(subject, batch)
    independence = by_layers_or_operations(subject, batch, lambda: _independent(subject, batch))
    found = []
    for training in modes:
        with undisturbed(model, training=training):
            measured = _measure(subject, batch)
        if measured.sensitivity > LARGEST_SENSITIVITY:
            measured = _in_double(subject, batch, training)
        found.append(measured)
    costs = _layer_costs if gradients == "ghost" else _whole_cost
    with undisturbed(model, training=False):
        costs(subject, batch)  # a warm-up
        layers = costs(subject, batch)
    return Checked(
        samples=samples,
        parameters=len(subject.plan.parameters),
        points=len(weights),
        modes=tuple("training mode" if training else "eval mode" for training in modes),
        independence=str(independence),
        sensitivity=max(measured.sensitivity for measured in found),
        dependence=max(measured.dependence for measured in found),
        disagreement=max(measured.disagreement for measured in found),
        all_zero=all(measured.all_zero for measured in found),
        layers=layers,
    )


def rules_used(model: nn.Module, loss_fn: LossFunction, batch: Any) -> dict[str, str]:
    """The name of the rule by which each trainable parameter gets its per-sample gradient, from one pass over a batch.

    "unreached" are parameters that no sample's loss depends on. The model stays as it was.

    Raises:
        ValueError: If per-sample gradients cannot be taken by rules; the error says why and what to give instead.

    >>> rules_used(nn.Linear(2, 1), lambda model, batch: model(batch).sum(1), torch.ones(3, 2))
    {'weight': 'linear', 'bias': 'linear'}
    """
    refuse_unsafe_model(model)
    plan = Plan.of(model)
    subject = Subject(model=model, plan=plan, loss_fn=loss_fn, clip_norm=1.0)
    choose_capture(subject, batch)
    with undisturbed(model, training=False):
        one = Pass(Anatomy(model), plan, loss_fn, trained(model), batch, batch_size(batch))
        found = _rules(one)
        reached = {name for name, _ in contributions(one)}
    return {name: found[name] if name in reached else "unreached" for name in plan.parameters}


def _independent(subject: Subject, batch: Any) -> Finding:
    found = proof(subject, batch)
    check_samples(subject, batch, proven=found.proven)
    return found


@dataclass(frozen=True, kw_only=True)
class _Measured:
    sensitivity: float
    dependence: float
    disagreement: float
    all_zero: bool


def _measure(subject: Subject, batch: Any) -> _Measured:
    """Leave each sample out once, and look at each alone; samples whose gradient is not finite take no part."""
    samples = batch_size(batch)

    def added_up(part: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        sums, norms, _ = clipped_sum(subject, part)
        return norms, sums

    together, whole = added_up(batch)
    sensitivity, dependence, disagreement = 0.0, 0.0, 0.0
    for index, single in enumerate(singles(batch)):
        others = added_up(without(batch, index))[1] if samples > 1 else {}
        moved = _norm([whole[name] - others[name] if others else whole[name] for name in whole])
        sensitivity = max(sensitivity, moved / subject.clip_norm)
        alone, sums = added_up(single)
        norm = float(alone[0])
        plain = subtract_plain(subject, single, sums)
        if norm == 0.0 or not alone.isfinite().all():
            continue
        dependence = max(dependence, abs(float(together[index]) - norm) / norm)
        if plain > 0.0:
            disagreement = max(disagreement, _norm(list(sums.values())) / min(plain, subject.clip_norm))
    return _Measured(
        sensitivity=sensitivity,
        dependence=dependence,
        disagreement=disagreement,
        all_zero=not bool(together.any()),
    )


def _in_double(subject: Subject, batch: Any, training: bool) -> _Measured:
    """Rounding may push another sample's activation over a kink: what remains in float64 is a fault."""
    exact = subject.in_double()
    with undisturbed(exact.model, training=training):
        measured = _measure(exact, to_dtype(batch, torch.float64))
    if measured.sensitivity > LARGEST_SENSITIVITY:
        raise ValueError(
            "leaving one sample out moves the sum of the clipped gradients by more than the clip norm, so a sample "
            "changes the others' gradients: look for an operation across axis 0"
        )
    return measured


def _whole_cost(subject: Subject, batch: Any) -> tuple[LayerCost, ...]:
    """Time the model as a whole, where its gradients are not taken layer by layer."""
    values = trained(subject.model)
    start = time.perf_counter()
    clipped_sum(subject, batch)
    return (
        LayerCost(
            layer="(model)",
            kind=type(subject.model).__name__,
            rule=subject.plan.gradients,
            parameters=sum(value.numel() for value in values.values()),
            seconds=time.perf_counter() - start,
        ),
    )


def _layer_costs(subject: Subject, batch: Any) -> tuple[LayerCost, ...]:
    """Time every layer's rule, norms and clipped sum, parameter by parameter."""
    plan, samples, values = subject.plan, batch_size(batch), trained(subject.model)
    seconds = dict.fromkeys(plan.parameters, 0.0)
    one = Pass(Anatomy(subject.model), plan, subject.loss_fn, values, batch, samples)
    taken = contributions(one)
    found = next(taken, None)  # the passes through the model; the first rule's own time goes with them
    start = time.perf_counter()
    while found is not None:
        name, contribution = found
        clipper = Clipper([name], clip_norm=1.0)
        alone = clipper.momentum(samples, 1)
        alone.add(name, contribution)
        clipper.add([alone], None, values)
        now = time.perf_counter()
        seconds[name] += now - start
        start, found = now, next(taken, None)
    rules, layers = _rules(one), _layer_by_parameter(plan)
    kinds = {name: type(module).__name__ for name, module in subject.model.named_modules()}
    costs: dict[str, LayerCost] = {}
    for parameter in plan.parameters:
        layer = layers.get(parameter)
        name = parameter if layer is None else layer.name
        before = costs.get(name)
        costs[name] = LayerCost(
            layer=name or "(model)",
            kind="Parameter" if layer is None else kinds[layer.name],
            rule=rules[parameter],
            parameters=values[parameter].numel() + (before.parameters if before else 0),
            seconds=seconds[parameter] + (before.seconds if before else 0.0),
        )
    return tuple(costs.values())


def _layer_by_parameter(plan: Plan) -> dict[str, RuledLayer]:
    """The layer that each parameter is taken at, by the parameter's name; none where operations are looked at."""
    if plan.learned.by_operations:
        return {}
    return {parameter: layer for layer in reversed(plan.layers) for parameter in layer.own.values()}


def _rules(one: Pass) -> dict[str, str]:
    """What each parameter's gradient is taken by: a layer's rule, or the operations that use it."""
    if one.plan.learned.by_operations:
        used = operations_of(one)
        return {name: ", ".join(sorted(used.get(name, {"unreached"}))) for name in one.plan.parameters}
    layers = _layer_by_parameter(one.plan)
    return {name: layers[name].rule.__name__.strip("_").replace("_", " ") for name in one.plan.parameters}


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())
