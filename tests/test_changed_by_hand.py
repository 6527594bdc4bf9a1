"""What users change in an optimizer between two steps: the fused path must notice, as torch.optim's paths do.

A plan of addresses lives from step to step there; one that no longer holds would step what is gone, leave out what is
new, or write into memory that is no longer its own.
"""

import copy
from collections import defaultdict

import pytest
import torch
from torch.nn import Parameter

from anon_optim import Anon
from anon_optim._fused import backend

PATHS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
pytestmark = pytest.mark.filterwarnings("ignore:fused=True was asked for")


def some(count, size=8):
    return [Parameter(torch.linspace(-1, 1, size) * (i + 1)) for i in range(count)]


def another(size=8):
    return Parameter(torch.linspace(2, 3, size))


def a_parameter_is_appended(optimizer):
    optimizer.param_groups[0]["params"].append(another())


def a_parameter_is_replaced(optimizer):
    """As those do who prune or grow a network in training."""
    params = optimizer.param_groups[0]["params"]
    new = another(params[0].numel())
    optimizer.state[new] = optimizer.state.pop(params[0])
    params[0] = new


def a_parameter_is_taken_out(optimizer):
    optimizer.state.pop(optimizer.param_groups[0]["params"].pop(0))


def the_state_is_cleared(optimizer):
    optimizer.state.clear()


def the_state_is_another(optimizer):
    optimizer.state = defaultdict(dict)


def a_state_is_forgotten(optimizer):
    del optimizer.state[optimizer.param_groups[0]["params"][1]]


def states_are_copies(optimizer):
    for p, state in list(optimizer.state.items()):
        optimizer.state[p] = copy.deepcopy(state)


def two_states_are_swapped(optimizer):
    a, b = optimizer.param_groups[0]["params"][:2]
    optimizer.state[a], optimizer.state[b] = optimizer.state[b], optimizer.state[a]


def a_parameter_changes_groups(optimizer):
    """All objects stay, also in their order."""
    first, second = optimizer.param_groups
    if len(first["params"]) > 1:
        second["params"].insert(0, first["params"].pop())


def a_group_is_taken_out(optimizer):
    optimizer.param_groups.pop(0)


def groups_are_swapped(optimizer):
    optimizer.param_groups.reverse()


def a_group_is_a_copy(optimizer):
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.5}


def adamw_is_loaded(optimizer):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    theirs = torch.optim.AdamW([{"params": group["params"]} for group in optimizer.param_groups])
    kept = [p.detach().clone() for p in params]
    for _ in range(20):
        for p in params:
            p.grad = torch.full_like(p, 0.3)
        theirs.step()
    with torch.no_grad():
        for p, old in zip(params, kept, strict=True):
            p.copy_(old)
    optimizer.load_adamw_state(theirs.state_dict())


def entry_is_replaced(name):
    def change(optimizer):
        for state in optimizer.state.values():
            state[name] = torch.full_like(state[name], 1.0)

    change.__name__ = f"{name}_is_replaced"
    return change


def a_parameter_is_cut(optimizer):
    p = optimizer.param_groups[0]["params"][0]
    p.data = p.data[:4]
    state = optimizer.state[p]
    for name in ("exp_avg", "exp_avg_sq", "preconditioner"):
        state[name] = state[name][:4]


ENTRIES = ("exp_avg", "exp_avg_sq", "preconditioner", "step", "weight", "memory", "gamma", "level", "brake")
CHANGES = [
    a_parameter_is_appended,
    a_parameter_is_replaced,
    a_parameter_is_taken_out,
    the_state_is_cleared,
    the_state_is_another,
    a_state_is_forgotten,
    states_are_copies,
    two_states_are_swapped,
    a_parameter_changes_groups,
    a_group_is_taken_out,
    groups_are_swapped,
    a_group_is_a_copy,
    adamw_is_loaded,
    a_parameter_is_cut,
    *map(entry_is_replaced, ENTRIES),
]


def outcome(change, path, times):
    """Every parameter, those that were taken out too, and every state entry, after some steps around the changes."""
    before = [*some(2, 96), *some(2)]  # of which the brake takes the first two
    optimizer = Anon([{"params": before[:2]}, {"params": before[2:], "lr": 0.01}], lr=0.1, gamma=1.1, **path)
    for t in range(10):
        if t in times:
            change(optimizer)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for i, p in enumerate([*held, *(p for p in before if all(p is not q for q in held))]):
            p.grad = torch.cos(torch.arange(p.numel()) * (t + 1.0) + i) * (10.0 if t == 6 else 1.0)
        optimizer.step()
    states = [optimizer.state[p] for p in held]
    assert all(set(state) == set(ENTRIES) for state in states)
    return [*before, *held], states


@pytest.mark.parametrize("times", [(5,), (3, 5)], ids=["once", "twice"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_path_does_the_same(change, times):
    params, states = outcome(change, PATHS["loop"], times)
    for name in ("foreach", "fused"):
        ours, their_states = outcome(change, PATHS[name], times)
        for p, q in zip(params, ours, strict=True):
            torch.testing.assert_close(q, p, rtol=2e-5, atol=1e-6)
        for a, b in zip(states, their_states, strict=True):
            for entry in ENTRIES:
                torch.testing.assert_close(b[entry], a[entry], rtol=2e-5, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize(("new_gradient", "state_too"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_parameter_that_no_longer_fits_its_gradient_or_state_is_an_error(path, new_gradient, state_too):
    (p,) = some(1)
    optimizer = Anon([p], lr=0.1, **path)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    whole = p.data
    p.data = p.data[:4]  # at the same address
    if new_gradient:
        p.grad = None
        p.grad = torch.ones(4)
    if state_too:
        for name in ("exp_avg", "exp_avg_sq", "preconditioner"):
            optimizer.state[p][name] = optimizer.state[p][name][:4]
    before = whole.clone()
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert torch.equal(whole, before)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_gradient_of_another_size_is_an_error_at_the_first_step(path):
    (p,) = some(1)
    p.grad = torch.ones(8)
    p.data = p.data[:4]
    with pytest.raises(RuntimeError):
        Anon([p], lr=0.1, **path).step()


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_parameter_may_be_turned_in_its_memory(path, channels_last):
    """Its address and its gradient's layout stay, but no longer fit each other."""
    start = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    if channels_last:
        start = start.contiguous(memory_format=torch.channels_last)
    p, q = Parameter(start.clone()), Parameter(start.clone(memory_format=torch.contiguous_format))
    gradients = torch.randn(6, 2, 4, 4, 4, generator=torch.Generator().manual_seed(1))
    ours, plain = Anon([p], lr=0.1, **path), Anon([q], lr=0.1, foreach=False)
    for t, gradient in enumerate(gradients):
        if t == 3:
            p.data, q.data = p.data.transpose(2, 3), q.data.transpose(2, 3).contiguous()
        p.grad = torch.empty_like(start).copy_(gradient)
        q.grad = gradient.clone()
        ours.step()
        plain.step()
    torch.testing.assert_close(p, q, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_sparse_gradient_after_a_dense_one_is_told_apart(path):
    p = Parameter(torch.ones(4, 2))
    optimizer = Anon([p], lr=0.1, **path)
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()


def test_a_plan_that_holds_is_kept():
    params = some(3)
    optimizer = Anon(params, lr=0.1, fused=True)
    if backend("cpu") is None:
        pytest.skip("there is no C compiler")
    seen = set()
    for t in range(9):
        for p in params:
            p.grad = torch.full_like(p, t + 1.0)
        optimizer.step()
        seen.add(id(optimizer._plans[0]))
    assert len(seen) == 1


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("first", [False, True])
def test_gradients_that_are_only_marked_as_negated(path, first):
    """Autograd makes such ones behind complex numbers; their memory holds the opposite of what they are."""
    a, b = Parameter(torch.tensor(0.3)), Parameter(torch.tensor(0.4))
    optimizer = Anon([a, b], lr=0.1, **path)
    if not first:
        a.grad, b.grad = torch.tensor(1.0), torch.tensor(1.0)
        optimizer.step()
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (torch.complex(a, b).conj() * torch.tensor(1 + 2j)).real
        loss.backward()
        assert b.grad.is_neg()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_gradients_without_memory_are_zeros(path):
    (p,) = some(1)
    optimizer = Anon([p], lr=0.1, **path)
    for t in range(3):
        p.grad = torch._efficientzerotensor(8) if t else torch.ones(8)
        optimizer.step()
    (q,) = some(1)
    plain = Anon([q], lr=0.1, **path)
    for t in range(3):
        q.grad = torch.zeros(8) if t else torch.ones(8)
        plain.step()
    torch.testing.assert_close(p, q)
