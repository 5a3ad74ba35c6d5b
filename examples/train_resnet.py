"""Trains a small ResNet-18 on synthetic 32x32 images: an ordinary training script that knows nothing of profilers.

python examples/train_resnet.py --steps 40 --device cpu --batch-size 32
whatif collect examples/train_resnet.py --batch-size 32
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

CLASSES = 10
STAGES = (2, 2, 2, 2)


class SyntheticImages(Dataset[tuple[torch.Tensor, int]]):
    """Images that are their class's pattern plus noise; heavy augmentation works like a decoder and a jitter."""

    def __init__(self, length: int, heavy_augmentation: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.patterns = torch.randn(CLASSES, 3, 32, 32, generator=generator)
        self.length = length
        self.heavy_augmentation = heavy_augmentation

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % CLASSES
        image = self.patterns[label] + 0.5 * torch.randn(3, 32, 32)
        if self.heavy_augmentation:
            large = functional.interpolate(image[None], size=(448, 448), mode="bicubic", antialias=True)
            small = functional.interpolate(large * (0.8 + 0.4 * torch.rand(1, 3, 1, 1)), size=(40, 40), mode="area")
            top, left = torch.randint(0, 9, (2,)).tolist()
            image = small[0, :, top : top + 32, left : left + 32]
        return image, label


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 for 32x32 images; the standard one has width 64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        blocks = []
        channels = width
        for stage, count in enumerate(STAGES):
            for position in range(count):
                stride = 2 if stage > 0 and position == 0 else 1
                blocks.append(Block(channels, width * 2**stage, stride))
                channels = width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.pool(self.blocks(self.stem(x))).flatten(1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=32, help="channels of the first stage")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16 trains under autocast")
    parser.add_argument("--augmentation", choices=["none", "heavy"], default="none")
    parser.add_argument("--workers", type=int, default=0, help="data loading processes")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    dataset = SyntheticImages(options.steps * options.batch_size, options.augmentation == "heavy")
    loader = DataLoader(
        dataset, options.batch_size, shuffle=True, num_workers=options.workers, pin_memory=options.device == "cuda"
    )
    model = ResNet(options.width).to(device)
    if options.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    started = time.perf_counter()
    for step, (images, labels) in enumerate(loader, start=1):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(options.device, dtype=torch.bfloat16, enabled=options.precision == "bf16"):
            loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            seconds = time.perf_counter() - started
            print(f"step {step:4d}  loss {loss.item():.4f}  {seconds / step * 1e3:.1f} ms a step", flush=True)


if __name__ == "__main__":
    main()
