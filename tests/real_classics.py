"""Classic PyTorch models, written as people write them: bare parameters, tied and computed weights, loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

SAMPLES = 4
WORDS = 30
CLASSES = 3
Built = tuple[nn.Module, Callable[[Any, Any], Tensor], Any]
Made = Callable[[], Built]


def classify(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(*batch[:-1]), batch[-1], reduction="none")


def next_words(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0][:, :-1]).mT, batch[0][:, 1:], reduction="none").mean(1)


def labels() -> Tensor:
    return torch.randint(CLASSES, (SAMPLES,))


def sentences(tokens: int = 7) -> Tensor:
    return torch.randint(1, WORDS, (SAMPLES, tokens))


class NanoGPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (part.view(n, tokens, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(n, tokens, width))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Positions without a batch axis, embedding tied to the head."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, width), nn.Embedding(16, width)
        self.h = nn.ModuleList(NanoGPTBlock(width, 2) for _ in range(2))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class PlainViT(nn.Module):
    """As vit-pytorch writes it: a class token and a position table of the model's own, patches by a reshape."""

    def __init__(self, width: int = 12, patch: int = 4) -> None:
        super().__init__()
        self.patch = patch
        self.to_patch = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, width), nn.LayerNorm(width))
        self.cls_token = nn.Parameter(torch.randn(width))
        self.pos_embedding = nn.Parameter(torch.randn(5, width))
        self.block = NanoGPTBlock(width, 2)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        n, p = len(image), self.patch
        x = image.unflatten(2, (-1, p)).unflatten(4, (-1, p)).permute(0, 2, 4, 3, 5, 1).reshape(n, -1, p * p * 3)
        x = torch.cat((self.cls_token.expand(n, 1, -1), self.to_patch(x)), 1)
        x += self.pos_embedding[: x.shape[1]]
        return self.head(self.block(x)[:, 0])


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], *, layers: int = 1, bidirectional: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.rnn = kind(8, 10, num_layers=layers, batch_first=True, bidirectional=bidirectional)
        self.fc = nn.Linear(20 if bidirectional else 10, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        output, _ = self.rnn(self.embedding(text))
        return self.fc(output.mean(1))


class TimeMajorLSTM(nn.Module):
    """torch's default: time first, then the batch; packed by lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn, self.fc = nn.Embedding(WORDS, 8), nn.LSTM(8, 10), nn.Linear(10, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        _, (hidden, _) = self.rnn(self.embedding(text.t()))
        return self.fc(hidden[-1])


class CellByCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.fc = nn.LSTMCell(5, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.new_zeros(len(x), 8), x.new_zeros(len(x), 8)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
        return self.fc(h)


class DoubleConv(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.GroupNorm(2, outside), nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, padding=1), nn.GroupNorm(2, outside), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = DoubleConv(3, 4), DoubleConv(4, 8), DoubleConv(8, 8)
        self.up2, self.conv2 = nn.ConvTranspose2d(8, 8, 2, stride=2), DoubleConv(16, 8)
        self.up1, self.conv1 = nn.ConvTranspose2d(8, 4, 3, 2, padding=1, output_padding=1), DoubleConv(8, 4)
        self.out = nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        x = self.up2(self.bottom(F.max_pool2d(two, 2)))
        x = self.up1(self.conv2(torch.cat([two, x], 1)))
        return self.out(self.conv1(torch.cat([one, x], 1)))


def pixel_losses(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none").mean((1, 2))


class MLPMixer(nn.Module):
    def __init__(self, width: int = 8, tokens: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Conv1d(tokens, 6, 1), nn.GELU(), nn.Conv1d(6, tokens, 1))
        self.channels = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).mT
        x = x + self.tokens(self.norm1(x))
        x = x + self.channels(self.norm2(x))
        return self.head(x.mean(1))


class ConvNeXtBlock(nn.Module):
    """LayerScale as the original writes it, DropPath off."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.dwconv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm, self.pwconv1, self.pwconv2 = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.gamma = nn.Parameter(0.1 * torch.ones(width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = kept = self.stem(x)
        x = self.pwconv2(F.gelu(self.pwconv1(self.norm(self.dwconv(x).permute(0, 2, 3, 1)))))
        x = kept + (self.gamma * x).permute(0, 3, 1, 2)
        return self.head(x.mean((2, 3)))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class HandWrittenLlama(nn.Module):
    """RMSNorm by hand, SwiGLU, one table of weights for query, key and value."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embedding, self.norm1, self.norm2 = nn.Embedding(WORDS, width), RMSNorm(width), RMSNorm(width)
        self.qkv = nn.Parameter(torch.randn(3, width, width) / math.sqrt(width))
        self.w1, self.w2, self.w3 = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.output = nn.Linear(width, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        q, k, v = torch.einsum("btd,sde->sbte", self.norm1(x), self.qkv)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = self.norm2(x)
        return self.output(x + self.w2(F.silu(self.w1(h)) * self.w3(h)))


class StandardisedConv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        mean, std = self.weight.mean((1, 2, 3), keepdim=True), self.weight.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean) / (std + 1e-5), self.bias, self.stride, self.padding)


class Weighted(nn.Module):
    """A convolution, and a head, whose weights are computed from parameters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        conv: nn.Module = (
            StandardisedConv2d(3, 8, 3, 2) if kind == "standardised" else weight_norm(nn.Conv2d(3, 8, 3, 2))
        )
        self.conv, self.norm = conv, nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, CLASSES) if kind == "standardised" else weight_norm(nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class GraphConvolution(nn.Module):
    """Kipf's layer on a dense adjacency: weight and bias are bare."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inside, outside) / 3), nn.Parameter(torch.zeros(outside))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.bmm(adjacency, torch.matmul(x, self.weight)) + self.bias


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gc1, self.gc2, self.head = GraphConvolution(5, 8), GraphConvolution(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.head(F.relu(self.gc2(F.relu(self.gc1(x, adjacency)), adjacency)).mean(1))


class SetTransformer(nn.Module):
    """Inducing points and a pooling seed that every sample repeats."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.inducing, self.seed = nn.Parameter(torch.randn(1, 3, width)), nn.Parameter(torch.randn(1, 1, width))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def attend(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(y), self.v(y)
        h = q + torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), 2) @ v
        return self.norm(h + F.relu(self.o(h)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        h = self.attend(self.inducing.repeat(len(x), 1, 1), x)
        x = self.attend(x, h)
        return self.head(self.attend(self.seed.repeat(len(x), 1, 1), x).squeeze(1))


class TabularTransformer(nn.Module):
    """FT-Transformer: numbers times bare weights plus bare biases, categories by offsets in one table."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, width)), nn.Parameter(torch.randn(4, width))
        self.categories, self.cls = nn.Embedding(9, width), nn.Parameter(torch.randn(width))
        self.register_buffer("offsets", torch.tensor([0, 4, 6]))
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        tokens = [numbers[..., None] * self.weight + self.bias, self.categories(categories + self.offsets)]
        x = torch.cat([self.cls.expand(len(numbers), 1, -1), *tokens], 1)
        return self.head(self.encoder(x)[:, 0])


class BagClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.EmbeddingBag(WORDS, 8, mode="mean"), nn.Linear(8, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        return self.fc(self.embedding(text))


class TCN(nn.Module):
    """Causal convolutions that dilate, with weight normalisation and a residual path."""

    def __init__(self, *, normalised: bool = False) -> None:
        super().__init__()
        convs = [nn.Conv1d(i, 8, 3, padding=2 * d, dilation=d) for i, d in ((4, 1), (8, 2))]
        self.convs = nn.ModuleList([weight_norm(conv) if normalised else conv for conv in convs])
        self.residual, self.head = nn.Conv1d(4, 8, 1), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for conv in self.convs:
            h = F.relu(conv(h)[..., : x.shape[-1]])
        return self.head((h + self.residual(x))[..., -1])


class VAE(nn.Module):
    """The noise of the reparametrisation comes with the batch, or is drawn by the model in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.mean, self.log_variance = nn.Linear(12, 10), nn.Linear(10, 3), nn.Linear(10, 3)
        self.fc2, self.out = nn.Linear(3, 10), nn.Linear(10, 12)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.fc1(x))
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + noise * torch.exp(0.5 * log_variance)
        return self.out(F.relu(self.fc2(z))), mean, log_variance


def evidence_bound(model: Any, batch: Any) -> Tensor:
    out, mean, log_variance = model(*batch)
    divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1)
    return F.binary_cross_entropy_with_logits(out, batch[0], reduction="none").sum(1) + divergence


class Siamese(nn.Module):
    """One network, run on two images of a pair, and a learned scale of their likeness."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 6)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.5))
        self.logit_bias = nn.Parameter(torch.zeros(1))

    def embed(self, x: Tensor) -> Tensor:
        return F.normalize(self.fc(F.relu(self.conv(x)).mean((2, 3))), dim=-1)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return (self.embed(one) * self.embed(two)).sum(-1) * self.logit_scale.exp() + self.logit_bias


def same_or_not(model: Any, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0], batch[1]), batch[2], reduction="none")


class SoftPrompt(nn.Module):
    """Trained prompt tokens before the words of a frozen language model."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(3, 12))
        self.inner = NanoGPT().requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.inner.wte(ids)
        x = torch.cat([self.prompt.unsqueeze(0).expand(len(ids), -1, -1), words], 1)
        for block in self.inner.h:
            x = block(x)
        return self.inner.lm_head(self.inner.ln_f(x[:, len(self.prompt) :]))


class RelativePositions(nn.Module):
    """A learned bias for every distance between tokens, as in T5, and a scale for every head."""

    def __init__(self, width: int = 8, heads: int = 2, tokens: int = 7) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(WORDS, width), nn.Linear(width, 3 * width, bias=False)
        self.bias, self.scale = nn.Embedding(2 * tokens, heads), nn.Parameter(torch.ones(heads, 1, 1))
        self.heads, self.head = heads, nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1])
        bias = self.bias(place[:, None] - place[None] + ids.shape[1]).permute(2, 0, 1)
        q, k, v = self.qkv(self.embedding(ids)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = torch.softmax(self.scale * (q @ k.mT) + bias, -1) @ v
        return self.head(x.transpose(1, 2).flatten(2).mean(1))


class MixtureOfExperts(nn.Module):
    """Every token goes to the expert that its router prefers: rows of a product that follow the data."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding, self.gate = nn.Embedding(WORDS, width), nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            out[rows] = weights[rows, None] * expert(tokens[rows])
        return self.head(out.view_as(x).mean(1))
