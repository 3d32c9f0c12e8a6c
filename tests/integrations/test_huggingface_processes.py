"""`PrivateTrainer` on two processes, of torchrun or accelerate: the bits of the plain loop and of one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from parallel import trainer_ranks
from pmlf.integrations.huggingface import PrivateTrainer
from small_trainers import trainer as small_trainer

pytestmark = pytest.mark.slow
TESTS = Path(__file__).resolve().parents[1]
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0")


class Together(NamedTuple):
    """What two processes left."""

    folder: Path
    printed: str
    ranks: list[dict[str, Any]]


def launched(launcher: tuple[str, ...], folder: Path) -> Together:
    """What two processes of a launcher leave in a folder."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, trainer_ranks.__file__, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return Together(folder, done.stdout, [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)])


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Together:
    return launched(TORCHRUN, tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[PrivateTrainer, trainer_ranks.Loaded]:
    """The same training on this process."""
    return trainer_ranks.private(tmp_path_factory.mktemp("alone"), processes=1, seed=0)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_two_processes_have_the_bits_of_the_plain_loop_and_of_one_process(
    together: Together, alone: tuple[PrivateTrainer, Any]
) -> None:
    expected = alone[0].model.state_dict()
    for rank in together.ranks:
        assert same(rank["loop"], expected)
        assert same(rank["trained"], expected)


def test_accelerate_launch_ends_with_the_same_bits_and_one_certificate(
    alone: tuple[PrivateTrainer, Any], tmp_path: Path
) -> None:
    found = launched(ACCELERATE, tmp_path)
    assert all(same(rank["trained"], alone[0].model.state_dict()) for rank in found.ranks)
    assert all(rank["certificate"]["processes"] == 2 for rank in found.ranks)
    assert found.printed.count("'learning_rate'") == 4  # by rank 0


def test_every_record_that_was_drawn_contributes_once(
    together: Together, alone: tuple[Any, trainer_ranks.Loaded]
) -> None:
    for step, drawn in enumerate(alone[1].steps):
        of_ranks = [rank["loaded"][step] for rank in together.ranks]
        assert all(of_ranks) and sorted(of_ranks[0] + of_ranks[1]) == drawn
        assert len(set(drawn)) == len(drawn) > 40


def test_evaluation_counts_every_record_once_though_accelerate_repeats_some(together: Together) -> None:
    for rank in together.ranks:
        assert {entry["eval_records"] for entry in rank["history"] if "eval_records" in entry} == {19}


def test_rank_0_alone_logs_and_saves_one_certificate_for_both(together: Together) -> None:
    assert together.printed.count("'learning_rate'") == 4 and together.printed.count("'eval_records'") == 2
    assert {path.name for path in (together.folder / "out").iterdir()} == {
        "certificate.json",
        "checkpoint-2",
        "checkpoint-4",
        "ledger.jsonl",
    }
    assert json.loads((together.folder / "out" / "certificate.json").read_text())["processes"] == 2
    assert {rank["wrapped"] for rank in together.ranks} == {"BertForSequenceClassification"}


def test_one_process_goes_on_where_two_stopped(
    together: Together, alone: tuple[PrivateTrainer, Any], tmp_path: Path
) -> None:
    copied = shutil.copytree(together.folder / "out", tmp_path / "out")
    resumed, _ = trainer_ranks.private(copied, processes=1, seed=3, resume=copied / "checkpoint-2")
    assert same(resumed.model.state_dict(), alone[0].model.state_dict())


def test_processes_that_the_training_arguments_do_not_count_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun does on a machine without GPUs, where accelerate sees one
    with pytest.raises(ValueError, match="use_cpu=True"):
        small_trainer(tmp_path, use_cpu=False)
