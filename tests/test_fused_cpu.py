"""The compiled CPU step: equal to the float64 oracle and to the single-tensor path, whatever the tensors and options.

Tolerances. u = 2^-24. Gradients keep their sign, so that every average is of terms of one sign and relative errors add:
m: three roundings a step and one of beta1, each fading as beta1^k: below 4u/(1 - beta1) = 40u;
s: at most 32 steps in an interval, three roundings and that of beta2 in each: below 128u, and |gamma|/2 of it in v;
v: refreshes are averaged with weights 2^-k, so what one of them adds counts twice: 4u in the kernel, which computes
powers in double; the other paths round a logarithm of up to 37 |gamma| four times: 148 |gamma| u;
r: the same with |1 - gamma|. A clipped v takes the errors of m_hat and r in place of its own.
"""

import copy
import math
import os
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from anon_optim import Anon, Box, Guard, Storage, _fused, _fused_cpu
from oracle import Guarded, printed

pytestmark = pytest.mark.skipif(not any(_fused_cpu._compilers()), reason="needs a C compiler")

U = 2.0**-24
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
GAMMAS = [-1.0, 0.0, 0.5, 1.0, 1.1, 1.5, 2.0]
UNGUARDED = {"clip": math.inf, "floor": 0.0, "touch": False, "brake": False}
FOLLOW = Guard(clip=math.inf, floor=0.0, touch=False, brake=False, follow=True)
SHAPES = [(6, 4), (), (1,), (127,), (128,), (2049,), (5, 3, 4, 2), (4300,)]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no library in memory."""
    monkeypatch.setenv("ANON_OPTIM_CACHE", str(tmp_path / "cache"))
    for each in (_fused.backend, _fused.has_compiled_kernel):
        each.cache_clear()
    yield tmp_path / "cache"
    for each in (_fused.backend, _fused.has_compiled_kernel):
        each.cache_clear()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A cache folder with a library in it, built once for this file's tests."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANON_OPTIM_CACHE", str(folder))
        _fused_cpu.library()
    return folder


@pytest.fixture
def filled_cache(cache, built):
    shutil.copytree(built, cache)
    return cache


def fused(params, **options):
    return Anon(params, fused=True, **options)


def single(params, **options):
    return Anon(params, foreach=False, fused=False, **options)


def error_of_update(gamma, paths=1, logs_in_float=False):
    v = 64 * abs(gamma) + 8 + (2 * 148 * abs(gamma) if logs_in_float else 0)
    r = 64 * abs(1 - gamma) + 8 + (2 * 148 * abs(1 - gamma) if logs_in_float else 0)
    return paths * (40 + max(v, 40 + r) + 10) * U


def roundings(dtype):
    """Of a parameter: of its decay, of their product and of the difference in float32, and of the result."""
    return 3 * U + (0 if dtype in (torch.float32, torch.float64) else UNIT[dtype])


def signs(shape, seed=3):
    return np.random.default_rng(seed).choice([-1.0, 1.0], shape)


def magnitudes(shape, t, seed=5, dense=False):
    """A coordinate's own scale over two decades, times noise of a decade; unless `dense` some start late or never."""
    own = 10.0 ** np.random.default_rng(seed).uniform(-2, 0, shape)
    noise = 10.0 ** np.random.default_rng([seed, t]).uniform(-0.7, 0.3, shape)
    start = np.random.default_rng(seed + 1).choice([1, 1, 1, 2, 3, 6, 16, 1000], shape)
    return own * noise * (dense | (start <= t))


def gradient(p, t, dense=False):
    """Each coordinate keeps its sign. `p` says which shape, dtype and layout."""
    shape = tuple(p.shape)
    g = torch.tensor(signs(shape) * magnitudes(shape, t, dense=dense)).to(p.dtype)
    return torch.empty_like(p).copy_(g)


def dense_gradient(p, t):
    return gradient(p, t, dense=True)


def parameter(shape, dtype=torch.float32, maximize=False):
    """On the side of 0 that its gradients drive it from, so that a decay that is added to them has their sign."""
    size = np.random.default_rng(7).uniform(1, 2, shape)
    return torch.nn.Parameter(torch.tensor(signs(shape) * size * (-1 if maximize else 1)).to(dtype))


# Against the oracle


def follow_oracle(opt, p, oracle, tolerance, steps=40, changes=None, dense=False):
    """Every single step against the oracle's update, from the parameter that the step began with."""
    for t in range(1, steps + 1):
        opt.param_groups[0].update((changes or {}).get(t, {}))
        for name, value in (changes or {}).get(t, {}).items():
            setattr(oracle, name, value)
        p.grad = gradient(p, t, dense)
        before = p.detach().double().numpy()
        opt.step()
        oracle.theta = before
        oracle.step(p.grad.double().numpy())
        update = abs(oracle.theta - before)
        error = abs(p.detach().double().numpy() - oracle.theta)
        # float16 has subnormal numbers here and there: half of the smallest is their rounding
        bound = tolerance * update + roundings(p.dtype) * abs(oracle.theta) + 2.0**-25 * (p.dtype == torch.float16)
        assert (error <= bound).all(), f"step {t}: {(error / bound).max():.2f} times the bound"


def assert_state_is_the_oracles(state, oracle, gamma):
    v_error = (64 * abs(gamma) + 8) * U
    np.testing.assert_allclose(state["exp_avg"].numpy(), oracle.m, rtol=40 * U)
    np.testing.assert_allclose(state["exp_avg_sq"].numpy(), oracle.s, rtol=128 * U)
    clipped_v_error = (40 * abs(gamma) + 16) * U
    np.testing.assert_allclose(state["preconditioner"].float().numpy(), oracle.v, rtol=max(v_error, clipped_v_error))
    assert state["level"].item() == pytest.approx(oracle.level, rel=72 * U)
    if oracle.foreseen:
        brake = [oracle.foreseen, oracle.average, oracle.excess]
        assert state["brake"].tolist() == pytest.approx(brake, rel=2 * max(v_error, clipped_v_error) + 128 * U)
    assert state["weight"].item() == pytest.approx(oracle.w, rel=128 * U)
    assert state["memory"].item() == pytest.approx(sum(oracle.weights), rel=128 * U)
    assert state["gamma"].item() == oracle.gamma_in_use
    assert state["step"].item() == oracle.t


@pytest.mark.parametrize("guard", [None, Guard()], ids=["unguarded", "guarded"])
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_follows_the_oracle_in_every_dtype(dtype, gamma, guard):
    p = parameter((6, 30), dtype)
    opt = fused([p], lr=0.01, gamma=gamma, guard=guard)
    oracle = Guarded(p.detach().double().numpy(), lr=0.01, gamma=gamma, **(UNGUARDED if guard is None else {}))
    # without guards a coordinate that has had no gradient moves by 1e8 lr and more, which is beyond float16
    follow_oracle(opt, p, oracle, error_of_update(gamma), dense=guard is None)
    assert_state_is_the_oracles(opt.state[p], oracle, gamma)


OPTIONS = {
    "touch alone": {**UNGUARDED, "touch": True},
    "clip alone": {**UNGUARDED, "clip": 1.0},
    "a tight clip": {"clip": 0.1},
    "floor alone": {**UNGUARDED, "floor": 0.01},
    "brake alone": {**UNGUARDED, "brake": True},
    "follow alone": {**UNGUARDED, "follow": True},
    "follow in others' place": {"clip": 3.0, "touch": False, "brake": False, "follow": True},
    "follow beside all": {"follow": True},
    "follow with a large eps": {**UNGUARDED, "follow": True, "eps": 1e-2},
    "follow beyond the last refresh": {**UNGUARDED, "follow": True, "total_steps": 40},
    "a high floor": {"floor": 0.5},
    "lr_scale": {"lr_scale": "tensor"},
    "lr_scale, unguarded": {"lr_scale": "tensor", **UNGUARDED},
    "decoupled decay": {"weight_decay": 0.3},
    "decoupled decay, unguarded": {"weight_decay": 0.3, **UNGUARDED},
    "coupled decay": {"weight_decay": 0.3, "decoupled_weight_decay": False},
    "coupled decay, unguarded": {"weight_decay": 0.3, "decoupled_weight_decay": False, **UNGUARDED},
    "maximize": {"maximize": True},
    "maximize with coupled decay": {"maximize": True, "weight_decay": 0.3, "decoupled_weight_decay": False},
    "no bias correction": {"bias_correction": False},
    "other betas": {"betas": (0.5, 0.75)},
    "beta3 0": {"beta3": 0.0},
    "beta3 None": {"beta3": None},
    "beta3 0.1": {"beta3": 0.1},
    "a large eps": {"eps": 1e-2},
    "growth 1.1": {"growth": 1.1},
    "growth 3": {"growth": 3.0},
    "growth inf": {"growth": math.inf},
    "growth of t": {"growth": lambda t: 1.2 if t < 10 else 2.5},
    "a known end": {"total_steps": 40},
    "a short window": {"betas": (0.9, 0.8), "window_tol": 0.5},
}


def anon_options(options):
    """The oracle's flat options as Anon takes them."""
    groups = {"guard": (Guard, ("clip", "floor", "touch", "brake", "follow")), "storage": (Storage, ("window_tol",))}
    flat = dict(options)
    for name, (kind, fields) in groups.items():
        flat[name] = kind(**{field: flat.pop(field) for field in fields if field in flat})
    return flat


@pytest.mark.parametrize("gamma", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_is_the_oracles(option, gamma):
    options = {"lr": 0.002, "gamma": gamma, **OPTIONS[option]}
    p = parameter((5, 31), maximize=options.get("maximize", False))
    opt = fused([p], **anon_options(options))
    oracle = Guarded(p.detach().double().numpy(), **options)
    follow_oracle(opt, p, oracle, error_of_update(gamma))
    assert_state_is_the_oracles(opt.state[p], oracle, gamma)


@pytest.mark.parametrize("guards", [{}, UNGUARDED], ids=["guarded", "unguarded"])
@pytest.mark.parametrize("gamma", [-1.0, 0.0, 1.0, 2.0])
def test_belief_is_the_oracles(gamma, guards):
    """g - m has the absolute error of m. In the root mean square of an interval it is at least an eighth of m here, so
    that s has 2 * 8 * 40u more."""
    p = parameter((5, 31))
    options = {"lr": 0.002, "gamma": gamma, "statistic": "belief", **guards}
    opt = fused([p], **anon_options(options))
    oracle = Guarded(p.detach().double().numpy(), **options)
    smallest, surprises = math.inf, []
    for t in range(1, 33):
        g = gradient(p, t).double().numpy()
        if t in (1, 2, 4, 8, 16, 32):
            surprises = []
        follow = oracle.m * 0.9 + 0.1 * g
        surprises.append((g - follow) ** 2)
        alive = g != 0
        if t + 1 in (2, 4, 8, 16, 32) and alive.any():
            smallest = min(smallest, (np.sqrt(np.mean(surprises, axis=0))[alive] / abs(follow)[alive]).min())
        before = p.detach().double().numpy()
        p.grad = gradient(p, t)
        opt.step()
        oracle.theta = before
        oracle.step(g)
        bound = (error_of_update(gamma) + abs(gamma) / 2 * 640 * U) * abs(oracle.theta - before) + U * abs(oracle.theta)
        assert (abs(p.detach().double().numpy() - oracle.theta) <= bound).all(), t
    assert smallest > 1 / 8


CHANGES = {
    "gamma 0 to 1": (0.0, {11: {"gamma": 0.5}, 30: {"gamma": 1.0}}),
    "gamma 1 to 0": (1.0, {11: {"gamma": 0.5}, 30: {"gamma": 0.0}}),
    "gamma -0.5 to 1.1": (-0.5, {10: {"gamma": 0.0}, 20: {"gamma": 1.1}}),
    "gamma there and back": (1.0, {18: {"gamma": 0.0}, 25: {"gamma": 1.0}}),
    "lr": (1.0, {5: {"lr": 0.003}, 20: {"lr": 0.0001}}),
    "clip": (1.0, {5: {"clip": math.inf}, 9: {"clip": 0.1}, 33: {"clip": 2.0}}),
    "floor": (0.5, {5: {"floor": 0.0}, 20: {"floor": 0.5}}),
    "touch": (1.0, {5: {"touch": False}, 36: {"touch": True}}),
    "follow": (1.0, {5: {"follow": True}, 36: {"follow": False}}),
    "growth": (1.0, {5: {"growth": 1.1}, 30: {"growth": 2.0}}),
    "growth to inf and back": (1.0, {10: {"growth": math.inf}, 20: {"growth": 1.5}}),
    "beta3": (1.0, {5: {"beta3": 0.0}, 20: {"beta3": 0.9}}),
    "betas": (1.0, {5: {"betas": (0.5, 0.75)}, 20: {"betas": (0.9, 0.99)}}),
    "weight decay": (1.0, {5: {"weight_decay": 0.5}, 20: {"weight_decay": 0.0}}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_group_may_change_during_training(change):
    gamma, changes = CHANGES[change]
    p = parameter((5, 31))
    opt = fused([p], lr=0.002, gamma=gamma)
    oracle = Guarded(p.detach().double().numpy(), lr=0.002, gamma=gamma)
    follow_oracle(opt, p, oracle, error_of_update(2.0), changes=changes)
    # beta3 = 0.9 sums the refreshes with larger weights than the bounds assume
    assert_state_is_the_oracles(opt.state[p], oracle, 2.0)


@pytest.mark.parametrize("growth", [2.0, 1.1, math.inf])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_without_guards_it_is_the_printed_algorithm(gamma, growth):
    """From 0 and with gradients of one sign theta is a sum of updates of one sign: errors of 40 sums add to theirs."""
    p = torch.nn.Parameter(torch.zeros(4, 40))
    grads = [torch.tensor(signs((4, 40)) * magnitudes((4, 40), 50 + t)).float() for t in range(40)]
    grads = [torch.where(grads[0] == 0, 1.0, g) for g in grads]
    opt = fused([p], lr=0.01, gamma=gamma, guard=None, growth=growth)
    for g in grads:
        p.grad = g
        opt.step()
    thetas, psis = printed([g.double().numpy() for g in grads], np.zeros((4, 40)), lr=0.01, gamma=gamma, growth=growth)
    np.testing.assert_allclose(p.detach().numpy(), thetas[-1], rtol=error_of_update(gamma) + 40 * U)
    v = opt.state[p]["preconditioner"].numpy()
    np.testing.assert_allclose(v, 1 / psis[-1], rtol=(64 * abs(gamma) + 8) * U)


def test_powers_beyond_float32_stay_in_range():
    """sigma^gamma leaves float32 on either side, v does not and is never 0."""
    scale = torch.tensor([1e-18, 1e-10, 1e-3, 1.0, 1e3, 1e10, 1e18])
    for gamma in (-8.0, -3.0, 3.0, 8.0):
        p = torch.nn.Parameter(torch.zeros(7))
        opt = fused([p], lr=0.0, gamma=gamma, eps=0.0, guard=None, growth=1.5)
        for _ in range(5):
            p.grad = scale.clone()
            opt.step()
        limits = torch.finfo(torch.float32)
        exact = (scale.double() ** -gamma).clamp(limits.tiny, limits.max)
        torch.testing.assert_close(
            opt.state[p]["preconditioner"].double(), exact, rtol=(64 * abs(gamma) + 8) * U, atol=0
        )


@pytest.mark.parametrize("clip", [1e-12, 0.5, 1e12])
@pytest.mark.parametrize("gamma", [0.5, 1.0, 1.1, 1.5, 2.0])
def test_the_clip_finds_whom_it_concerns_anywhere_in_float32(gamma, clip):
    """The look before the clip goes by products or logarithms that may leave float32; what it misses is not clipped."""
    v, g = torch.meshgrid(torch.arange(-126.0, 127.0, 4.0).exp2(), torch.arange(-64.0, 65.0, 2.0).exp2(), indexing="ij")
    p = torch.nn.Parameter(torch.zeros_like(v))
    opt = fused([p], lr=0.0, gamma=gamma, betas=(0.0, 0.999), growth=float("inf"), guard=Guard(clip=clip, brake=False))
    p.grad = g.clone()
    opt.step()
    opt.state[p]["preconditioner"].copy_(v)
    opt.step()
    limits = torch.finfo(torch.float32)
    limit = ((clip / g.double()) ** gamma).clamp(limits.tiny, limits.max)
    expected = torch.minimum(v.double(), limit)
    torch.testing.assert_close(opt.state[p]["preconditioner"].double(), expected, rtol=(8 * gamma + 8) * U, atol=0)


@pytest.mark.parametrize("brake", [False, True])
@pytest.mark.parametrize("clip", [0.5, 1e-15])
@pytest.mark.parametrize("gamma", [0.5, 1.0, 1.1, 1.5, 2.0])
def test_the_clip_finds_a_single_coordinate(gamma, clip, brake):
    """128 at a time are looked at at once: row after row has one place that is 0.1 % beyond the clip, or within it."""
    n = 128
    size = torch.logspace(-6, 3, n, dtype=torch.float64).float()
    limit = (clip / size.double()) ** gamma
    for share, moves in ((1.001, True), (0.999, False)):
        v = (limit[:, None] * torch.where(torch.eye(n, dtype=torch.bool), share, 0.9)).float()
        p = torch.nn.Parameter(torch.zeros(n, n))
        opt = fused(
            [p], lr=0.0, gamma=gamma, betas=(0.0, 0.999), growth=float("inf"), guard=Guard(clip=clip, brake=brake)
        )
        p.grad = size[:, None].expand(n, n).contiguous()
        opt.step()
        opt.state[p]["preconditioner"].copy_(v)
        opt.step()
        after = opt.state[p]["preconditioner"]
        assert torch.equal(after != v, torch.eye(n, dtype=torch.bool) & moves)
        torch.testing.assert_close(
            after.double().amax(1) / limit, torch.full((n,), min(share, 1.0)).double(), rtol=32 * U, atol=0
        )


@pytest.mark.parametrize("beta2", [0.5, 0.999])
@pytest.mark.parametrize("gamma", [0.3, 0.5, 1.0, 1.1, 1.5, 2.0, 3.0])
def test_psi_follows_anywhere_in_float32(gamma, beta2):
    v, s = torch.meshgrid(
        torch.arange(-126.0, 127.0, 2.0).exp2(), torch.arange(-126.0, 127.0, 2.0).exp2(), indexing="ij"
    )
    p = torch.nn.Parameter(torch.zeros_like(v))
    opt = fused([p], lr=0.0, gamma=gamma, betas=(0.0, beta2), eps=0.0, growth=3.0, guard=FOLLOW)
    p.grad = torch.ones_like(p)
    opt.step()
    state = opt.state[p]
    state["preconditioner"].copy_(v)
    state["exp_avg_sq"].copy_(s)
    p.grad = torch.zeros_like(p)
    opt.step()
    limits = torch.finfo(torch.float32)
    sigma = (state["exp_avg_sq"].double() / (1 - beta2**2)).clamp(limits.tiny, limits.max)
    expected = torch.minimum(v.double(), (sigma ** (-gamma / 2)).clamp(limits.tiny, limits.max))
    torch.testing.assert_close(state["preconditioner"].double(), expected, rtol=(16 * gamma + 16) * U, atol=0)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 1.1, 1.5, 2.0])
def test_a_single_coordinate_follows(gamma):
    """128 at a time are looked at at once: row after row has one place that is 0.1 % too large, or small enough."""
    n, beta2 = 128, 0.999
    sigma = torch.logspace(-12, 6, n, dtype=torch.float64).float()
    limit = sigma.double() ** (-gamma / 2)
    for share, moves in ((1.001, True), (0.999, False)):
        v = (limit[:, None] * torch.where(torch.eye(n, dtype=torch.bool), share, 0.9)).float()
        p = torch.nn.Parameter(torch.zeros(n, n))
        opt = fused([p], lr=0.0, gamma=gamma, betas=(0.0, beta2), eps=0.0, growth=3.0, guard=FOLLOW)
        p.grad = torch.ones_like(p)
        opt.step()
        opt.state[p]["preconditioner"].copy_(v)
        opt.state[p]["exp_avg_sq"].copy_((sigma.double() * (1 - beta2**2) / beta2).float()[:, None].expand(n, n))
        p.grad = torch.zeros_like(p)
        opt.step()
        after = opt.state[p]["preconditioner"]
        assert torch.equal(after != v, torch.eye(n, dtype=torch.bool) & moves)


# Against the single-tensor path


def assert_in_step(ours, theirs, tolerance, fraction=0.01):
    """Each parameter within rounding of its twin, and where its dtype is coarse, nearly always equal to it."""
    for p, q, before in zip(params_of(ours), params_of(theirs), ours.before, strict=True):
        update = (q.detach().double() - before).abs()
        difference = (p.detach().double() - q.detach().double()).abs()
        bound = tolerance * update + 2 * roundings(p.dtype) * q.detach().double().abs()
        if p.dtype == torch.float16:
            bound = bound + 2.0**-24
        assert (difference <= bound).all()
        if p.dtype in (torch.bfloat16, torch.float16):
            assert (difference > 0).double().mean().nan_to_num() <= max(fraction, 1 / max(p.numel(), 1))


def params_of(opt):
    return [p for group in opt.param_groups for p in group["params"]]


def train_together(ours, theirs, tolerance, steps=20, grads=gradient, each_step=None):
    """Both optimizers on the same gradients, `theirs` starting each step from our parameters."""
    for t in range(1, steps + 1):
        for p, q in zip(params_of(ours), params_of(theirs), strict=True):
            with torch.no_grad():
                q.copy_(p)
            g = grads(p, t)
            p.grad = g
            q.grad = None if g is None else g.clone(memory_format=torch.preserve_format)
        if each_step is not None:
            each_step(t, ours)
            each_step(t, theirs)
        ours.before = [p.detach().double().clone() for p in params_of(ours)]
        ours.step()
        theirs.step()
        assert_in_step(ours, theirs, tolerance)


def assert_states_agree(ours, theirs, gamma):
    v_error = 2 * (64 * abs(gamma) + 8 + 296 * abs(gamma)) * U
    clipped_v_error = (40 * abs(gamma) + 16) * U
    rtols = {"exp_avg": 80 * U, "exp_avg_sq": 256 * U, "level": 296 * U}
    for p, q in zip(params_of(ours), params_of(theirs), strict=True):
        a, b = ours.state[p], theirs.state[q]
        assert a.keys() == b.keys()
        for key in ("step", "weight", "gamma"):
            assert torch.equal(a[key], b[key]), key
        for key, rtol in rtols.items():
            torch.testing.assert_close(a[key], b[key], rtol=rtol, atol=0)
        v_unit = 2.0**-7 if a["preconditioner"].dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(
            a["preconditioner"], b["preconditioner"], rtol=max(v_error, 2 * clipped_v_error) + v_unit, atol=0
        )


def both(shapes, dtype=torch.float32, make_params=None, **options):
    make_params = make_params or (lambda: [parameter(shape, dtype) for shape in shapes])
    return fused(make_params(), **options), single(make_params(), **options)


PATHS = {
    "guarded": {},
    "guarded, between": {"gamma": 0.5},
    "below 0": {"gamma": -0.5},
    "0": {"gamma": 0.0},
    "lr_scale": {"gamma": 2.0, "lr_scale": "tensor"},
    "unguarded": {"guard": None},
    "decay": {"weight_decay": 0.1},
    "coupled decay": {"weight_decay": 0.1, "decoupled_weight_decay": False},
    "a tight clip, often refreshed": {"guard": Guard(clip=0.1), "growth": 1.1},
    "Adam's memory": {"beta3": None, "growth": 1.25},
    "follow": {"guard": Guard(clip=math.inf, follow=True)},
    "follow, between, capturable": {"guard": Guard(brake=False, follow=True), "gamma": 0.5, "capturable": True},
    "follow, capturable": {"guard": FOLLOW, "capturable": True},
    "follow, v in bfloat16": {"guard": FOLLOW, "storage": Storage(preconditioner=torch.bfloat16)},
    "once": {"growth": math.inf},
    "capturable": {"capturable": True, "weight_decay": 0.1},
    "capturable, Adam's memory": {"capturable": True, "beta3": None, "gamma": 1.5, "growth": 1.25},
    "capturable, between": {"capturable": True, "gamma": 0.5, "growth": 1.3},
    "lr in a tensor": {"lr": torch.tensor(0.002)},
    "capturable, lr in a tensor": {"lr": torch.tensor(0.002), "capturable": True, "growth": 1.5},
    "v in bfloat16": {"storage": Storage(preconditioner=torch.bfloat16)},
    "projected": {"project": Box(-1.5, 1.5)},
}


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_equals_the_single_path(path, dtype):
    """A v in bfloat16 that is rounded to its other neighbour differs by 2^-7 from then on. A clock in float32 knows lr
    to u, and 1 - beta1^t, which is a difference, to 2u / (1 - beta1), and so does the other path."""
    options = {"lr": 0.002, **PATHS[path]}
    gamma = options.get("gamma", 1.0)
    ours, theirs = both(SHAPES, dtype, **options)
    tolerance = error_of_update(gamma, paths=2, logs_in_float=True)
    tolerance += 2.0**-7 if "storage" in options else 0.0
    tolerance += 42 * U if "capturable" in options else 0.0
    unguarded = options.get("guard", True) is None
    train_together(ours, theirs, tolerance, grads=dense_gradient if unguarded else gradient)
    assert all(not plan.rest for plan in ours._plans.values())
    assert_states_agree(ours, theirs, gamma)


@pytest.mark.parametrize("capturable", [False, True])
def test_each_tensor_has_a_memory_of_its_own(capturable):
    """One batch, whose tensors remember differently, and on whose way gamma changes and somebody refreshes."""
    options = {"lr": 0.002, "gamma": 1.5, "beta3": None, "growth": 1.25, "betas": (0.9, 0.99), "capturable": capturable}
    ours, theirs = both(SHAPES, **options)

    def change(t, opt):
        states = [opt.state[p] for p in params_of(opt)]
        if t == 7:
            for state, share in zip(states, torch.linspace(0.1, 1, len(states)), strict=True):
                state["memory"].mul_(share)
        if t == 12:
            opt.param_groups[0]["gamma"] = 1.1
        if t == 22:
            opt.refresh()

    tolerance = error_of_update(1.5, paths=2, logs_in_float=True) + (42 * U if capturable else 0)
    train_together(ours, theirs, tolerance, steps=30, each_step=change)
    assert all(len(plan.batches) == 1 and not plan.rest for plan in ours._plans.values())
    memories = [[opt.state[p]["memory"].item() for p in params_of(opt)] for opt in (ours, theirs)]
    assert memories[0] == pytest.approx(memories[1], rel=64 * U)
    assert len(set(memories[0])) == len(SHAPES)


def test_a_projection_holds_after_rounding():
    for dtype in (torch.bfloat16, torch.float16):
        p = parameter((50,), dtype)
        opt = fused([p], lr=0.1, project=Box(-1.25, 1.25))
        for t in range(1, 4):
            p.grad = -gradient(p, t)
            opt.step()
            seen = opt.state[p]["preconditioner"] > 0
            assert (p[seen].abs() <= 1.25).all()


def channels_last(dtype):
    p = parameter((4, 3, 5, 5), dtype)
    return torch.nn.Parameter(p.detach().to(memory_format=torch.channels_last))


def transposed(dtype):
    return torch.nn.Parameter(parameter((40, 7), dtype).detach().t())


def unaligned(dtype):
    base = torch.zeros(601, dtype=dtype)
    base[1:] = parameter((600,), dtype).detach()
    return torch.nn.Parameter(base[1:])


def with_gaps(dtype):
    base = torch.zeros(30, 8, dtype=dtype)
    base[:, ::2] = parameter((30, 4), dtype).detach()
    return torch.nn.Parameter(base[:, ::2])


def empty(dtype):
    return torch.nn.Parameter(torch.zeros(0, 3, dtype=dtype))


LAYOUTS = {
    "channels_last": (channels_last, True),
    "transposed": (transposed, True),
    "unaligned": (unaligned, True),
    "gaps": (with_gaps, False),
    "empty": (empty, False),
}


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, dtype):
    make, is_fused = LAYOUTS[layout]
    ours, theirs = both(None, make_params=lambda: [make(dtype), parameter((300,), dtype)], lr=0.002)
    train_together(ours, theirs, error_of_update(1.0, paths=2, logs_in_float=True))
    assert (len(ours._plans[0].rest) == 0) == is_fused
    assert_states_agree(ours, theirs, 1.0)


def test_a_gradient_of_another_layout_takes_another_path():
    def grads(p, t):
        g = gradient(p, t)
        return g.t().contiguous().t() if t % 2 else g

    ours, theirs = both([(30, 40)], lr=0.002)
    train_together(ours, theirs, error_of_update(1.0, paths=2, logs_in_float=True), grads=grads)
    assert_states_agree(ours, theirs, 1.0)


def test_a_change_of_memory_format_during_training():
    """The state then lies in memory as the parameter did."""
    ours, theirs = both([(4, 3, 5, 5)], lr=0.002)

    def turn(t, opt):
        if t == 8:
            (p,) = params_of(opt)
            p.data = p.data.to(memory_format=torch.channels_last)
            p.grad = p.grad.to(memory_format=torch.channels_last)

    train_together(ours, theirs, error_of_update(1.0, paths=2, logs_in_float=True), each_step=turn)
    assert_states_agree(ours, theirs, 1.0)


def test_mixed_dtypes_in_one_group():
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float32, torch.bfloat16]

    def make():
        return [parameter((150 + i,), dtype) for i, dtype in enumerate(dtypes)]

    ours, theirs = both(None, make_params=make, lr=0.002, weight_decay=0.1)
    train_together(ours, theirs, error_of_update(1.0, paths=2, logs_in_float=True))
    assert [p.dtype for p in ours._plans[0].rest] == [torch.float64]
    assert len(ours._plans[0].batches) == 3


def test_a_gradient_may_be_of_another_dtype_than_the_parameter():
    """As mixed precision sets it up with `grad_dtype`."""
    for grad_dtype in (torch.bfloat16, torch.float16):
        p = parameter((300,))
        p.grad_dtype = grad_dtype
        opt = fused([p], lr=0.002)
        oracle = Guarded(p.detach().double().numpy(), lr=0.002)
        for t in range(1, 10):
            p.grad = gradient(p, t).to(grad_dtype)
            before = p.detach().double().numpy()
            opt.step()
            oracle.theta = before
            oracle.step(p.grad.double().numpy())
            bound = error_of_update(1.0) * abs(oracle.theta - before) + U * abs(oracle.theta)
            assert (abs(p.detach().double().numpy() - oracle.theta) <= bound).all()


def test_frozen_parameters_keep_their_own_clock():
    def grads(p, t):
        return None if p.numel() == 300 and t % 3 else gradient(p, t)

    ours, theirs = both([(300,), (200,), (4, 5)], lr=0.002)
    train_together(ours, theirs, error_of_update(1.0, paths=2, logs_in_float=True), grads=grads, steps=30)
    assert [ours.state[p]["step"].item() for p in params_of(ours)] == [10, 30, 30]
    assert_states_agree(ours, theirs, 1.0)


def test_several_groups_with_their_own_options():
    def groups():
        return [
            {"params": [parameter((300,))], "gamma": 0.5},
            {"params": [parameter((20, 20)), parameter((3,))], "weight_decay": 0.1, "growth": 1.1},
        ]

    ours, theirs = both(None, make_params=groups, lr=0.002)
    train_together(ours, theirs, error_of_update(1.0, paths=2, logs_in_float=True))


def test_a_known_end_releases_s_and_a_run_past_it_goes_on():
    ours, theirs = both([(300,), (1,)], lr=0.002, total_steps=12)
    tolerance = error_of_update(1.0, paths=2, logs_in_float=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        released = []
        train_together(
            ours,
            theirs,
            tolerance,
            steps=40,
            each_step=lambda t, opt: released.append(t >= 2 and opt is ours and s_is_released(opt)),
        )
    assert [t for t, was in enumerate(released[::2], start=1) if was] == [9, 10, 11, 12, 13]
    assert len([w for w in said if "total_steps" in str(w.message)]) == 2
    assert_states_agree(ours, theirs, 1.0)


def s_is_released(opt):
    return not any(opt.state[params_of(opt)[0]]["exp_avg_sq"].stride())


def test_refresh_on_demand():
    def refresh(t, opt):
        if t in (7, 12):
            opt.refresh()

    ours, theirs = both(SHAPES, lr=0.002)
    train_together(ours, theirs, error_of_update(1.0, paths=2, logs_in_float=True), each_step=refresh)
    assert_states_agree(ours, theirs, 1.0)


def test_max_grad_norm_is_clip_grad_norm():
    params, clipped = ([parameter(shape) for shape in SHAPES] for _ in range(2))
    ours = fused(params, lr=0.002, max_grad_norm=0.5)
    theirs = single(clipped, lr=0.002)

    def clip(t, opt):
        if opt is theirs:
            norm = torch.nn.utils.clip_grad_norm_(clipped, 0.5)
            assert norm > 0.5

    # the norm of 7,000 squares in float32, twice in different ways: 2 log2(7000) u
    train_together(ours, theirs, error_of_update(1.0, 2, logs_in_float=True) + 26 * U, each_step=clip)


@pytest.mark.parametrize("memory", [{}, {"beta3": None, "growth": 1.3}], ids=["", "Adam's memory"])
@pytest.mark.parametrize("capturable", [False, True])
def test_amp_unscales_and_skips(capturable, memory):
    params, plain = ([parameter(shape) for shape in SHAPES] for _ in range(2))
    ours = fused(params, lr=0.002, capturable=capturable, **memory)
    theirs = single(plain, lr=0.002, **memory)
    for t in range(1, 12):
        for p, q in zip(params, plain, strict=True):
            p.grad = gradient(p, t) * 1024
            q.grad = gradient(p, t)
        ours.grad_scale = torch.tensor(1024.0)
        ours.found_inf = torch.tensor(float(t % 4 == 0))
        before = [p.detach().clone() for p in params]
        states = copy.deepcopy([ours.state[p] for p in params])
        ours.step()
        if t % 4:
            theirs.step()
        else:
            for p, old, state in zip(params, before, states, strict=True):
                assert torch.equal(p, old)
                assert all(torch.equal(value, ours.state[p][key]) for key, value in state.items())
    tolerance = error_of_update(1.0, paths=2, logs_in_float=True) + (42 * U if capturable else 0)
    for p, q in zip(params, plain, strict=True):
        # eleven updates below lr each, and eleven roundings of a number below 2
        torch.testing.assert_close(p, q, rtol=0, atol=11 * (0.002 * tolerance + 2 * U))
        assert ours.state[p]["memory"].item() == pytest.approx(theirs.state[q]["memory"].item(), rel=64 * U)


def test_a_bad_gradient_spoils_its_own_coordinate_only():
    for bad in (math.nan, math.inf, -math.inf):
        for options in ({}, {"guard": None}, {"gamma": 0.5}, {"statistic": "belief"}, {"weight_decay": 0.1}):
            params = [parameter((300,)) for _ in range(2)]
            opts = [fused([p], lr=0.002, **options) for p in params]
            for t in range(1, 10):
                for p in params:
                    p.grad = gradient(p, t)
                if t == 3:
                    params[1].grad[17] = bad
                for opt in opts:
                    opt.step()
            good = torch.arange(300) != 17
            assert params[1][17].isnan()
            assert params[1][good].isfinite().all()
            if "guard" in options:  # the guards know the mean of the tensor, which has lost one coordinate
                assert torch.equal(params[0][good], params[1][good])


def test_zero_gradients_move_nothing():
    for gamma in (-1.0, 0.5, 1.0, 2.0):
        p = parameter((300,))
        before = p.detach().clone()
        opt = fused([p], lr=0.1, gamma=gamma)
        for _ in range(5):
            p.grad = torch.zeros_like(p)
            opt.step()
        assert torch.equal(p, before)
        assert not opt.state[p]["preconditioner"].any()


# Numbers of 16 bits


def every_number(dtype):
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    return numbers[numbers.isfinite()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_survives(dtype):
    p = torch.nn.Parameter(every_number(dtype))
    before = p.detach().clone()
    opt = fused([p], lr=0.0, gamma=0.0)
    p.grad = torch.ones_like(p)
    opt.step()
    assert torch.equal(p.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_as_torch_does(dtype):
    """At gamma = 0 without momentum theta = -lr g, here over all g and ties, subnormal numbers and overflow."""
    for lr in (1.0, 0.5, 0.3, 1.0009765625, 1.00390625, 1e-3, 3e-6, 1e4):
        g = every_number(dtype)
        p = torch.nn.Parameter(torch.zeros_like(g))
        opt = fused([p], lr=lr, gamma=0.0, betas=(0.0, 0.999), bias_correction=False)
        p.grad = g
        opt.step()
        expected = (0 - g.float() * torch.tensor(lr)).to(dtype)
        assert torch.equal(p, expected), lr


def test_stochastic_rounding_is_unbiased_and_seeded():
    """1 + k/2^7 * (i/64): the share that is rounded up is the fraction, and a seed gives the same bits again."""
    n, draws = 64 * 256, 40
    fraction = (torch.arange(n) % 64) / 64
    storage = Storage(stochastic_round=True)
    ups, results = torch.zeros(n, dtype=torch.float64), []
    torch.manual_seed(0)
    for draw in range(draws):
        if draw == draws - 1:
            torch.manual_seed(0)
        p = torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
        p.grad_dtype = torch.float32
        p.grad = -fraction * 2**-7
        opt = fused([p], lr=1.0, gamma=0.0, betas=(0.0, 0.999), bias_correction=False, storage=storage)
        opt.step()
        assert ((p == 1) | (p == 1 + 2**-7)).all()
        ups += (p > 1).double()
        results.append(p.detach().clone())
    assert torch.equal(results[0], results[-1])
    assert not torch.equal(results[0], results[1])
    share = ups.reshape(-1, 64).mean(0) / draws
    exact = fraction[:64].double()
    standard_error = (exact * (1 - exact) / (256 * draws)).sqrt()
    assert ((share - exact).abs() <= 4 * standard_error).all()
    neighbours = torch.stack([(results[1] > 1).double(), (results[2] > 1).double()])
    middle = neighbours[:, fraction == 0.5]
    assert abs(torch.corrcoef(middle)[0, 1].item()) < 4 / math.sqrt(256)


# State


def test_state_dict_round_trip_is_bit_for_bit(tmp_path):
    def run(params, opt, steps):
        for t in steps:
            for p in params:
                p.grad = gradient(p, t)
            opt.step()

    for options in ({}, {"capturable": True}, {"total_steps": 12}, {"storage": Storage(preconditioner=torch.bfloat16)}):
        whole, parts = ([parameter(s) for s in SHAPES] + [parameter((90,), torch.bfloat16)] for _ in range(2))
        opt = fused(whole, lr=0.002, **options)
        run(whole, opt, range(1, 25 if "total_steps" not in options else 13))
        first = fused(parts, lr=0.002, **options)
        run(parts, first, range(1, 11))
        torch.save(first.state_dict(), tmp_path / "state.pt")
        second = fused(parts, lr=0.002, **options)
        second.load_state_dict(torch.load(tmp_path / "state.pt"))
        run(parts, second, range(11, 25 if "total_steps" not in options else 13))
        for p, q in zip(whole, parts, strict=True):
            assert torch.equal(p, q)
            for key, value in opt.state[p].items():
                assert torch.equal(value, second.state[q][key]), key


def test_it_can_be_copied():
    p = parameter((300,))
    opt = fused([p], lr=0.002)
    p.grad = gradient(p, 1)
    opt.step()
    twin = copy.deepcopy(opt)
    (q,) = params_of(twin)
    for t in (2, 3):
        p.grad, q.grad = gradient(p, t), gradient(p, t)
        opt.step()
        twin.step()
    assert torch.equal(p, q)
    assert p is not q


def test_autograd_sees_that_the_parameters_change():
    p = parameter((300,))
    opt = fused([p], lr=0.002)
    loss = (p * p).sum()
    p.grad = gradient(p, 1)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_number_of_threads_changes_no_bit():
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        params = [parameter((70_000,)), parameter((3,)), parameter((257, 129)), parameter((40_000,), torch.bfloat16)]
        opt = fused(params, lr=0.002, gamma=1.1, storage=Storage(stochastic_round=True))
        for t in range(1, 6):
            for p in params:
                p.grad = gradient(p, t)
            opt.step()
        results.append([x.clone() for p in params for x in (p.detach(), *opt.state[p].values())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# Compiling


def steps_taken(n=3, **options):
    p = parameter((300,))
    opt = fused([p], **{"lr": 0.002, **options})
    for t in range(1, n + 1):
        p.grad = gradient(p, t)
        opt.step()
    return p.detach()


@pytest.fixture
def compilations(monkeypatch):
    """A list that grows with every run of the compiler."""
    runs, compile_ = [], _fused_cpu._compile

    def counted(compiler, target):
        runs.append(compiler)
        compile_(compiler, target)

    monkeypatch.setattr(_fused_cpu, "_compile", counted)
    return runs


def test_compiles_once_whatever_changes(cache, compilations):
    p = parameter((300,))
    opt = fused([p], lr=0.002)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    for t in range(1, 20):
        opt.param_groups[0].update({5: {"gamma": 0.5}, 9: {"betas": (0.8, 0.99)}, 11: {"clip": 2.0}}.get(t, {}))
        p.grad = gradient(p, t)
        opt.step()
        schedule.step()
    steps_taken(weight_decay=0.1, statistic="belief", maximize=True)
    assert len(compilations) == 1
    assert len(list(cache.glob("*.so"))) == 1
    _fused.backend.cache_clear()
    assert torch.equal(steps_taken(), steps_taken())
    assert len(compilations) == 1


def test_without_a_compiler_it_warns_once_and_takes_the_other_path(cache, monkeypatch):
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.warns(UserWarning, match="needs a C compiler: none was found.*Install gcc or clang") as said:
        fell_back = steps_taken()
    assert len(said) == 1
    steps_taken(gamma=0.5)  # a second warning would be an error here
    p = parameter((300,))
    opt = single([p], lr=0.002)
    for t in range(1, 4):
        p.grad = gradient(p, t)
        opt.step()
    assert torch.equal(fell_back, p.detach())


def is_fused(optimizer) -> bool:
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = torch.ones_like(p)
    optimizer.step()
    return bool(optimizer._plans)


@pytest.mark.parametrize(
    ("options", "dtype", "fuses"),
    [
        ({}, torch.float32, True),
        ({}, torch.bfloat16, True),
        ({}, torch.float64, False),
        ({}, torch.complex64, False),
        ({"fused": False}, torch.float32, False),
        ({"foreach": False}, torch.float32, False),
        ({"foreach": True}, torch.float32, False),
        ({"statistic": lambda grad, exp_avg: grad * grad}, torch.float32, False),
    ],
)
def test_by_default_the_kernel_takes_what_it_can(options, dtype, fuses):
    assert is_fused(Anon([torch.nn.Parameter(torch.ones(4, dtype=dtype))], **options)) == fuses


def test_without_a_compiler_the_default_is_quiet(cache, monkeypatch):
    monkeypatch.setattr(_fused_cpu, "COMPILERS", ())
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_fused(Anon([torch.nn.Parameter(torch.ones(4))]))


def test_a_compiler_that_fails_is_named(cache, monkeypatch):
    monkeypatch.setenv("CC", "false")
    monkeypatch.setattr(_fused_cpu, "COMPILERS", ())
    with pytest.warns(UserWarning, match="needs a C compiler: false failed"):
        steps_taken()


def test_the_users_compiler_comes_first_and_another_helps_out(cache, compilations, monkeypatch):
    monkeypatch.setenv("CC", "false --with 'an argument'")
    steps_taken()
    assert compilations[0] == ["false", "--with", "an argument"]
    assert len(compilations) == 2


def test_a_cached_library_needs_no_compiler(filled_cache, compilations, monkeypatch):
    monkeypatch.setenv("PATH", "")
    steps_taken()
    assert not compilations


DAMAGES = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "garbage": lambda content: b"no library at all" * 100,
    "one bit": lambda content: content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_rebuilt(damage, filled_cache, compilations):
    (path,) = filled_cache.glob("*.so")
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    first = steps_taken()
    assert len(compilations) == 1
    _fused.backend.cache_clear()
    assert torch.equal(steps_taken(), first)
    assert len(compilations) == 1


def test_a_foreign_library_under_its_name_is_rebuilt(filled_cache, compilations, tmp_path):
    (path,) = filled_cache.glob("*.so")
    foreign = tmp_path / "foreign.so"
    compiler = next(_fused_cpu._compilers())
    source = b"int anon_step_size(void) { return 1; } void anon_step(void) {}"
    subprocess.run([*compiler, "-x", "c", "-shared", "-fPIC", "-o", str(foreign), "-"], input=source, check=True)
    path.unlink()
    digest = _fused_cpu._digest(foreign.read_bytes())
    shutil.copy(foreign, path.with_name(path.stem.rsplit("-", 1)[0] + f"-{digest}.so"))
    steps_taken()
    assert len(compilations) == 1


def test_a_cache_that_cannot_be_written(cache, compilations, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANON_OPTIM_CACHE", str(tmp_path / "file" / "below"))
    steps_taken()
    assert len(compilations) == 1


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("ANON_OPTIM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _fused_cpu._cache_folder() == tmp_path / "anon_optim"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(_fused_cpu._cache_folder()) == "/home/somebody/.cache/anon_optim"


PROCESS = """
import torch
from anon_optim import Anon
torch.set_num_threads(1)
p = torch.nn.Parameter(torch.linspace(1, 2, 300))
opt = Anon([p], lr=0.002, fused=True)
for t in range(3):
    p.grad = torch.linspace(-1, 1, 300) * (t + 1)
    opt.step()
print(p.double().sum().item())
"""


def test_two_processes_may_compile_at_once(tmp_path):
    environment = {**os.environ, "ANON_OPTIM_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-W", "error", "-c", PROCESS]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert outputs[0] == outputs[1] != ""
    left = list((tmp_path / "cache").iterdir())
    assert left
    assert all(path.suffix == ".so" for path in left)


def test_it_runs_on_torchs_own_threads():
    """One pool: the function that starts the threads is in a library that torch itself has loaded."""
    if "OpenMP" not in torch.__config__.parallel_info():
        pytest.skip("torch has no OpenMP")
    address = _fused_cpu._parallel()
    assert address is not None
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("cannot see what is loaded")
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps if "/torch" in line or "omp" in line]
    owners = set()
    for region in regions:
        begin, end = (int(x, 16) for x in region[0].split("-"))
        if begin <= address < end:
            owners.add(region[-1])
    assert len(owners) == 1


def test_a_sparse_gradient_is_refused_before_anything_moves():
    dense, sparse = parameter((300,)), parameter((4, 3))
    optimizer = Anon([dense, sparse], fused=True)
    dense.grad = torch.ones_like(dense)
    sparse.grad = torch.ones(4, 3).to_sparse()
    before = dense.detach().clone()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert torch.equal(dense.detach(), before)
