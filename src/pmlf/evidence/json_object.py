"""Strict reading of JSON objects: exact names, exact types, numbers in range."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pmlf.basics.arguments import MOST, is_number
from pmlf.mechanism.accounting import Event

_Value = TypeVar("_Value")


class JsonObject:
    """A JSON object whose entries are read by type. A boolean is not a number, and neither is NaN.

    Every method raises ValueError, with the entry's name and value, if the entry has another type or range.

    Args:
        entries: The object.
        where: Its name in errors.

    >>> JsonObject({"steps": True}, "the plan").count("steps")
    Traceback (most recent call last):
    ValueError: steps=True of the plan is not a whole number from 0 to 1000000000
    """

    def __init__(self, entries: Any, where: str) -> None:
        if not isinstance(entries, Mapping):
            raise ValueError(f"{where} is not a JSON object")
        self._entries = entries
        self._where = where

    def require(self, *names: str, optional: tuple[str, ...] = ()) -> None:
        """Check that these entries exist, and no others except the optional ones."""
        for name in names:
            if name not in self._entries:
                raise ValueError(f"{self._where} has no {name!r}")
        for name in self._entries:
            if name not in (*names, *optional):
                raise ValueError(f"{self._where} has {name!r}, which no certificate of this version has")

    def same(self, name: str, value: Any) -> None:
        """Check that an entry has this type and value."""
        given = self._entries[name]
        if type(given) is not type(value) or given != value:
            raise ValueError(f"{name}={given!r} is not {value!r}, the only value that this version accounts for")

    def text(self, name: str) -> str:
        """A string."""
        return str(self._of(name, isinstance(self._entries[name], str), "a string"))

    def truth(self, name: str) -> bool:
        """A boolean."""
        return bool(self._of(name, isinstance(self._entries[name], bool), "true or false"))

    def one_of(self, name: str, allowed: Sequence[str]) -> str:
        """One of these strings."""
        given = self.text(name)
        self._of(name, given in allowed, f"one of {', '.join(map(repr, allowed))}")
        return given

    def count(self, name: str, *, least: int = 0, most: int = MOST) -> int:
        """A whole number from `least` to `most`."""
        given = self._entries[name]
        fits = isinstance(given, int) and not isinstance(given, bool) and least <= given <= most
        return int(self._of(name, fits, f"a whole number from {least} to {most}"))

    def number(self, name: str) -> float:
        """A finite number."""
        given = self._entries[name]
        return float(self._of(name, is_number(given) and math.isfinite(given), "a finite number"))

    def amount(self, name: str) -> float:
        """A number of at least 0."""
        return float(self._of(name, self.number(name) >= 0, "a number of at least 0"))

    def positive(self, name: str) -> float:
        """A number above 0."""
        return float(self._of(name, self.number(name) > 0, "a number above 0"))

    def probability(self, name: str) -> float:
        """A number between 0 and 1, both excluded."""
        return float(self._of(name, 0 < self.number(name) < 1, "a number between 0 and 1"))

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        listed = self._of(name, isinstance(self._entries[name], list), "a list of numbers")
        return tuple(JsonObject({name: value}, self._where).number(name) for value in listed)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        listed = self._of(name, isinstance(self._entries[name], list), "a list of strings")
        return tuple(JsonObject({name: value}, self._where).text(name) for value in listed)

    def event(self) -> Event:
        """The event that the entries noise_multiplier and sample_rate, and overflow if there is one, describe."""
        rate = self.positive("sample_rate")
        self._of("sample_rate", rate <= 1, "a number of at most 1")
        overflow = self.probability("overflow") if self.has("overflow") else 0.0
        return Event(noise_multiplier=self.positive("noise_multiplier"), sample_rate=rate, overflow=overflow)

    def optional(self, name: str, read: Callable[[str], _Value]) -> _Value | None:
        """An entry read by another method, or None for null."""
        return None if self._entries[name] is None else read(name)

    def has(self, name: str) -> bool:
        """Whether there is an entry of this name."""
        return name in self._entries

    def part(self, name: str) -> JsonObject:
        """An object inside this one."""
        return JsonObject(self._entries[name], name)

    def parts(self, name: str) -> list[JsonObject]:
        """A list of objects."""
        given = self._entries[name]
        self._of(name, isinstance(given, list), "a list")
        return [JsonObject(entries, f"{name}[{place}]") for place, entries in enumerate(given)]

    def amounts(self, name: str, names: Sequence[str]) -> Mapping[str, float]:
        """An object with exactly these names, each with a number of at least 0."""
        part = self.part(name)
        part.require(*names)
        return {one: part.amount(one) for one in names}

    def _of(self, name: str, fits: bool, kind: str) -> Any:
        if not fits:
            raise ValueError(f"{name}={self._entries[name]!r} of {self._where} is not {kind}")
        return self._entries[name]
