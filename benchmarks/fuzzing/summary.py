"""Verdicts counted by family, with a few recipes of each as examples."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from fuzzing.oracle import Verdict
from fuzzing.recipes import Recipe

EXAMPLES = 3  # of a family


@dataclass
class Family:
    """What came of the recipes of one family."""

    models: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    holes: int = 0  # models with one or more
    kinds: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)  # of the models with a hole
    largest: float = 0.0  # multiple of what one record may move the sum by
    refusals: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, recipe: Recipe, verdict: Verdict) -> None:
        self.models += 1
        self.outcomes[verdict.outcome] += 1
        if verdict.outcome == "refused":
            self.refusals[shortened(verdict.said)] += 1
        self.kinds.update({hole.kind for hole in verdict.holes})
        self.largest = max(self.largest, verdict.moved)
        if verdict.holes:
            self.holes += 1
            self.faults.update(recipe.faults)
        if (verdict.holes or verdict.outcome == "bug") and len(self.examples) < EXAMPLES:
            self.examples.append({"recipe": asdict(recipe), "verdict": asdict(verdict)})

    def as_dict(self) -> dict[str, Any]:
        return {
            "models": self.models,
            **{outcome: self.outcomes[outcome] for outcome in ("accepted", "refused", "bug")},
            "holes": self.holes,
            "kinds_of_hole": dict(self.kinds.most_common()),
            "faults_with_a_hole": dict(self.faults.most_common()),
            "most_moved": round(self.largest, 3),
            "refusals": dict(self.refusals.most_common()),
            "examples": self.examples,
        }


class Tally:
    """Counts verdicts as they come; complete at any time."""

    def __init__(self) -> None:
        self.models = self.honest = self.holes = self.bugs = 0
        self.false_refusals: Counter[str] = Counter()
        self._families: dict[str, Family] = {}

    def add(self, recipe: Recipe, verdict: Verdict) -> None:
        self.models += 1
        self.honest += recipe.honest
        self.holes += bool(verdict.holes)
        self.bugs += verdict.outcome == "bug"
        if recipe.honest and verdict.outcome == "refused":
            self.false_refusals[shortened(verdict.said)] += 1
        self._families.setdefault(recipe.family, Family()).add(recipe, verdict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "models": self.models,
            "honest": self.honest,
            "holes": self.holes,
            "bugs": self.bugs,
            "false_refusals": dict(self.false_refusals.most_common()),
            "families": {name: family.as_dict() for name, family in sorted(self._families.items())},
        }


def shortened(sentence: str) -> str:
    """The start of a sentence without the names and numbers in it: the same reason reads the same."""
    return re.sub(r"'[^']*'|[0-9]+", "*", sentence).split(":")[0][:160]
