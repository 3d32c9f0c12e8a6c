"""Per-sample gradients at operations against autograd in float64, one sample at a time: every rule, every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmlf
from pmlf.engine.anatomy import Anatomy
from pmlf.engine.factors import Factors
from pmlf.engine.layers import UnsupportedModel
from pmlf.engine.operations.capture import taken_at_operations
from pmlf.engine.operations.layouts import Learned
from pmlf.engine.operations.looking import operations_of
from pmlf.engine.passes import Pass, Rows
from pmlf.engine.plan import Plan
from reference import single_gradient

N, T, D = 5, 4, 6
Function = Callable[[Any, Tensor], Tensor]


class Bare(nn.Module):
    """Parameters by shape, and what is done with them and (n, T, D) samples."""

    def __init__(self, function: Function, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(3)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=chance, dtype=torch.float64)))
        self.register_buffer("places", torch.arange(T))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def numbers(x: Tensor) -> Tensor:
    """A number from 0 to 6 for every token."""
    return (x[..., 0].abs() * 5).long() % 7


def picked_rows(m: Any, x: Tensor) -> Tensor:
    chosen = (x[..., 0] > 0).nonzero()
    found = F.linear(x[chosen[:, 0], chosen[:, 1]], m.w)
    return x.new_zeros(len(x), m.w.shape[0]).index_add(0, chosen[:, 0], found.tanh())


def written(m: Any, x: Tensor) -> Tensor:
    out = x.new_zeros(len(x), T + 1, D)
    out[:, :1] = m.w
    out[:, 1:] = x
    return out.tanh()


def masked(m: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x[x[..., 0] > 0] = m.w
    return x.sin()


def experts(m: Any, x: Tensor) -> Tensor:
    """Each token by one of three matrices."""
    flat = x.reshape(-1, D)
    chosen = (flat[:, 0] * 3).long().abs() % 3
    out = torch.zeros_like(flat)
    for number in chosen.unique():
        rows = (chosen == number).nonzero()[:, 0]
        out = out.index_add(0, rows, F.linear(flat[rows], m.w[number]).tanh())
    return out.reshape(x.shape)


def weight_normed(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.g * m.w / m.w.norm(dim=1, keepdim=True))


def relative(m: Any, x: Tensor) -> Tensor:
    apart = m.places[:, None] - m.places + T
    return (x @ x.mT + F.embedding(apart, m.w).squeeze(-1)).softmax(-1) @ x


def joined(m: Any, x: Tensor) -> Tensor:
    q, k, v = F.linear(x, torch.cat([m.q, m.k, m.v])).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v)


def attended(m: Any, x: Tensor) -> Tensor:
    return F.multi_head_attention_forward(
        *[x.transpose(0, 1)] * 3, D, 2, m.w, m.b, None, None, False, 0.0, m.o, m.c, need_weights=False
    )[0].transpose(0, 1)


def in_place(m: Any, x: Tensor) -> Tensor:
    found = F.linear(x, m.w)
    found += m.b
    found.mul_(m.b)
    return found.relu_()


def checkpointed(m: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda y: F.linear(y, m.w).tanh() * m.b, x.requires_grad_(), use_reentrant=False)


def by_image(function: Callable[[Any, Tensor], Tensor]) -> Function:
    return lambda m, x: function(m, x.reshape(-1, 2, 3, 4))


def looked_up_by_rows(m: Any, x: Tensor) -> Tensor:
    return x + F.embedding(m.places.expand(len(x), T), m.w)


def in_frequencies(function: Callable[[Tensor, Tensor], Tensor]) -> Function:
    return lambda m, x: torch.fft.irfft(function(torch.fft.rfft(x), torch.view_as_complex(m.w)))


SQUARE, ROW = (D, D), (D,)
CASES: dict[str, tuple[Function, dict[str, tuple[int, ...]]]] = {
    "linear": (lambda m, x: F.linear(x, m.w, m.b), {"w": (3, D), "b": (3,)}),
    "linear, batch second": (lambda m, x: F.linear(x.transpose(0, 1), m.w).tanh().transpose(0, 1), {"w": SQUARE}),
    "linear, batch minor": (
        lambda m, x: F.linear(x.transpose(0, 1).reshape(-1, D), m.w).tanh().reshape(T, -1, D).transpose(0, 1),
        {"w": SQUARE},
    ),
    "linear on picked rows": (picked_rows, {"w": (3, D)}),
    "linear of a transpose": (lambda m, x: F.linear(x, m.w.t()), {"w": (D, 3)}),
    "linear of rows": (lambda m, x: F.linear(F.linear(x, m.w[2:8]), m.w[:3]), {"w": (9, D)}),
    "linear of a matrix among others": (lambda m, x: F.linear(x, m.w[1]), {"w": (3, 2, D)}),
    "linear of other matrices joined": (joined, {"q": SQUARE, "k": SQUARE, "v": SQUARE}),
    "linear of a normalised weight": (weight_normed, {"w": (3, D), "g": (3, 1)}),
    "tied": (lambda m, x: F.linear(F.embedding(numbers(x), m.w).tanh(), m.w), {"w": (7, D)}),
    "tied, as another shape": (
        lambda m, x: F.linear(x, m.w).sum(-1) + F.conv1d(x.mT, m.w.reshape(D, D, 1)).sum(1),
        {"w": SQUARE},
    ),
    "matmul": (lambda m, x: x @ m.w, {"w": (D, 3)}),
    "weight first": (lambda m, x: m.w @ x, {"w": (3, T)}),
    "vector": (lambda m, x: x @ m.w, {"w": ROW}),
    "vector first": (lambda m, x: m.w @ x, {"w": (T,)}),
    "mv": (lambda m, x: torch.mv(x.reshape(-1, D), m.w).view(len(x), T), {"w": ROW}),
    "inner": (lambda m, x: torch.inner(x, m.w), {"w": (3, D)}),
    "outer": (lambda m, x: torch.outer(x[:, 0, 0], m.w).tanh(), {"w": ROW}),
    "tensordot": (lambda m, x: torch.tensordot(x, m.w, dims=([2, 1], [0, 2])), {"w": (D, 3, T)}),
    "addmm": (lambda m, x: torch.addmm(m.b, x.reshape(-1, D), m.w).view(len(x), -1), {"w": (D, 3), "b": (3,)}),
    "batched matrices": (lambda m, x: x[:, None] @ m.w, {"w": (2, D, 3)}),
    "bmm of repeated": (lambda m, x: torch.bmm(x, m.w.repeat(len(x), 1, 1).mT), {"w": (1, 3, D)}),
    "einsum": (lambda m, x: torch.einsum("ntd,dhk->nhtk", x, m.w), {"w": (D, 2, 3)}),
    "einsum, a vector a head": (lambda m, x: torch.einsum("nthk,hk->nth", x.reshape(-1, T, 2, 3), m.w), {"w": (2, 3)}),
    "einsum, other axes": (lambda m, x: torch.einsum("...d,hd->...h", x, m.w), {"w": (3, D)}),
    "einsum, output left out": (lambda m, x: torch.einsum("ntd,dh", x, m.w).movedim(0, -1), {"w": (D, 3)}),
    "einsum of three": (lambda m, x: torch.einsum("ntd,nsd,dh->ntsh", x, x.sin(), m.w), {"w": (D, 3)}),
    "bilinear": (lambda m, x: F.bilinear(x, x.sin(), m.w, m.b), {"w": (3, D, D), "b": (3,)}),
    "embedding": (lambda m, x: F.embedding(numbers(x), m.w, padding_idx=2), {"w": (7, 3)}),
    "embedding by index": (lambda m, x: m.w[numbers(x)], {"w": (7, 3)}),
    "embedding by two indices": (
        lambda m, x: m.w[numbers(x)[:, 1:], numbers(x)[:, :-1] % 3],
        {"w": (7, 3, 2)},
    ),
    "embedding of a later axis": (lambda m, x: m.w[:, numbers(x)].movedim(0, -1), {"w": (2, 7, 3)}),
    "positions by index": (lambda m, x: m.w[:, numbers(x)[:, 0]].squeeze(0), {"w": (1, 7, 3)}),
    "index select": (lambda m, x: m.w.index_select(1, numbers(x)[:, 0]).mT, {"w": (3, 7)}),
    "embedding bag": (lambda m, x: F.embedding_bag(numbers(x), m.w, mode="mean"), {"w": (7, 3)}),
    "positions": (lambda m, x: (x + m.w[m.places]).tanh(), {"w": (9, D)}),
    "positions for every sample": (looked_up_by_rows, {"w": (9, D)}),
    "relative positions": (relative, {"w": (2 * T, 1)}),
    "positions in the samples' precision": (
        lambda m, x: x + F.linear(m.places.to(x).unsqueeze(1), m.w),
        {"w": (D, 1)},
    ),
    "broadcast": (lambda m, x: torch.stack(torch.broadcast_tensors(x, m.w.exp())).prod(0).tanh(), {"w": ROW}),
    "class token": (lambda m, x: torch.cat([m.w.expand(len(x), -1, -1), x], 1).tanh(), {"w": (1, 1, D)}),
    "queries": (lambda m, x: F.scaled_dot_product_attention(m.w.expand(len(x), 3, D), x, x), {"w": (3, D)}),
    "mask of attention": (lambda m, x: F.scaled_dot_product_attention(x, x, x, m.w), {"w": (1, T, T)}),
    "scale": (lambda m, x: (x * m.w).tanh(), {"w": ROW}),
    "scale of two axes": (lambda m, x: x[:, None] * m.w, {"w": (2, 1, D)}),
    "one number": (lambda m, x: x * m.w.exp(), {"w": ()}),
    "scale of a number a sample": (lambda m, x: x.sum((1, 2)) * m.w.exp(), {"w": ()}),
    "divided": (lambda m, x: x / (m.w.abs() + 1), {"w": ROW}),
    "power": (lambda m, x: x.abs() ** m.w.abs(), {"w": ROW}),
    "cosine similarity": (lambda m, x: F.cosine_similarity(x.unsqueeze(-2), m.w, dim=-1), {"w": (3, D)}),
    "clamped": (lambda m, x: x.clamp(min=m.w), {"w": ROW}),
    "the larger one": (lambda m, x: torch.max(x, m.w), {"w": ROW}),
    "log of a sum": (lambda m, x: torch.logaddexp(x, m.w), {"w": ROW}),
    "complex scale": (in_frequencies(lambda f, w: f * w), {"w": (T, D // 2 + 1, 2)}),
    "complex quotient": (in_frequencies(lambda f, w: f / w), {"w": (T, D // 2 + 1, 2)}),
    "complex matrix": (in_frequencies(lambda f, w: f @ w), {"w": (D // 2 + 1, D // 2 + 1, 2)}),
    "complex einsum": (
        in_frequencies(lambda f, w: torch.einsum("ntf,tfg->ntg", f, w)),
        {"w": (T, D // 2 + 1, D // 2 + 1, 2)},
    ),
    "complex view of a like shape": (lambda m, x: (x[:, :2, 0] * torch.view_as_complex(m.w)).abs(), {"w": (2, 2)}),
    "real scale of complex numbers": (lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * m.w), {"w": (D // 2 + 1,)}),
    "where": (lambda m, x: torch.where(x > 0, x, m.w), {"w": ROW}),
    "written into zeros": (written, {"w": (1, D)}),
    "written where a mask says": (masked, {"w": ROW}),
    "prelu": (lambda m, x: F.prelu(x.mT, m.w), {"w": ROW}),
    "layer norm": (lambda m, x: F.layer_norm(x, (D,), m.w, m.b), {"w": ROW, "b": ROW}),
    "rms norm": (lambda m, x: F.rms_norm(x, (D,), m.w), {"w": ROW}),
    "rms norm by hand": (lambda m, x: x * torch.rsqrt(x.square().mean(-1, True) + 1e-6) * (1 + m.w), {"w": ROW}),
    "group norm": (lambda m, x: F.group_norm(x.mT, 2, m.w, m.b), {"w": ROW, "b": ROW}),
    "instance norm": (lambda m, x: F.instance_norm(x.mT, weight=m.w, bias=m.b), {"w": ROW, "b": ROW}),
    "convolution": (by_image(lambda m, x: F.conv2d(x, m.w, m.b, padding=1)), {"w": (3, 2, 2, 2), "b": (3,)}),
    "convolution, same": (by_image(lambda m, x: F.conv2d(x, m.w, padding="same", dilation=2)), {"w": (3, 2, 2, 3)}),
    "convolution by channel": (lambda m, x: F.conv1d(x.mT, m.w, m.b, groups=D), {"w": (D, 1, 3), "b": ROW}),
    "transposed convolution": (
        by_image(lambda m, x: F.conv_transpose2d(x, m.w, m.b, stride=2, padding=1, output_padding=1)),
        {"w": (2, 3, 3, 3), "b": (3,)},
    ),
    "transposed convolution in groups": (
        by_image(lambda m, x: F.conv_transpose2d(x, m.w, groups=2, dilation=2)),
        {"w": (2, 2, 2, 2)},
    ),
    "standardised convolution": (
        by_image(lambda m, x: F.conv2d(x, (m.w - m.w.mean((1, 2, 3), True)) / m.w.std((1, 2, 3), keepdim=True))),
        {"w": (3, 2, 2, 2)},
    ),
    "attention of torch": (attended, {"w": (3 * D, D), "b": (3 * D,), "o": SQUARE, "c": ROW}),
    "in place": (in_place, {"w": SQUARE, "b": ROW}),
    "checkpointed": (checkpointed, {"w": SQUARE, "b": ROW}),
    "experts": (experts, {"w": (3, D, D)}),
    "penalty": (lambda m, x: (x @ m.w).square() + m.w.square().sum(), {"w": ROW}),
}


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    found: Tensor = model(batch[0])
    return found.square().flatten(1).sum(1) if found.ndim > 1 else found.sin()


def samples(count: int = N) -> tuple[Tensor]:
    return (torch.randn(count, T, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64),)


def taken(
    model: nn.Module, batch: Any, count: int, rows: Rows = "marked", plan: Plan | None = None
) -> dict[str, Tensor]:
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    plan = plan or Plan(parameters=tuple(values), learned=Learned(by_operations=True))
    found: dict[str, Tensor] = {}
    for name, part in taken_at_operations(Pass(Anatomy(model), plan, loss, values, batch, count, 0.5, rows)):
        whole = (part.formed() if isinstance(part, Factors) else part).reshape(count, *values[name].shape)
        found[name] = found[name] + whole if name in found else whole
    return found


def assert_exact(model: nn.Module, batch: tuple[Tensor, ...], found: dict[str, Tensor]) -> None:
    for number in range(len(batch[0])):
        single = single_gradient(model, loss, (batch[0][number : number + 1].detach(),))
        for (name, _), expected in zip(model.named_parameters(), single, strict=True):
            ours = found[name][number] if name in found else torch.zeros_like(expected)
            assert float((ours - 0.5 * expected).norm()) <= 1e-10 * float(expected.norm()) + 1e-12, name


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, T, N])
@pytest.mark.parametrize("name", CASES)
def test_every_use_is_exact(name: str, count: int) -> None:
    """As many samples as tokens too, so that a table of positions looks like one of samples."""
    function, shapes = CASES[name]
    model, batch = Bare(function, **shapes), samples(count)
    assert_exact(model, batch, taken(model, batch, count))


@pytest.mark.parametrize("name", CASES)
def test_every_use_has_a_rule(name: str) -> None:
    function, shapes = CASES[name]
    model = Bare(function, **shapes)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    plan = Plan(parameters=tuple(shapes), learned=Learned(by_operations=True))
    used = operations_of(Pass(Anatomy(model), plan, loss, values, samples(3), 3))
    assert {name for names in used.values() for name in names if name.startswith("autograd of")} == set()


@pytest.mark.parametrize("name", CASES)
def test_what_was_learned_serves_without_marks(name: str) -> None:
    function, shapes = CASES[name]
    model = Bare(function, **shapes)
    plan = Plan(parameters=tuple(shapes), learned=Learned(by_operations=True))
    taken(model, samples(3), 3, plan=plan)
    assert_exact(model, samples(7), taken(model, samples(7), 7, "their own", plan))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers_are_exact(kind: str, batch_first: bool) -> None:
    torch.manual_seed(0)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = getattr(nn, kind)(D, 3, num_layers=2, bidirectional=True, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.inner(x if batch_first else x.transpose(0, 1))[0]
            return found if batch_first else found.transpose(0, 1)

    model, batch = Recurrent().double(), samples()
    assert_exact(model, batch, taken(model, batch, N))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_packed_sequences_are_exact(kind: str) -> None:
    torch.manual_seed(0)

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = getattr(nn, kind)(D, 3, bidirectional=True, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            lengths = 1 + (x[:, 0, 0].abs() * 7).long() % T
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            padded, _ = nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=True, total_length=T)
            return padded

    model, batch = Packed().double(), samples()
    assert_exact(model, batch, taken(model, batch, N))


def test_cells_are_exact() -> None:
    torch.manual_seed(0)

    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.LSTMCell(D, 3), nn.GRUCell(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            state, other = None, x.new_zeros(len(x), 3)
            for token in x.unbind(1):
                state = self.one(token, state)
                other = self.two(state[0], other)
            return other

    model, batch = Cells().double(), samples()
    assert_exact(model, batch, taken(model, batch, N))


def test_rows_that_mix_samples_are_refused() -> None:
    model = Bare(lambda m, x: F.linear(x - x.mean(0), m.w).tanh() * F.linear(x.mean(0), m.w), w=SQUARE)
    with pytest.raises(UnsupportedModel, match="not the samples' own"):
        taken(model, samples(), N)


@pytest.mark.slow
@pytest.mark.parametrize("tables", [12, 70])
def test_tables_that_look_like_samples_are_exact_or_refused_and_never_dropped(tables: int) -> None:
    def shared(m: Any, x: Tensor) -> Tensor:
        """Every table is repeated as often as there are samples, by chance, and each sample takes all of it."""
        return sum((x * getattr(m, f"w{k}").expand(N, D).sum(0) for k in range(tables)), torch.zeros_like(x)).tanh()

    model = Bare(shared, **{f"w{k}": ROW for k in range(tables)})
    if tables == 12:
        assert_exact(model, samples(), taken(model, samples(), N))
        return
    with pytest.raises(UnsupportedModel, match="another micro-batch size"):
        taken(model, samples(), N)


def test_a_parameter_that_goes_around_the_operations_is_refused() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * grad

    model = Bare(lambda m, x: F.linear(x, m.v) + Doubled.apply(m.w), w=ROW, v=SQUARE)  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedModel, match=r"'w' reaches the loss by an operation that is not seen"):
        taken(model, samples(), N)


def test_an_error_of_the_users_own_is_shown_as_it_is() -> None:
    model = Bare(lambda m, x: F.linear(x, m.w), w=(3, D + 1))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        taken(model, samples(), N)


def test_matrices_that_every_token_chooses_by_number_are_summed_in_the_parameters_own_shape() -> None:
    """Found by the fuzzer: a lookup in a parameter of three axes could not be written into it."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.randn(3, 4, 4))

        def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
            return (x.unsqueeze(-2) @ self.experts[chosen]).square().mean((1, 2, 3))

    torch.manual_seed(0)
    model, x, chosen = Experts(), torch.randn(5, 6, 4), torch.arange(30).reshape(5, 6) % 3
    step = pmlf.PrivateStep(
        model,
        lambda model, batch: model(*batch),
        method="dpsgd",
        clip_norm=1e6,
        noise_multiplier=1.0,
        expected_batch_size=5,
    )
    step.accumulate((x, chosen))
    total = step.sensitive_sum()
    assert total is not None
    (expected,) = torch.autograd.grad(model(x, chosen).sum(), model.experts)
    torch.testing.assert_close(total.values["experts"].float(), expected)
