"""Recurrent layers, token by token: all products with the input at once, and one use for each weight.

    gates_t = W x_t + b + U h_{t-1} + c

For an LSTM and a plain RNN the gradient at W x_t + b is that at U h_{t-1} + c too. A GRU scales a third of the latter
by its reset gate. So the gradient at the input's product, for all tokens, is all that the four parameters need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]


class Steps(NamedTuple):
    """What one direction of one layer computed: for every step the state before it and, of a GRU, its reset gate."""

    states: list[Tensor]
    resets: list[Tensor]


def lstm_cell(gates: Tensor, hidden: Tensor, state: State) -> tuple[State, None]:
    enter, forget, cell, out = (gates + hidden).chunk(4, -1)
    memory = forget.sigmoid() * state[1] + enter.sigmoid() * cell.tanh()
    return (out.sigmoid() * memory.tanh(), memory), None


def gru_cell(gates: Tensor, hidden: Tensor, state: State) -> tuple[State, Tensor]:
    (reset, update, new), (reset_h, update_h, new_h) = gates.chunk(3, -1), hidden.chunk(3, -1)
    reset, update = (reset + reset_h).sigmoid(), (update + update_h).sigmoid()
    candidate = (new + reset * new_h).tanh()
    return (candidate + update * (state[0] - candidate),), reset


def tanh_cell(gates: Tensor, hidden: Tensor, state: State) -> tuple[State, None]:
    return ((gates + hidden).tanh(),), None


def relu_cell(gates: Tensor, hidden: Tensor, state: State) -> tuple[State, None]:
    return ((gates + hidden).relu(),), None


Cell = Callable[[Tensor, Tensor, State], tuple[State, Tensor | None]]
CELLS: dict[str, Cell] = {"lstm": lstm_cell, "gru": gru_cell, "rnn_tanh": tanh_cell, "rnn_relu": relu_cell}


class Weights4(NamedTuple):
    """The weights of one direction of one layer: for the input, for the state, their biases, an LSTM's projection."""

    input: Tensor
    state: Tensor
    input_bias: Tensor | None
    state_bias: Tensor | None
    projection: Tensor | None


def unpacked(weights: Sequence[Tensor], biases: bool, layers: int, directions: int) -> Iterator[Weights4]:
    """The flat list of a recurrent layer's weights, direction by direction."""
    each = len(weights) // (layers * directions)
    for start in range(0, len(weights), each):
        own = list(weights[start : start + each])
        bias = own[2:4] if biases else [None, None]
        yield Weights4(own[0], own[1], bias[0], bias[1], own[-1] if each in (3, 5) else None)


def direction(
    cell: Cell,
    gates: Sequence[Tensor],
    first: State,
    product: Callable[[Tensor], Tensor],
    projection: Callable[[Tensor], Tensor],
) -> tuple[list[Tensor], State, Steps]:
    """All steps of one direction, in the order given: gates (sequences, width) of each.

    Sequences are sorted by length, so that a step has those that are not at their end. `product` is U h + c, and
    `projection` what an LSTM does with its output.
    """
    outputs, steps, ended = list[Tensor](), Steps([], []), list[State]()
    begun = len(gates[0])  # a slice of all rows would be one of samples, for the proof
    state = tuple(part if len(part) == begun else part[:begun] for part in first)
    for now in gates:
        here, size = len(state[0]), len(now)
        if size < here:
            ended.append(tuple(part[size:] for part in state))
            state = tuple(part[:size] for part in state)
        elif size > here:
            state = tuple(torch.cat([part, start[here:size]]) for part, start in zip(state, first, strict=True))
        steps.states.append(state[0].detach())
        state, reset = cell(now, product(state[0]), state)
        state = (projection(state[0]), *state[1:])
        if reset is not None:
            steps.resets.append(reset.detach())
        outputs.append(state[0])
    if ended:
        state = tuple(torch.cat([part, *rest]) for part, *rest in zip(state, *reversed(ended), strict=True))
    return outputs, state, steps


def dropped(tokens: Tensor, rate: float, training: bool) -> Tensor:
    """Between layers."""
    return F.dropout(tokens, rate, training) if rate and training else tokens
