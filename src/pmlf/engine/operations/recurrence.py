"""Recurrent layers and cells, run token by token under the eye of the mode: see `recurrent`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pmlf.engine.layers import Contribution
from pmlf.engine.operations.elementwise import reduced
from pmlf.engine.operations.layouts import Layout
from pmlf.engine.operations.products import contracted, linear_letters
from pmlf.engine.operations.recurrent import CELLS, Cell, State, Steps, Weights4, direction, dropped, unpacked
from pmlf.engine.operations.uses import Uses, rows_of


def run_layers(mode: Uses, name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """`torch.lstm` and its like, of batches or of packed sequences."""
    packed = isinstance(args[3], (list, tuple))
    if packed:
        input, sizes, hidden, weights, biases, layers, rate, training, both = args
        lengths, first_axis = sizes.tolist(), None
    else:
        input, hidden, weights, biases, layers, rate, training, both, batch_first = args
        first_axis = 1 if batch_first else 0
        input = input.transpose(0, 1) if batch_first else input
        lengths = []
    states = _of_samples(mode, tuple(hidden) if name == "lstm" else (hidden,))
    ways = 1 + bool(both)
    last, found = list[State](), list[Tensor]()
    for number, own in enumerate(unpacked(weights, biases, layers, ways)):
        if number % ways == 0:
            if number:
                input = dropped(torch.cat(found, -1), rate, training)
            found = []
        first = tuple(part[number] for part in states)
        outputs, state = _direction(mode, CELLS[name], input, lengths, first, own, backwards=number % ways == 1)
        found.append(outputs)
        last.append(state)
    output = torch.cat(found, -1)
    output = output.transpose(0, 1) if first_axis == 1 else output
    return output, *(torch.stack(part) for part in zip(*last, strict=True))


def run_cell(mode: Uses, name: str, args: tuple[Any, ...]) -> Any:
    """`torch.lstm_cell` and its like."""
    input, hidden, *weights = args
    name = name.removesuffix("_cell")
    state = _of_samples(mode, tuple(hidden) if name == "lstm" else (hidden,))
    bias, state_bias = weights[2:] or (None, None)
    own = Weights4(weights[0], weights[1], bias, state_bias, None)
    _, state = _direction(mode, CELLS[name], input.unsqueeze(0), [], state, own, backwards=False)
    return state if name == "lstm" else state[0]


def _of_samples(mode: Uses, state: State) -> State:
    """A first state that is a weight, with rows for the samples."""
    return tuple(
        rows_of(mode, part, list(part.shape), presumed=False) if part in mode.weights else part for part in state
    )


def _direction(
    mode: Uses, cell: Cell, input: Tensor, lengths: Sequence[int], first: State, own: Weights4, *, backwards: bool
) -> tuple[Tensor, State]:
    """One direction of one layer over (tokens, samples, features), or over packed rows."""
    weights = tuple(each for each in own[:4] if isinstance(each, Tensor) and each in mode.weights)
    stand_in = {id(each): each.detach() for each in own[:4] if each is not None and each in mode.weights}
    of_input, of_state, bias, state_bias = (None if each is None else stand_in.get(id(each), each) for each in own[:4])
    assert of_input is not None and of_state is not None
    if not input.requires_grad:
        of_input = of_input.detach().requires_grad_()
    gates = F.linear(input, of_input, bias)
    steps = Steps([], [])

    def take(number: int, grad: Tensor, layout: Layout) -> Contribution:
        weight = weights[number]
        states = [*reversed(steps.states)] if backwards else steps.states
        resets = [*reversed(steps.resets)] if backwards else steps.resets
        joined = torch.cat if lengths else torch.stack
        if resets and (weight is own.state or weight is own.state_bias):
            free, new = grad.tensor_split([2 * grad.shape[-1] // 3], -1)
            grad = torch.cat([free, new * joined(resets)], -1)
        if weight is own.input_bias or weight is own.state_bias:
            return reduced([grad], grad.shape, weight.shape, layout)
        side = input.detach() if weight is own.input else joined(states)
        letters = linear_letters(grad.ndim)
        found = contracted(grad, letters[2], side, letters[0], letters[1], layout)
        assert found is not None
        return found

    gates = mode.record("recurrent", gates, weights, take, [input]) if torch.is_grad_enabled() else gates
    parts = list(gates.split(list(lengths))) if lengths else list(gates.unbind(0))
    outputs, state, done = direction(
        cell,
        parts[::-1] if backwards else parts,
        first,
        lambda hidden: F.linear(hidden, of_state, state_bias),
        (lambda hidden: hidden)
        if own.projection is None
        else lambda hidden: mode.run(F.linear, hidden, own.projection),
    )
    steps.states.extend(done.states)
    steps.resets.extend(done.resets)
    outputs = outputs[::-1] if backwards else outputs
    return (torch.cat if lengths else torch.stack)(outputs), state
