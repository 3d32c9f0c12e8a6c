"""The building blocks of fuzzed models, on rows (n, width) or (n, tokens, width), and how their rows get to them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzzing.recipes import OPERATIONS, RANDOM, RECURRENT, REORDERED, TABLES, Block, Condition

PROMPT = 2  # rows that a prompt puts in front
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
}


class Layer(nn.Module):
    """Takes rows and which of them count; returns rows."""

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        raise NotImplementedError


class Dense(Layer):
    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(width, width), activation

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        return ACTIVATIONS[self.activation](self.linear(rows))


class Perceptron(Layer):
    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), activation

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        found: Tensor = rows + self.down(ACTIVATIONS[self.activation](self.up(rows)))
        return found


class Norm(Layer):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        channels_second = isinstance(self.norm, nn.GroupNorm)
        found: Tensor = self.norm(rows.mT).mT if channels_second else self.norm(rows)
        return found


class Scale(Layer):
    """A vector of its own, without a rule."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1.0 + 0.3 * torch.randn(width))

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        return rows * self.gamma


class Bare(Layer):
    """A parameter of shape (1, width) times the rows, or added to them."""

    def __init__(self, width: int, *, added: bool) -> None:
        super().__init__()
        self.bare, self.added = nn.Parameter((0.0 if added else 1.0) + 0.3 * torch.randn(1, width)), added

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        bare = self.bare if rows.ndim == 2 else self.bare[:, None]
        return torch.tanh(rows + bare) if self.added else rows * bare


class Prompt(Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.prompt = nn.Parameter(0.5 * torch.randn(1, PROMPT, width))

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        rows = torch.cat([self.prompt.expand(len(rows), -1, -1), rows], 1)
        return torch.tanh(rows + 0.5 * rows.cumsum(1))  # so that no row keeps to itself


class Position(Layer):
    """A table of positions: a bare parameter (1, tokens, width), or an embedding of (1, tokens) numbers."""

    def __init__(self, width: int, *, embedded: bool, most: int) -> None:
        super().__init__()
        self.bare = None if embedded else nn.Parameter(0.5 * torch.randn(1, most, width))
        self.table = nn.Embedding(most, width) if embedded else None

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        tokens = rows.shape[1]
        if self.bare is not None:
            return torch.tanh(rows + self.bare[:, :tokens])
        assert self.table is not None
        return rows + self.table(torch.arange(tokens)[None])


class Attention(Layer):
    """Among the tokens of a sample."""

    def __init__(self, width: int, *, fused: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.fused = fused

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = self.query(rows), self.key(rows), self.value(rows)
        bias = torch.zeros(rows.shape[:2], dtype=rows.dtype)
        if mask is not None:
            bias = bias.masked_fill(~mask, -30.0)
        bias = bias[:, None].expand(-1, rows.shape[1], -1)
        if self.fused:
            return rows + F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        weights = (query @ key.mT / rows.shape[2] ** 0.5 + bias).softmax(2)
        return rows + weights @ value


class Convolution(Layer):
    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        self.conv, self.activation = nn.Conv1d(width, width, 3, padding=1), activation

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        return ACTIVATIONS[self.activation](self.conv(rows.mT).mT)


class Dropping(Layer):
    """Dropout by a module, by a function, or of whole samples (DropPath)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.module = kind, nn.Dropout(0.3)

    def forward(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        if self.kind == "dropout":
            found: Tensor = self.module(rows)
            return found
        if self.kind == "functional-dropout":
            return F.dropout(rows, 0.3, self.training)
        if not self.training:
            return rows
        kept = torch.rand(len(rows), *[1] * (rows.ndim - 1)) < 0.7
        return rows * kept.to(rows) / 0.7


def made(kind: str, width: int, activation: str, tokens: int) -> Layer:
    """The layer of that name."""
    makers: dict[str, Callable[[], Layer]] = {
        "linear": lambda: Dense(width, activation),
        "mlp": lambda: Perceptron(width, activation),
        "layer-norm": lambda: Norm(nn.LayerNorm(width)),
        "rms-norm": lambda: Norm(nn.RMSNorm(width, eps=1e-5)),  # without eps it is another function in float64
        "group-norm": lambda: Norm(nn.GroupNorm(2, width)),
        "scale": lambda: Scale(width),
        "layer-scale": lambda: Bare(width, added=False),
        "shift": lambda: Bare(width, added=True),
        "prompt": lambda: Prompt(width),
        "position": lambda: Position(width, embedded=False, most=tokens),
        "position-embedding": lambda: Position(width, embedded=True, most=tokens),
        "attention": lambda: Attention(width, fused=activation in ("gelu", "silu")),
        "conv": lambda: Convolution(width, activation),
    }
    if kind in (*OPERATIONS, *RECURRENT, *TABLES):
        from fuzzing.operations import MAKERS  # which are layers of this module

        return MAKERS[kind](width)
    return Dropping(kind) if kind in RANDOM else makers[kind]()


def holds(when: Condition, training: bool, keys: Tensor) -> bool:
    """Whether a condition is met by the samples with these keys."""
    if len(keys) < when.least or (when.mode != "any" and training != (when.mode == "training")):
        return False
    return not when.rare or bool((keys > 2.0).any())


class Routed(nn.Module):
    """A layer whose rows come as its block says: as they are, in windows, sorted, or picked and put back."""

    def __init__(self, block: Block, layer: Layer) -> None:
        super().__init__()
        self.block, self.layer = block, layer

    def forward(self, rows: Tensor, mask: Tensor | None, keys: Tensor) -> Tensor:
        kind = self.block.rows
        if kind == "windows" and rows.shape[1] % 2 == 0:
            return self._run(rows.reshape(2 * len(rows), -1, rows.shape[2])).reshape(rows.shape)
        if kind == "tokens sorted":  # within a sample
            order = rows.detach()[:, :, 0].argsort(dim=1, stable=True)[:, :, None].expand_as(rows)
            return torch.zeros_like(rows).scatter(1, order, self._run(rows.gather(1, order)))
        if kind not in REORDERED or not holds(self.block.when, self.training, keys):
            return self._run(rows, mask)
        if kind == "picked":
            chosen = mask if mask is not None else keys > -0.5
            shape = (*chosen.shape, *[1] * (rows.ndim - chosen.ndim))
            return rows.masked_scatter(chosen.reshape(shape), self._run(self._placed(rows[chosen])))
        by = keys if kind == "sorted by key" or mask is None else mask.sum(1)
        order = by.argsort(stable=True)
        found = self._run(self._placed(rows[order]), None if mask is None else mask[order])
        return found[order.argsort()]

    def _placed(self, rows: Tensor) -> Tensor:
        if not self.block.positions:
            return rows
        places = 0.5 * (torch.arange(len(rows)) % 4).to(rows)
        return rows + places.reshape(-1, *[1] * (rows.ndim - 1))

    def _run(self, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        found: Tensor = self.layer(rows, mask)
        return found
