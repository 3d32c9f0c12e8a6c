"""Plausible mistakes, each with the sentence that says what to do: on the command line and in Python."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from pmlf import cli
from pmlf.bench import suite
from pmlf.data import sources
from small_runs import dataset, loss, private, small

TABLE = "text,label\ngood,yes\nbad,no\n"

# a command line, and what its error says
TYPED = {
    "train --dataset cifar-10": "Did you mean 'cifar10'?",
    "train --dataset no/such/folder": "'no/such/folder' does not exist: give",
    "train --dataset missing.csv --text-column text --labels yes no": "'missing.csv' does not exist: give",
    "train --dataset own.csv": "'own.csv'",
    "train --dataset own.csv --text-column text": "--text-column needs --labels: give all possible labels",
    "train --dataset own.csv --text-column text --labels yes no --model linear": "--model='linear' is for images",
    "train --dataset mnist --data-dir nowhere": "--data-dir='nowhere' does not exist: give a folder of datasets",
    "train --model cnn": "Did you mean 'cnn5'?",
    "train --method dp-sgd": "Did you mean 'dpsgd'?",
    "train --epsilon abc": "could not convert string to float: 'abc'",
    "train --epsilom 3": "Perhaps you meant: --epsilon FLOAT",
    "train --epsilon 3 --noise-multiplier 1": "each determines the other, so give one",
    "train --epochs 1 --steps 3": "are both given: give one",
    "train --batch-size 100000": "--batch-size=100000 is not in (0, 12000]",
    "train --delta 2": "--delta=2.0 is not in (0, 1): give a number well below 1/n",
    "train --optimizer adamw": "give one of sgd, adam",
    "train --lr 0": "give a learning rate such as 1.0",
    "train --kappa 0.5": "--kappa is not an option of dp-pmlf, which takes --k, --beta, --a, --b",
    "train --resume nowhere": "'nowhere' does not exist: give the folder of a run",
    "train --out .": "already exists: give another folder",
    "train --log tensorbord": "Did you mean 'tensorboard'?",
    "train --epochs": "Missing value for argument '--epochs'",
    "tarin": "Available subcommands: train, compare",
    "compare --methods dpsgd dpsgd": "give each method once",
    "compare --plot picture.jpg": "end the name in .png, .pdf, .svg",
    "account --certificate missing.json": "'missing.json' does not exist",
    "account --certificate own.csv": "'own.csv' is not a certificate",
    "tune --mode accounted --mean-trials 0.5": "--mean-trials=0.5 is not in [1, 10000]: it is the mean",
    "account --records 1000 --batch-size 10 --bands 100": "--bands=100 is more than 64",
    "filter --bands 65": "--bands=65 is more than 64",
    "train --method dp-pmlf-shaped --bands 1": "one band is white noise, which is method dp-pmlf",
    "account --records 0": "--records=0 is not a number of training records: give 1 or more",
    "plan --epsilons -1 --model linear --no-timing": "--epsilons=-1.0 is not a privacy budget",
    "plan --model mlp": "--model mlp is for tables: give --features",
    "compare --model prior-linear": "train them with `pmlf train`",
    "probe own.npy": "--classes is missing: give all possible classes, as in --classes cat dog",
    "probe own.npy --head least-squares": "as in --target-range 0 100",
    "filter --a -1 --b 0": "give at least one nonzero coefficient",
    "report nowhere": "'nowhere' is not a folder",
    "bench --cases resnet": "give one of cnn5, resnet18",
}


@pytest.mark.slow
@pytest.mark.parametrize("line", TYPED)
def test_a_mistake_on_the_command_line_is_answered_with_a_way_out(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "own.csv").write_text(TABLE)
    assert cli.main(shlex.split(line)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert TYPED[line] in said and "Traceback" not in said
    assert os.listdir(tmp_path) == ["own.csv"]  # nothing is left behind


def frame() -> Any:
    return pytest.importorskip("pandas").DataFrame({"x": [0.0, 1.0], "y": [0, 1]})


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any) -> Any:
        return 2 * weight

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return 2 * grad


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 2))

    def forward(self, x: Any) -> Any:
        return x @ Doubled.apply(self.weight)


# a call in Python, and what its error says
WRITTEN: dict[str, tuple[Callable[[], Any], str]] = {
    "a DataFrame": (lambda: private(dataset=frame()), "indexed by column and not by record: give torch.utils.data"),
    "a dictionary": (lambda: private(dataset={"x": [1]}), "indexed by key and not by record"),
    "an iterable": (lambda: private(dataset=Endless()), "give a map-style dataset with __len__ and __getitem__"),
    "an empty dataset": (lambda: private(dataset=[]), "the dataset is empty"),
    "a loader that drops": (
        lambda: private(dataset=DataLoader(dataset(), 30, drop_last=True), batch_size=None),
        "leave drop_last out",
    ),
    "no batch size": (lambda: private(batch_size=None), "batch_size is missing: give the expected number"),
    "Opacus' clip norm": (lambda: private(max_grad_norm=1.0), "give clip_norm"),
    "a misspelled name": (lambda: private(learning_rat=1.0), "make_private has no argument 'learning_rat'"),
    "a mean loss": (
        lambda: next(iter(_steps(private(loss_fn=lambda model, batch: loss(model, batch).mean())))),
        "return one loss a sample, for example F.cross_entropy(logits, labels, reduction='none')",
    ),
    "class weights": (
        lambda: private(loss_fn=nn.CrossEntropyLoss(weight=torch.ones(2))),
        "F.cross_entropy(model(batch[0]), batch[1], weight=weight",
    ),
    "BatchNorm": (lambda: private(batch_norm()), "fix_model"),
    "LBFGS": (lambda: _with(LBFGS), "use SGD or Adam"),
    "a plateau": (
        lambda: _scheduled(lambda optimizer: ReduceLROnPlateau(optimizer)),
        "use a scheduler that depends on the step count alone",
    ),
    "both budgets": (lambda: private(noise_multiplier=1.0), "give target_epsilon or noise_multiplier, one of the two"),
    "a seed in words": (lambda: private(seed="zero"), "None gives cryptographic noise"),
    "an unknown method": (lambda: private(method="dp-sgd"), "Did you mean 'dpsgd'?"),
    "the path of a ledger": (lambda: private(ledger="patients.ledger"), "give pmlf.Ledger(path, dataset='...')"),
    "too few ids": (lambda: private(units=[1, 2, 3]), "units has 3 ids for 120 records: give one id per record"),
    "weights behind a function": (
        lambda: next(iter(_steps(private(Hidden())))),
        'your own autograd.Function, give gradients="one-by-one"',
    ),
}


def _steps(run: Any) -> Any:
    for batch in run.batches():
        yield run.step(batch)


def _with(optimizer: Any) -> Any:
    model = small()
    return private(model, optimizer=optimizer(model.parameters()))


def _scheduled(build: Any) -> Any:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return private(model, optimizer=optimizer, scheduler=build(optimizer))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_mistake_in_python_is_answered_with_a_way_out(name: str) -> None:
    call, said = WRITTEN[name]
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        call()


def test_a_wrong_column_lists_the_columns(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(TABLE)
    (tmp_path / "test.csv").write_text(TABLE)
    found = sources.own_source(tmp_path)
    with pytest.raises(ValueError, match="has no column 'txt', only 'text', 'label': give one of them as text_column"):
        list(found.tables("train", {"txt": "text_column"}))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["trian"], "there is no command 'trian'. Did you mean 'train'?"),
        (["x"], "there is no command 'x'. `pmlf --help` lists the commands"),
        (["train", "--max_grad_norm=1"], "pmlf train has no option --max-grad-norm: give --clip-norm."),
        (["train", "--epsilom", "1"], "no option --epsilom. Did you mean '--epsilon'? `pmlf train --help` lists"),
        (["filter", "--sigma", "1"], "pmlf filter has no option --sigma. `pmlf filter --help`"),
    ],
)
def test_an_unknown_command_or_option_is_answered_with_the_one_to_type(
    typed: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(typed) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_controls_with_too_few_canaries_say_how_many_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", "--controls", "--canaries", "100", "--seed", "0"]) == 1
    assert "100 are too few to show it: give --canaries 21000 or more" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("load", "busy"), [(0.4, False), (12.5, True)])
def test_a_busy_machine_is_told(load: float, busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    said = suite.business()
    assert (said is not None) == busy and (said is None or "a load of 12.5 on 2 cores" in said)


def test_the_completion_script_knows_the_flags(tmp_path: Path) -> None:
    assert cli.main(["--tyro-write-completion", "bash", str(tmp_path / "pmlf")]) == 0
    assert "--noise-multiplier" in (tmp_path / "pmlf").read_text()
