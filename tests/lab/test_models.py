"""The networks: their sizes are the published ones, and their parts compute what their equations say."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anon_lab.models.resnet import BasicBlock, Bottleneck, Pad, ResNet, resnet18, resnet20, resnet50
from anon_lab.models.vit import Attention, ViT


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def shape(make: Callable[..., ResNet], **arguments: Any) -> ResNet:
    """The network without its numbers, which take time to draw."""
    with torch.device("meta"):
        return make(**arguments)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_resnets_have_the_published_number_of_parameters() -> None:
    assert count(shape(resnet20)) == 269_722
    assert count(shape(resnet20, shortcut="B")) == 272_474
    assert count(shape(resnet18)) == 11_689_512
    assert count(shape(resnet50)) == 25_557_032


def test_vit_has_the_parameters_of_its_equations() -> None:
    width, hidden, depth, patches = 192, 384, 9, 64
    attention = 4 * (width * width + width)
    mlp = 2 * width * hidden + hidden + width
    embedding = 3 * 4 * 4 * width + width + patches * width
    assert count(ViT()) == embedding + depth * (attention + mlp + 4 * width) + 2 * width + width * 10 + 10


@pytest.mark.parametrize(("make", "layers"), [(resnet20, 20), (resnet18, 18), (resnet50, 50)])
def test_resnets_have_as_many_layers_as_their_names_say(make: Callable[..., ResNet], layers: int) -> None:
    weights = [name for name, p in shape(make).named_parameters() if p.ndim > 1 and "downsample" not in name]
    assert len(weights) == layers


def test_parameters_are_named_as_in_torchvision() -> None:
    norm = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]

    def names(depths: tuple[int, ...], convolutions: int, first_projects: bool) -> list[str]:
        found = ["conv1.weight", *(f"bn1.{key}" for key in norm), "fc.weight", "fc.bias"]
        for stage, depth in enumerate(depths, start=1):
            for block in range(depth):
                at = f"layer{stage}.{block}"
                for i in range(1, convolutions + 1):
                    found += [f"{at}.conv{i}.weight", *(f"{at}.bn{i}.{key}" for key in norm)]
                if block == 0 and (stage > 1 or first_projects):
                    found += [f"{at}.downsample.0.weight", *(f"{at}.downsample.1.{key}" for key in norm)]
        return sorted(found)

    assert sorted(shape(resnet18).state_dict()) == names((2, 2, 2, 2), 2, first_projects=False)
    assert sorted(shape(resnet50).state_dict()) == names((3, 4, 6, 3), 3, first_projects=True)
    assert shape(resnet50).state_dict()["layer4.0.conv2.weight"].shape == (512, 512, 3, 3)
    assert shape(resnet50, classes=7).state_dict()["fc.weight"].shape == (7, 2048)


def test_stages_halve_the_image_and_double_the_width() -> None:
    shapes: dict[str, tuple[int, ...]] = {}

    def watch(net: ResNet, image_size: int) -> list[tuple[int, ...]]:
        shapes.clear()
        for name in net.stages:
            net.get_submodule(name).register_forward_hook(
                lambda module, inputs, output, name=name: shapes.update({name: tuple(output.shape[1:])})
            )
        assert net(torch.randn(2, 3, image_size, image_size)).shape == (2, net.fc.out_features)
        return list(shapes.values())

    assert watch(resnet20(), 32) == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]
    assert watch(resnet18(classes=5), 64) == [(64, 16, 16), (128, 8, 8), (256, 4, 4), (512, 2, 2)]
    assert watch(resnet50(classes=5), 64) == [(256, 16, 16), (512, 8, 8), (1024, 4, 4), (2048, 2, 2)]


def test_padding_shortcut_takes_every_second_pixel_and_adds_zeros() -> None:
    x = torch.arange(2 * 4 * 4.0).view(1, 2, 4, 4)
    y = Pad(added=2, stride=2)(x)
    assert y[0, 0].tolist() == [[0, 2], [8, 10]]
    assert y[0, 1].tolist() == [[16, 18], [24, 26]]
    assert y[0, 2:].count_nonzero() == 0
    assert y.shape == (1, 4, 2, 2)


def normalised(x: Tensor) -> Tensor:
    mean = x.mean((0, 2, 3), keepdim=True)
    return (x - mean) / (x.var((0, 2, 3), unbiased=False, keepdim=True) + 1e-5).sqrt()


def test_blocks_follow_their_equations() -> None:
    x = torch.randn(4, 8, 6, 6, dtype=torch.float64)
    basic = BasicBlock(8, 16, 2, "B").double()
    y = normalised(F.conv2d(x, basic.conv1.weight, stride=2, padding=1)).relu()
    y = normalised(F.conv2d(y, basic.conv2.weight, padding=1))
    assert isinstance(basic.downsample, nn.Sequential)
    led = normalised(F.conv2d(x, basic.downsample[0].weight, stride=2))
    torch.testing.assert_close(basic(x), (y + led).relu())

    narrow = Bottleneck(8, 2, 1, "B").double()
    y = normalised(F.conv2d(x, narrow.conv1.weight)).relu()
    y = normalised(F.conv2d(y, narrow.conv2.weight, padding=1)).relu()
    y = normalised(F.conv2d(y, narrow.conv3.weight))
    assert narrow.downsample is None
    torch.testing.assert_close(narrow(x), (y + x).relu())


@pytest.mark.parametrize("make", [resnet18, resnet50])
def test_zero_init_makes_blocks_their_shortcuts(make: Callable[..., ResNet]) -> None:
    net = make(classes=3, zero_init=True)
    x = torch.rand(2, *{resnet18: (64, 8, 8), resnet50: (256, 8, 8)}[make])
    torch.testing.assert_close(net.get_submodule("layer1.1")(x), x)
    assert not torch.equal(make(classes=3).get_submodule("layer1.1")(x), x)


def test_convolutions_keep_the_scale_of_gradients() -> None:
    for conv in (module for module in resnet18().modules() if isinstance(module, nn.Conv2d)):
        fan_out = conv.out_channels * conv.kernel_size[0] ** 2
        tolerance = 5 / math.sqrt(2 * conv.weight.numel())  # five standard errors of a standard deviation
        assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=tolerance)


def test_attention_follows_its_equation() -> None:
    attention = Attention(width=6, heads=2).double()
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    q, k, v = (x @ attention.qkv.weight.T + attention.qkv.bias).split(6, dim=-1)
    heads = []
    for head in (slice(0, 3), slice(3, 6)):
        weights = (q[..., head] @ k[..., head].transpose(1, 2) / math.sqrt(3)).softmax(-1)
        heads.append(weights @ v[..., head])
    want = torch.cat(heads, -1) @ attention.out.weight.T + attention.out.bias
    torch.testing.assert_close(attention(x), want)


def test_vit_knows_patches_by_their_embedded_place_alone() -> None:
    net = ViT(depth=2).eval()
    x = torch.randn(1, 3, 32, 32)
    patches = x.view(1, 3, 8, 4, 8, 4)
    shuffled = patches[:, :, torch.randperm(8)][:, :, :, :, torch.randperm(8)].reshape(x.shape)
    assert not torch.allclose(net(x), net(shuffled), atol=1e-4)
    nn.init.zeros_(net.place)
    torch.testing.assert_close(net(x), net(shuffled), atol=1e-5, rtol=1e-4)


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="patch must divide the image's 32 pixels, but is 5"):
        ViT(patch=5)
    with pytest.raises(ValueError, match="width must be a multiple of the 5 heads, but is 192"):
        ViT(heads=5)


@pytest.mark.parametrize("make", [resnet20, lambda: resnet18(classes=10), lambda: resnet50(classes=10), ViT])
def test_gradient_reaches_every_parameter_also_in_bfloat16(make: Callable[[], nn.Module]) -> None:
    net = make()
    x, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    for dtype in (torch.float32, torch.bfloat16):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = net(x.to(memory_format=torch.channels_last))
            loss = F.cross_entropy(logits, labels)
        loss.backward()
        assert logits.dtype == dtype
        assert loss.dtype == torch.float32
        for name, p in net.named_parameters():
            assert p.grad is not None, name
            assert p.grad.isfinite().all(), name
            assert p.grad.count_nonzero() > 0, name
