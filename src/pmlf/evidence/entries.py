"""JSON objects read strictly: exact names, exact types, numbers in range."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pmlf.basics.arguments import MOST, is_number
from pmlf.mechanism.accounting import Event

_Value = TypeVar("_Value")


class Entries:
    """The entries of a JSON object, each asked for by its type; a truth value is no number, nor is NaN.

    >>> Entries({"steps": True}, "the plan").count("steps")
    Traceback (most recent call last):
    ValueError: steps=True of the plan is not a whole number from 0 to 1000000000
    """

    def __init__(self, entries: Any, where: str) -> None:
        if not isinstance(entries, Mapping):
            raise ValueError(f"{where} is not a JSON object")
        self._entries = entries
        self._where = where

    def require(self, *names: str, optional: tuple[str, ...] = ()) -> None:
        """Exactly these names, and of others the optional ones."""
        for name in names:
            if name not in self._entries:
                raise ValueError(f"{self._where} has no {name!r}")
        for name in self._entries:
            if name not in (*names, *optional):
                raise ValueError(f"{self._where} has {name!r}, which no certificate of this version has")

    def same(self, name: str, value: Any) -> None:
        given = self._entries[name]
        if type(given) is not type(value) or given != value:
            raise ValueError(f"{name}={given!r} is not {value!r}, for which this version accounts")

    def text(self, name: str) -> str:
        return str(self._of(name, isinstance(self._entries[name], str), "a text"))

    def truth(self, name: str) -> bool:
        return bool(self._of(name, isinstance(self._entries[name], bool), "true or false"))

    def one_of(self, name: str, allowed: Sequence[str]) -> str:
        given = self.text(name)
        self._of(name, given in allowed, "known")
        return given

    def count(self, name: str, *, least: int = 0, most: int = MOST) -> int:
        given = self._entries[name]
        fits = isinstance(given, int) and not isinstance(given, bool) and least <= given <= most
        return int(self._of(name, fits, f"a whole number from {least} to {most}"))

    def number(self, name: str) -> float:
        given = self._entries[name]
        return float(self._of(name, is_number(given) and math.isfinite(given), "a finite number"))

    def amount(self, name: str) -> float:
        return float(self._of(name, self.number(name) >= 0, "a number of at least 0"))

    def positive(self, name: str) -> float:
        return float(self._of(name, self.number(name) > 0, "a number above 0"))

    def probability(self, name: str) -> float:
        return float(self._of(name, 0 < self.number(name) < 1, "a number between 0 and 1"))

    def numbers(self, name: str) -> tuple[float, ...]:
        listed = self._of(name, isinstance(self._entries[name], list), "a list of numbers")
        return tuple(Entries({name: value}, self._where).number(name) for value in listed)

    def event(self) -> Event:
        rate = self.positive("sample_rate")
        self._of("sample_rate", rate <= 1, "a number of at most 1")
        return Event(noise_multiplier=self.positive("noise_multiplier"), sample_rate=rate)

    def optional(self, name: str, read: Callable[[str], _Value]) -> _Value | None:
        return None if self._entries[name] is None else read(name)

    def has(self, name: str) -> bool:
        return name in self._entries

    def part(self, name: str) -> Entries:
        return Entries(self._entries[name], name)

    def parts(self, name: str) -> list[Entries]:
        given = self._entries[name]
        self._of(name, isinstance(given, list), "a list")
        return [Entries(entries, f"{name}[{place}]") for place, entries in enumerate(given)]

    def amounts(self, name: str, names: Sequence[str]) -> Mapping[str, float]:
        part = self.part(name)
        part.require(*names)
        return {one: part.amount(one) for one in names}

    def _of(self, name: str, fits: bool, kind: str) -> Any:
        if not fits:
            raise ValueError(f"{name}={self._entries[name]!r} of {self._where} is not {kind}")
        return self._entries[name]
