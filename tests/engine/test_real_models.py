"""Models that people train, against float64 autograd, one sample at a time: gradients, norms, and the path by name.

Every released sum is compared parameter by parameter. A sample's norm is read off the sum: over the reference's
gradients, which are linearly independent, the sum has one set of coefficients, and they are the clip factors.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from pmlf import PrivateStep, methods
from pmlf.checks.inspection import rules_used
from pmlf.engine.operations.rules import RULES as OPERATIONS
from real_models import REAL, Path

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "noise_multiplier=0",
        "no loss depends on",  # embeddings for masks, a norm behind a head
        ".torch.jit.script. is deprecated",  # DeBERTa scripts a function of its own
    )
]
transformers.logging.set_verbosity_error()

RELATIVE, OF_CLIP_NORM = 1e-4, 3e-6
MOST_ALIKE = 1e3  # condition of the samples' directions, beyond which lengths cannot be told apart
BETA = 0.5
RUNNING = [name for name, real in REAL.items() if real.path in ("rules", "autograd")]
OTHERS = [name for name, real in REAL.items() if real.path not in ("rules", "autograd")]
CHECKED = RUNNING[::5]  # with the proof and the watch too, which take longer than all the rest
LONG = RUNNING[1::8]
ORDERS = ([[0, 1, 2, 3]], [[0, 1, 2], [3]], [[3, 1], [2, 0]], [[2, 3, 0, 1]])  # samples of a release's micro-batches


def rows(batch: Any, chosen: Sequence[int]) -> Any:
    if isinstance(batch, dict):
        return {name: value[list(chosen)] for name, value in batch.items()}
    return tuple(value[list(chosen)] for value in batch)


def in_double(batch: Any) -> Any:
    def wide(value: Tensor) -> Tensor:
        return value.double() if value.is_floating_point() else value

    return {k: wide(v) for k, v in batch.items()} if isinstance(batch, dict) else tuple(wide(v) for v in batch)


class OneByOne:
    """v of every sample, in float64: gradients at the last k iterates, weighted by powers of beta that add up to 1."""

    def __init__(self, model: nn.Module, loss_fn: Any, batch: Any, k: int) -> None:
        self._model, self._loss_fn = copy.deepcopy(model).double(), loss_fn
        if isinstance(self._model, transformers.PreTrainedModel):
            self._model.set_experts_implementation("eager")  # grouped products have no float64
        self._batch, self._k = in_double(batch), k
        self._iterates: list[list[Tensor]] = []

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self._model.parameters() if p.requires_grad]

    def momenta(self, iterate: Sequence[Tensor], samples: int) -> Tensor:
        """(samples, parameters), at one more iterate."""
        self._iterates = [[p.detach().double() for p in iterate], *self._iterates][: self._k]
        weights = [BETA**j for j in range(len(self._iterates))]
        found = torch.zeros(samples, sum(p.numel() for p in self.trained), dtype=torch.float64)
        for weight, values in zip(weights, self._iterates, strict=True):
            with torch.no_grad():
                for parameter, value in zip(self.trained, values, strict=True):
                    parameter.copy_(value)
            for i in range(samples):
                loss = self._loss_fn(self._model, rows(self._batch, [i])).sum()
                grads = torch.autograd.grad(loss, self.trained, allow_unused=True, materialize_grads=True)
                found[i] += weight / sum(weights) * torch.cat([g.flatten() for g in grads])
        return found


def compare(
    name: str, *, k: int, releases: int = 3, clipped: int = 2, assumed: bool = True, gradients: str = "ghost"
) -> None:
    """The first release is at one point, whatever k is. So many of four samples are clipped at first: their norms show,
    and the lengths of the others."""
    model, loss_fn, batch = REAL[name].made()
    reference = OneByOne(model, loss_fn, batch, k)
    v = reference.momenta([p for p in model.parameters() if p.requires_grad], 4)
    clip_norm = float(v.norm(dim=1).sort(descending=True).values[clipped - 1 : clipped + 1].mean())
    step = PrivateStep(
        model, loss_fn, method=methods.dp_pmlf_without_lf(k=k, beta=BETA), clip_norm=clip_norm, noise_multiplier=0.0,
        expected_batch_size=2.0, assume_independent_samples=assumed, gradients=gradients,  # type: ignore[arg-type]
    )  # fmt: skip
    for t in range(releases):
        for chosen in ORDERS[t]:
            step.accumulate(rows(batch, chosen))
        step.release()
        v = v if t == 0 else reference.momenta(step.trained, 4)
        factors = (clip_norm / v.norm(dim=1)).clamp(max=1.0)
        ours = [2.0 * p.grad.double() for p in step.trained if p.grad is not None]
        wanted = (factors[:, None] * v).sum(0).split([p.numel() for p in step.trained])
        for parameter, found, expected in zip(names_of(model), ours, wanted, strict=True):
            off = float((found.flatten() - expected).norm())
            assert off <= RELATIVE * float(expected.norm()) + OF_CLIP_NORM * clip_norm, f"{parameter}, release {t}"
        units = v / v.norm(dim=1, keepdim=True)
        if float(torch.linalg.cond(units)) <= MOST_ALIKE:  # otherwise several have one gradient, and their sum is all
            summed = torch.cat([found.flatten() for found in ours])[:, None]
            lengths = torch.linalg.lstsq(units.T, summed).solution[:, 0]
            assert torch.allclose(lengths, factors * v.norm(dim=1), rtol=RELATIVE, atol=0.0), f"norms, release {t}"
        with torch.no_grad():
            for parameter in step.trained:
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.2 / clip_norm)


def names_of(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def path_of(name: str) -> Path:
    """How the engine takes a model today: every operation that uses a parameter has a rule, or some have none."""
    model, loss_fn, batch = REAL[name].made()
    operations = {each for rule in rules_used(model, loss_fn, batch).values() for each in rule.split(", ")}
    unknown = {each for each in operations if each not in RULES and not each.startswith("autograd of ")}
    assert not unknown, f"{name} is taken by {unknown}, which no list here knows"
    return "autograd" if operations - RULES else "rules"


RULES = {
    "transposed linear", "convolution", "layer norm", "rms norm", "group norm", "instance norm",  # of layers
    "recurrent", "expand", "unreached", *OPERATIONS,
}  # fmt: skip


def test_the_zoo_is_large() -> None:
    assert len(REAL) >= 80


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNING)
def test_a_real_model_has_the_reference_s_gradients_and_norms(name: str) -> None:
    assert path_of(name) == REAL[name].path
    compare(name, k=2, clipped=3)


def test_a_tied_embedding_that_its_own_class_scales_is_taken_by_rules() -> None:
    model, loss_fn, batch = REAL["Gemma 3"].made()
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    assert type(embedding) is not nn.Embedding and embedding.weight is model.lm_head.weight  # type: ignore[union-attr]
    assert rules_used(model, loss_fn, batch)["model.embed_tokens.weight"] == "embedding, linear"


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_a_real_model_is_accepted_and_right_with_its_samples_checked(name: str) -> None:
    compare(name, k=2, releases=2, assumed=False)  # at one point, then at two


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_a_real_model_is_right_at_four_points(name: str) -> None:
    compare(name, k=4, releases=4)


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_rules_do_not_take_is_refused_and_right_one_by_one(name: str) -> None:
    """Once the engine takes one of these, its path in `real_models` changes."""
    expected = ValueError if REAL[name].path == "refused" else RuntimeError
    model, loss_fn, batch = REAL[name].made()
    try:
        step = PrivateStep(model, loss_fn, noise_multiplier=0.0, expected_batch_size=4.0)
        step.accumulate(rows(batch, [0, 1, 2]))  # three, so that no table of four or eight rows looks like samples
    except expected:
        pass
    else:
        pytest.fail(f"{name} is {REAL[name].path!r} in tests/real_models.py, and runs now: it is {path_of(name)!r}")
    compare(name, k=2, gradients="one-by-one")
