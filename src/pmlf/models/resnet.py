"""Residual networks for small images, with GroupNorm. BatchNorm mixes samples, which DP training does not allow."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

MAX_GROUPS = 32


class ResNet(nn.Module):
    """A 3x3 stem and stages of basic blocks. Each stage after the first doubles the width and halves the image."""

    def __init__(
        self, blocks: Sequence[int] = (2, 2, 2, 2), width: int = 64, in_channels: int = 3, classes: int = 10
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv3x3(in_channels, width), _group_norm(width), nn.ReLU(inplace=True))
        stages: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            out_channels = width * 2**stage
            for block in range(count):
                halves = stage > 0 and block == 0
                stages.append(BasicBlock(channels, out_channels, stride=2 if halves else 1))
                channels = out_channels
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.stages(self.stem(images))  # (N, channels, h, w)
        return self.head(maps.mean(dim=(2, 3)))  # (N, classes)


class BasicBlock(nn.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))), with a 1x1 convolution on x if the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _conv3x3(in_channels, out_channels, stride),
            _group_norm(out_channels),
            nn.ReLU(inplace=True),
            _conv3x3(out_channels, out_channels),
            _group_norm(out_channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False),
                _group_norm(out_channels),
            )
        self.activation = nn.ReLU(inplace=True)

    def forward(self, maps: Tensor) -> Tensor:
        return self.activation(self.residual(maps) + self.shortcut(maps))


def resnet18(in_channels: int = 3, classes: int = 10) -> ResNet:
    """ResNet-18 for small images: two basic blocks in each of four stages, 64 to 512 channels."""
    return ResNet(blocks=(2, 2, 2, 2), width=64, in_channels=in_channels, classes=classes)


def _conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    # no bias: the next norm has one
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)


def _group_norm(channels: int) -> nn.GroupNorm:
    groups = next(groups for groups in range(min(MAX_GROUPS, channels), 0, -1) if channels % groups == 0)
    return nn.GroupNorm(groups, channels)
