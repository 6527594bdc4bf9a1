"""Residual networks (He et al., 2016, arXiv:1512.03385): ResNet-20 for small images, ResNet-18 and ResNet-50."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

Shortcut = Literal["A", "B"]


class Pad(nn.Module):
    """The shortcut without parameters (the paper's option A): every second pixel, and zeros for the new channels."""

    def __init__(self, added: int, stride: int) -> None:
        super().__init__()
        self.added, self.stride = added, stride

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(kind: Shortcut, inputs: int, outputs: int, stride: int) -> nn.Module | None:
    """What brings a block's input into the shape of its output; None where it has it."""
    if stride == 1 and inputs == outputs:
        return None
    if kind == "A":
        return Pad(outputs - inputs, stride)
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions around which the input is led."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(shortcut, inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two 1 x 1; the stride sits on the 3 x 3, as in torchvision and not in the paper."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = _conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(shortcut, inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """A stem, stages of blocks that halve the image and double the width, a mean over pixels and a linear layer.

    Parameters are named as in torchvision, so that weights can go from one to the other.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        width: int,
        classes: int,
        *,
        small_images: bool = False,
        shortcut: Shortcut = "B",
        zero_init: bool = False,
    ) -> None:
        """**Arguments:**
        - `depths`: blocks in each stage.
        - `width`: channels of the stem, and of the first stage's 3 x 3 convolutions.
        - `small_images`: a 3 x 3 stem that keeps the size, instead of 7 x 7 and a pool that divide it by 4.
        - `shortcut`: where a stage begins, "A" pads with zeros and "B" projects.
        - `zero_init`: start the last norm of every block at 0, so that each block begins as its shortcut.
        """
        super().__init__()
        self.conv1 = _conv(3, width, 3) if small_images else _conv(3, width, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        self.stages = [f"layer{i + 1}" for i in range(len(depths))]
        inputs = width
        for i, (name, depth) in enumerate(zip(self.stages, depths, strict=True)):
            blocks = []
            for j in range(depth):
                blocks.append(block(inputs, width << i, 2 if i > 0 and j == 0 else 1, shortcut))
                inputs = (width << i) * block.expansion
            self.add_module(name, nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, classes)
        self._initialise(zero_init)

    def _initialise(self, zero_init: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init and isinstance(module, BasicBlock):
                nn.init.zeros_(module.bn2.weight)
            elif zero_init and isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(functional.relu(self.bn1(self.conv1(x))))
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return self.fc(x.mean((2, 3)))


def resnet20(classes: int = 10, shortcut: Shortcut = "A") -> ResNet:
    """The paper's network for CIFAR-10, with 0.27 M parameters."""
    return ResNet(BasicBlock, (3, 3, 3), 16, classes, small_images=True, shortcut=shortcut)


def resnet18(classes: int = 1000, zero_init: bool = False) -> ResNet:
    """11.7 M parameters."""
    return ResNet(BasicBlock, (2, 2, 2, 2), 64, classes, zero_init=zero_init)


def resnet50(classes: int = 1000, zero_init: bool = False) -> ResNet:
    """25.6 M parameters."""
    return ResNet(Bottleneck, (3, 4, 6, 3), 64, classes, zero_init=zero_init)
