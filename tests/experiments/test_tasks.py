"""Tasks: dataset and model of a run, and the part of the training split held out for tuning."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pmlf import data
from pmlf.experiments import runner, splits, tasks
from pmlf.experiments.spec import RunSpec

QUICK = RunSpec(model="linear", steps=2, batch_size=20, noise_multiplier=1.0, seed=0)


@pytest.mark.slow
def test_a_task_reads_the_published_splits_by_default() -> None:
    task = tasks.prepare(QUICK)
    loaded = data.load()
    assert task.records == 12_000
    ((name, test),) = task.judged_on.items()
    assert name == "test" and torch.equal(test.images, loaded.test.images)


@pytest.mark.slow
def test_losses_are_the_cross_entropy_of_each_sample() -> None:
    task = tasks.prepare(QUICK)
    batch = data.collate(data.load().train.__getitems__([0, 5, 7]))
    logits = task.model(batch[0])
    expected = logits.logsumexp(1) - logits[torch.arange(3), batch[1]]
    torch.testing.assert_close(task.losses(task.model, batch), expected)


@pytest.mark.slow
def test_the_holdout_splits_the_training_records_and_leaves_the_test_records_alone() -> None:
    task = tasks.prepare(RunSpec(**{**vars(QUICK), "holdout": 0.25}))
    kept, held = splits.holdout_indices(12_000, 0.25)
    assert list(task.judged_on) == ["holdout"] and task.records == 9_000
    assert sorted([*kept, *held]) == list(range(12_000))
    train = data.load().train
    for index in (0, 17, 2_999):
        assert torch.equal(task.judged_on["holdout"][index][0], train[held[index]][0])
        assert torch.equal(task.train[index][0], train[kept[index]][0])


def test_the_holdout_depends_on_the_count_alone_and_mixes_the_records() -> None:
    _, held = splits.holdout_indices(1000, 0.1)
    assert np.array_equal(held, splits.holdout_indices(1000, 0.1)[1])
    assert held[:5].tolist() == [5, 19, 58, 71, 77]  # must never change: documented results depend on it
    assert abs(held.mean() - 500) < 100
    assert set(held) < set(splits.holdout_indices(1000, 0.2)[1])


@pytest.mark.slow
def test_the_accountant_counts_the_records_that_are_left(tmp_path: Path) -> None:
    runner.run(RunSpec(**{**vars(QUICK), "holdout": 0.5}), tmp_path / "run")
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert certificate["records"] == 6_000 and certificate["sample_rate"] == 20 / 6_000
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert metrics["split"] == "holdout"


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1e-9, float("nan")])
def test_a_holdout_that_leaves_nothing_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="leaves one part empty"):
        splits.holdout_indices(1000, fraction)
