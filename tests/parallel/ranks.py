"""What the processes of the tests in this folder do: each runs all cases, in a world of three and in one of two.

Every process writes what it found to a file of its own, and the test process compares.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pmlf
from pmlf import PrivateRun, PrivateStep
from pmlf.engine.augmentation import Augmentation
from pmlf.evidence import ledger as ledgers
from pmlf.evidence.ledger import Ledger
from pmlf.parallel.failure import RankFailed

WORLD = 3
Found = dict[str, Any]


def records(size: int = 200) -> TensorDataset:
    x = torch.randn(size, 5, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2))


def wide_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 700), nn.Tanh(), nn.Linear(700, 400), nn.Linear(400, 2))


def losses(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def shaken(batch: Any, uniforms: Tensor) -> Any:
    return batch[0] + uniforms.float(), batch[1]


def private(group: Any, model: nn.Module | None = None, *, adam: bool = False, **options: Any) -> PrivateRun:
    model = model or network()
    kind = torch.optim.Adam if adam else torch.optim.SGD
    options = {
        "optimizer": kind(model.parameters(), lr=0.05),
        "dataset": records(),
        "loss_fn": losses,
        "noise_multiplier": 1.0,
        "target_delta": 1e-3,
        "batch_size": 80,
        "steps": 4,
        "max_physical_batch_size": 16,
        "seed": 3,
        "assume_independent_samples": True,  # a proof takes longer than the steps: two of the runs have it
        **options,
    }
    return pmlf.make_private(model=model, group=group, **options)


def everything(group: Any) -> PrivateRun:
    augmentation = Augmentation(function=shaken, draws=5, per_point=True)
    scheduled = network()
    optimizer = torch.optim.Adam(scheduled.parameters(), lr=0.05, betas=(0.0, 0.999))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return private(
        group,
        scheduled,
        optimizer=optimizer,
        scheduler=scheduler,
        augmentation=augmentation,
        ema=0.9,
        secure_noise=True,
        assume_independent_samples=False,
    )


SEEDED: dict[str, Callable[[Any], PrivateRun]] = {
    "DP-SGD": lambda group: private(group, method="dpsgd", assume_independent_samples=False),
    "DP-PMLF with Adam, EMA, schedule, augmentation per point and hardened noise": everything,
    "a model of several buckets": lambda group: private(group, wide_network(), steps=2),
    "mostly empty batches": lambda group: private(group, batch_size=0.5, steps=6, max_physical_batch_size=1),
    "records sorted by length": lambda group: private(
        group, lengths=torch.arange(200).flip(0).numpy(), max_physical_batch_size=7, steps=2
    ),
}


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(run: PrivateRun) -> Found:
    for batch in run.batches():
        run.step(batch)
    averaged = run.averaged_model()
    return {
        "parameters": parameters(run.model),
        "average": None if averaged is None else parameters(averaged),
    }


def without_noise(group: Any, rank: int, ranks: int) -> Found:
    """Two steps of one's own loop, of seven pieces: the gradients released at noise 0."""
    import warnings

    x, y = records().tensors
    model = network().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = PrivateStep(
            model, losses, method="dp-pmlf", noise_multiplier=0.0, expected_batch_size=70, clip_norm=0.1, group=group
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    released = []
    for _ in range(2):
        for piece in list(zip(x[:70].split(10), y[:70].split(10), strict=True))[rank::ranks]:
            step.accumulate(piece)
        step.release()
        released.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.step()
    return {"released": torch.stack(released)}


def unseeded_noise(group: Any, rank: int) -> Found:
    """Releases of an empty batch: nothing but noise, of standard deviation 2 * 0.5, over a million coordinates."""
    model = nn.Linear(1000, 1000, bias=False)
    nn.init.zeros_(model.weight)
    step = PrivateStep(
        model, losses, method="dpsgd", noise_multiplier=2.0, clip_norm=0.5, expected_batch_size=1, group=group
    )
    released = []
    for _ in range(2):
        step.release()
        assert model.weight.grad is not None
        released.append(model.weight.grad.clone())
    return {"noise": torch.stack(released)}


class Asked(TensorDataset):
    """Notes which records are loaded."""

    def __init__(self) -> None:
        super().__init__(*records().tensors)
        self.indices: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.indices.append(index)
        return super().__getitem__(index)


def unseeded_draws(group: Any, folder: Path, rank: int) -> Found:
    """The records that each rank loads in each of three steps; the state, in a file; the key."""
    asked = Asked()
    run = private(group, dataset=asked, seed=None)
    found = []
    for batch in run.batches():
        asked.indices.clear()
        run.step(batch)
        found.append(sorted(asked.indices))
    saved = folder / f"state-{rank}.safetensors"
    pmlf.checkpoint.save(saved, run.state_dict())
    key = run._sampler._randomness._key  # type: ignore[union-attr]
    return {"loaded": found, "key_on_disk": key in saved.read_bytes() or key.hex().encode() in saved.read_bytes()}


def refused(action: Callable[[], Any], kinds: Any = (ValueError, RankFailed)) -> str:
    try:
        action()
    except kinds as error:
        return str(error)
    return "accepted"


def refusals(group: Any, rank: int) -> Found:
    """What each rank says where rank 1 differs."""
    other = rank == 1

    def moved() -> nn.Module:
        model = network()
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1e-7 if other else 0.0
        return model

    def drifts() -> None:
        run = private(group)
        batches = run.batches()
        run.step(next(batches))
        if other:
            with torch.no_grad():
                next(run.model.parameters()).view(-1)[0] += 1e-4
        run.step(next(batches))

    changed = TensorDataset(records().tensors[0] + 0.001 * other, records().tensors[1])
    return {
        "parameters": refused(lambda: private(group, moved())),
        "clip norm": refused(lambda: private(group, clip_norm=0.5 if other else 1.0)),
        "steps": refused(lambda: private(group, steps=5 if other else 4)),
        "seed": refused(lambda: private(group, seed=4 if other else 3)),
        "size of the dataset": refused(lambda: private(group, dataset=records(), batch_size=80, noise_multiplier=1.0))
        if not other
        else refused(lambda: private(group, dataset=records(201), batch_size=80)),
        "content of the dataset": refused(lambda: private(group, dataset=changed)),
        "mode": refused(lambda: private(group, network().train(not other))),
        "learning rate": refused(
            lambda: private(group, model := network(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1 + other))
        ),
        "drift": refused(drifts),
    }


def one_rank_fails(group: Any, rank: int) -> Found:
    """Rank 1's loss fails in step 1, once; then the run goes on to its end."""
    fails = {1: rank == 1}

    def failing(model: Any, batch: Any) -> Tensor:
        if run_of and run_of[0].steps_done == 1 and fails.pop(1, False):
            raise ArithmeticError("a secret of rank 1")
        return losses(model, batch)

    run_of: list[PrivateRun] = []
    run = private(group, loss_fn=failing)
    run_of.append(run)
    said = ""
    while run.steps_done < run.steps:
        try:
            for batch in run.batches():
                run.step(batch)
        except RankFailed as error:
            said = f"{error} ({type(error.__cause__).__name__})"
            at_failure = run.steps_done, run.budget.run_events, run.private_step.pending
    return {"said": said, "at_failure": at_failure, "parameters": parameters(run.model)}


def one_ledger(group: Any, folder: Path, rank: int) -> Found:
    """A run with a target that ends before its plan does, since its ledger holds another run."""
    path = folder / "ledger.jsonl"
    if rank == 0:
        with Ledger(path, dataset="records") as first:
            options = {"target_epsilon": 2.0, "noise_multiplier": None, "steps": 1, "seed": None, "ledger": first}
            trained(private_alone(**options))
    opened = Ledger(path, dataset="records") if rank == 0 else None
    run = private(group, ledger=opened, target_epsilon=8.0, noise_multiplier=None, steps=4, seed=None)
    found = trained(run)
    if opened is not None:
        opened.close()
    counted = sum(ledgers.read(path).events.values())
    return {
        **found,
        "epsilon": run.epsilon(),
        "certificate": run.certificate(),
        "steps": run.steps_done,
        "in_the_ledger": counted,
        "counted": sum(run.budget.tally.events.values()),
    }


def private_alone(**options: Any) -> PrivateRun:
    """A run of this process by itself, in a world of several."""
    from pmlf.parallel.processes import OneProcess

    return private(OneProcess(), **options)


def cases(group: Any, folder: Path, rank: int, ranks: int) -> Found:
    found: Found = {name: trained(make(group)) for name, make in SEEDED.items()}
    found["without noise"] = without_noise(group, rank, ranks)
    if ranks == WORLD:
        found["one rank fails"] = one_rank_fails(group, rank)
        found["refusals"] = refusals(group, rank)
        found["one ledger"] = one_ledger(group, folder, rank)
        found["unseeded noise"] = unseeded_noise(group, rank)
        found["unseeded draws"] = unseeded_draws("auto", folder, rank)
        found["without a group"] = (
            refused(lambda: private(None)),
            refused(lambda: PrivateStep(network(), losses, noise_multiplier=1.0, expected_batch_size=1)),
        )
    return found


def work(rank: int, folder: Path) -> None:
    two = dist.new_group([0, 1])
    if rank < 2:
        torch.save(cases(two, folder, rank, 2), folder / f"2-{rank}.pt")
    torch.save(cases("auto", folder, rank, WORLD), folder / f"{WORLD}-{rank}.pt")
