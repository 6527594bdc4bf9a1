"""What must hold for every gamma, gradient and schedule: finite parameters, adaptivity gamma, unbiased rounding."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anon_optim import Anon, Guard, Storage

GAMMAS = st.floats(-4.5, 4.5).map(lambda x: round(x, 3))
GROWTHS = st.one_of(st.floats(1.001, 10.0), st.just(math.inf))
BETA3S = st.floats(0.0, 0.999) | st.none()
SHAPES = st.sampled_from([(), (0,), (1,), (3, 0), (5,), (1, 1, 2), (3, 4)])
PATHS = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "capturable": {"capturable": True, "foreach": False},
    "capturable foreach": {"capturable": True, "foreach": True},
}


def decades(gamma):
    """The decades of |g| in 1e-20 .. 1e10 where v = |g|^-gamma and the update |g|^(1-gamma) stay in 1e-30 .. 1e30."""
    steepest = max(abs(gamma), abs(1 - gamma))
    return max(-20.0, -30 / steepest), min(10.0, 30 / steepest)


def wild_gradient(rng, shape, gamma, alive):
    low, high = decades(gamma)
    g = 10.0 ** rng.uniform(low, high, shape) * rng.choice([-1.0, 1.0], shape)
    return torch.tensor(np.where(rng.uniform(size=shape) < alive, g, 0.0))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    path=st.sampled_from(sorted(PATHS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    gamma=GAMMAS,
    growth=GROWTHS,
    beta3=BETA3S,
    shape=SHAPES,
    alive=st.sampled_from([0.05, 0.5, 1.0]),
    statistic=st.sampled_from(["gradient", "belief"]),
    follow=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_finite_gradients_give_finite_parameters(
    path, dtype, gamma, growth, beta3, shape, alive, statistic, follow, seed
):
    rng = np.random.default_rng(seed)
    params = [torch.nn.Parameter(torch.ones(s, dtype=dtype)) for s in (shape, shape, (2,))]
    how = {"growth": growth, "beta3": beta3, "statistic": statistic, "guard": Guard(follow=follow), **PATHS[path]}
    opt = Anon(params, lr=1e-3, gamma=gamma, **how)
    for _ in range(12):
        for p in params:
            p.grad = wild_gradient(rng, p.shape, gamma, alive).to(dtype)
        opt.step()
        for p in params:
            assert torch.isfinite(p).all()
            state = opt.state[p]
            for key in ("exp_avg", "exp_avg_sq", "preconditioner", "level"):
                assert torch.isfinite(state[key]).all(), key
            seen = state["preconditioner"][state["preconditioner"] != 0]
            assert (seen >= torch.finfo(torch.float32).tiny).all()


ALL_PATHS = {**PATHS, "fused": {"fused": True}, "capturable fused": {"fused": True, "capturable": True}}


def moves(gradients, gamma=1.0, guard=None, size=64, **options):
    """How far coordinates with equal gradients move on each step, with lr = 1 and no averages."""
    p = torch.nn.Parameter(torch.zeros(size))
    guard = guard or Guard(clip=math.inf, floor=0.0)
    opt = Anon([p], lr=1.0, gamma=gamma, betas=(0.0, 0.0), beta3=0.0, eps=0.0, guard=guard, **options)
    path = [0.0]
    for g in gradients:
        p.grad = torch.full_like(p, g)
        opt.step()
        path.append(p[0].item())
    return [before - after for before, after in pairwise(path)]


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("gamma", [0.5, 1.0, 1.5])
def test_the_brake_holds_until_the_next_refresh(gamma, path):
    # Refreshes at 1, 2, 4 and 8, so after step 4 psi stays 1. Step 5 is 3 times as large; the steps after it know.
    found = moves([1.0, 1.0, 1.0, 1.0, 3.0, 1.0, 2.0, 2.0, 2.0], gamma, **ALL_PATHS[path])
    held = 9 ** (gamma / 2)
    later = 2 / 2**gamma  # psi = 2^gamma from step 8 on
    assert found == pytest.approx([1, 1, 1, 1, 3, 1 / held, 2 / held, later, later], rel=1e-5)


def test_the_brake_is_one_of_the_diagnostics():
    p = torch.nn.Parameter(torch.zeros(64))
    opt = Anon([p], gamma=1.5, betas=(0.0, 0.999), guard=Guard(clip=math.inf))
    for g in (1.0, 1.0, 1.0, 1.0, 3.0):
        p.grad = torch.full_like(p, g)
        opt.step()
    assert opt.diagnostics()[0].brake == pytest.approx(9**0.75)
    opt.refresh()
    assert opt.diagnostics()[0].brake == 1


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("gamma", [0.5, 1.0, 1.5, 1.7])
def test_psi_follows_gradients_that_grow_and_falls_at_refreshes_alone(gamma, path):
    """Beside Adam's average, as if all had been zero until the last refresh (at 1, 2, 4 and 8)."""
    p, beta2 = torch.nn.Parameter(torch.zeros(64)), 0.5
    guard = Guard(clip=math.inf, floor=0.0, touch=False, brake=False, follow=True)
    opt = Anon([p], gamma=gamma, betas=(0.0, beta2), beta3=0.0, eps=0.0, guard=guard, **ALL_PATHS[path])
    psi2, found = [], []
    for t, g in enumerate([1.0, 1.0, 1.0, 1.0, 3.0, 0.1, 0.1, 2.0, 1.0], 1):
        p.grad = torch.full_like(p, g)
        opt.step()
        found.append(opt.state[p]["preconditioner"][0].item() ** (-2 / gamma))
        psi2.append(1.0 if t < 5 else beta2 * 9 / (1 - beta2**5) if t < 8 else found[-1])
    assert found == pytest.approx(psi2, rel=1e-5)
    assert found[8] == found[7] < found[6]


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("gamma", [-0.5, 0.0, 0.5])
def test_nothing_is_followed_below_0(gamma, path):
    gradients = [1.0, 1.0, 1.0, 1.0, 3.0, 1.0, 2.0]
    guards = [Guard(clip=math.inf, brake=False, follow=follow) for follow in (False, True)]
    plain, following = (moves(gradients, gamma, guard, **ALL_PATHS[path]) for guard in guards)
    assert (following == plain) == (gamma <= 0)


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize(("gamma", "size"), [(-0.5, 64), (0.0, 64), (1.0, 63)])
def test_there_is_no_brake_below_0_or_in_small_tensors(gamma, size, path):
    gradients = [1.0, 1.0, 1.0, 1.0, 3.0, 1.0, 2.0]
    unbraked = moves(gradients, gamma, Guard(clip=math.inf, floor=0.0, brake=False), size, **ALL_PATHS[path])
    assert moves(gradients, gamma, size=size, **ALL_PATHS[path]) == unbraked


@pytest.mark.parametrize("path", ALL_PATHS)
def test_gradients_that_come_back_are_not_held_up(path):
    """beta3 keeps psi above what an interval of small gradients would make of it, so what they were is no danger."""
    p = torch.nn.Parameter(torch.zeros(64))
    opt = Anon([p], lr=1.0, betas=(0.0, 0.999), guard=Guard(clip=math.inf), **ALL_PATHS[path])
    for t in range(1, 32):
        p.grad = torch.full((64,), 1e-3 if 8 < t <= 16 else 1.0)
        opt.step()
    foreseen, average, excess = opt.state[p]["brake"].tolist()
    assert foreseen == pytest.approx(1, rel=1e-5)  # and not the small gradients' power
    assert (average, excess) == pytest.approx((2, 2), rel=1e-5)  # psi2 was halved at step 16


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_the_others_their_brake(path, bad):
    p = torch.nn.Parameter(torch.zeros(64))
    opt = Anon([p], lr=1.0, **ALL_PATHS[path])
    for t in range(1, 10):
        p.grad = torch.tensor([1.0] * 63 + [bad if t in (3, 4) else 1.0])
        opt.step()
        assert opt.state[p]["brake"].isfinite().all()
        assert opt.state[p]["brake"][0] > 0
    assert p[0].isfinite()


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize(
    ("gamma", "sizes", "options"),
    [
        (3.5, [1e18] * 9, {"lr_scale": "tensor"}),
        (3.5, [1e-10] * 9, {}),
        (2.0, [1e-23] * 4 + [1e-18] * 5, {"eps": 0.0}),
    ],
)
def test_powers_beyond_float32_spoil_nothing(gamma, sizes, options, path):
    p = torch.nn.Parameter(torch.zeros(100))
    opt = Anon([p], lr=1e-30, gamma=gamma, **options, **ALL_PATHS[path])
    rng = torch.Generator().manual_seed(0)
    for size in sizes:
        p.grad = size * (1 + torch.rand(100, generator=rng))
        opt.step()
        assert p.isfinite().all()
        assert opt.state[p]["brake"].isfinite().all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("gamma", "limit"), [(8.0, "max"), (-8.0, "tiny")])
def test_the_preconditioner_stays_in_the_normal_range(gamma, limit, path):
    """1e-6 to the power -+8 is none of float32's numbers; 0 would mean unseen. Set by a refresh, then by a touch."""
    p = torch.nn.Parameter(torch.zeros(2))
    opt = Anon([p], lr=1e-30, gamma=gamma, guard=Guard(clip=math.inf, floor=0.0), **PATHS[path])
    for t in range(1, 4):
        p.grad = torch.tensor([1e-6, 1e-6 * (t >= 3)])
        opt.step()
    expected = getattr(torch.finfo(torch.float32), limit)
    assert opt.state[p]["preconditioner"].tolist() == [expected, expected]
    assert torch.isfinite(p).all()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    path=st.sampled_from(sorted(PATHS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    gamma=st.floats(-4.5, 4.5),
    shape=SHAPES,
    lr_scale=st.sampled_from([None, "tensor"]),
)
def test_steps_on_zero_gradients_move_nothing(path, dtype, gamma, shape, lr_scale):
    p = torch.nn.Parameter(torch.full(shape, 1.5, dtype=dtype))
    opt = Anon([p], lr=1e-3, gamma=gamma, lr_scale=lr_scale, **PATHS[path])
    for _ in range(5):
        p.grad = torch.zeros_like(p)
        opt.step()
    assert torch.equal(p, torch.full(shape, 1.5, dtype=dtype))


# Adaptivity


def last_update(gradients, k, gamma, **options):
    """|theta_T - theta_{T-1}| in float64 when every gradient is multiplied by k."""
    p = torch.nn.Parameter(torch.zeros(gradients.shape[1:], dtype=torch.float64))
    # Started at 0 and set back to it, the parameter holds the update to all its digits.
    opt = Anon([p], lr=1.0, gamma=gamma, foreach=False, **options)
    for g in gradients:
        p.grad = torch.tensor(k * g)
        p.data.zero_()
        opt.step()
    return p.detach().numpy().copy()


def adaptivity(gradients, gamma, **options):
    """A = 1 - d ln|update| / d ln k, from replays at k = 2 and k = 1/2, which scale floats without rounding."""
    more, less = (abs(last_update(gradients, k, gamma, **options)) for k in (2.0, 0.5))
    moving = (more > 0) & (less > 0)
    assert moving.any()
    return 1 - np.log(more[moving] / less[moving]) / math.log(4), moving


def eps_error(gradients, gamma):
    """How far A may be from gamma: (|gamma| + |1-gamma|) eps / EMA at k = 1/2, of psi and of the clip's r."""
    smallest = abs(gradients).min() / 2
    return (abs(gamma) + abs(1 - gamma)) * 1e-16 / smallest**2 + 1e-9


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    gamma=GAMMAS,
    growth=GROWTHS,
    beta3=BETA3S,
    guarded=st.booleans(),
    steps=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_adaptivity_is_gamma_for_dense_gradients(gamma, growth, beta3, guarded, steps, seed):
    rng = np.random.default_rng(seed)
    gradients = 10.0 ** rng.uniform(-6, 2, (steps, 7)) * rng.choice([-1, 1], (steps, 7))
    options = {"growth": growth, "beta3": beta3, "guard": Guard() if guarded else None}
    measured, _ = adaptivity(gradients, gamma, **options)
    tolerance = eps_error(gradients, gamma)
    assert tolerance < 5e-3
    np.testing.assert_allclose(measured, gamma, rtol=0, atol=tolerance)


@pytest.mark.parametrize("gamma", [-2.0, -0.5, 0.0, 0.3, 1.0, 1.1, 2.0])
def test_adaptivity_to_a_thousandth(gamma):
    rng = np.random.default_rng(0)
    gradients = 10.0 ** rng.uniform(-6, 0, (30, 20)) * rng.choice([-1, 1], (30, 20))
    for guard in (None, Guard()):
        measured, moving = adaptivity(gradients, gamma, guard=guard)
        assert moving.all()
        np.testing.assert_allclose(measured, gamma, rtol=0, atol=1e-3)


def growing_gradients(rng, steps=45):
    """A third of the coordinates grows a thousandfold after the refresh at 32, so that their v is stale."""
    gradients = 10.0 ** (rng.uniform(-4, -3, 12) + rng.uniform(-0.1, 0.1, (steps, 12))) * rng.choice([-1, 1], 12)
    gradients[36:, :4] *= 1e3
    return gradients


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gamma", [-0.5, 0.0, 0.01, 0.25, 0.5, 1.0, 1.1, 2.0])
def test_the_clip_fades_as_gamma_falls_to_zero(gamma, path):
    """A first step, in which m_hat is the gradient: sigma counts as (m_hat / clip)^2, so that the step is clip^gamma of
    what it would be."""
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    p.grad = torch.tensor([4.0, -4.0, 4.0], dtype=torch.float64)
    Anon([p], lr=0.1, gamma=gamma, guard=Guard(clip=0.25), **PATHS[path]).step()
    share = 0.25**gamma if gamma > 0 else 1
    assert p.detach().tolist() == pytest.approx([sign * 0.1 * share * 4 ** (1 - gamma) for sign in (-1, 1, -1)])


@pytest.mark.parametrize("gamma", [0.3, 0.7, 1.0, 1.1, 2.0, 3.5])
def test_adaptivity_is_gamma_where_the_clip_acts_and_where_not(gamma):
    gradients = growing_gradients(np.random.default_rng(1))
    # Constant gradients have m_hat^2 near sigma: a wider clip leaves them alone.
    guard, free = Guard(clip=2.0), Guard(clip=math.inf)
    clipped = last_update(gradients, 1.0, gamma, guard=guard) != last_update(gradients, 1.0, gamma, guard=free)
    assert clipped.any()
    assert not clipped.all()
    measured, moving = adaptivity(gradients, gamma, guard=guard)
    assert moving.all()
    np.testing.assert_allclose(measured, gamma, rtol=0, atol=1e-3)


@pytest.mark.parametrize("gamma", [-2.0, -0.5, 0.0, 0.3, 1.0, 1.1, 2.0])
@pytest.mark.parametrize("last", [11, 16, 24, 45])
def test_adaptivity_is_gamma_for_coordinates_that_start_late(gamma, last):
    gradients = growing_gradients(np.random.default_rng(2))[:last]
    gradients[0] = 0.0
    gradients[:10, 5] = 0.0
    gradients[:22, 6:8] = 0.0
    gradients[:, 8] = 0.0
    measured, moving = adaptivity(gradients, gamma)
    assert list(np.flatnonzero(~moving)) == ([6, 7, 8] if last < 23 else [8])
    np.testing.assert_allclose(measured, gamma, rtol=0, atol=1e-3)


@pytest.mark.parametrize("gamma", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_under_lr_scale_the_tensor_as_a_whole_responds_as_adam(gamma):
    gradients = growing_gradients(np.random.default_rng(3))
    gradients[0] = 0.0
    measured, _ = adaptivity(gradients, gamma, lr_scale="tensor")
    np.testing.assert_allclose(measured, 1.0, rtol=0, atol=1e-3)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(gamma=GAMMAS, growth=GROWTHS, seed=st.integers(0, 2**32 - 1))
def test_within_an_interval_the_preconditioner_only_tightens(gamma, growth, seed):
    """The sticky clip lowers v and nothing raises it before the next refresh: the argument of the convergence proof."""
    rng = np.random.default_rng(seed)
    p = torch.nn.Parameter(torch.zeros(8, dtype=torch.float64))
    opt = Anon([p], lr=1.0, gamma=gamma, growth=growth)
    before = None
    for _ in range(30):
        p.grad = wild_gradient(rng, p.shape, gamma, 0.5)
        opt.step()
        state = opt.state[p]
        v = state["preconditioner"].clone()
        if before is not None and state["weight"] > 0:
            assert ((v <= before) | (before == 0)).all()
        before = v


# Stochastic rounding


def rounded_once(theta, gradient, count=1, **options):
    """One step of plain SGD (gamma 0, no momentum), so that the float32 result is theta - lr * gradient."""
    p = torch.nn.Parameter(torch.full((count,), theta, dtype=torch.bfloat16))
    p.grad = torch.full((count,), gradient, dtype=torch.bfloat16)
    storage = Storage(stochastic_round=True)
    Anon([p], gamma=0.0, betas=(0.0, 0.999), storage=storage, **options).step()
    return p.detach()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("theta", "gradient", "lr"),
    [(1.0, 1.0, 1e-3), (-1.0, 1.0, 1e-3), (1.0, -1.0, 2e-3), (300.0, 3.0, 0.037), (2e-5, 1.0, 3e-8)],
)
def test_stochastic_rounding_is_unbiased(theta, gradient, lr, path):
    torch.manual_seed(0)
    count = 100_000
    drawn = rounded_once(theta, gradient, count, lr=lr, **PATHS[path]).double()
    start = torch.tensor(theta, dtype=torch.bfloat16).double().item()
    exact = start - lr * gradient
    values = drawn.unique()
    assert len(values) == 2
    assert values[0] < exact < values[1]
    error = drawn.std().item() / math.sqrt(count)
    assert abs(drawn.mean().item() - exact) < 4 * error


@pytest.mark.parametrize("path", PATHS)
def test_stochastic_rounding_draws_from_torchs_generator(path):
    def draw(seed):
        torch.manual_seed(seed)
        return rounded_once(1.0, 1.0, 1000, lr=1e-3, **PATHS[path])

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize("path", PATHS)
def test_stochastic_rounding_leaves_representable_values_alone(path):
    torch.manual_seed(0)
    for theta, gradient, lr in [(1.0, 1.0, 0.25), (-3.0, 0.5, 0.5), (1.0, 1.0, 1.0), (0.375, -2.0, 2.0)]:
        result = rounded_once(theta, gradient, 2000, lr=lr, **PATHS[path])
        assert (result == theta - lr * gradient).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(bits=st.integers(0, 2**16 - 1), path=st.sampled_from(sorted(PATHS)))
def test_stochastic_rounding_without_an_update_changes_no_bit(bits, path):
    theta = torch.tensor([bits - 2**16 if bits >= 2**15 else bits], dtype=torch.int16).view(torch.bfloat16)
    if not torch.isfinite(theta).all():
        return
    p = torch.nn.Parameter(theta.repeat(100))
    p.grad = torch.zeros_like(p)
    Anon([p], gamma=0.0, storage=Storage(stochastic_round=True), **PATHS[path]).step()
    assert torch.equal(p.view(torch.int16), theta.repeat(100).view(torch.int16)) or not theta.any()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(theta=st.floats(-1e6, 1e6), update=st.floats(-10.0, 10.0), path=st.sampled_from(sorted(PATHS)))
def test_stochastic_rounding_lands_on_a_neighbour(theta, update, path):
    """Never further than one bf16 spacing from the float32 result."""
    result = rounded_once(theta, update, 50, lr=1.0, **PATHS[path]).double()
    start, step = (torch.tensor(x, dtype=torch.bfloat16).double().item() for x in (theta, update))
    exact = start - step
    spacing = 2.0 ** (math.frexp(exact)[1] - 8) if exact else 0.0
    assert (abs(result - exact) <= spacing * (1 + 2.0**-14)).all()


def test_other_dtypes_are_untouched_by_stochastic_rounding():
    results = []
    for storage in (Storage(), Storage(stochastic_round=True)):
        p = torch.nn.Parameter(torch.ones(5))
        p.grad = torch.full((5,), 0.3)
        Anon([p], lr=1e-3, storage=storage).step()
        results.append(p.detach())
    assert torch.equal(*results)
