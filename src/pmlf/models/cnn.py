"""CNN-5, the small convolutional network of the paper's image experiments."""

from __future__ import annotations

from torch import Tensor, nn

NORM_GROUPS = 16


class CNN5(nn.Module):
    """Five 3x3 convolutions with tanh and GroupNorm. The logits are the means of the last one's maps.

    >>> sum(parameter.numel() for parameter in CNN5().parameters())
    412426
    """

    def __init__(self, in_channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_halving_block(in_channels, 32),
            *_halving_block(32, 64),
            *_halving_block(64, 128),
            nn.Conv2d(128, 256, kernel_size=3, padding=1),
            nn.Tanh(),
            nn.GroupNorm(NORM_GROUPS, 256),
        )
        self.head = nn.Conv2d(256, classes, kernel_size=3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.head(self.features(images))  # (N, classes, H/8, W/8)
        return maps.mean(dim=(2, 3))  # (N, classes)


def _halving_block(in_channels: int, out_channels: int) -> list[nn.Module]:
    return [
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.GroupNorm(NORM_GROUPS, out_channels),
    ]
