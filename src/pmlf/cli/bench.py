"""`pmlf bench`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pmlf.cli.common import Command, check_plot, say
from pmlf.experiments.spec import shown_default


@dataclass(frozen=True, kw_only=True)
class Bench(Command):
    """What a private gradient costs on this machine, in time and memory, beside a plain one and beside others' ways.

    Every contender has a process of its own, and all do one round before any does the next: a call that is not timed,
    then those that are, as the steps of a training follow each other. The table gives the best and the median time of
    one gradient, the peak of memory beyond imports, both also over a plain gradient's, and then whether each of the
    project's targets holds. Models have random weights, and no dropout; nothing is downloaded.
    pmlf-step is a whole step of DP-PMLF (k=2, filter, noise) over the case's batch, on cnn5 over four of them.
    """

    cases: Annotated[tuple[str, ...] | None, shown_default("all", "NAME [NAME ...]")] = None
    """Some of cnn5, resnet18, vit, roberta, linear."""

    contenders: Annotated[tuple[str, ...] | None, shown_default("all", "NAME [NAME ...]")] = None
    """Some of plain, plain-channels-last, opacus, opacus-ghost, vmap, pmlf-k1, pmlf-k2, pmlf-k4, pmlf-step."""

    rounds: int = 7
    """How often each is measured, after a warm-up that does not count."""

    batch_scale: float = 1.0
    """Factor on all batch sizes: less than 1 for a quick look."""

    threads: Annotated[int | None, shown_default("the number of cores")] = None
    """Threads of every process."""

    clock: Literal["wall", "cpu"] = "wall"
    """wall, or on a machine that is busy with other work cpu: processor time, with --threads 1."""

    freed_memory: Literal["kept", "returned"] = "returned"
    """returned: as malloc does by itself, large pieces go back to the system and are fetched anew in every step: how
    each library comes, and where the targets were set. kept: what a step frees stays with its process for the next
    one, as in `pmlf train`; so for every contender."""

    growth: bool = False
    """Instead: how time and memory of pmlf grow with k, micro-batch, width and sequence length of a transformer."""

    out: Annotated[Path | None, shown_default("none")] = None
    """File for the JSON document, with all raw times; written after every case."""

    plot: Annotated[Path | None, shown_default("none")] = None
    """Picture: a .png, .pdf or .svg file."""

    def execute(self) -> int:
        from pmlf.bench import suite

        check_plot(self.plot)
        if self.out is not None and not self.out.parent.is_dir():
            raise ValueError(f"out={str(self.out)!r} is in no folder that exists: make {str(self.out.parent)!r} first")
        if self.growth and (self.cases is not None or self.contenders is not None):
            raise ValueError("--growth has a case and contenders of its own: leave --cases and --contenders out")
        settings = suite.Settings(
            cases=self.cases,
            contenders=self.contenders,
            rounds=self.rounds,
            batch_scale=self.batch_scale,
            threads=self.threads,
            clock=self.clock,
            freed_memory=self.freed_memory,
        )
        document = suite.growth(settings, say) if self.growth else suite.run(settings, say, self._write)
        self._write(document)
        if self.plot is not None:
            suite.plot(document, self.plot)
        self.show(document, *suite.readable(document))
        return 0

    def _write(self, document: dict[str, Any]) -> None:
        if self.out is not None:
            self.out.write_text(json.dumps(document, indent=2) + "\n")
