"""`pmlf bench`: time and memory of private gradients."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pmlf.cli.common import Command, check_plot, say
from pmlf.experiments.spec import shown_default


@dataclass(frozen=True, kw_only=True)
class Bench(Command):
    """Measure time and memory of a private gradient on this machine, next to non-private training and other libraries.

    Every contender runs in its own process. They take turns: all finish a round before the next one starts, and each
    round begins with an untimed call. The table shows the best and the median time of one gradient and the peak
    memory beyond imports, also as ratios to a plain (non-private) gradient, and then whether the project's targets
    hold. The models have random weights and no dropout. Nothing is downloaded.
    pmlf-step is one whole step of DP-PMLF (k=2, filter, noise) over one batch, or four batches for cnn5.
    """

    cases: Annotated[tuple[str, ...] | None, shown_default("all", "NAME [NAME ...]")] = None
    """One or more of cnn5, resnet18, vit, roberta, linear, llama, t5, convnext, lstm, unet, llama-lora."""

    contenders: Annotated[tuple[str, ...] | None, shown_default("all", "NAME [NAME ...]")] = None
    """One or more of plain, plain-channels-last, opacus, opacus-ghost, vmap, pmlf-k1, pmlf-k2, pmlf-k4, pmlf-step."""

    rounds: int = 7
    """Number of rounds, after a warm-up that does not count."""

    batch_scale: float = 1.0
    """Multiply all batch sizes by this factor. Give less than 1 for a quick look."""

    threads: Annotated[int | None, shown_default("the number of cores")] = None
    """Number of threads of each process."""

    clock: Literal["wall", "cpu"] = "wall"
    """wall, or cpu for processor time on a busy machine; cpu needs --threads 1."""

    freed_memory: Literal["kept", "returned"] = "returned"
    """returned: large blocks that a step frees go back to the operating system, which is what malloc does by default.
    kept: each process keeps freed memory for its next step, as `pmlf train` does. The targets are set for this."""

    growth: bool = False
    """Measure instead how time and memory of pmlf grow with k, micro-batch size, width and sequence length."""

    out: Annotated[Path | None, shown_default("none")] = None
    """Write the JSON document with all raw times to this file, after each case."""

    plot: Annotated[Path | None, shown_default("none")] = None
    """Write a chart: a .png, .pdf or .svg file."""

    def execute(self) -> int:
        from pmlf.bench import suite

        check_plot(self.plot)
        if self.out is not None and not self.out.parent.is_dir():
            raise ValueError(
                f"out={str(self.out)!r}: the folder {str(self.out.parent)!r} does not exist; make it first"
            )
        if self.growth and (self.cases is not None or self.contenders is not None):
            raise ValueError("--growth has its own case and contenders: leave --cases and --contenders out")
        settings = suite.BenchSettings(
            cases=self.cases,
            contenders=self.contenders,
            rounds=self.rounds,
            batch_scale=self.batch_scale,
            threads=self.threads,
            clock=self.clock,
            freed_memory=self.freed_memory,
        ).resolved()
        busy = suite.business()
        if busy is not None:
            say(f"warning: {busy}")
        document = suite.growth(settings, say) if self.growth else suite.run(settings, say, self._write)
        self._write(document)
        if self.plot is not None:
            suite.plot(document, self.plot)
        self.show(document, *suite.readable(document))
        return 0

    def _write(self, document: dict[str, Any]) -> None:
        if self.out is not None:
            self.out.write_text(json.dumps(document, indent=2) + "\n")
