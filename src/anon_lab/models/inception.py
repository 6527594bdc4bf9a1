"""The Inception-v3 of the Fréchet inception distance: the network of 2015, not the one that torchvision ships."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anon_lab.tasks import DataMissing

FEATURES = 2048
SIZE = 299
"""Pixels on a side that the network was trained on."""


class Inception(nn.Module):
    """Images (n, 3, h, w) with pixels from 0 to 255 to 2,048 features each, those before the classifier.

    The layers have torchvision's names. What differs from its network: average pools count no padding, the last block
    takes the maximum where the others take the average, and pixels become (x - 128) / 128. Images are resized by
    bilinear interpolation between the centres of pixels, without smoothing, as pytorch-fid does; TensorFlow's first
    resize, with which the measure was introduced, places the centres half a pixel off.
    """

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Conv(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Conv(32, 32, 3)
        self.Conv2d_2b_3x3 = Conv(32, 64, 3, padding=1)
        self.Conv2d_3b_1x1 = Conv(64, 80, 1)
        self.Conv2d_4a_3x3 = Conv(80, 192, 3)
        self.Mixed_5b = A(192, pool=32)
        self.Mixed_5c = A(256, pool=64)
        self.Mixed_5d = A(288, pool=64)
        self.Mixed_6a = B(288)
        self.Mixed_6b = C(768, inner=128)
        self.Mixed_6c = C(768, inner=160)
        self.Mixed_6d = C(768, inner=160)
        self.Mixed_6e = C(768, inner=192)
        self.Mixed_7a = D(768)
        self.Mixed_7b = E(1280, maximum=False)
        self.Mixed_7c = E(2048, maximum=True)

    def forward(self, images: Tensor) -> Tensor:
        # In float32 even where the caller works in less: the weights and the measure are defined there.
        with torch.autocast(images.device.type, enabled=False):
            return self._features(images.float())

    def _features(self, images: Tensor) -> Tensor:
        if images.device.type == "cpu":  # whose convolutions are 1.6 times as fast with channels last
            images = images.contiguous(memory_format=torch.channels_last)
        x = F.interpolate(images, size=(SIZE, SIZE), mode="bilinear", align_corners=False)
        x = (x - 128) / 128
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x)))
        x = self.Mixed_6a(x)
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(x))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        return x.mean((2, 3))


class Conv(nn.Module):
    """A convolution without bias, batch norm, ReLU."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


def average(x: Tensor) -> Tensor:
    """Of the 3 x 3 pixels around each, without the padding."""
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


class A(nn.Module):
    """At 35 x 35: kernels of 1, 5, and twice 3."""

    def __init__(self, inputs: int, pool: int):
        super().__init__()
        self.branch1x1 = Conv(inputs, 64, 1)
        self.branch5x5_1 = Conv(inputs, 48, 1)
        self.branch5x5_2 = Conv(48, 64, 5, padding=2)
        self.branch3x3dbl_1 = Conv(inputs, 64, 1)
        self.branch3x3dbl_2 = Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Conv(96, 96, 3, padding=1)
        self.branch_pool = Conv(inputs, pool, 1)

    def forward(self, x: Tensor) -> Tensor:
        five = self.branch5x5_2(self.branch5x5_1(x))
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch1x1(x), five, double, self.branch_pool(average(x))], 1)


class B(nn.Module):
    """From 35 x 35 to 17 x 17."""

    def __init__(self, inputs: int):
        super().__init__()
        self.branch3x3 = Conv(inputs, 384, 3, stride=2)
        self.branch3x3dbl_1 = Conv(inputs, 64, 1)
        self.branch3x3dbl_2 = Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Conv(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), double, F.max_pool2d(x, 3, stride=2)], 1)


class C(nn.Module):
    """At 17 x 17: kernels of 7, as a row and a column."""

    def __init__(self, inputs: int, inner: int):
        super().__init__()
        row: dict = {"kernel": (1, 7), "padding": (0, 3)}
        column: dict = {"kernel": (7, 1), "padding": (3, 0)}
        self.branch1x1 = Conv(inputs, 192, 1)
        self.branch7x7_1 = Conv(inputs, inner, 1)
        self.branch7x7_2 = Conv(inner, inner, **row)
        self.branch7x7_3 = Conv(inner, 192, **column)
        self.branch7x7dbl_1 = Conv(inputs, inner, 1)
        self.branch7x7dbl_2 = Conv(inner, inner, **column)
        self.branch7x7dbl_3 = Conv(inner, inner, **row)
        self.branch7x7dbl_4 = Conv(inner, inner, **column)
        self.branch7x7dbl_5 = Conv(inner, 192, **row)
        self.branch_pool = Conv(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        seven = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return torch.cat([self.branch1x1(x), seven, double, self.branch_pool(average(x))], 1)


class D(nn.Module):
    """From 17 x 17 to 8 x 8."""

    def __init__(self, inputs: int):
        super().__init__()
        self.branch3x3_1 = Conv(inputs, 192, 1)
        self.branch3x3_2 = Conv(192, 320, 3, stride=2)
        self.branch7x7x3_1 = Conv(inputs, 192, 1)
        self.branch7x7x3_2 = Conv(192, 192, (1, 7), padding=(0, 3))
        self.branch7x7x3_3 = Conv(192, 192, (7, 1), padding=(3, 0))
        self.branch7x7x3_4 = Conv(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_2(self.branch3x3_1(x))
        seven = self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x))))
        return torch.cat([three, seven, F.max_pool2d(x, 3, stride=2)], 1)


class E(nn.Module):
    """At 8 x 8: kernels of 3 whose row and column stand side by side."""

    def __init__(self, inputs: int, maximum: bool):
        super().__init__()
        self.maximum = maximum
        self.branch1x1 = Conv(inputs, 320, 1)
        self.branch3x3_1 = Conv(inputs, 384, 1)
        self.branch3x3_2a = Conv(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3_2b = Conv(384, 384, (3, 1), padding=(1, 0))
        self.branch3x3dbl_1 = Conv(inputs, 448, 1)
        self.branch3x3dbl_2 = Conv(448, 384, 3, padding=1)
        self.branch3x3dbl_3a = Conv(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3dbl_3b = Conv(384, 384, (3, 1), padding=(1, 0))
        self.branch_pool = Conv(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = F.max_pool2d(x, 3, stride=1, padding=1) if self.maximum else average(x)
        parts = [
            self.branch1x1(x),
            self.branch3x3_2a(three),
            self.branch3x3_2b(three),
            self.branch3x3dbl_3a(double),
            self.branch3x3dbl_3b(double),
            self.branch_pool(pooled),
        ]
        return torch.cat(parts, 1)


def load(path: Path) -> Inception:
    """The network with the weights of an .npz or .safetensors file of any precision, ready to judge images."""
    net = Inception()
    wanted = {name: tensor for name, tensor in net.state_dict().items() if not _is_spare(name)}
    found = {name: array for name, array in _read(path).items() if not _is_spare(name)}
    if odd := sorted(wanted.keys() ^ found.keys()):
        state = "lacks" if odd[0] in wanted else "has the unknown"
        raise DataMissing(f"{path} is not the Inception-v3 of FID: it {state} {odd[0]}, one of {len(odd)} differences")
    for name, tensor in wanted.items():
        if found[name].shape != tuple(tensor.shape) or found[name].dtype.kind != "f":
            raise DataMissing(
                f"{path}: {name} must be floats of shape {tuple(tensor.shape)}, "
                f"but is {found[name].dtype} of shape {found[name].shape}"
            )
        tensor.copy_(torch.from_numpy(found[name].astype(np.float32)))
    return net.eval().requires_grad_(False)


def _is_spare(name: str) -> bool:
    """Whether it is part of a classifier or a counter of training, which may come along unused."""
    return name.startswith(("fc.", "AuxLogits.")) or name.endswith("num_batches_tracked")


def _read(path: Path) -> dict[str, np.ndarray]:
    if path.suffix not in (".npz", ".safetensors"):
        raise DataMissing(f"the weights must be an .npz or .safetensors file, but are {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            return load_file(path)
        # numpy leaves a damaged file open that it has opened by itself.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except FileNotFoundError:
        raise DataMissing(f"{path} is not there") from None
    except Exception as error:  # each library has its own for a damaged file
        raise DataMissing(f"{path} is damaged: {error}") from None
