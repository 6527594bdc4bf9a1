"""decay_groups: what decays, what does not, and that nothing is lost on the way into an optimizer."""

import doctest
import math

import pytest
import torch
from torch import nn

import anon_optim._decay
from anon_optim import Anon, decay_groups


class Transformer(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.full((5, 8), 0.1))
        self.scale = nn.Parameter(torch.ones(()))
        self.block = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.position * self.scale
        return self.head(self.norm(self.block(x)))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 3, 3, padding=1)
        self.bn2 = nn.GroupNorm(1, 3)

    def forward(self, x):
        return x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))


def names(groups, weight_decay):
    return [name for group in groups if group["weight_decay"] == weight_decay for name, _ in group["params"]]


def check_complete(groups, model):
    """Every parameter once, under the name and in the order of named_parameters()."""
    listed = dict(model.named_parameters())
    entries = [entry for group in groups for entry in group["params"]]
    assert len(entries) == len(listed)
    assert all(listed[name] is parameter for name, parameter in entries)
    order = list(listed)
    for group in groups:
        positions = [order.index(name) for name, _ in group["params"]]
        assert positions == sorted(positions)


def test_transformer():
    model = Transformer()
    groups = decay_groups(model, 0.1)
    assert names(groups, 0.1) == [
        "position",
        "embed.weight",
        "block.self_attn.in_proj_weight",
        "block.self_attn.out_proj.weight",
        "block.linear1.weight",
        "block.linear2.weight",
        "head.weight",
    ]
    assert names(groups, 0.0) == [
        "scale",
        "block.self_attn.in_proj_bias",
        "block.self_attn.out_proj.bias",
        "block.linear1.bias",
        "block.linear2.bias",
        "block.norm1.weight",
        "block.norm1.bias",
        "block.norm2.weight",
        "block.norm2.bias",
        "norm.weight",
    ]
    check_complete(groups, model)


def test_residual_network():
    model = nn.Sequential(Residual(), Residual())
    groups = decay_groups(model, 5e-4)
    assert names(groups, 5e-4) == [f"{i}.conv{k}.weight" for i in (0, 1) for k in (1, 2)]
    check_complete(groups, model)


def test_tied_parameters_come_once():
    model = Transformer(tied=True)
    groups = decay_groups(model, 0.1)
    assert "embed.weight" in names(groups, 0.1)
    assert "head.weight" not in names(groups, 0.1) + names(groups, 0.0)
    check_complete(groups, model)


def test_a_module_used_twice_comes_once():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    groups = decay_groups(model, 0.1)
    assert names(groups, 0.1) == ["0.weight"]
    check_complete(groups, model)


def test_a_tied_parameter_is_spared_if_any_of_its_places_spares_it():
    model = nn.ModuleDict({"plain": nn.Linear(3, 2, bias=False), "norm": nn.LayerNorm((2, 3), bias=False)})
    model["norm"].weight = model["plain"].weight
    (group,) = decay_groups(model, 0.1)
    assert group["weight_decay"] == 0.0
    assert [name for name, _ in group["params"]] == ["plain.weight"]


def test_a_model_without_norms_and_empty_groups():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    groups = decay_groups(model, 0.1)
    assert names(groups, 0.1) == ["0.weight", "2.weight"]
    assert names(groups, 0.0) == ["0.bias", "2.bias"]
    assert [g["weight_decay"] for g in decay_groups(nn.Linear(3, 4, bias=False), 0.1)] == [0.1]
    assert [g["weight_decay"] for g in decay_groups(nn.LayerNorm(3), 0.1)] == [0.0]
    assert decay_groups(nn.ReLU(), 0.1) == []


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm((2, 3)),
        nn.RMSNorm((2, 3)),
        nn.GroupNorm(2, 4),
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.BatchNorm3d(4),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm1d(4, affine=True),
        nn.InstanceNorm2d(4, affine=True),
        nn.InstanceNorm3d(4, affine=True),
        type("Renamed", (nn.LayerNorm,), {})((2, 3)),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_every_norm_of_torch_is_spared(norm):
    (group,) = decay_groups(nn.Sequential(norm), 0.1)
    assert group["weight_decay"] == 0.0
    assert len(group["params"]) == len(list(norm.parameters()))


def test_norms_are_known_by_name_and_only_own_what_is_directly_theirs():
    class FancyNORM2(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1, 4, 1, 1))
            self.inner = nn.Linear(4, 4, bias=False)

    assert names(decay_groups(FancyNORM2(), 0.1), 0.0) == ["gain"]
    assert names(decay_groups(FancyNORM2(), 0.1), 0.1) == ["inner.weight"]


def test_a_bias_is_known_by_the_end_of_its_name():
    model = nn.Module()
    model.register_parameter("rel_pos_bias", nn.Parameter(torch.zeros(3, 3)))
    model.register_parameter("bias", nn.Parameter(torch.zeros(3, 3)))
    model.register_parameter("biased", nn.Parameter(torch.zeros(3, 3)))
    groups = decay_groups(model, 0.1)
    assert names(groups, 0.0) == ["rel_pos_bias", "bias"]
    assert names(groups, 0.1) == ["biased"]


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.SGD,
    ],
    ids=lambda optimizer: optimizer.__name__,
)
def test_any_optimizer_takes_the_groups_and_keeps_the_names(optimizer):
    torch.manual_seed(0)
    model = Transformer(tied=True)
    opt = optimizer(decay_groups(model, 0.1), lr=1e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.randint(11, (2, 5))).square().sum().backward()
    opt.step()
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())
    saved = opt.state_dict()["param_groups"]
    assert [group["weight_decay"] for group in saved] == [0.1, 0.0]
    assert [name for group in saved for name in group["param_names"]] == [
        name for group in decay_groups(model, 0.1) for name, _ in group["params"]
    ]


def test_only_the_first_group_decays():
    model = nn.Linear(3, 3)
    nn.init.ones_(model.bias)
    opt = torch.optim.AdamW(decay_groups(model, 0.5), lr=0.1)
    weight = model.weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    assert torch.equal(model.weight, weight * (1 - 0.1 * 0.5))
    assert torch.equal(model.bias, torch.ones(3))


def test_frozen_parameters_are_listed_like_the_others():
    model = nn.Linear(3, 3).requires_grad_(False)
    check_complete(decay_groups(model, 0.1), model)


@pytest.mark.parametrize("weight_decay", [-0.1, math.nan, math.inf])
def test_refuses_a_bad_weight_decay(weight_decay):
    with pytest.raises(ValueError, match=f"weight_decay must be at least 0 and finite, got {weight_decay}"):
        decay_groups(nn.Linear(2, 2), weight_decay)


def test_refuses_parameters_in_place_of_a_model():
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, not its parameters, got generator"):
        decay_groups(nn.Linear(2, 2).parameters(), 0.1)  # pyright: ignore[reportArgumentType]


def test_too_much_decay_is_told_with_the_most_that_is_possible():
    model = nn.Linear(2, 2)
    Anon(model.parameters(), lr=4.0, weight_decay=0.25)
    with pytest.raises(ValueError, match=r"1 - lr \* weight_decay = -0\.2; it may be at most 0\.25 here"):
        Anon(model.parameters(), lr=4.0, weight_decay=0.3)
    for lr in (1.5, 6.0, 7.0, 49.0, 1e3):
        with pytest.raises(ValueError, match="may be at most") as refused:
            Anon(model.parameters(), lr=lr, weight_decay=3.0)
        most = float(str(refused.value).partition("it may be at most ")[2].split()[0])
        Anon(model.parameters(), lr=lr, weight_decay=most)


def test_refuses_parameters_that_do_not_exist_yet():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"0\.weight"):
        decay_groups(model, 0.1)
    model(torch.ones(1, 2))
    assert names(decay_groups(model, 0.1), 0.1) == ["0.weight"]


def test_the_example_in_the_documentation():
    result = doctest.testmod(anon_optim._decay)
    assert result.attempted > 0
    assert result.failed == 0
