"""Gradients of many small residual networks at once: a launch for each layer, not for each layer of each network."""

# A kernel's language only looks like Python: its types are not pyright's.
# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from anon_lab.models import _stacked_kernels as kernels
from anon_lab.models.resnet import BasicBlock, Pad, ResNet

BLOCK = 128
"""Pixels of a program of a norm."""
CONVOLVED = 256
"""Of a convolution."""
CORRELATED, ROUNDS = 64, 64
"""At once, and how many times, of a kernel's gradient."""
HEAD = ("fc.weight", "fc.bias")
NARROWEST = 16
"""Channels of an image, with zeros beside its colours: the least that tensor cores multiply."""
ALIGNED = 64
"""Every tensor begins at a multiple of so many numbers."""
MOMENTUM = 0.1
"""Of BatchNorm's running statistics."""


@dataclass(frozen=True)
class Layer:
    """A convolution and its norm; `side` is its input's."""

    side: int
    stride: int
    inputs: int
    outputs: int
    real: int
    """Inputs that are no padding."""
    kernel: int
    """Where its parameters begin among all, and its norm's."""
    gain: int
    bias: int
    taps: int
    """Where its kernel begins among all kernels, and its norm's channels among all norms'."""
    norm: int

    @property
    def out(self) -> int:
        return self.side // self.stride

    def sizes(self) -> dict[str, int]:
        """Of its convolution, by the kernels' names."""
        return {"SIDE": self.side, "STRIDE": self.stride, "INPUTS": self.inputs, "OUTPUTS": self.outputs}


class Kept(NamedTuple):
    """Of a layer on the way forward: its input, and the convolution of that."""

    x: Tensor
    z: Tensor


def fits(net: nn.Module) -> bool:
    """Whether it is one that this module can stack: basic blocks for small images, with shortcuts that pad."""
    if not isinstance(net, ResNet) or not isinstance(net.maxpool, nn.Identity):
        return False
    blocks = [block for name in net.stages for block in cast(nn.Sequential, net.get_submodule(name))]
    norms = [each for each in net.modules() if isinstance(each, nn.BatchNorm2d)]
    return (
        all(isinstance(block, BasicBlock) and isinstance(block.downsample, Pad | None) for block in blocks)
        and all((each.eps, each.momentum) == (kernels.EPSILON.value, MOMENTUM) for each in norms)
        and all(each.num_features in (16, 32, 64) for each in norms)
    )


class Stacked:
    """Networks of one shape, whose parameters, gradients and statistics lie side by side from now on; they stay what
    they were to everybody else.

    **Arguments:**
    - `side`: height and width of their images.
    - `dtype`: of activations.
    """

    def __init__(self, nets: Sequence[nn.Module], side: int, dtype: torch.dtype = torch.bfloat16) -> None:
        if not all(map(fits, nets)):
            raise ValueError("only residual networks of basic blocks for small images can be stacked")
        halved = 2 ** (len(cast(ResNet, nets[0]).stages) - 1)
        if side % halved:
            raise ValueError(f"side must be a multiple of {halved}, by which these networks divide it, but is {side}")
        self.nets, self.side, self.dtype = cast(Sequence[ResNet], nets), side, dtype
        self.device = next(nets[0].parameters()).device
        self._starts = self._stack_parameters()
        self.layers = self._plan()
        self._stack_statistics()
        self._order = self._kernel_order()
        self.dkernels = torch.zeros(len(nets), len(self._order), device=self.device)
        self.kernels = torch.zeros_like(self.dkernels, dtype=dtype)

    # What is prepared once.

    def _stack_parameters(self) -> dict[str, int]:
        """Move parameters into one tensor, (networks, numbers), and give them gradients in another."""
        starts, end = {}, 0
        for name, parameter in self.nets[0].named_parameters():
            starts[name] = end
            end += -(-parameter.numel() // ALIGNED) * ALIGNED
        # Beyond the last there are zeros, of which padding is made.
        self.parameters = torch.zeros(len(self.nets), end + ALIGNED, device=self.device)
        self.gradients = torch.zeros_like(self.parameters)
        for net, mine, gradient in zip(self.nets, self.parameters, self.gradients, strict=True):
            for name, parameter in net.named_parameters():
                place = slice(starts[name], starts[name] + parameter.numel())
                mine[place] = parameter.detach().flatten()
                parameter.data = mine[place].view(parameter.shape)
                parameter.grad = gradient[place].view(parameter.shape)
        return starts

    def _plan(self) -> list[Layer]:
        found: list[Layer] = []
        net, start, side = self.nets[0], self._starts, self.side
        named = [("conv1", "bn1")]
        for stage in net.stages:
            for number in range(len(cast(nn.Sequential, net.get_submodule(stage)))):
                named += [(f"{stage}.{number}.conv{i}", f"{stage}.{number}.bn{i}") for i in (1, 2)]
        for conv, norm in named:
            module = cast(nn.Conv2d, net.get_submodule(conv))
            before = found[-1] if found else None
            layer = Layer(
                side,
                module.stride[0],
                max(NARROWEST, module.in_channels),
                module.out_channels,
                module.in_channels,
                start[f"{conv}.weight"],
                start[f"{norm}.weight"],
                start[f"{norm}.bias"],
                before.taps + 9 * before.inputs * before.outputs if before else 0,
                before.norm + before.outputs if before else 0,
            )
            found.append(layer)
            side = layer.out
        return found

    def _stack_statistics(self) -> None:
        channels = self.layers[-1].norm + self.layers[-1].outputs
        self.sums = torch.zeros(2, len(self.nets), channels, device=self.device)
        self.running = torch.zeros_like(self.sums)
        norms = [[each for each in net.modules() if isinstance(each, nn.BatchNorm2d)] for net in self.nets]
        self.batches = torch.zeros(len(self.nets), len(norms[0]), dtype=torch.int64, device=self.device)
        for row, own in enumerate(norms):
            for column, (norm, layer) in enumerate(zip(own, self.layers, strict=True)):
                place = slice(layer.norm, layer.norm + layer.outputs)
                for kind, name in enumerate(("running_mean", "running_var")):
                    self.running[kind, row, place] = norm.get_buffer(name)
                    setattr(norm, name, self.running[kind, row, place])
                self.batches[row, column] = cast(Tensor, norm.num_batches_tracked)
                norm.num_batches_tracked = self.batches[row, column]
        # Pixels of an image that each channel's norm goes over.
        self._pixels = torch.cat([torch.full((each.outputs,), each.out**2, device=self.device) for each in self.layers])

    def _kernel_order(self) -> Tensor:
        """Where each number of the kernels, in the order (tap, input, output), is found among the parameters."""
        zero, pieces = self.parameters.shape[1] - 1, []
        for layer in self.layers:
            places = torch.full((9, layer.inputs, layer.outputs), zero)
            numbers = torch.arange(layer.outputs * layer.real * 9).view(layer.outputs, layer.real, 9)
            places[:, : layer.real] = layer.kernel + numbers.permute(2, 1, 0)
            pieces.append(places.flatten())
        return torch.cat(pieces).to(self.device)

    def _stacked(self, numbers: Tensor, name: str) -> Tensor:
        """All networks' own of this name, in parameters or gradients."""
        shape = self.nets[0].get_parameter(name).shape
        start = self._starts[name]
        return numbers[:, start : start + shape.numel()].unflatten(1, shape)

    # What a step does.

    def gradient(self, images: Tensor, labels: Tensor) -> Tensor:
        """Leave the gradient of each network's mean cross-entropy in its parameters; return these losses.

        **Arguments:**
        - `images`: (networks, images, channels, height, width), each network's own; `labels`: (networks, images).
        """
        with torch.no_grad():
            self.gradients.zero_()
            self.sums.zero_()
            self.kernels.copy_(self.parameters[:, self._order])
            self.dkernels.zero_()
            count = images.shape[1]
            shape = (len(self.nets), count, self.side, self.side, NARROWEST)
            x = torch.zeros(shape, dtype=self.dtype, device=self.device)
            x[..., : images.shape[2]] = images.permute(0, 1, 3, 4, 2)
            y, kept = self._forward(x)
            self._keep_statistics(count)
        losses, dy = self._head(y, kept[-1].z, labels)
        with torch.no_grad():
            self._backward(dy, kept)
            self.gradients.index_copy_(1, self._order, self.dkernels)
        return losses

    def _forward(self, x: Tensor) -> tuple[Tensor, list[Kept]]:
        """The last layer's output, and what the way back needs."""
        kept: list[Kept] = []
        for number, layer in enumerate(self.layers):
            z = x.new_empty(*x.shape[:2], layer.out, layer.out, layer.outputs)
            self._convolve(layer, x, z)
            y = torch.empty_like(z)
            ends_block = number > 0 and number % 2 == 0
            self._normalise(layer, z, kept[number - 1].x if ends_block else None, y)
            kept.append(Kept(x, z))
            x = y
        return x, kept

    def _head(self, y: Tensor, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The losses, and their gradient by what the last layer's norm makes, where relu let it through."""
        layer = self.layers[-1]
        pooled = y.float().mean((2, 3)).to(self.dtype).requires_grad_()
        weight, bias = (self._stacked(self.parameters, name).detach().requires_grad_() for name in HEAD)
        with torch.enable_grad():
            logits = torch.baddbmm(bias.to(self.dtype)[:, None], pooled, weight.to(self.dtype).mT)
            each = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
            losses = each.view(labels.shape).mean(1)
            dpooled, *found = torch.autograd.grad(losses.sum(), (pooled, weight, bias))
        for name, gradient in zip(HEAD, found, strict=True):
            self._stacked(self.gradients, name).copy_(gradient)
        dy = torch.where(y > 0, (dpooled / layer.out**2)[:, :, None, None], 0.0)

        mean, square = (self.sums[:, :, layer.norm :] / (y.shape[1] * layer.out**2))[:, :, None, None, None]
        value = (z - mean) * ((square - mean * mean).clamp(min=0) + kernels.EPSILON.value).rsqrt()
        for start, gradient in ((layer.bias, dy.float()), (layer.gain, dy * value)):
            self.gradients[:, start : start + layer.outputs] = gradient.sum((1, 2, 3))
        return losses.detach(), dy

    def _backward(self, dy: Tensor, kept: list[Kept]) -> None:
        passed = None  # the gradient of the output of the block that is gone through
        for number in reversed(range(len(self.layers))):
            layer, here = self.layers[number], kept[number]
            dz = torch.empty_like(dy)
            self._unnormalise(layer, dy, here.z, dz)
            self._correlate(layer, here.x, dz)
            if number == 0:
                return
            if number % 2 == 0:  # a block's end
                passed = dy
            dy = torch.empty_like(here.x)
            shortcut = passed if number % 2 == 1 else None
            self._convolve_back(layer, self.layers[number - 1], dz, shortcut, here.x, kept[number - 1].z, dy)

    def _keep_statistics(self, images: int) -> None:
        """Move the running mean and variance, as BatchNorm does, with the unbiased one."""
        count = self._pixels * images
        mean, square = self.sums / count
        variance = (square - mean * mean).clamp_(min=0) * (count / (count - 1))
        self.running.lerp_(torch.stack((mean, variance)), MOMENTUM)
        self.batches += 1

    # Launches.

    def _grid(self, images: int, side: int, block: int) -> tuple[int, int]:
        return -(-images * side**2 // block), len(self.nets)

    def _rows(self, x: Tensor) -> tuple[int, ...]:
        """What every kernel is told."""
        rows = (self.sums.shape[2], self.parameters.shape[1], self.kernels.shape[1])
        return x.shape[1], len(self.nets), *rows

    def _convolve(self, layer: Layer, x: Tensor, z: Tensor) -> None:
        kernels.convolve[self._grid(x.shape[1], layer.out, CONVOLVED)](
            x,
            self.kernels[:, layer.taps :],
            z,
            self.sums[:, :, layer.norm :],
            *self._rows(x),
            **layer.sizes(),
            BLOCK=CONVOLVED,
        )

    def _normalise(self, layer: Layer, z: Tensor, shortcut: Tensor | None, y: Tensor) -> None:
        kernels.normalise[self._grid(z.shape[1], layer.out, BLOCK)](
            z,
            self.sums[:, :, layer.norm :],
            self.parameters[:, layer.gain :],
            self.parameters[:, layer.bias :],
            z if shortcut is None else shortcut,
            y,
            *self._rows(z),
            SIDE=layer.out,
            CHANNELS=layer.outputs,
            SHORTCUT=0 if shortcut is None else shortcut.shape[-1],
            BLOCK=BLOCK,
        )

    def _unnormalise(self, layer: Layer, dy: Tensor, z: Tensor, dz: Tensor) -> None:
        kernels.unnormalise[self._grid(z.shape[1], layer.out, BLOCK)](
            dy,
            z,
            self.sums[:, :, layer.norm :],
            self.parameters[:, layer.gain :],
            self.gradients[:, layer.gain :],
            self.gradients[:, layer.bias :],
            dz,
            *self._rows(z),
            SIDE=layer.out,
            CHANNELS=layer.outputs,
            BLOCK=BLOCK,
        )

    def _correlate(self, layer: Layer, x: Tensor, dz: Tensor) -> None:
        taps, used = {16: (16, 9), 32: (4, 3)}.get(layer.inputs, (1, 1))
        rounds = min(ROUNDS, -(-x.shape[1] * layer.out**2 // CORRELATED))
        parts, networks = self._grid(x.shape[1], layer.out, CORRELATED * rounds)
        kernels.correlate[(parts, 9 // used, networks)](
            x,
            dz,
            self.dkernels[:, layer.taps :],
            *self._rows(x),
            **layer.sizes(),
            TAPS=taps,
            USED=used,
            BLOCK=CORRELATED,
            BLOCKS=rounds,
        )

    def _convolve_back(
        self, layer: Layer, before: Layer, dz: Tensor, shortcut: Tensor | None, x: Tensor, z: Tensor, dx: Tensor
    ) -> None:
        kernels.convolve_back[self._grid(dx.shape[1], layer.side, CONVOLVED)](
            dz,
            self.kernels[:, layer.taps :],
            dz if shortcut is None else shortcut,
            x,
            z,
            self.sums[:, :, before.norm :],
            self.gradients[:, before.gain :],
            self.gradients[:, before.bias :],
            dx,
            *self._rows(dx),
            **layer.sizes(),
            SHORTCUT=shortcut is not None,
            BLOCK=CONVOLVED,
        )
