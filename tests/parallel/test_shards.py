"""Models that `fully_shard` has cut, on two processes: the steps of one process, in parts of the memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel import sharded_ranks as ranks
from parallel.together import distance, in_processes

pytestmark = pytest.mark.slow
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What every rank found."""
    folder = tmp_path_factory.mktemp("shards")
    in_processes(ranks.work, ranks.WORLD, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks.WORLD)]


@pytest.mark.parametrize("name", ranks.RUNS)
def test_two_processes_with_a_part_each_train_as_one_process_does(found: Found, name: str) -> None:
    alone = ranks.trained(name, sharded=False)
    for each in found:
        assert distance(each[name]["parameters"], alone["parameters"]) < 1e-5
        assert each[name]["epsilon"] == alone["epsilon"]
    assert sum(each[name]["history"] for each in found) == alone["history"]
    assert all(each[name]["history"] <= 0.6 * alone["history"] for each in found)


def test_a_resumed_run_ends_with_the_same_bits(found: Found) -> None:
    for each in found:
        assert torch.equal(each["resumed"]["resumed"], each["resumed"]["straight"])


def test_if_one_rank_fails_no_rank_releases_and_the_step_can_be_taken_again(found: Found) -> None:
    straight = ranks.private(ranks.transformer(), method="dp-pmlf")
    for batch in straight.batches():
        straight.step(batch)
    for rank, each in enumerate(found):
        assert "rank 1 of 2 failed in step 1" in each["one rank fails"]["seen"], rank
        assert each["one rank fails"]["steps"] == 3
        assert distance(each["one rank fails"]["parameters"], ranks.whole(straight.model)) < 1e-5


def test_between_steps_the_model_runs_as_fully_shard_left_it(found: Found) -> None:
    assert all(each["used in between"] < 1e-5 for each in found)


def test_unseeded_noise_is_added_once_everywhere(found: Found) -> None:
    noise = found[0]["unseeded noise"]
    assert torch.equal(noise, found[1]["unseeded noise"])
    half = len(noise) // 2
    assert float(noise[:half].std()) == pytest.approx(2.0, rel=0.01)
    assert float(noise[half:].std()) == pytest.approx(2.0, rel=0.01)
    assert abs(float((noise[:half] * noise[-half:]).mean())) < 0.05  # the ranks' keys differ


@pytest.mark.parametrize(
    ("what", "answer"),
    [
        ("replicas", "replicas of shards (HSDP) and other axes are not"),
        ("in part", "call fully_shard on the model itself too"),
        ("mixed precision", "put torch.autocast into loss_fn instead"),
        ("vmap", "needs whole parameters"),
        ("average", "leave `ema` out"),
        ("automatic size", "give a number"),
        ("shaped noise", "runs in one process"),
    ],
)
def test_what_is_not_followed_is_refused_by_name(found: Found, what: str, answer: str) -> None:
    for each in found:
        assert answer in each["refusals"][what]
