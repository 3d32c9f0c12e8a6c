"""A small vision transformer of Conv2d, Linear and LayerNorm, which have rules for per-sample gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INITIAL_STD = 0.02  # of the class token and the position table, as in the original ViT
MLP_RATIO = 4


class ViT(nn.Module):
    """A vision transformer: pre-norm attention blocks on patches and a class token, which is classified."""

    def __init__(
        self,
        image_size: int = 32,
        patch: int = 4,
        in_channels: int = 3,
        width: int = 192,
        depth: int = 6,
        heads: int = 3,
        classes: int = 10,
    ) -> None:
        super().__init__()
        if image_size % patch:
            raise ValueError(f"patch={patch} does not divide image_size={image_size}: give a divisor of it")
        if width % heads:
            raise ValueError(f"heads={heads} does not divide width={width}: give a divisor of it")
        self.image_size = image_size
        tokens = (image_size // patch) ** 2 + 1
        self.embedding = nn.Conv2d(in_channels, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, tokens, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.class_token, std=INITIAL_STD)
        nn.init.trunc_normal_(self.positions, std=INITIAL_STD)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[2:] != (self.image_size, self.image_size):
            height, width = images.shape[2:]
            raise ValueError(
                f"the images are {height}x{width}, but this ViT is for {self.image_size}x{self.image_size}: build it "
                f"with image_size={height}"
            )
        patches = self.embedding(images).flatten(2).transpose(1, 2)  # (N, T-1, D)
        class_tokens = self.class_token.expand(len(images), -1, -1)  # (N, 1, D)
        tokens = torch.cat((class_tokens, patches), dim=1) + self.positions  # (N, T, D)
        return self.head(self.norm(self.blocks(tokens)[:, 0]))  # (N, classes)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, MLP_RATIO * width), nn.GELU(), nn.Linear(MLP_RATIO * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.attention_norm(tokens))  # (N, T, D)
        return tokens + self.mlp(self.mlp_norm(tokens))  # (N, T, D)


class SelfAttention(nn.Module):
    """Self-attention with Linear projections. (In nn.MultiheadAttention they are bare parameters.)"""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        samples, length, width = tokens.shape
        qkv = self.qkv(tokens).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (N, heads, T, D/heads)
        mixed = F.scaled_dot_product_attention(query, key, value)  # (N, heads, T, D/heads)
        return self.projection(mixed.transpose(1, 2).reshape(samples, length, width))  # (N, T, D)
