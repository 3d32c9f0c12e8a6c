"""Operations without a sharding rule, written as others that have one: the same function of every sample.

That they are the same is seen by the proof's own comparison with the plain run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import _disable_current_modes


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    groups = input.reshape(input.shape[0], num_groups, -1)
    centred = groups - groups.mean(2, keepdim=True)
    found = (centred * torch.rsqrt(centred.square().mean(2, keepdim=True) + eps)).reshape(input.shape)
    channels = (1, -1, *[1] * (input.ndim - 2))
    found = found if weight is None else found * weight.reshape(channels)
    return found if bias is None else found + bias.reshape(channels)


def _batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Batch normalisation by elementwise operations, where its statistics are not those of the batch."""
    if training or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    channels = (1, -1, *[1] * (input.ndim - 2))
    found = (input - running_mean.reshape(channels)) * torch.rsqrt(running_var + eps).reshape(channels)
    found = found if weight is None else found * weight.reshape(channels)
    return found if bias is None else found + bias.reshape(channels)


def _pad(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Tensor:
    """Reflected, repeated and circular borders by lookups along the axes that are padded."""
    if mode == "constant":
        return F.pad(input, pad, mode, value)
    for axis, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True), start=1):
        length = input.shape[-axis]
        places = torch.arange(-before, length + after, device=input.device)
        if mode == "circular":
            places = places % length
        elif mode == "reflect":
            places = (length - 1) - ((length - 1) - places.abs()).abs()
        else:
            places = places.clamp(0, length - 1)
        input = input.index_select(input.ndim - axis, places)
    return input


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """A bag a row of tokens; bags by offsets have no rule."""
    if input.ndim != 2 or max_norm is not None or scale_grad_by_freq or padding_idx is not None or mode == "max":
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    rows = F.embedding(input, weight)
    rows = rows if per_sample_weights is None else rows * per_sample_weights.unsqueeze(-1)
    return rows.sum(1) if mode == "sum" else rows.mean(1)


def _getitem(tensor: Tensor, index: Any) -> Any:
    """`x[arange(samples), columns]`: every sample looks up its own row."""
    parts = index if isinstance(index, tuple) else (index,)
    parts = tuple(torch.tensor(part, device=tensor.device) if type(part) is int else part for part in parts)
    own = _own_rows(tensor, parts[0]) if parts else None
    if own is None or not isinstance(tensor, DTensor) or not all(isinstance(part, Tensor) for part in parts):
        return Tensor.__getitem__(tensor, index)
    axis, axes = own
    if max(part.ndim for part in parts) != axes:  # other indices add axes in front, so that the samples' one moves
        return Tensor.__getitem__(tensor, index)
    mesh, columns = tensor.device_mesh, []
    for part in parts[1:]:
        if not isinstance(part, DTensor):
            whole = part.shape[axis - axes + part.ndim] if part.ndim >= axes - axis else 1
            rank = mesh.get_coordinate()[0]  # type: ignore[index]
            columns.append(part.narrow(axis - axes + part.ndim, rank, 1) if whole == tensor.shape[0] else part)
        elif part.placements in ((Replicate(),), (Shard(axis - axes + part.ndim),)):
            columns.append(part.to_local())
        else:
            return Tensor.__getitem__(tensor, index)
    first = torch.zeros([1] * axes, dtype=torch.int64, device=tensor.device)
    found = tensor.to_local()[(first, *columns)]
    return DTensor.from_local(found, mesh, [Shard(axis)], run_check=False)


def _own_rows(tensor: Tensor, rows: Any) -> tuple[int, int] | None:
    """(axis, number of axes) of an index that counts the samples along one axis and is 1 long along the others."""
    if not isinstance(tensor, DTensor) or tensor.placements != (Shard(0),) or tensor.to_local().shape[0] != 1:
        return None
    if isinstance(rows, DTensor) and rows.placements == (Replicate(),):
        rows = rows.to_local()
    if not isinstance(rows, Tensor) or isinstance(rows, DTensor) or rows.dtype not in (torch.int64, torch.int32):
        return None
    long = [axis for axis, size in enumerate(rows.shape) if size != 1]
    with _disable_current_modes():  # a look at constants
        counts = torch.arange(tensor.shape[0], device=rows.device, dtype=rows.dtype)
        return (long[0], rows.ndim) if len(long) == 1 and torch.equal(rows.flatten(), counts) else None


def _recurrent(cell: Callable[[Tensor, Any, list[Tensor]], Any], states: int) -> Callable[..., Any]:
    """A recurrent layer, token by token and sample by sample, for inputs that are not packed."""

    def run(
        input: Tensor, hidden: Any, weights: list[Tensor], has_biases: bool, layers: int, dropout: float,
        training: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        hidden = tuple(hidden) if states == 2 else (hidden,)
        tokens = list(input.unbind(1 if batch_first else 0))  # (samples, features) each
        each = len(weights) // (layers * (1 + bidirectional))
        last: list[tuple[Tensor, ...]] = []
        for layer in range(layers):
            directions = []
            for backwards in range(1 + bidirectional):
                number = layer * (1 + bidirectional) + backwards
                own, state = weights[number * each : (number + 1) * each], tuple(part[number] for part in hidden)
                found = []
                for token in reversed(tokens) if backwards else tokens:
                    state = cell(token, state, own)
                    found.append(state[0])
                directions.append(found[::-1] if backwards else found)
                last.append(state)
            tokens = [torch.cat(parts, 1) if bidirectional else parts[0] for parts in zip(*directions, strict=True)]
            if dropout and training and layer < layers - 1:
                tokens = [F.dropout(token, dropout) for token in tokens]
        return torch.stack(tokens, 1 if batch_first else 0), *(torch.stack(part) for part in zip(*last, strict=True))

    return run


def _gates(token: Tensor, state: Tensor, own: list[Tensor]) -> tuple[Tensor, Tensor]:
    of_token, of_state = token @ own[0].mT, state @ own[1].mT
    return (of_token + own[2], of_state + own[3]) if len(own) > 2 else (of_token, of_state)


def _lstm_cell(token: Tensor, state: tuple[Tensor, Tensor], own: list[Tensor]) -> tuple[Tensor, Tensor]:
    of_token, of_state = _gates(token, state[0], own)
    enter, forget, cell, out = (of_token + of_state).chunk(4, 1)
    memory = forget.sigmoid() * state[1] + enter.sigmoid() * cell.tanh()
    return out.sigmoid() * memory.tanh(), memory


def _gru_cell(token: Tensor, state: tuple[Tensor], own: list[Tensor]) -> tuple[Tensor]:
    of_token, of_state = _gates(token, state[0], own)
    (reset, update, new), (reset_h, update_h, new_h) = of_token.chunk(3, 1), of_state.chunk(3, 1)
    gate = (update + update_h).sigmoid()
    candidate = (new + (reset + reset_h).sigmoid() * new_h).tanh()
    return (candidate + gate * (state[0] - candidate),)


def _batch_norm_operation(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float, cudnn: bool,
) -> Tensor:  # fmt: skip
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _group_norm_operation(
    input: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, cudnn: bool
) -> Tensor:
    return _group_norm(input, groups, weight, bias, eps)


def _adaptive_avg_pool1d(input: Tensor, output_size: Any) -> Tensor:
    size = output_size if isinstance(output_size, int) else output_size[0]
    return (
        input.mean(-1, keepdim=True) if size == 1 else F.adaptive_avg_pool2d(input[..., None, :], (1, size))[..., 0, :]
    )


REWRITES: dict[Any, Callable[..., Any]] = {
    torch.adaptive_avg_pool1d: _adaptive_avg_pool1d,
    torch.group_norm: _group_norm_operation,
    torch.batch_norm: _batch_norm_operation,
    torch._C._nn.pad: _pad,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.pad: _pad,
    F.embedding_bag: _embedding_bag,
    Tensor.__getitem__: _getitem,
    torch.lstm: _recurrent(_lstm_cell, 2),
    torch.gru: _recurrent(_gru_cell, 1),
}
