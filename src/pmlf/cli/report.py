"""`pmlf report`: your own runs, or results of `pmlf reproduce`, as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Show your own runs side by side, or the results of `pmlf reproduce` next to the paper's numbers, on one page.

    Folders of `pmlf train` and `pmlf compare` make a page with curves, intervals, epsilon, costs and recomputed
    certificates. Otherwise reads folders written by `pmlf reproduce` (its --out) and by `pmlf train --diagnostics`. Can
    also write the tables as Markdown and LaTeX and the charts as images. Diagnostics are sensitive: a page or Markdown
    file that shows them gets file mode 0600.
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[DIR ...]")] = (
        Path("runs/reproduction"),
    )
    """Run folders, or folders with records of `pmlf reproduce`. If two have a record of the same name, the later folder
    counts."""

    out: Path = Path("report.html")
    """HTML file to write."""

    markdown: Annotated[Path | None, shown_default("none", "FILE")] = None
    """Markdown file to write: findings and tables."""

    latex: Annotated[Path | None, shown_default("none", "FILE")] = None
    """LaTeX file to write: the tables, with booktabs."""

    figures: Annotated[Path | None, shown_default("none", "DIR")] = None
    """Folder to write every chart into, as .png and .svg."""

    def execute(self) -> int:
        from pmlf.reproduction.report import page, pictures, summary, text

        for file in (self.out, self.markdown, self.latex):
            if file is not None and not file.parent.is_dir():
                raise ValueError(f"{str(file)!r} cannot be written: the folder {str(file.parent)!r} does not exist")
        # a run with diagnostics has a page of its own, which only its owner can read
        measured = any((folder / "diagnostics.json").exists() for folder in self.folders)
        runs = [run for folder in self.folders for run in _runs_in(folder)]
        if not measured and any((run / "spec.json").exists() for run in runs):
            return self._own_runs(runs)
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

    def _own_runs(self, folders: Sequence[Path]) -> int:
        from pmlf.experiments import runs_page

        for name in ("markdown", "latex", "figures"):
            if getattr(self, name) is not None:
                raise ValueError(f"`{name}` is only for results of `pmlf reproduce`: leave it out")
        runs = [runs_page.ReportedRun.read(folder) for folder in folders]
        self.out.write_text(runs_page.render(runs))
        self.show(
            {"runs": [run.result.to_json() for run in runs], "page": str(self.out)}, facts([("page", str(self.out))])
        )
        return 0


def _runs_in(folder: Path) -> list[Path]:
    """The folders of the runs of `pmlf compare`; any other folder is itself."""
    if not (folder / "comparison.json").is_file():
        return [folder]
    return sorted(spec.parent for spec in folder.glob("*/spec.json"))


def _write(path: Path, text: str, *, sensitive: bool) -> None:
    if not sensitive:
        path.write_text(text)
        return
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(
            f"{str(path)!r} is a link or a device, and sensitive diagnostics go into regular files only: give one"
        )
    write_atomically(path, text.encode())
