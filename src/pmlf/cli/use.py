"""`pmlf predict`, `pmlf evaluate` and `pmlf export`: use a model that was trained."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from pmlf.basics.files import write_atomically
from pmlf.cli.common import Command, say
from pmlf.cli.display import facts
from pmlf.experiments.options import shown_default
from pmlf.experiments.spec import RunSpec

_RunFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_DIR")]


@dataclass(frozen=True, kw_only=True)
class Predict(Command):
    """Predict classes, labels or numbers for images, texts or rows with a trained model.

    The run's folder holds all that is needed: weights, preprocessing, names of the classes. The result is a CSV with
    one line per input: the prediction, its probability, and the probability of every class.

    Predictions cost no privacy: they depend on the released model.
    """

    run: _RunFolder
    """Folder of a run of `pmlf train` or `pmlf probe`, or one that `pmlf export --format hub` wrote."""

    inputs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="INPUT")] = ()
    """Images: files or folders. Texts and tables: .csv, .tsv, .jsonl or .parquet files with the columns of the training
    data; for texts also .txt files with one text per line. Features of `pmlf probe`: .npy, .npz or .parquet files."""

    text: Annotated[tuple[str, ...] | None, shown_default("none", "TEXT [TEXT ...]")] = None
    """Texts to predict, for a text model."""

    out: Annotated[Path | None, shown_default("standard output", "FILE.csv")] = None
    """Write the CSV to this file."""

    average: bool = False
    """Use the average of the parameters that --ema kept, instead of the last iterate."""

    def execute(self) -> int:
        from pmlf.experiments.released import load

        if not self.inputs and not self.text:
            raise ValueError("there is nothing to predict: give files after the folder of the run, or --text")
        released = load(self.run, average=self.average)
        if self.text and released.tokenizer is None:
            raise ValueError("`text` is for models of texts, and this one takes none: give files instead")
        rows = list(released.predict_files(self.inputs))
        if self.text:
            given = released.predict(self.text)
            rows += [{"input": f"text {number}", **row} for number, row in enumerate(given, start=1)]
        written = _csv(rows)
        if self.out is not None:
            write_atomically(self.out, written.encode())
            say(f"{len(rows)} predictions are in {self.out}")
        if self.json:
            self.show({"predictions": rows})
        elif self.out is None:
            sys.stdout.write(written)
        return 0


@dataclass(frozen=True, kw_only=True)
class Evaluate(Command):
    """Score a trained model on a dataset: the same numbers as at the end of training.

    The records of the dataset are read as in training, and get the preprocessing of the run. They are not protected.
    """

    run: _RunFolder
    """Folder of a run of `pmlf train` or `pmlf probe`, or one that `pmlf export --format hub` wrote."""

    dataset: Annotated[str | None, shown_default("the dataset of the run")] = None
    """A dataset named or laid out as in `pmlf train`. A single table is evaluated as a whole, and so is a file of
    features; but of the table that the run was trained on only the records that it held out."""

    split: Annotated[str | None, shown_default("test; the first validation split for sst2, qnli, qqp and mnli")] = None
    """The split to evaluate on."""

    label_column: Annotated[str | None, shown_default("that of the run, else label")] = None
    """Column of the labels in your own data; for features also a .npy file."""

    data_dir: Annotated[Path | None, shown_default("$PMLF_DATA, else the Hugging Face hub")] = None
    """Folder of datasets with the layout of the Hugging Face hub."""

    average: bool = False
    """Use the average of the parameters that --ema kept, instead of the last iterate."""

    def execute(self) -> int:
        from pmlf.data.catalogue import TEXT_DATASETS
        from pmlf.data.feature_files import FeatureForm
        from pmlf.experiments.folder import RunFolder
        from pmlf.experiments.released import load
        from pmlf.experiments.splits import HOLDOUT

        released = load(self.run, average=self.average)
        of_a_dataset = not isinstance(released.form.inputs, FeatureForm) and (self.run / "spec.json").exists()
        spec = RunFolder(self.run).spec() if of_a_dataset else None
        dataset = self.dataset or (None if spec is None else spec.dataset)
        if dataset is None:
            raise ValueError(f"{str(self.run)!r} does not name its dataset: give `dataset`")
        usual = TEXT_DATASETS[dataset].judged_on[0] if dataset in TEXT_DATASETS else "test"
        label = self.label_column or (None if spec is None else spec.own.label_column) or "label"
        same = spec if spec is not None and _is_file_of(spec, dataset) else None
        split = HOLDOUT if same is not None else self.split or usual
        found = released.evaluate(dataset, split=split, data_dir=self.data_dir, label_column=label, held_out_by=same)
        self.show(
            {"run": str(self.run), "dataset": dataset, "split": split, "score": found.to_json()},
            facts([(f"{split} {found.metric}", found.in_words()), ("records", str(found.records))]),
        )
        return 0


@dataclass(frozen=True, kw_only=True)
class Export(Command):
    """Write a trained model in a form that other programs read.

    onnx: one .onnx file for onnxruntime and others. torch-export: one .pt2 file, which torch.export.load reads. Both
    take pixels (N, C, S, S) as bytes, tokens, or the encoded columns of a table, and give probabilities. hub: a folder
    for the Hugging Face hub with weights, certificate, and a model card that states the privacy guarantee in words.
    """

    run: _RunFolder
    """Folder of a run of `pmlf train` or `pmlf probe`."""

    format: Literal["onnx", "torch-export", "hub"] = "hub"
    """onnx, torch-export or hub. onnx needs `pip install 'dp-pmlf[onnx]'`."""

    out: Annotated[Path | None, shown_default("model.onnx, model.pt2 or hub, next to the weights")] = None
    """New file or folder. An existing one is refused."""

    average: bool = False
    """Export the average of the parameters that --ema kept, instead of the last iterate."""

    def execute(self) -> int:
        from pmlf.experiments import export

        out = self.out or self.run / export.NAMES[self.format]
        if out.exists():
            raise ValueError(f"{str(out)!r} already exists: give another `out`, or move it away")
        described = export.write(self.run, self.format, out, average=self.average)
        self.show(
            {"format": self.format, "out": str(out), **described}, facts([("written to", str(out)), *_lines(described)])
        )
        return 0


def _is_file_of(spec: RunSpec, dataset: str) -> bool:
    """Whether a dataset is the single file that a run was trained on."""
    return Path(dataset).is_file() and Path(dataset).resolve() == Path(spec.dataset).resolve()


def _lines(described: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in described.items()]


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV, with numbers at full precision."""
    written = io.StringIO()
    writer = csv.DictWriter(written, fieldnames=list(rows[0]) if rows else ["input"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue()
