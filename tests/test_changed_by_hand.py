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
    new = another()
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


ENTRIES = ("exp_avg", "exp_avg_sq", "preconditioner", "step", "weight", "gamma", "level", "brake")
CHANGES = [
    a_parameter_is_appended,
    a_parameter_is_replaced,
    a_parameter_is_taken_out,
    the_state_is_cleared,
    the_state_is_another,
    a_state_is_forgotten,
    states_are_copies,
    two_states_are_swapped,
    a_group_is_taken_out,
    groups_are_swapped,
    a_group_is_a_copy,
    adamw_is_loaded,
    a_parameter_is_cut,
    *map(entry_is_replaced, ENTRIES),
]


def outcome(change, path):
    """Every parameter and state entry, after some steps around the change."""
    optimizer = Anon([{"params": some(2)}, {"params": some(2), "lr": 0.01}], lr=0.1, gamma=1.1, **path)
    for t in range(10):
        if t in (3, 6):
            change(optimizer)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.cos(torch.arange(p.numel()) * (t + 1.0))
        optimizer.step()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state[p] for p in params]
    assert all(set(state) == set(ENTRIES) for state in states)
    return params, states


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_path_does_the_same(change):
    params, states = outcome(change, PATHS["loop"])
    for name in ("foreach", "fused"):
        ours, their_states = outcome(change, PATHS[name])
        for p, q in zip(params, ours, strict=True):
            torch.testing.assert_close(q, p, rtol=2e-5, atol=1e-6)
        for a, b in zip(states, their_states, strict=True):
            for entry in ENTRIES:
                torch.testing.assert_close(b[entry], a[entry], rtol=2e-5, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_parameter_that_no_longer_fits_its_state_is_an_error(path):
    (p,) = some(1)
    optimizer = Anon([p], lr=0.1, **path)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    whole = p.data
    p.data = p.data[:4]  # at the same address
    p.grad = None
    p.grad = torch.ones(4)
    before = whole.clone()
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert torch.equal(whole, before)


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
