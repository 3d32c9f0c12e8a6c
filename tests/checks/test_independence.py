"""The proof of independence: what it must prove, and what it must never prove."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import zoo
from pmlf import PrivateStep
from pmlf.checks.finding import PROVEN, Finding
from pmlf.checks.independence import prove
from pmlf.engine.plan import Plan
from pmlf.models import resnet

Loss = Callable[[Any, Any], Tensor]
N, WIDTH = 12, 6


def finding(model: nn.Module, loss: Loss, batch: Any, *, training: bool = True) -> Finding:
    model.train(training)
    return prove(model, Plan.of(model), loss, batch)


def small_batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, WIDTH, generator=generator), torch.randint(zoo.LABELS, (N,), generator=generator)


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, zoo.LABELS))


def classified(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


# What must be proven


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(zoo.CASES))
def test_the_zoo_is_proven(name: str) -> None:
    case = zoo.CASES[name]
    assert finding(zoo.make(name), case.loss, case.batch(N)) == PROVEN


_TEXT: dict[str, Any] = {
    "vocab_size": zoo.VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}
_IMAGES: dict[str, Any] = {"num_labels": zoo.LABELS}


def _gpt2(**also: Any) -> Any:
    return hf.GPT2Config(
        vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=40, bos_token_id=0, eos_token_id=0, **also
    )


_MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bert": (lambda: hf.BertForSequenceClassification(hf.BertConfig(num_labels=4, **_TEXT)), "text"),
    "minilm": (lambda: hf.BertModel(hf.BertConfig(**{**_TEXT, "num_hidden_layers": 3})), "pooled"),
    "roberta": (lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(num_labels=4, **_TEXT)), "text"),
    "gpt2": (lambda: hf.GPT2LMHeadModel(_gpt2()), "next"),
    "gpt2-classifier": (lambda: hf.GPT2ForSequenceClassification(_gpt2(num_labels=4, pad_token_id=1)), "text"),
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=1, **_TEXT)), "next"),
    "vit": (
        lambda: hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=16,
                patch_size=8, **_IMAGES,
            )
        ),
        "image",
    ),
    "convnext": (
        lambda: hf.ConvNextForImageClassification(
            hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, drop_path_rate=0.2, **_IMAGES)
        ),
        "image",
    ),
}  # fmt: skip


def _pooled(model: Any, batch: Any) -> Tensor:
    hidden = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return ((hidden * mask).sum(1) / mask.sum(1)).square().sum(1)


def _next(model: Any, batch: Any) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    losses = F.cross_entropy(logits[:, :-1].mT, batch["input_ids"][:, 1:], reduction="none")
    return (losses * batch["attention_mask"][:, 1:]).sum(1) / batch["attention_mask"][:, 1:].sum(1)


def _image(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).logits, batch[1], reduction="none")


_LOSSES: dict[str, Loss] = {"text": zoo.classify_text, "pooled": _pooled, "next": _next, "image": _image}


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", sorted(_MODELS))
def test_models_of_transformers_with_masks_and_dropout_are_proven(name: str, training: bool) -> None:
    make, kind = _MODELS[name]
    batch = zoo.images(3, 16, 16)(N) if kind == "image" else zoo.token_batch(N)
    assert finding(make(), _LOSSES[kind], batch, training=training) == PROVEN


@pytest.mark.slow
def test_low_rank_adapters_are_proven() -> None:
    peft = pytest.importorskip("peft")
    model = hf.RobertaForSequenceClassification(hf.RobertaConfig(num_labels=4, **_TEXT))
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))
    assert finding(adapted, zoo.classify_text, zoo.token_batch(N)) == PROVEN


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.bottom = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.up = nn.Upsample(scale_factor=2)
        self.out = nn.Conv2d(12, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.silu(self.norm(self.down(x)))
        return self.out(torch.cat([self.up(F.silu(self.bottom(skip))), skip], 1))


def test_a_u_net_is_proven() -> None:
    batch = zoo.images(2, 8, 8)(N)
    assert finding(UNet(), lambda m, b: (m(b[0]) - b[0]).square().mean((1, 2, 3)), batch) == PROVEN


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(0.7) / 0.7 if self.training else x


def test_randomness_of_each_sample_is_proven() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 8), DropPath(), nn.Dropout(0.3), nn.Linear(8, zoo.LABELS))
    assert finding(model, lambda m, b: classified(m, (F.dropout(b[0]), b[1])), small_batch()) == PROVEN


def test_own_rows_looked_up_by_number_are_proven() -> None:
    def picked(model: nn.Module, batch: Any) -> Tensor:
        return -model(batch[0]).log_softmax(1)[torch.arange(len(batch[0])), batch[1]]

    assert finding(small_model(), picked, small_batch()) == PROVEN


def test_own_rows_looked_up_beside_a_fixed_place_are_proven() -> None:
    """As in a conditional random field: the score of the label of a token."""

    def scored(model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch[0]).unsqueeze(1)
        return -scores.log_softmax(2)[torch.arange(len(scores)), 0, batch[1]]

    assert finding(small_model(), scored, small_batch()) == PROVEN


def test_a_distribution_that_looks_at_its_arguments_is_proven() -> None:
    def likelihood(model: nn.Module, batch: Any) -> Tensor:
        return -torch.distributions.Categorical(logits=model(batch[0])).log_prob(batch[1])

    assert finding(small_model(), likelihood, small_batch()) == PROVEN


class Recurrent(nn.Module):
    """The recurrent layer is frozen: its parameters have no rule yet, what flows through it has."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Linear(3, 4)
        self.recurrent = kind(4, 5, batch_first=True).requires_grad_(False)
        self.head = nn.Linear(5, zoo.LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(x))[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_proven(kind: type[nn.RNNBase]) -> None:
    x, y = small_batch()
    assert finding(Recurrent(kind), classified, (x.view(N, 2, 3), y)) == PROVEN


# What must never be proven: each is the loss or the model, given a small batch


class Through(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, zoo.LABELS)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def _batch_norm(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt()


def _sorted_run_put_back(x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return (x[order] * torch.linspace(0.5, 1.5, len(x)).unsqueeze(1))[order.argsort()]


def _experts_with_capacity(x: Tensor) -> Tensor:
    chosen = x[:, :2].argmax(1)
    place = F.one_hot(chosen, 2).cumsum(0).gather(1, chosen.unsqueeze(1))
    return torch.where(place <= 3, 2 * x, x)


def _attention_over_the_batch(x: Tensor) -> Tensor:
    return (x @ x.mT).softmax(1) @ x


_MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "batch norm by hand": _batch_norm,
    "batch centring": lambda x: x - x.mean(0, keepdim=True),
    "sort, run, put back": _sorted_run_put_back,
    "experts with capacity": _experts_with_capacity,
    "attention over the batch": _attention_over_the_batch,
    "softmax over the batch": lambda x: x.softmax(0),
    "cumulative sum": lambda x: x.cumsum(0),
    "shifted by one sample": lambda x: torch.cat([x[1:], x[:1]]),
    "rolled": lambda x: x.roll(1, 0),
    "flipped": lambda x: x + x.flip(0),
    "mixup": lambda x: 0.7 * x + 0.3 * x[torch.randperm(len(x))],
    "compared with the largest": lambda x: x / x.abs().amax(),
    "top of the batch": lambda x: x * (x >= x.topk(2, 0).values[-1]),
}


@pytest.mark.parametrize("name", sorted(_MIXING))
def test_models_that_mix_samples_are_refused_by_the_proof_with_the_operation_and_its_line(name: str) -> None:
    found = finding(Through(_MIXING[name]), classified, small_batch())
    assert not found.proven and found.samples_meet, found
    assert "test_independence.py, line" in (found.reason or "") and "aten." in (found.reason or "")


def _class_weights(model: nn.Module, batch: Any) -> Tensor:
    weights = len(batch[1]) / F.one_hot(batch[1], zoo.LABELS).sum(0).clamp(min=1)
    return F.cross_entropy(model(batch[0]), batch[1], weight=weights, reduction="none")


def _contrastive(model: nn.Module, batch: Any) -> Tensor:
    z = F.normalize(model(batch[0]))
    return F.cross_entropy(z @ z.mT, torch.arange(len(z)), reduction="none")


def _normalised_by_positives(model: nn.Module, batch: Any) -> Tensor:
    return classified(model, batch) / (batch[1] > 0).sum().clamp(min=1)


def _clean(model: nn.Module, batch: Any) -> Tensor:
    if (batch[0] > 2).any():
        return 2 * classified(model, batch)
    return classified(model, batch)


_MIXING_LOSSES: dict[str, Loss] = {
    "class weights of the batch": _class_weights,
    "contrastive": _contrastive,
    "divided by the positives": _normalised_by_positives,
    "divided by a count that is read": lambda m, b: classified(m, b) / (b[0] > 0).sum().item(),
    "a branch on all samples": _clean,
    "cut to the longest": lambda m, b: classified(m, (b[0] * (torch.arange(WIDTH) < int(b[1].max()) + 2), b[1])),
    "values by tolist": lambda m, b: classified(m, b) * sum(b[1].tolist()),
    "values by numpy": lambda m, b: classified(m, b) * float(b[1].numpy().sum()),
    "equal": lambda m, b: classified(m, b) * (2.0 if torch.equal(b[0], b[0].abs()) else 1.0),
}


@pytest.mark.parametrize("name", sorted(_MIXING_LOSSES))
def test_losses_that_mix_samples_are_refused_by_the_proof(name: str) -> None:
    found = finding(small_model(), _MIXING_LOSSES[name], small_batch())
    assert not found.proven and found.samples_meet, found
    assert "test_independence.py, line" in (found.reason or "")


def test_similarities_of_all_samples_that_the_loss_does_not_use_are_no_fault() -> None:
    """As in CLIP, which returns them beside each image's own features."""

    def alone(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        alike = (z @ z.mT * 2.0).softmax(-1)
        assert alike.t().shape == (len(z), len(z)) and len(list(alike)) == len(z)
        return F.cross_entropy(z, batch[1], reduction="none")

    assert finding(small_model(), alone, small_batch()) == PROVEN


def _written(z: Tensor, alike: Tensor) -> Tensor:
    out = torch.zeros_like(z)
    out[:] = alike.mean(1, keepdim=True)
    return out


def _added(z: Tensor, alike: Tensor) -> Tensor:
    z += alike.mean(1, keepdim=True)
    return z


def _replaced(z: Tensor, alike: Tensor) -> Tensor:
    other = z.detach().clone()
    other.data = alike.mean(1, keepdim=True).expand_as(z)
    return z + other


_KEPT: list[Tensor] = []


def _kept(z: Tensor, alike: Tensor) -> Tensor:
    _KEPT[:] = [alike.mean(1, keepdim=True)]
    return z


def _caught(z: Tensor, alike: Tensor) -> Tensor:
    try:
        return z * (2.0 if float(alike.mean()) > 1e6 else 1.0)  # at a loss that no sample of the proof has
    except Exception:
        return z


_HIDDEN_MIXING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "compared": lambda z, alike: torch.where(alike.amax(1, keepdim=True) > 0, z, -z),
    "numbers that are no numbers left out": lambda z, alike: z + alike.mean(1, keepdim=True).nan_to_num(0.0),
    "written": _written,
    "added in place": _added,
    "put in place of another": _replaced,
    "read": lambda z, alike: z * (1.0 if float(alike.mean()) > 0 else 2.0),
    "branched on": lambda z, alike: z if alike.mean() > 0 else 2 * z,
    "kept for the next batch": _kept,
    "read, with a way out for what a proof raises": _caught,
    "looked up by": lambda z, alike: z * z.new_tensor([1.0, 2.0])[(alike.mean(1) > 0).long()].unsqueeze(1),
}


@pytest.mark.parametrize("name", sorted(_HIDDEN_MIXING))
def test_similarities_of_all_samples_that_reach_the_loss_in_any_way_are_refused(name: str) -> None:
    def mixed(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        return F.cross_entropy(_HIDDEN_MIXING[name](z, z @ z.mT), batch[1], reduction="none")

    found = finding(small_model(), mixed, small_batch())
    assert not found.proven and found.samples_meet, found


class Counted(nn.Module):
    """Mixes from its third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, zoo.LABELS)
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return self.layer(x)


class Standardised(nn.Module):
    """Remembers the mean of the first batch in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, zoo.LABELS)
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return self.layer(x - self.mean)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0)


def _randomly_mixed(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0] - batch[0].mean(0) if torch.rand(()) > 0.9 else batch[0]
    return classified(model, (x, batch[1]))


def _python_random(model: nn.Module, batch: Any) -> Tensor:
    return classified(model, batch) * (1.0 + (random.random() > 2.0))


def _numpy_random(model: nn.Module, batch: Any) -> Tensor:
    return classified(model, batch) * (1.0 + (np.random.rand() > 2.0))


_UNKNOWN_LOSSES: dict[str, Loss] = {
    "divided by the number of samples": lambda m, b: classified(m, b) / len(b[0]),
    "weighted by the place in the batch": lambda m, b: classified(m, b) * torch.arange(len(b[0])),
    "values by repr": lambda m, b: classified(m, b) * len(str(b[0])),
    "a branch on randomness": _randomly_mixed,
    "Python's generator": _python_random,
    "NumPy's generator": _numpy_random,
}


@pytest.mark.parametrize("name", sorted(_UNKNOWN_LOSSES))
def test_losses_outside_the_proof_are_not_proven(name: str) -> None:
    assert not finding(small_model(), _UNKNOWN_LOSSES[name], small_batch()).proven


@pytest.mark.parametrize(
    "model",
    [
        Through(Halved.apply),
        Counted(),
        Standardised(),
        Through(lambda x: x.reshape(4, len(x), 2).permute(1, 0, 2).flatten(1)),
        Through(lambda x: torch.zeros_like(x).masked_scatter(x > 0, x[x > 0].sort().values)),
    ],
    ids=["own backward", "a counter", "the first batch's mean", "another shape", "rows picked by a mask"],
)
def test_models_outside_the_proof_are_not_proven(model: nn.Module) -> None:
    assert not finding(model, classified, small_batch()).proven


def test_hooks_on_gradients_are_not_proven() -> None:
    by_parameter, by_module = small_model(), small_model()
    next(by_parameter.parameters()).register_hook(lambda grad: grad - grad.mean(0))
    by_module[0].register_full_backward_hook(lambda module, given, taken: None)
    for model in (by_parameter, by_module):
        assert not finding(model, classified, small_batch()).proven


class Prompted(nn.Module):
    """A bare parameter of leading size 1, used as `use` says."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(1, WIDTH))
        self.layer = nn.Linear(WIDTH, zoo.LABELS)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.use(x, self.prompt))


def test_a_bare_parameter_is_proven_where_no_sample_meets_another() -> None:
    for use in (lambda x, p: x + p, lambda x, p: x + p[0], lambda x, p: x + p.mean(0)):
        assert finding(Prompted(use), classified, small_batch()).proven
    assert not finding(Prompted(lambda x, p: x + p * x.mean(0)), classified, small_batch()).proven


def test_the_model_and_the_generators_are_left_as_they_were() -> None:
    model, batch = Standardised(), small_batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.random.get_rng_state(), random.getstate()
    finding(model, lambda m, b: classified(m, (F.dropout(b[0]), b[1])), batch)
    assert model.mean is None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(states[0], torch.random.get_rng_state()) and states[1] == random.getstate()
    assert all(p.grad is None for p in model.parameters())
    assert not torch.distributed.is_initialized()


def test_fused_attention_is_proven_by_its_formula() -> None:
    def attention(x: Tensor) -> Tensor:
        heads = x.view(len(x), 1, 2, 4)
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(heads, heads, heads).flatten(1)

    assert finding(Through(attention), classified, small_batch()) == PROVEN


@pytest.mark.slow
def test_the_resnet_of_the_paper_is_proven() -> None:
    model = resnet.ResNet((2, 2), 8, 3, zoo.LABELS)
    assert finding(model, classified, zoo.images(3, 8, 8)(N)) == PROVEN


@pytest.mark.slow
def test_attention_that_joins_tokens_and_samples_in_one_axis_is_proven() -> None:
    """`nn.MultiheadAttention` puts the first token of every sample before the second of each."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.attention(x, x, x, need_weights=False)[0]
            return found.square().mean((1, 2))

    step = PrivateStep(
        Attends(), lambda model, x: model(x), method="dpsgd", noise_multiplier=1.0, expected_batch_size=4
    )
    step.accumulate(torch.randn(4, 6, 8))
    assert step.independence is not None and step.independence.proven
