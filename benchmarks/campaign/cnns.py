"""The campaign's convolutional networks, written from their papers: random weights, any size.

ResNet (He et al., CVPR 2016, table 1), VGG (Simonyan and Zisserman, ICLR 2015, table 1) and DenseNet (Huang et al.,
CVPR 2017, table 1). Images come as (batch, 3, height, width), scores go as (batch, classes).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

RESNET_EXPANSION = 4
DENSENET_BOTTLENECK = 4


def conv_norm(channels_in: int, channels: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution that keeps the image's size (divided by its stride), with batch normalisation instead of a bias."""
    convolution = nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(channels)]


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up, and a shortcut; the output has four times `width` channels."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels = width * RESNET_EXPANSION
        self.reduce = nn.Sequential(*conv_norm(channels_in, width, 1), nn.ReLU(inplace=True))
        self.spatial = nn.Sequential(*conv_norm(width, width, 3, stride), nn.ReLU(inplace=True))
        self.expand = nn.Sequential(*conv_norm(width, channels, 1))
        same = stride == 1 and channels_in == channels
        self.shortcut = nn.Sequential() if same else nn.Sequential(*conv_norm(channels_in, channels, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.expand(self.spatial(self.reduce(x)))
        y = y + self.shortcut(x)
        activated: Tensor = self.relu(y)
        return activated


class ResNet(nn.Module):
    """Stages of bottlenecks; `small_images` has a 3x3 stem without pooling, as for 32 px."""

    def __init__(self, stages: Sequence[int], width: int, classes: int, small_images: bool) -> None:
        super().__init__()
        if small_images:
            stem = [*conv_norm(3, width, 3), nn.ReLU(inplace=True)]
        else:
            stem = [*conv_norm(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        self.stem = nn.Sequential(*stem)
        self.stages = nn.ModuleList()
        channels = width
        for number, depth in enumerate(stages):
            blocks = []
            for position in range(depth):
                stride = 2 if number > 0 and position == 0 else 1
                blocks.append(Bottleneck(channels, width << number, stride))
                channels = (width << number) * RESNET_EXPANSION
            self.stages.append(nn.Sequential(*blocks))
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        scores: Tensor = self.classifier(x.mean((2, 3)))
        return scores


class Vgg(nn.Module):
    """Plain 3x3 convolutions with pooling after every stage, then three fully connected layers.

    `stages` gives (convolutions, channels) of each stage and `side` the height and width of the images in px.
    """

    def __init__(self, stages: Sequence[tuple[int, int]], side: int, hidden: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        channels = 3
        for depth, width in stages:
            layers: list[nn.Module] = []
            for _ in range(depth):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            self.stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
        features = channels * (side >> len(stages)) ** 2
        self.classifier = nn.Sequential(
            nn.Linear(features, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for stage in self.stages:
            x = stage(x)
        scores: Tensor = self.classifier(x.flatten(1))
        return scores


class DenseLayer(nn.Module):
    """Normalise, 1x1 to four times the growth, normalise, 3x3 to the growth; the output follows the input channels."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        width = DENSENET_BOTTLENECK * growth
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, width, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(width), nn.Conv2d(width, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(self.relu(self.norm2(y)))], 1)


class Transition(nn.Sequential):
    """Halves channels, height and width between two dense blocks."""

    def __init__(self, channels: int) -> None:
        convolution = nn.Conv2d(channels, channels // 2, 1, bias=False)
        super().__init__(nn.BatchNorm2d(channels), nn.ReLU(inplace=True), convolution, nn.AvgPool2d(2))


class DenseNet(nn.Module):
    """Dense blocks with transitions between them; the stem has twice `growth` channels."""

    def __init__(self, blocks: Sequence[int], growth: int, classes: int, small_images: bool) -> None:
        super().__init__()
        channels = 2 * growth
        if small_images:
            stem: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
        else:
            stem = [*conv_norm(3, channels, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        self.stem = nn.Sequential(*stem)
        self.blocks = nn.ModuleList()
        for number, depth in enumerate(blocks):
            layers: list[nn.Module] = [] if number == 0 else [Transition(channels)]
            channels = channels if number == 0 else channels // 2
            layers += [DenseLayer(channels + position * growth, growth) for position in range(depth)]
            channels += depth * growth
            self.blocks.append(nn.Sequential(*layers))
        self.norm = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        x = functional.relu(self.norm(x), inplace=True)
        scores: Tensor = self.classifier(x.mean((2, 3)))
        return scores
