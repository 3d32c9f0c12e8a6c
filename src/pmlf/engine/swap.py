"""The model with other tensors in place of its parameters and buffers, for one pass, and what that pass wrote into it.

A forward pass may keep nothing: what it writes into a buffer, a new buffer or an attribute was computed from private
records, goes to later samples and to `state_dict()`, and has no noise on it.
"""

from __future__ import annotations

import copy
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import NoneType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from pmlf.basics.batches import same_bits
from pmlf.engine.anatomy import Anatomy

_OWN = ("_parameters", "_buffers", "_modules")


class ModelWritten(ValueError):
    """A forward pass has written into the model."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name!r} was written by the forward pass: it would carry the data without noise; remove what writes it "
            "(running statistics, counters, statistics of the first batch), make it before training from public "
            "inputs, or put that module in eval mode"
        )


@dataclass
class Swap:
    """What a pass has written: names of buffers, parameters, submodules and attributes that hold tensors."""

    written: list[str] = field(default_factory=list)

    def refuse_written(self) -> None:
        if self.written:
            raise ModelWritten(self.written[0])


@contextmanager
def swapped(anatomy: Anatomy, replacements: Mapping[int, Tensor]) -> Iterator[Swap]:
    """Put `replacements` (by the id of what they stand for) in place wherever it is used; put all back afterwards.

    After the block `Swap.written` tells what it has written; none of it is left.
    """
    swap, known = Swap(), set[int]()
    aside = _BuffersAside(anatomy.buffers, replacements)
    places = [_Place(name, vars(module), module) for name, module in anatomy.modules.items()]
    for place in list(places):
        places += [_Place(place.name, vars(found), None) for found in _plain_objects(place.values, known)]
    try:
        for place in places:
            place.put(replacements)
        yield swap
        with _disable_current_modes():  # what somebody observes is the pass, not this look at it
            swap.written = [name for place in places for name in place.written()]
            swap.written += aside.written()
    finally:
        with _disable_current_modes():
            aside.restore()
            for place in places:
                place.restore()


class _BuffersAside:
    """Buffers for which others stand in. Code that holds them from outside the model can still write them."""

    def __init__(self, buffers: Mapping[str, Tensor], replacements: Mapping[int, Tensor]) -> None:
        self._buffers = [
            (name, buffer, buffer.detach().clone(), replacements[id(buffer)])
            for name, buffer in buffers.items()
            if id(buffer) in replacements
        ]

    def written(self) -> list[str]:
        return [
            name
            for name, buffer, before, stand_in in self._buffers
            if not (_same_values(buffer, before) and _same_values(stand_in, before))
        ]

    def restore(self) -> None:
        for _, buffer, before, _ in self._buffers:
            if not _same_values(buffer, before):
                buffer.data.copy_(before)


class _Place:
    """What a module, or a plain object that it holds, has: parameters, buffers, submodules, attributes with tensors."""

    def __init__(self, name: str, attributes: dict[str, Any], module: nn.Module | None) -> None:
        self.name, self._module, self._now = name, module, attributes
        self._kept_by_torch = _BOOKKEEPING if module is not None else frozenset()
        owned = () if module is None else _OWN
        self._before = [(place := attributes[own], dict(place)) for own in owned]
        self._put = self._before
        self._others = {name: attributes[name] for name in attributes.keys() - self._kept_by_torch}
        self._held = {name: _Attribute(value) for name, value in self._others.items() if _may_hold(value)}

    @property
    def values(self) -> Iterable[Any]:
        """What its attributes hold."""
        return self._others.values()

    def put(self, replacements: Mapping[int, Tensor]) -> None:
        self._put = [
            (place, {name: replacements.get(id(value), value) for name, value in values.items()})
            for place, values in self._before
        ]
        self._install(self._put)

    def written(self) -> Iterator[str]:
        prefix = f"{self.name}." if self.name else ""
        for place, put in self._put:
            if not _same_entries(place, put):
                yield from (prefix + name for name in {**put, **place} if place.get(name) is not put.get(name))
        yield from (prefix + name for name, held in self._held.items() if not held.same(self._now.get(name)))
        yield from (prefix + name for name in self._new())

    def restore(self) -> None:
        self._install(self._before)
        for name in self._new():
            del self._now[name]
            if name in self._others:
                self._now[name] = self._others[name]
        for name, held in self._held.items():
            held.restore(self._now, name)

    def _new(self) -> list[str]:
        """Attributes that hold tensors now, and did not."""
        names = self._now.keys() - self._kept_by_torch - self._held.keys()
        return [name for name in names if next(_leaves(self._now[name]), None) is not None]

    def _install(self, entries: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        for place, values in entries:
            if not _same_entries(place, values):
                place.clear()
                place.update(values)
        if isinstance(self._module, nn.RNNBase):  # keeps its parameters in a list as well, and uses that
            flat = [getattr(self._module, name, None) for name in self._module._flat_weights_names]
            self._module._flat_weights = flat


def _same_entries(place: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return len(place) == len(values) and all(place.get(name) is value for name, value in values.items())


class _Attribute:
    """An attribute that holds tensors or other floating-point numbers, in containers or by itself, or could (an empty
    list)."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._leaves = [(leaf, _copied(leaf)) for leaf in _leaves(value)]
        self._content = copy.copy(value) if isinstance(value, (list, dict, set, deque)) else None

    def same(self, value: Any) -> bool:
        now = list(_leaves(value))
        if value is not self._value and not (isinstance(value, float) and isinstance(self._value, float)):
            return False
        pairs = zip(now, self._leaves, strict=False)
        return len(now) == len(self._leaves) and all(_is_still(leaf, *before) for leaf, before in pairs)

    def restore(self, attributes: dict[str, Any], name: str) -> None:
        if self.same(attributes.get(name)):
            return
        attributes[name] = self._value
        if isinstance(self._value, (list, deque)):
            self._value.clear()
            self._value.extend(self._content or ())
        elif isinstance(self._value, (dict, set)):
            self._value.clear()
            self._value.update(self._content or ())
        for leaf, kept in self._leaves:
            if isinstance(leaf, Tensor) and isinstance(kept, Tensor):
                leaf.data.copy_(kept)
            elif isinstance(leaf, np.ndarray):
                leaf[...] = kept


Leaf = Tensor | np.ndarray[Any, Any] | float


def _copied(leaf: Leaf) -> Leaf:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else copy.copy(leaf)


def _is_still(now: Leaf, before: Leaf, kept: Leaf) -> bool:
    """Whether a leaf is the one that it was, with the value that it had."""
    if isinstance(now, Tensor) and isinstance(kept, Tensor):
        return now is before and _same_values(now, kept)
    if isinstance(now, np.ndarray) and isinstance(kept, np.ndarray):
        return now is before and np.array_equal(now, kept, equal_nan=now.dtype.kind in "fc")
    return type(now) is type(kept) and (now == kept or (now != now and kept != kept))


# hooks, parameters, flat weights: looked at by themselves
_CONTAINERS = (list, tuple, set, frozenset, deque, Mapping)
_OPAQUE = (nn.Module, Tensor, type, types.FunctionType, types.MethodType, types.ModuleType, Enum)
_MOST_OBJECTS = 1000
_BOOKKEEPING = frozenset(
    (*vars(nn.Module()), "_flat_weights", "_flat_weights_names", "_flat_weight_refs", "_all_weights")
)


def _may_hold(value: Any) -> bool:
    """Whether a value is or holds tensors, or is an empty container that might come to."""
    return next(_leaves(value), None) is not None or (isinstance(value, (list, dict, set, deque)) and not value)


def tensors_held(module: nn.Module) -> dict[str, list[Tensor]]:
    """The tensors in a module's attributes, by attribute; parameters and buffers are none of them."""
    attributes = vars(module)
    names = attributes.keys() - _BOOKKEEPING
    return {name: [leaf for leaf in _leaves(attributes[name]) if isinstance(leaf, Tensor)] for name in names}


def plain_values(module: nn.Module) -> dict[str, Any]:
    """A module's own numbers, texts and truth values."""
    attributes = vars(module)
    names = attributes.keys() - _BOOKKEEPING
    return {name: attributes[name] for name in names if isinstance(attributes[name], (bool, int, float, str, NoneType))}


def _leaves(value: Any, depth: int = 4) -> Iterator[Leaf]:
    """Tensors, arrays and floating-point numbers in a value, in containers too."""
    if isinstance(value, (Tensor, float, np.ndarray)):
        yield value
    elif depth and isinstance(value, _CONTAINERS):
        for item in list(value.values() if isinstance(value, Mapping) else value):
            yield from _leaves(item, depth - 1)


def _plain_objects(values: Iterable[Any], known: set[int], depth: int = 4) -> Iterator[Any]:
    """Objects with attributes of their own that a module holds, each once: namespaces, states, configurations."""
    for value in list(values) if depth else ():
        if isinstance(value, _CONTAINERS):
            yield from _plain_objects(value.values() if isinstance(value, Mapping) else value, known, depth - 1)
        elif id(value) not in known and _has_attributes(value) and len(known) < _MOST_OBJECTS:
            known.add(id(value))
            yield value
            yield from _plain_objects(vars(value).values(), known, depth - 1)


def _has_attributes(value: Any) -> bool:
    return not isinstance(value, _OPAQUE) and isinstance(getattr(value, "__dict__", None), dict)


def _same_values(one: Tensor, other: Tensor) -> bool:
    return type(one) is type(other) and one.device == other.device and same_bits(one, other)
