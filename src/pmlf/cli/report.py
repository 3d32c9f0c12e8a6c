"""`pmlf report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from pmlf.basics.files import write_atomically
from pmlf.cli.common import Command
from pmlf.cli.display import facts
from pmlf.experiments.spec import shown_default


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """A page of what `pmlf reproduce` has run, beside the paper's own numbers: one HTML file that needs nothing else.

    Folders are those that `pmlf reproduce` wrote (its --out), and those of `pmlf train --diagnostics`. The same tables
    as Markdown and LaTeX, and the charts as pictures, are written where they are asked for. Diagnostics are sensitive:
    a page or Markdown that shows them is for your eyes alone (mode 0600).
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[DIR ...]")] = (
        Path("runs/reproduction"),
    )
    """Folders with records; of two records of the same runs the later counts."""

    out: Path = Path("report.html")
    """The page."""

    markdown: Annotated[Path | None, shown_default("none", "FILE")] = None
    """The results in words and tables."""

    latex: Annotated[Path | None, shown_default("none", "FILE")] = None
    """The tables for a paper, with booktabs."""

    figures: Annotated[Path | None, shown_default("none", "DIR")] = None
    """Folder for every chart as .png and .svg."""

    def execute(self) -> int:
        from pmlf.reproduction.report import page, pictures, summary, text

        for file in (self.out, self.markdown, self.latex):
            if file is not None and not file.parent.is_dir():
                raise ValueError(f"{str(file)!r} is in no folder that exists: make {str(file.parent)!r} first")
        records, diagnostics = summary.read(self.folders)
        written = {"page": self.out}
        _write(self.out, page.render(records, diagnostics), sensitive=bool(diagnostics))
        if self.markdown is not None:
            _write(self.markdown, text.markdown(records, diagnostics), sensitive=bool(diagnostics))
            written["markdown"] = self.markdown
        if self.latex is not None:
            self.latex.write_text(text.latex(records))
            written["latex"] = self.latex
        if self.figures is not None:
            pictures.draw(records, self.figures)
            written["figures"] = self.figures
        document = {name: str(path) for name, path in written.items()}
        self.show({"records": [record.key for record in records], **document}, facts(list(document.items())))
        return 0


def _write(path: Path, text: str, *, sensitive: bool) -> None:
    if not sensitive:
        path.write_text(text)
        return
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(
            f"{str(path)!r} is a link or a device, and what shows diagnostics is for you alone: name a plain file"
        )
    write_atomically(path, text.encode())
