"""Parameters that no loss depends on: reported by name, from synthetic samples; right when a record reaches them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import pmlf
from pmlf.evidence import certificate, certificate_page
from reference import single_gradient, to_double

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0")
REPORTED = "no loss depends on"
CLIP_NORM = 0.5


class Branching(nn.Module):
    """Uses `extra`, a layer or a bare parameter, for records with a marker, which no synthetic sample has."""

    def __init__(self, *, bare: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.extra: nn.Module | nn.Parameter = nn.Parameter(torch.randn(5)) if bare else nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden, marked = self.body(x).tanh(), x[:, 0] > 2
        if bool(marked.any()):
            extra = hidden * self.extra if isinstance(self.extra, Tensor) else self.extra(hidden)
            hidden = torch.where(marked[:, None], 30.0 * extra, hidden)
        return self.head(hidden)


class Routed(nn.Module):
    """Experts in a list: records with a marker go to the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.experts[int(x[0, 0] > 2)](x)
        return found


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def records(*markers: float) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.rand(len(markers), 4)
    x[:, 0] = torch.tensor(markers)
    return x, torch.randint(3, (len(markers),))


def clipped_sum(model: nn.Module, loss_fn: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    exact, total = copy.deepcopy(model).double(), torch.zeros((), dtype=torch.float64)
    for single in zip(*(part.split(1) for part in batch), strict=True):
        v = torch.cat([part.flatten() for part in single_gradient(exact, loss_fn, to_double(single))])
        total = total + v * min(1.0, CLIP_NORM / float(v.norm()))
    return total


def released(step: pmlf.PrivateStep, batch: Any) -> Tensor:
    step.accumulate(batch)
    step.release()
    return torch.cat([p.grad.flatten().double() for p in step.trained if p.grad is not None])


def a_step(model: nn.Module, loss_fn: Any = classified, noise: float = 0.0, **options: Any) -> pmlf.PrivateStep:
    return pmlf.PrivateStep(
        model, loss_fn, method="dpsgd", clip_norm=CLIP_NORM, noise_multiplier=noise, expected_batch_size=1.0, **options
    )


WAYS: list[dict[str, Any]] = [{"assume_independent_samples": True}, {"gradients": "one-by-one"}]


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("bare", [True, False])
def test_a_record_that_reaches_a_reported_parameter_later_is_clipped_with_it(bare: bool, options: Any) -> None:
    model = Branching(bare=bare)
    step = a_step(model, **options)
    for number, batch in enumerate([records(0.5, 0.2, 0.9), records(0.5, 9.0, 0.1), records(9.0)]):
        wanted = clipped_sum(model, classified, batch)
        if number == 0:
            with pytest.warns(UserWarning, match=f"{REPORTED} 'extra"):
                found = released(step, batch)
        else:
            found = released(step, batch)  # reported once
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert float(wanted[-5:].norm()) > 0 and float(wanted.norm()) <= CLIP_NORM * (1 + 1e-6)


def test_the_report_is_the_same_whatever_the_first_records_are() -> None:
    """Otherwise the certificate would tell that no record of the first batch has the marker."""
    found = []
    for markers in ((0.5, 0.1), (9.0, 9.0), (9.0,)):
        step = a_step(Branching(bare=True), assume_independent_samples=True)
        with pytest.warns(UserWarning, match=REPORTED) as told:
            step.accumulate(records(*markers))
        found.append((step.first_look.unreached, [str(warning.message) for warning in told]))
    assert found == [found[0]] * 3 and found[0][0] == ("extra",)


def test_a_reported_parameter_gets_noise_of_the_same_scale_as_the_others() -> None:
    """Without noise, the first record that reaches it would be seen."""
    model = nn.ModuleDict({"used": nn.Linear(100, 100, bias=False), "unused": nn.Linear(100, 100, bias=False)})
    step = a_step(model, lambda model, x: model["used"](x).square().sum(1), noise=3.0)
    with pytest.warns(UserWarning, match=REPORTED):
        step.accumulate(torch.rand(2, 100))
    step.release()
    grad = model["unused"].weight.grad
    assert grad is not None and float(grad.std()) == pytest.approx(3.0 * CLIP_NORM, rel=0.05)


def test_an_expert_that_no_synthetic_sample_is_sent_to_is_not_reported() -> None:
    step = a_step(Routed(), gradients="one-by-one")
    step.accumulate(records(0.5, 9.0))  # a warning would be an error
    assert step.first_look.unreached == ()


@pytest.mark.slow
@pytest.mark.filterwarnings(f"ignore:{REPORTED}")
def test_a_wav2vec_whose_mask_embedding_nothing_reaches_is_right_and_its_certificate_names_it() -> None:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(1)
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20, conv_dim=(8, 8),
        conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, classifier_proj_size=8, num_labels=3, apply_spec_augment=False,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, layerdrop=0.0,
        final_dropout=0.0,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForSequenceClassification(config)

    def loss_fn(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).logits, batch[1], reduction="none")

    sounds, labels = torch.randn(30, 200), torch.randint(3, (30,))
    batch = sounds[:3], labels[:3]
    wanted = clipped_sum(model, loss_fn, batch)
    found = released(a_step(copy.deepcopy(model), loss_fn), batch)
    assert float((found - wanted).norm()) <= 1e-4 * float(wanted.norm())

    run = pmlf.make_private(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_fn, batch_size=10, steps=1,
        dataset=torch.utils.data.TensorDataset(sounds, labels), method="dpsgd", noise_multiplier=1.0, target_delta=1e-3,
    )  # fmt: skip
    for logical in run.batches():
        run.step(logical)
    document = run.certificate()
    assert document["unreached_parameters"] == ["wav2vec2.masked_spec_embed"]
    assert certificate.examined(document)[1] is None
    assert "wav2vec2.masked_spec_embed" in certificate_page.page(document)
