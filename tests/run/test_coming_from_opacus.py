"""What a script written for Opacus meets: its loaders, criteria, names, loops and schedulers."""

from __future__ import annotations

import difflib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR, StepLR
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import pmlf
import small_runs
from pmlf.engine.criteria import as_per_sample
from pmlf.run.iteration import Epochs
from pmlf.run.names import OF_OPACUS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "from-opacus.md"


# --- a DataLoader as dataset


def twice(records: list[Any]) -> Any:
    inputs, labels = default_collate(records)
    return 2 * inputs, labels


def private_on(loader: Any, **options: Any) -> pmlf.PrivateRun:
    return small_runs.private(dataset=loader, batch_size=None, **options)


@pytest.mark.slow
def test_a_run_on_a_loader_is_the_run_on_what_is_in_it() -> None:
    data = small_runs.dataset()
    models = small_runs.small(), small_runs.small()
    loader = DataLoader(data, batch_size=30, shuffle=True, collate_fn=twice, num_workers=1, pin_memory=False)
    from_loader = private_on(loader, model=models[0], seed=1)
    plain = small_runs.private(models[1], batch_size=30, collate_fn=twice, seed=1)
    small_runs.finish(from_loader)
    small_runs.finish(plain)
    assert torch.equal(small_runs.weights(models[0]), small_runs.weights(models[1]))
    assert from_loader.certificate()["expected_batch_size"] == 30


REFUSED_LOADERS = {
    "sampler=WeightedRandomSampler": lambda data: DataLoader(
        data, batch_size=30, sampler=WeightedRandomSampler([1.0] * len(data), len(data))
    ),
    "Subset(dataset, indices)": lambda data: DataLoader(data, batch_size=30, sampler=SubsetRandomSampler(range(50))),
    "sampler=RandomSampler, which does not take every record once": lambda data: DataLoader(
        data, batch_size=30, sampler=RandomSampler(data, replacement=True)
    ),
    "drop_last=True": lambda data: DataLoader(data, batch_size=30, drop_last=True),
    "has a generator": lambda data: DataLoader(data, batch_size=30, shuffle=True, generator=torch.Generator()),
    "worker_init_fn": lambda data: DataLoader(data, batch_size=30, worker_init_fn=print),
    "batch_sampler=list": lambda data: DataLoader(data, batch_sampler=[[0, 1], [2, 3]]),  # type: ignore[arg-type]
    "batch_size=None": lambda data: DataLoader(data, batch_size=None),
}


@pytest.mark.parametrize("said", REFUSED_LOADERS)
def test_a_loader_with_its_own_sampling_is_refused_by_its_name(said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        private_on(REFUSED_LOADERS[said](small_runs.dataset()))


def test_what_opacus_has_wrapped_is_refused() -> None:
    opacus = pytest.importorskip("opacus")
    model, data = small_runs.small(), small_runs.dataset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped, optimizer, loader = opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=30),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    with pytest.raises(ValueError, match="model is a GradSampleModule of Opacus"):
        small_runs.private(wrapped)
    with pytest.raises(ValueError, match="optimizer is a DPOptimizer of Opacus"):
        small_runs.private(optimizer=optimizer)
    with pytest.raises(ValueError, match="dataset is a DPDataLoader of Opacus"):
        private_on(loader)


@pytest.mark.parametrize(
    "options", [{"batch_size": 40}, {"batch_size": None, "num_workers": 2}, {"batch_size": None, "collate_fn": twice}]
)
def test_an_argument_that_differs_from_the_loaders_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="leave one of them out"):
        small_runs.private(dataset=DataLoader(small_runs.dataset(), batch_size=30), **options)


# --- criteria

CRITERIA: dict[str, tuple[nn.Module, Any, Any]] = {
    "classes": (nn.CrossEntropyLoss(label_smoothing=0.1), (5, 3), torch.tensor([0, 2, 1, 1, 0])),
    "class probabilities": (nn.CrossEntropyLoss(), (5, 3), torch.rand(5, 3).softmax(1)),
    "images of classes": (nn.CrossEntropyLoss(ignore_index=0), (5, 3, 4, 2), torch.randint(0, 3, (5, 4, 2))),
    "log-likelihoods": (nn.NLLLoss(), (5, 3), torch.tensor([0, 2, 1, 1, 0])),
    "squares": (nn.MSELoss(), (5, 3, 2), torch.rand(5, 3, 2)),
    "absolutes": (nn.L1Loss(), (5,), torch.rand(5)),
    "logits": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0])), (5, 3), torch.rand(5, 3).round()),
    "margins": (nn.MultiMarginLoss(), (5, 3), torch.tensor([0, 2, 1, 1, 0])),
    "rows": (nn.MultiLabelSoftMarginLoss(), (5, 3), torch.rand(5, 3).round()),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_the_loss_of_a_sample_is_what_the_criterion_says_of_it_alone(name: str) -> None:
    criterion, shape, targets = CRITERIA[name]
    inputs = torch.randn(shape, dtype=torch.float64)
    targets = targets.double() if targets.is_floating_point() else targets
    found = as_per_sample(criterion.double())(nn.Identity(), (inputs, targets))
    alone = [criterion(inputs[i : i + 1], targets[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(found, torch.stack(alone))
    assert criterion.reduction == "mean"  # the user's own is not changed


def test_a_sample_with_nothing_to_count_has_loss_0() -> None:
    targets = torch.tensor([[7, 7], [0, 1]])
    losses = as_per_sample(nn.CrossEntropyLoss(ignore_index=7))(nn.Identity(), (torch.randn(2, 3, 2), targets))
    assert losses[0] == 0.0 and losses[1] > 0.0


def test_a_run_with_a_criterion_is_the_run_with_its_function() -> None:
    models = small_runs.small(), small_runs.small()
    small_runs.finish(small_runs.private(models[0], loss_fn=nn.CrossEntropyLoss(), seed=1))
    small_runs.finish(small_runs.private(models[1], seed=1))
    assert torch.equal(small_runs.weights(models[0]), small_runs.weights(models[1]))


class OwnCriterion(nn.CrossEntropyLoss):
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(input, target) ** 2


@pytest.mark.parametrize(
    ("criterion", "line"),
    [
        (nn.CrossEntropyLoss(weight=torch.ones(2)), "F.cross_entropy(model(batch[0]), batch[1], weight=weight, red"),
        (nn.CrossEntropyLoss(reduction="sum"), "give CrossEntropyLoss(), with the learning rate multiplied"),
        (nn.GaussianNLLLoss(), 'loss_fn=lambda model, batch: nn.GaussianNLLLoss(reduction="none")'),
        (OwnCriterion(), 'loss_fn=lambda model, batch: nn.OwnCriterion(reduction="none")'),
        (F.cross_entropy, 'write loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="n'),
        ("cross_entropy", "give a function of (model, batch)"),
    ],
)
def test_a_criterion_that_cannot_be_separated_is_refused_with_the_line_to_write(criterion: Any, line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        small_runs.private(loss_fn=criterion)


def test_targets_that_would_be_broadcast_over_samples_are_refused() -> None:
    data = TensorDataset(torch.randn(40, 3), torch.randn(40))
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    run = small_runs.private(model, dataset=data, optimizer=optimizer, loss_fn=nn.MSELoss(), batch_size=20)
    with pytest.raises(ValueError, match=re.escape("batch[1].unsqueeze(1)")):
        small_runs.finish(run)


def test_a_batch_that_is_no_pair_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes batches of \(inputs, targets\), and this batch is a dict"):
        as_per_sample(nn.MSELoss())(nn.Identity(), {"x": torch.zeros(2), "y": torch.zeros(2)})


# --- names


@pytest.mark.parametrize("name", OF_OPACUS)
def test_an_argument_of_opacus_is_refused_with_what_to_give(name: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"make_private has no argument {name!r}: {OF_OPACUS[name]}")):
        small_runs.private(**{name: 1.0})


def test_every_argument_of_opacus_has_an_answer() -> None:
    opacus = pytest.importorskip("opacus")
    import inspect

    theirs = inspect.signature(opacus.PrivacyEngine.make_private_with_epsilon).parameters
    ours = inspect.signature(pmlf.make_private).parameters
    named = {name for name, parameter in theirs.items() if parameter.kind is parameter.KEYWORD_ONLY}
    assert named - set(ours) - set(OF_OPACUS) == set()


def test_a_misspelled_argument_is_suggested_and_a_positional_one_refused() -> None:
    with pytest.raises(TypeError, match=r"no argument 'clipnorm'\. Did you mean 'clip_norm'"):
        small_runs.private(clipnorm=1.0)
    with pytest.raises(TypeError, match="takes arguments by name only"):
        pmlf.make_private(small_runs.small())  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="BatchMemoryManager': pass max_physical_batch_size"):
        _ = pmlf.BatchMemoryManager


# --- loops


@pytest.mark.parametrize(("records", "size", "steps"), [(120, 50, 12), (120, 30, 6), (7, 7, 3), (100, 33.3, 1)])
def test_epochs_share_out_all_steps(records: int, size: float, steps: int) -> None:
    epochs = Epochs(records=records, batch_size=size, steps=steps)
    ends = [epochs.end(epoch) for epoch in range(1, epochs.count + 1)]
    assert ends[-1] == steps and ends == sorted(set(ends))
    assert [step + 1 for step in range(steps) if epochs.complete(step + 1)] == ends
    assert all(abs(end - epoch * records / size) < 1 for epoch, end in enumerate(ends[:-1], start=1))


@pytest.mark.slow
def test_a_loop_over_epochs_takes_every_step_and_ends_with_the_last() -> None:
    run = small_runs.private(batch_size=50, steps=None, epochs=2.6)
    seen = []
    for epoch in run.epochs():
        length = len(epoch)
        before = run.steps_done
        for batch in epoch:
            run.step(batch)
        assert run.steps_done - before == length and len(epoch) == 0
        seen.append((epoch.number, run.steps_done))
    assert seen == [(1, 3), (2, 5), (3, 7)] and run.steps_done == run.steps
    assert len(run.batches()) == 0 and list(run.epochs()) == []


def test_batches_have_a_length() -> None:
    run = small_runs.private()
    batches = run.batches()
    assert len(batches) == 6
    run.step(next(batches))
    assert len(batches) == len(run.batches()) == 5


def test_a_loop_that_goes_on_in_the_middle_of_an_epoch_continues_it() -> None:
    run = small_runs.private()
    small_runs.finish(run, until=2)
    first = next(iter(run.epochs()))
    assert (first.number, len(first)) == (1, 2)


def test_an_epoch_that_is_left_early_is_an_error() -> None:
    run = small_runs.private()
    with pytest.raises(RuntimeError, match="epoch 1 has 3 steps left"):
        for epoch in run.epochs():
            for batch in epoch:
                run.step(batch)
                break


# --- what a run says of itself


def test_a_run_describes_itself_in_text_and_html() -> None:
    run = small_runs.finish(small_runs.private(seed=3), until=2)
    text, page = repr(run), run._repr_html_()
    for value in ("dp-pmlf", "2 of 6 done, 2 epochs", "of 2 spent", "30 of 120 records", "SGD, learning rate 0.5"):
        assert value in text and value in page
    assert "<script" not in page and page.count("<tr>") == text.count("\n")


# --- schedulers


def with_schedule(build: Any, **options: Any) -> pmlf.PrivateRun:
    model = small_runs.small()
    optimizer = SGD(model.parameters(), lr=1.0)
    return small_runs.private(model, optimizer=optimizer, scheduler=build(optimizer), **{"steps": 40, **options})


@pytest.mark.parametrize(
    "build",
    [
        lambda optimizer: StepLR(optimizer, 1, gamma=0.7),
        lambda optimizer: CosineAnnealingLR(optimizer, T_max=10),
        lambda optimizer: SequentialLR(
            optimizer, [LinearLR(optimizer, total_iters=2), StepLR(optimizer, 3, gamma=0.1)], milestones=[2]
        ),
    ],
)
def test_a_schedule_that_counts_epochs_is_told_that_it_counts_steps(build: Any) -> None:
    with pytest.warns(
        UserWarning, match=r"after every step of the run, not after every epoch.*scheduler_interval="
    ) as told:
        run = with_schedule(build)
    assert len(told) == 1 and told[0].filename == small_runs.__file__
    assert run.scheduler_interval == "step"
    assert [group["lr"] for group in run.optimizer.param_groups] == [
        build(SGD([torch.zeros(1)], lr=1.0)).get_last_lr()[0]
    ]


@pytest.mark.parametrize(
    "build",
    [
        lambda optimizer: CosineAnnealingLR(optimizer, T_max=40),
        lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=40, cycle_momentum=False),
        lambda optimizer: LinearLR(optimizer, total_iters=5),
        lambda optimizer: StepLR(optimizer, 15, gamma=0.3),
    ],
)
def test_a_schedule_that_counts_steps_is_left_alone(build: Any) -> None:
    assert with_schedule(build).scheduler_interval == "step"


def test_a_schedule_by_epochs_steps_once_an_epoch() -> None:
    run = with_schedule(lambda optimizer: StepLR(optimizer, 1, gamma=0.5), steps=6, scheduler_interval="epoch")
    rates = []
    for batch in run.batches():
        run.step(batch)
        rates.append(run.optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


def test_a_schedule_that_is_too_short_is_refused_before_the_first_step() -> None:
    with pytest.raises(ValueError, match="is called 40 times in this run and ends after 4: build it for 40 calls"):
        with_schedule(lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=4, cycle_momentum=False))
    with pytest.raises(ValueError, match='neither "step" nor "epoch"'):
        with_schedule(lambda optimizer: StepLR(optimizer, 1), scheduler_interval="batch")


# --- the page


def test_the_mnist_example_of_opacus_is_ported_with_at_most_twelve_new_or_changed_lines() -> None:
    theirs, ours = re.findall(r'```python title="\w+"\n(.*?)```', PAGE.read_text(), flags=re.DOTALL)
    changed = [line for line in difflib.ndiff(theirs.splitlines(), ours.splitlines()) if line.startswith("+ ")]
    assert "PrivacyEngine" in theirs and "PrivacyEngine" not in ours
    assert len(changed) <= 12
    assert len(changed) == 11 and "Eleven lines are new or changed" in PAGE.read_text()
