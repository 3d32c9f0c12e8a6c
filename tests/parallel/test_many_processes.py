"""One, two and three processes take the same steps: same bits on all ranks, noise once, one budget, errors together."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from parallel import ranks
from parallel.together import distance, in_processes

Found = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What every rank found, by the number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    in_processes(ranks.work, ranks.WORLD, folder)
    return {
        size: [torch.load(folder / f"{size}-{rank}.pt", weights_only=False) for rank in range(size)]
        for size in (2, ranks.WORLD)
    }


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ranks.SEEDED)
def test_seeded_runs_end_alike_on_every_number_of_processes(found: Found, size: int, name: str) -> None:
    alone = ranks.trained(ranks.SEEDED[name](None))
    for rank in range(size):
        together = found[size][rank][name]
        assert torch.equal(together["parameters"], found[size][0][name]["parameters"])
        assert distance(together["parameters"], alone["parameters"]) < 1e-6
        if alone["average"] is not None:
            assert torch.equal(together["average"], found[size][0][name]["average"])
            assert distance(together["average"], alone["average"]) < 1e-6
        if name != "mostly empty batches":  # of at most 64 expected samples, which one process adds up in float32
            assert torch.equal(together["parameters"], alone["parameters"])


@pytest.mark.parametrize("size", [2, 3])
def test_released_gradients_without_noise_are_those_of_one_process(found: Found, size: int) -> None:
    alone = ranks.without_noise(None, 0, 1)["released"]
    for rank in range(size):
        assert torch.equal(found[size][rank]["without noise"]["released"], alone)


def test_unseeded_noise_is_added_once_and_is_the_same_on_all_ranks(found: Found) -> None:
    noise = [each["unseeded noise"]["noise"] for each in found[3]]
    assert all(torch.equal(each, noise[0]) for each in noise)
    for each in noise[0]:
        assert float(each.std()) == pytest.approx(2.0 * 0.5, rel=0.01)
        assert abs(float(each.mean())) < 5e-3
    first, second = noise[0].flatten(1)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 5e-3
    for part in first.split(1 << 17):  # whoever made it
        assert float(part.std()) == pytest.approx(1.0, rel=0.02)
    shifted = torch.corrcoef(torch.stack([first[: 1 << 17], first[1 << 17 : 1 << 18]]))[0, 1]
    assert abs(float(shifted)) < 0.02


def test_an_unseeded_draw_is_one_draw_that_the_ranks_share_out(found: Found) -> None:
    loaded = [each["unseeded draws"]["loaded"] for each in found[3]]
    whole = []
    for step in range(4):
        of_ranks = [loaded[rank][step] for rank in range(3)]
        together = [index for each in of_ranks for index in each]
        assert len(together) == len(set(together)), "a record was drawn twice"
        assert len(of_ranks[0]) >= len(of_ranks[1]) >= len(of_ranks[2])
        assert 40 < len(together) < 130
        whole.append(frozenset(together))
    assert len(set(whole)) == 4
    assert not any(each["unseeded draws"]["key_on_disk"] for each in found[3])


def test_a_rank_that_fails_stops_all_of_them_and_nothing_is_spent(found: Found) -> None:
    undisturbed = ranks.trained(ranks.private(None))["parameters"]
    for rank in range(3):
        mine = found[3][rank]["one rank fails"]
        sentence = "rank 1 of 3 failed in step 1, so no rank releases anything: rank 1 reports why"
        assert mine["said"] == f"{sentence} ({'ArithmeticError' if rank == 1 else 'NoneType'})"
        assert mine["at_failure"] == (1, 1, False)
        assert torch.equal(mine["parameters"], undisturbed), "the step was not taken again as it was"


REFUSED = {
    "parameters": "rank 1 has another value of a parameter than rank 0",
    "clip norm": "rank 1 has another setting of the step than rank 0",
    "steps": "rank 1 has another plan of the run than rank 0",
    "seed": "rank 1 has another seed than rank 0",
    "size of the dataset": "rank 1 has another plan of the run than rank 0",
    "content of the dataset": r"rank 1 has another dataset \(the content of a record\) than rank 0",
    "mode": "rank 1 has another model than rank 0",
    "learning rate": "rank 1 has another optimizer than rank 0",
    "drift": "the parameters of rank 1 differ from those of rank 0 at step 1, so no rank releases anything",
}


@pytest.mark.parametrize("what", REFUSED)
def test_ranks_that_differ_are_refused_in_the_same_words(found: Found, what: str) -> None:
    said = [each["refusals"][what] for each in found[3]]
    assert len(set(said)) == 1 and re.match(REFUSED[what], said[0]), said


def test_a_world_without_a_group_is_refused(found: Found) -> None:
    for each in found[3]:
        for said, name in zip(each["without a group"], ("make_private", "PrivateStep"), strict=True):
            assert said.startswith(f"{name} is called in one of 3 processes") and 'group="auto" joins them' in said


def test_rank_0_keeps_one_ledger_for_all(found: Found) -> None:
    mine = [each["one ledger"] for each in found[3]]
    for each in mine:
        assert each["in_the_ledger"] == each["counted"] == each["steps"] + 1
        assert each["epsilon"] == mine[0]["epsilon"] <= 8.0
        assert torch.equal(each["parameters"], mine[0]["parameters"])
        stated = each["certificate"]
        assert (stated["epsilon"], stated["dataset"], stated["processes"]) == (8.0, "records", 3)
