"""Random models against the library: does one record ever move the sum before noise by more than the clip norm?

python benchmarks/fuzz.py --models 2000 --seed 0 --out docs/results/fuzz.json

A recipe (fuzzing.recipes) says everything about a model, its loss, its data and its method; about half of them are
honest, the others mix samples, reorder their rows or keep something of the data. The oracle (fuzzing.oracle) runs the
library on each, measures what it promises, and looks for the worst record. Counted are holes (a promise that does not
hold), bugs (an error that is no sentence of the library's) and false refusals (of an honest recipe).

Ctrl-C leaves the results so far. Another checkout of the library is fuzzed by PYTHONPATH=<checkout>/src. One recipe is
looked at by --only INDEX.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from fuzzing.oracle import judged
from fuzzing.recipes import drawn, drawn_with_operations
from fuzzing.summary import Tally
from pmlf import machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=2000, help="recipes to try")
    parser.add_argument("--seed", type=int, default=0, help="of the recipes")
    parser.add_argument("--only", type=int, help="print the recipe of this index and what comes of it, no others")
    parser.add_argument("--operations", action="store_true", help="layers that use their weights by operations, too")
    parser.add_argument("--out", type=Path, help="where the results go; printed without it")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.only is not None:
        recipe = (drawn_with_operations if given.operations else drawn)(given.seed, given.only)
        print(json.dumps({"family": recipe.family, "recipe": asdict(recipe)}, indent=2))
        print(json.dumps(asdict(judged(recipe)), indent=2))
        return
    text = json.dumps(fuzzed(given.models, given.seed, operations=given.operations), indent=1)
    if given.out is None:
        print(text)
    else:
        given.out.write_text(text + "\n")


def fuzzed(models: int, seed: int, *, operations: bool = False) -> dict[str, Any]:
    """Results of so many recipes, or of those before Ctrl-C."""
    tally, begin, used = Tally(), time.monotonic(), time.process_time()
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("recipes", total=models)
        try:
            for index in range(models):
                recipe = (drawn_with_operations if operations else drawn)(seed, index)
                tally.add(recipe, judged(recipe))
                progress.update(task, advance=1, description=f"{tally.holes} holes, {tally.bugs} bugs")
        except KeyboardInterrupt:
            progress.console.print(f"stopped after {tally.models} recipes")
    return {
        "seed": seed,
        "operations": operations,
        "code": machine.code(),
        **tally.as_dict(),
        "seconds": round(time.monotonic() - begin, 1),
        "processor_seconds": round(time.process_time() - used, 1),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
