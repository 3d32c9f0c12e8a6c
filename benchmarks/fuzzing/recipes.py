"""The grammar: a recipe is pure data, drawn by (seed, index), that says everything about a model and its training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

Inputs = Literal["vectors", "sequences", "tokens", "images"]
Mode = Literal["any", "training", "evaluation"]
Rows = Literal["plain", "windows", "tokens sorted", "sorted by key", "sorted by length", "picked"]
Head = Literal["linear", "zero", "tied"]
Lengths = Literal["full", "ragged", "short first", "balanced"]

LENGTHS: tuple[Lengths, ...] = ("full", "ragged", "short first", "balanced")
PICKABLE: tuple[Lengths, ...] = LENGTHS + 8 * LENGTHS[-1:]  # mostly balanced
ROWWISE = ("linear", "mlp", "layer-norm", "rms-norm", "scale", "layer-scale", "shift")
RANDOM = ("dropout", "functional-dropout", "drop-path")
OPERATIONS = ("einsum", "heads", "standardised", "experts", "in place", "checkpointed")
RECURRENT = ("lstm", "gru")  # for rows in the order of their sample
TABLES = ("position table", "relative positions")  # without a batch axis, for whole samples
OF_SEQUENCES = ("attention", "conv", "group-norm", "prompt", "position", "position-embedding")
BARE = ("layer-scale", "shift", "prompt", "position")  # parameters of shape (1, ...) that no layer owns
REORDERED: tuple[Rows, ...] = ("sorted by key", "sorted by length", "picked")
MIXTURES = (
    "centre", "standardise", "roll", "swap", "attend", "fours", "nudge", "rank", "cumsum", "size", "largest",
)  # fmt: skip
STATISTICS = (
    "class weights", "inverse frequencies", "inverse frequencies", "positives", "positives", "positives read",
    "centred logits", "contrastive", "batch size", "hardest", "largest",
)  # fmt: skip
MEMORIES = (
    "lazy buffer", "lazy attribute", "last batch", "running buffer", "initialised parameter", "frozen parameter",
)  # fmt: skip


class Data:
    """Never changes: its copy is itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass(frozen=True, kw_only=True)
class Condition(Data):
    """When something between samples happens: from so many samples on, in a mode, or only with a rare record."""

    least: int = 2
    mode: Mode = "any"
    rare: bool = False  # where some sample's key is above 2


@dataclass(frozen=True, kw_only=True)
class Block(Data):
    """A layer, and how its rows get to it."""

    layer: str
    rows: Rows = "plain"
    positions: bool = False  # rows in another order get something of their place in it
    when: Condition = Condition()


@dataclass(frozen=True, kw_only=True)
class Mixture(Data):
    """An operation across axis 0, in the model before a block."""

    operation: str
    before: int
    when: Condition


@dataclass(frozen=True, kw_only=True)
class Statistic(Data):
    """Something of the batch in a sample's loss."""

    kind: str
    when: Condition


@dataclass(frozen=True, kw_only=True)
class Memory(Data):
    """What a forward pass keeps in the model; a "cache" holds nothing of the data."""

    kind: str
    when: Condition


@dataclass(frozen=True, kw_only=True)
class Window(Data):
    """Evaluation points: k past iterates with weights decay^j, normalised or not; or DiSK's look-ahead."""

    k: int
    decay: float
    normalised: bool = True
    look_ahead: float | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe(Data):
    """A model, its loss, its data and its training, in full."""

    seed: int
    index: int
    inputs: Inputs
    width: int
    tokens: int  # a sample's, at most
    vocabulary: int
    classes: int
    activation: str
    gain: float  # of the weights
    blocks: tuple[Block, ...]
    head: Head
    loss: str
    mixture: Mixture | None
    statistic: Statistic | None
    memory: Memory | None
    training: bool
    window: Window
    warm_up: int  # empty releases first, so that every point exists
    gradients: Literal["ghost", "one-by-one"]
    clip_norm: float
    learning_rate: float
    sizes: tuple[tuple[int, ...], ...]  # of the micro-batches of each release
    lengths: Lengths
    each: int  # rows a sample where lengths are balanced
    late: bool  # keys and lengths are all the same in the first micro-batch
    planted: bool  # later releases have an attacker's record in every micro-batch
    positives: float  # their rate
    spread: float  # of the records' size
    pooled: bool  # a tied head reads the mean of a sample's tokens, and not each of them
    scaled: bool = False  # an embedding of tokens is a class of its own that multiplies what it looks up

    def seed_for(self, purpose: str) -> int:
        return random.Random(f"{self.seed}/{self.index}/{purpose}").getrandbits(31)

    @property
    def random(self) -> bool:
        """Whether randomness enters the loss."""
        return self.training and (self.permuted or any(block.layer in RANDOM for block in self.blocks))

    @property
    def permuted(self) -> bool:
        """Whether the draws of all samples change with their number; by other randomness the last one's draws alone
        come or go with it, since there is at most one random block."""
        return self.mixture is not None and self.mixture.operation == "swap"

    @property
    def mixes(self) -> bool:
        """Whether one sample can change what another one's loss is."""
        placed = any(block.rows in REORDERED and block.positions for block in self.blocks)
        remembers = self.memory is not None and self.memory.kind != "cache"
        return placed or remembers or self.mixture is not None or self.statistic is not None

    @property
    def honest(self) -> bool:
        """Whether the library has to take it: no sample changes another, and every row is where its sample is."""
        return not self.mixes and all(block.rows not in REORDERED for block in self.blocks)

    @property
    def faults(self) -> tuple[str, ...]:
        """By name, what goes between samples, reorders their rows or is kept of them."""
        found = [block.rows for block in self.blocks if block.rows in REORDERED]
        parts = [self.mixture and self.mixture.operation, self.statistic and self.statistic.kind]
        parts += [self.memory.kind if self.memory is not None and self.memory.kind != "cache" else None]
        return tuple(dict.fromkeys([*found, *(part for part in parts if part)]))

    @property
    def family(self) -> str:
        """What is tried, in a few words; one of them where there is more."""
        reordered = [block for block in self.blocks if block.rows in REORDERED]
        if self.memory is not None and self.memory.kind != "cache":
            return "data kept in the model"
        if self.statistic is not None:
            return "statistics of the batch in the loss"
        if self.honest and self.head == "tied":
            return f"tied embedding, vocabulary {'below' if self.vocabulary < self.width else 'above'} width"
        if self.honest:
            return "honest"
        if self.random:
            return "mixing under randomness"
        if self.head == "zero":
            return "mixing behind a head of zeros"
        if self.mixture is not None:
            return "mixing"
        if all(block.layer in BARE for block in reordered):
            return "bare parameter with rows in another order"
        return "picked rows" if any(block.rows == "picked" for block in reordered) else "sorted rows"


def drawn_with_operations(seed: int, index: int) -> Recipe:
    """The same recipe as `drawn`, with layers that use their weights by operations in place of some of its own, and
    half of the embeddings scaled."""
    recipe, chance = drawn(seed, index), random.Random(f"{seed}/{index}/operations")
    blocks = []
    for block in recipe.blocks:
        free = block.layer not in RANDOM and block.layer not in BARE
        kinds: tuple[str, ...] = OPERATIONS
        if block.rows == "plain":
            kinds += RECURRENT if recipe.inputs == "vectors" else RECURRENT + TABLES
        layer = chance.choice(kinds) if free and chance.random() < 0.7 else block.layer
        blocks.append(replace(block, layer=layer))
    return replace(recipe, blocks=tuple(blocks), scaled=recipe.inputs == "tokens" and chance.random() < 0.5)


def drawn(seed: int, index: int) -> Recipe:
    """The recipe of this seed and index: half or more of them are honest."""
    chance = random.Random(f"{seed}/{index}")
    inputs: Inputs = chance.choice(("vectors", "sequences", "sequences", "tokens", "tokens", "images"))
    faults = set() if chance.random() < 0.52 else _faults(chance)
    head: Head = "linear"
    if inputs == "tokens" and chance.random() < 0.5:
        head = "tied"
    elif chance.random() < 0.3:
        head = "zero"
    blocks = _blocks(chance, inputs, bool(faults))
    if "rows" in faults:
        blocks = _with_reordered(chance, inputs, blocks)
    mixture = statistic = None
    if "mixture" in faults:
        mixture = Mixture(
            operation=chance.choice(MIXTURES), before=chance.randint(0, len(blocks)), when=_condition(chance)
        )
    if "statistic" in faults:
        always = chance.random() < 0.6
        statistic = Statistic(kind=chance.choice(STATISTICS), when=Condition() if always else _condition(chance))
    memory = Memory(kind="cache", when=Condition()) if chance.random() < 0.05 else None
    if "memory" in faults:
        memory = Memory(kind=chance.choice(MEMORIES), when=_condition(chance))
    window = _window(chance)
    tied, picked = head == "tied", any(block.rows == "picked" for block in blocks)
    few, many = (1, 2, 3, 4, 5, 7, 8, 11), (2, 3, 4, 6, 8, 12, 16, 24, 32)
    sizes = many if mixture is not None or statistic is not None else few
    return Recipe(
        seed=seed,
        index=index,
        inputs=inputs,
        width=chance.choice((6, 8, 16, 24, 32, 32) if tied else (4, 6, 8)),
        tokens=chance.choice((2, 4, 6, 8, 8) if tied else (2, 4, 6, 8)),
        vocabulary=chance.choice((5, 8, 11, 20, 20, 40)),
        classes=chance.choice((2, 2, 3)),
        activation=chance.choice(("tanh", "gelu", "silu", "relu")),
        gain=chance.choice((1.0, 1.0, 2.0, 3.0)),
        blocks=blocks,
        head=head,
        loss=chance.choice(("cross-entropy", "cross-entropy", "squares", "weighted")),
        mixture=mixture,
        statistic=statistic,
        memory=memory,
        training=chance.random() < 0.85,
        window=window,
        warm_up=chance.choice((0, 0, window.k - 1)),
        gradients="one-by-one" if chance.random() < 0.04 else "ghost",
        clip_norm=chance.choice((0.1, 1.0, 1.0, 4.0)),
        learning_rate=chance.choice((0.1, 0.5, 2.0)),
        sizes=tuple(
            tuple(chance.choice(sizes) for _ in range(chance.choice((1, 2, 2, 3))))
            for _ in range(chance.choice((2, 2, 3)))
        ),
        lengths=chance.choice(PICKABLE if picked else LENGTHS),
        each=chance.choice((1, 1, 1, 2)),
        planted=chance.random() < 0.4,
        late=chance.random() < (0.8 if picked else 0.3),
        positives=chance.choice((0.5, 0.05, 0.01)),
        spread=chance.choice((0.0, 0.5, 1.5)),
        pooled=chance.random() < 0.4,
    )


def _faults(chance: random.Random) -> set[str]:
    """One, or now and then two, of what goes between samples."""
    kinds = ("rows", "rows", "mixture", "mixture", "statistic", "memory")
    return {chance.choice(kinds) for _ in range(1 if chance.random() < 0.85 else 2)}


def _condition(chance: random.Random) -> Condition:
    return Condition(
        least=chance.choice((2, 2, 3, 4, 4, 6)),
        mode=chance.choice(("any", "any", "training", "evaluation")),
        rare=chance.random() < 0.15,
    )


def _blocks(chance: random.Random, inputs: Inputs, faulty: bool) -> tuple[Block, ...]:
    """Some layers; random ones are more frequent where something else is wrong, which they could hide."""
    layers: Sequence[str] = ROWWISE if inputs == "vectors" else (*ROWWISE, *OF_SEQUENCES)
    chosen = [chance.choice(layers) for _ in range(chance.randint(1, 4))]
    if chance.random() < (0.35 if faulty else 0.2):
        chosen.insert(chance.randint(0, len(chosen)), chance.choice(RANDOM))
    return tuple(Block(layer=layer, rows=_honest_rows(chance, inputs, layer)) for layer in chosen)


def _honest_rows(chance: random.Random, inputs: Inputs, layer: str) -> Rows:
    if inputs == "vectors" or layer not in ("linear", "mlp", "layer-norm", "rms-norm") or chance.random() < 0.7:
        return "plain"
    return chance.choice(("windows", "tokens sorted"))


def _with_reordered(chance: random.Random, inputs: Inputs, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """One block, or all that can be, get their rows sorted, or picked by a mask where there is one."""
    able = [i for i, block in enumerate(blocks) if block.layer in ROWWISE or block.layer in BARE]
    if not able:
        blocks, able = (*blocks, Block(layer=chance.choice(ROWWISE))), [len(blocks)]
    chosen = set(able if chance.random() < 0.2 else [chance.choice(able)])
    without_lengths = inputs in ("vectors", "images")
    rows: Rows = "sorted by key" if without_lengths else chance.choice((*REORDERED, "picked"))
    positions = chance.random() < (0.15 if rows == "picked" else 0.4)
    when = _condition(chance) if chance.random() < 0.3 else Condition()
    return tuple(
        _reordered(block, rows, positions, when) if index in chosen else block for index, block in enumerate(blocks)
    )


def _reordered(block: Block, rows: Rows, positions: bool, when: Condition) -> Block:
    if rows == "picked" and block.layer not in ROWWISE:  # prompts and position tables are for whole samples
        rows = "sorted by key"
    return Block(layer=block.layer, rows=rows, positions=positions, when=when)


def _window(chance: random.Random) -> Window:
    k = chance.choice((1, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8))
    kind = chance.random()
    if kind < 0.1:
        return Window(k=2, decay=0.7, look_ahead=0.5)
    return Window(k=k, decay=chance.choice((0.1, 0.5, 1.0)), normalised=kind < 0.85)
