"""Per-sample gradients of modules without a rule, by running each again under vmap."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from pmlf.engine.arithmetic import full_precision
from pmlf.engine.layers import Call, Contribution, UnsupportedModel


def by_vmap(call: Call, wanted: Collection[str], values: Mapping[str, Tensor]) -> dict[str, Contribution]:
    """Per-sample gradients of a module's own parameters by running it again, one sample at a time, under vmap.

    For modules without a rule whose parameters are used in their own forward pass. Raises if that is random.

    Args:
        call: The module's call in the forward pass.
        wanted: Names of the module's parameters to differentiate.
        values: All of the module's parameters at the evaluation point.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")  # slow is better than wrong
            return _by_rows(call, wanted, values)
    except UnsupportedModel:
        raise
    except (RuntimeError, ValueError) as error:
        raise UnsupportedModel(
            f"module {call.name!r} ({type(call.module).__name__}) has no rule for its parameters {sorted(wanted)} and "
            f"vmap cannot run it sample by sample ({_first_line(error)}): keep them in a small module of their own "
            "that draws no random numbers (a LayerScale, say), build it from layers with rules, or freeze them"
        ) from error


def _by_rows(call: Call, wanted: Collection[str], values: Mapping[str, Tensor]) -> dict[str, Contribution]:
    """It is not known which arguments have a row for every sample, and others may have the same length. Those are
    mapped that give the output again, at other parameters too: a gate of zeros hides what is behind it."""
    if call.grad.shape[0] != call.samples:
        raise UnsupportedModel(
            f"module {call.name!r} ({type(call.module).__name__}) has no rule and axis 0 of its output does not count "
            "the samples: put the batch first"
        )
    values = {name: full_precision(value) for name, value in values.items()}  # as the arguments below
    own = {name: values[name] for name in wanted}
    rest = {name: value for name, value in values.items() if name not in own}
    elsewhere = {name: value + 0.1 + 0.3 * value.abs() for name, value in own.items()}
    names = list(call.named_args)
    arguments = [
        full_precision(argument) if isinstance(argument, Tensor) else argument
        for argument in (*call.args, *call.named_args.values())
    ]
    fitting = [i for i, a in enumerate(arguments) if isinstance(a, Tensor) and a.ndim > 0 and len(a) == call.samples]

    def called(own: Mapping[str, Tensor], given: Sequence[Any]) -> Tensor:
        positional = tuple(given[: len(call.args)])
        named = dict(zip(names, given[len(call.args) :], strict=True))
        found: Tensor = torch.func.functional_call(call.module, {**rest, **own}, positional, named)
        return found

    def output(own: Mapping[str, Tensor], mapped: Sequence[int], rows: Sequence[Tensor]) -> Tensor:
        given = [rows[mapped.index(i)].unsqueeze(0) if i in mapped else a for i, a in enumerate(arguments)]
        return called(own, given).squeeze(0)

    def by_row(mapped: Sequence[int]) -> tuple[Tensor, ...]:
        return tuple(arguments[i] for i in mapped)

    def gives_the_output(mapped: Sequence[int]) -> bool:
        def outputs(own: Mapping[str, Tensor]) -> Tensor:
            if not mapped:  # one output for all: positions, say
                one = output(own, (), ())
                return one.expand(call.samples, *one.shape)
            return torch.func.vmap(lambda rows: output(own, mapped, rows))(by_row(mapped))

        assert call.output is not None
        there = called(elsewhere, arguments)
        there = there.expand(call.samples, *there.shape[1:]) if there.shape[0] == 1 else there
        return _rows_agree(outputs(own), call.output) and _rows_agree(outputs(elsewhere), there)

    def gradients(mapped: Sequence[int]) -> dict[str, Contribution]:
        per_sample = torch.func.vmap(
            torch.func.grad(lambda own, grad, rows: (output(own, mapped, rows) * grad).sum()), in_dims=(None, 0, 0)
        )
        return dict(per_sample(own, call.grad, by_row(mapped)))

    reason: Exception = ValueError("its arguments, row by row, do not give its output again")
    for count in range(len(fitting), -1, -1):
        for mapped in combinations(fitting, count):
            try:
                if gives_the_output(mapped):
                    return gradients(mapped)
            except (RuntimeError, ValueError) as error:  # these rows do not fit; others may
                reason = error
    raise reason


def _rows_agree(one: Tensor, other: Tensor) -> bool:
    """Row by row but for rounding, which is coarse in half precision; rows that are not finite tell nothing."""
    if one.shape != other.shape:
        return False
    half = other.dtype in (torch.bfloat16, torch.float16)
    first, second = (full_precision(tensor).reshape(len(tensor), -1) for tensor in (one, other))
    distance, lengths = (torch.linalg.vector_norm(rows, dim=1) for rows in (first - second, second))
    return bool(((distance <= (2e-2 if half else 1e-4) * lengths + 1e-30) | ~distance.isfinite()).all())


def _first_line(error: Exception) -> str:
    """Without its numbers, which may count the samples."""
    return re.sub(r"[0-9]+", "n", (str(error).splitlines() or [""])[0])
