"""DNN 1 and DNN 2 of the DTS paper (tables II and III), and the paper's cuts."""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn

# The paper does not print the sizes of the images. Linear(256, ...) leaves 44 to 51 pixels for DNN 1 and
# Linear(1024, ...) 62 to 77 for DNN 2; with 50 and 64 DNN 2 takes 4.8 times the FLOPs of DNN 1, as the paper says.
IMAGE_PIXELS = {"dnn1": 50, "dnn2": 64}
CLASSES = 2
BATCH = 100


@dataclass(frozen=True)
class PaperCut:
    """The last layer of a client (layers 1-4 of DNN 1, 1-3 of DNN 2), and those of three pipeline workers."""

    client: str
    workers: tuple[str, str]


# The paper gives no split for pipeline learning: here the client's part is the first, and the linear layers the last.
CUTS = {"dnn1": PaperCut("pool2", ("pool2", "flatten")), "dnn2": PaperCut("relu2", ("relu2", "flatten"))}


def build(name: str) -> nn.Sequential:
    """Return the untrained network of that name, a chain of named layers."""
    torch.manual_seed(0)
    convolutions, products = {
        "dnn1": (((1, 16, 5), (16, 32, 5), (32, 64, 5)), ((256, 32), (32, CLASSES))),
        "dnn2": (
            ((1, 32, 3), (32, 64, 3), (64, 128, 3), (128, 256, 3)),
            ((1024, 512), (512, 256), (256, CLASSES)),
        ),
    }[name]
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (channels, maps, kernel) in enumerate(convolutions, 1):
        layers[f"conv{number}"] = nn.Conv2d(channels, maps, kernel)
        layers[f"relu{number}"] = nn.ReLU()
        layers[f"pool{number}"] = nn.MaxPool2d(2)
    layers["flatten"] = nn.Flatten()
    for number, (features, outputs) in enumerate(products, 1):
        layers[f"fc{number}"] = nn.Linear(features, outputs)
        if number < len(products):
            layers[f"fc_relu{number}"] = nn.ReLU()
    layers["softmax"] = nn.LogSoftmax(dim=1)
    return nn.Sequential(layers)


def part_of(model: nn.Sequential, first: str | None, last: str | None) -> nn.Sequential:
    """Return the layers after `first` (None: from the beginning) up to and including `last` (None: to the end)."""
    names = list(dict(model.named_children()))
    begin = 0 if first is None else names.index(first) + 1
    end = len(names) if last is None else names.index(last) + 1
    return nn.Sequential(OrderedDict((name, getattr(model, name)) for name in names[begin:end]))


def batch_of(name: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of random images and labels: the time of training does not depend on their content."""
    generator = torch.Generator().manual_seed(seed)
    pixels = IMAGE_PIXELS[name]
    images = torch.rand(BATCH, 1, pixels, pixels, generator=generator)
    return images, torch.randint(CLASSES, (BATCH,), generator=generator)
