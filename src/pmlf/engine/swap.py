"""Other tensors in place of a model's parameters and buffers, for one pass, and what that pass wrote into the model.

A forward pass must keep nothing. What it writes into a buffer, a new buffer or an attribute is computed from private
records, reaches later samples and `state_dict()`, and has no noise.
"""

from __future__ import annotations

import copy
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from pmlf.basics.batches import same_bits
from pmlf.engine.anatomy import Anatomy
from pmlf.engine.arithmetic import on_host
from pmlf.engine.questions import Questions

_OWN = ("_parameters", "_buffers", "_modules")


class ModelWritten(ValueError):
    """A forward pass has written into the model."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"{name!r} was written by the forward pass, so it would carry the data without noise: remove what writes "
            "it (running statistics, counters, statistics of the first batch), make it before training from public "
            "inputs, or put that module in eval mode"
        )


@dataclass
class Swap:
    """What a pass has written: names of buffers, parameters, submodules and attributes that hold tensors.

    Whether tensors on a device were written is a flag there, which is not read before it is asked about.
    """

    written: list[str] = field(default_factory=list)
    doubted: list[tuple[str, Tensor]] = field(default_factory=list)

    def refuse_written(self, questions: Questions | None = None) -> None:
        """Raise ModelWritten; of tensors on a device when the questions are answered, or at once without any."""
        if self.written:
            raise ModelWritten(self.written[0])
        asked = questions or Questions()
        for name, flag in self.doubted:
            asked.refuse(flag, partial(_raise_written, name))
        if questions is None:
            asked.answer()

    def add(self, name: str, written: bool | Tensor) -> None:
        """Something was written, or a flag on a device says whether."""
        if isinstance(written, Tensor):
            self.doubted.append((name, written))
        elif written:
            self.written.append(name)


def _raise_written(name: str) -> None:
    raise ModelWritten(name)


def stand_ins(anatomy: Anatomy, leaves: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """The replacements of a pass: `leaves` for the parameters of these names, and a copy for every buffer."""
    replacements = {id(anatomy.parameters[name]): leaf for name, leaf in leaves.items()}
    return replacements | {id(buffer): buffer.clone() for buffer in anatomy.buffers.values()}


@contextmanager
def swapped(anatomy: Anatomy, replacements: Mapping[int, Tensor]) -> Iterator[Swap]:
    """Put `replacements` (by the id of what they replace) in place wherever it is used; restore all afterwards.

    After the block `Swap.written` names what it has written; none of it is left.
    """
    swap, known = Swap(), set[int]()
    aside = _BuffersAside(anatomy.buffers, replacements)
    holders = [_Holder(name, vars(module), module) for name, module in anatomy.modules.items()]
    for holder in list(holders):
        if holder.objects:
            holders += [_Holder(holder.name, vars(found), None) for found in _plain_objects(holder.objects, known)]
    try:
        for holder in holders:
            holder.put(replacements)
        with _run_eagerly():
            yield swap
        with _disable_current_modes():  # what somebody observes is the pass, not this look at it
            for holder in holders:
                holder.look(swap)
            aside.look(swap)
    finally:
        with _disable_current_modes():
            aside.restore()
            for holder in holders:
                holder.restore()


def _run_eagerly() -> AbstractContextManager[object]:
    """Compiled functions run as they are written: hooks, modes and other parameters would have them compiled anew at
    every pass, and what they are compiled to cannot be seen."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class _BuffersAside:
    """Buffers for which others stand in. Code that holds them from outside the model can still write them."""

    def __init__(self, buffers: Mapping[str, Tensor], replacements: Mapping[int, Tensor]) -> None:
        self._buffers = [
            (name, buffer, buffer.detach().clone(), replacements[id(buffer)])
            for name, buffer in buffers.items()
            if id(buffer) in replacements
        ]

    def look(self, swap: Swap) -> None:
        for name, buffer, before, stand_in in self._buffers:
            swap.add(name, _written(buffer, before))
            swap.add(name, _written(stand_in, before))

    def restore(self) -> None:
        for _, buffer, before, _ in self._buffers:
            _put_back(buffer, before)


class _Holder:
    """What a module, or a plain object that it holds, has: parameters, buffers, submodules and attributes.

    Most attributes are numbers, texts and tuples of them. That they are the same objects afterwards is seen at once;
    those that can be changed in place (tensors, lists, ...) are compared with copies.
    """

    def __init__(self, name: str, attributes: dict[str, Any], module: nn.Module | None) -> None:
        self.name, self._module, self._now = name, module, attributes
        self._before = dict(attributes)
        self._owned: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for place in _OWN if module is not None else ():
            self._owned.append((attributes[place], dict(attributes[place])))
        self._put = self._owned
        self._as_put = False  # until `written` has looked
        self._held: dict[str, _Attribute] = {}
        self.objects: list[Any] = []  # which may have attributes of their own
        own = _BOOKKEEPING if module is not None else ()
        for attribute, value in attributes.items():
            kind = type(value)
            if kind in _PLAIN or attribute in own or (kind is tuple and _PLAIN.issuperset(map(type, value))):
                continue
            if _may_hold(value):
                self._held[attribute] = _Attribute(value)
            self.objects.append(value)

    def put(self, replacements: Mapping[int, Tensor]) -> None:
        """Install the replacements of parameters and buffers."""
        self._put = []
        for place, values in self._owned:
            if values and not replacements.keys().isdisjoint(map(id, values.values())):
                values = {name: replacements.get(id(value), value) for name, value in values.items()}
                place.update(values)
            self._put.append((place, values))
        if isinstance(self._module, nn.RNNBase):
            _flatten(self._module)

    def look(self, swap: Swap) -> None:
        """Tell what is not as it was put."""
        prefix = f"{self.name}." if self.name else ""
        found: list[str] = []
        for place, put in self._put:
            if [*map(id, place.values())] != [*map(id, put.values())] or place.keys() != put.keys():
                found += [name for name in {**put, **place} if place.get(name) is not put.get(name)]
        for name in found:
            swap.add(prefix + name, True)
        self._as_put = not found
        for name, held in self._held.items():
            for written in held.written(self._now.get(name)):
                self._as_put &= written is False
                swap.add(prefix + name, written)
        for name in self._new():
            self._as_put = False
            swap.add(prefix + name, True)

    def restore(self) -> None:
        for place, values in self._owned:
            if [*map(id, place.values())] != [*map(id, values.values())] or place.keys() != values.keys():
                place.clear()
                place.update(values)
        if isinstance(self._module, nn.RNNBase):
            _flatten(self._module)
        if self._as_put:
            return
        for name in self._new():
            del self._now[name]
            if name in self._before:
                self._now[name] = self._before[name]
        for name, held in self._held.items():
            held.restore(self._now, name)

    def _new(self) -> list[str]:
        """Attributes that hold tensors now, and did not."""
        found = []
        for name, value in self._now.items():
            kind = type(value)
            if kind in _PLAIN or name in self._held or (self._module is not None and name in _BOOKKEEPING):
                continue
            if kind is tuple and value is self._before.get(name):
                continue
            if next(_leaves(value), None) is not None:
                found.append(name)
        return found


def _flatten(module: nn.RNNBase) -> None:
    """A recurrent layer keeps its parameters in a list as well, and uses that."""
    module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


class _Attribute:
    """An attribute that holds tensors or other floating-point numbers, in containers or by itself, or could (an empty
    list)."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._leaves = [(leaf, _copied(leaf)) for leaf in _leaves(value)]
        self._content = copy.copy(value) if isinstance(value, (list, dict, set, deque)) else None

    def written(self, value: Any) -> list[bool | Tensor]:
        """Whether the attribute is another one, and whether each of its leaves is."""
        now = list(_leaves(value))
        if value is not self._value and not (isinstance(value, float) and isinstance(self._value, float)):
            return [True]
        if len(now) != len(self._leaves):
            return [True]
        return [_changed(leaf, *before) for leaf, before in zip(now, self._leaves, strict=True)]

    def restore(self, attributes: dict[str, Any], name: str) -> None:
        if not any(written is not False for written in self.written(attributes.get(name))):
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
                _put_back(leaf, kept)
            elif isinstance(leaf, np.ndarray):
                leaf[...] = kept


Leaf = Tensor | np.ndarray[Any, Any] | float


def _copied(leaf: Leaf) -> Leaf:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else copy.copy(leaf)


def _changed(now: Leaf, before: Leaf, kept: Leaf) -> bool | Tensor:
    """Whether a leaf is another one than it was, or has another value."""
    if isinstance(now, Tensor) and isinstance(kept, Tensor):
        return True if now is not before else _written(now, kept)
    if isinstance(now, np.ndarray) and isinstance(kept, np.ndarray):
        return now is not before or not np.array_equal(now, kept, equal_nan=now.dtype.kind in "fc")
    return type(now) is not type(kept) or not (now == kept or (now != now and kept != kept))


# hooks, parameters, flat weights: looked at by themselves
_CONTAINERS = (list, tuple, set, frozenset, deque, Mapping)
_OPAQUE = (nn.Module, Tensor, type, types.FunctionType, types.MethodType, types.ModuleType, Enum)
_MOST_OBJECTS = 1000
_PLAIN = frozenset((int, bool, str, bytes, NoneType, type, types.FunctionType, types.BuiltinFunctionType, torch.dtype))
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


def _written(now: Tensor, before: Tensor) -> bool | Tensor:
    """Whether a tensor has other bits than before; a flag on its device, where to know would make the host wait."""
    if type(now) is not type(before) or now.device != before.device:
        return True
    if on_host(now) or now.shape != before.shape or now.dtype != before.dtype or now.layout != torch.strided:
        return not same_bits(now, before)
    first, second = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (now, before))
    return (first != second).any()


def _put_back(tensor: Tensor, before: Tensor) -> None:
    """The bits that it had. On a device they are written in any case: to look first would make the host wait."""
    if _written(tensor, before) is not False:
        tensor.data.copy_(before)
