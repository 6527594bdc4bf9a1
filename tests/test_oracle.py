"""Equalities: the optimizer against the naive oracle, its paths against each other, its special cases against SGD."""

import inspect
import math
from functools import partial

import numpy as np
import pytest
import torch

from anon_optim import Anon, Guard, Storage, _idu, decay_groups
from anon_optim._state import ENTRIES, fresh_state
from oracle import Guarded, closed_form_psi, ema, printed

GAMMAS = [-2.0, -1.0, -0.5, 0.0, 0.3, 0.5, 1.0, 1.1, 2.0]
BETA3S = [0.0, 0.1, 0.5, 0.9, None]
GROWTHS = [2.0, 1.1, 1.5, 3.0, math.inf, lambda t: 1.2 if t < 20 else 2.5]
GROWTH_IDS = ["2", "1.1", "1.5", "3", "inf", "callable"]
SHAPE = (6, 12)
STEPS = 72
UNGUARDED = {"clip": math.inf, "floor": 0.0, "touch": False, "brake": False}
FOLLOW = Guard(clip=3.0, touch=False, brake=False, follow=True)


def heterogeneous_gradients(steps=STEPS, seed=0, dense=False):
    """Scales over six decades, exact zeros, coordinates and rows that start late or never, one that jumps."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-4, 2, SHAPE)
    drift = 10.0 ** np.linspace(0, rng.uniform(-1, 1), steps)
    g = rng.normal(size=(steps, *SHAPE)) * scale * drift[:, None, None]
    if not dense:
        g[rng.uniform(size=g.shape) < 0.1] = 0.0
        g[:2, 1] = 0.0
        g[:37, 2] = 0.0
        g[:9, 3, 1] = 0.0
        g[:, 3, 2] = 0.0
        g[5:50, 4] = 0.0
        g[:20, 5, 0] *= 1e-9
    return list(g)


def parameter(theta, dtype=torch.float64):
    return torch.nn.Parameter(torch.tensor(np.asarray(theta), dtype=dtype))


def run(make, thetas, gradients, before_step=None):
    """Every theta_t of each parameter under the optimizer `make(params)`, one parameter for each row of thetas."""
    params = [parameter(theta) for theta in thetas]
    opt = make(params)
    history = []
    for t, g in enumerate(gradients, start=1):
        if before_step is not None:
            before_step(t, opt)
        for p in params:
            p.grad = torch.tensor(g, dtype=p.dtype)
        opt.step()
        history.append([p.detach().numpy().copy() for p in params])
    return opt, [np.array(one) for one in zip(*history, strict=True)]


def assert_close(actual, expected, rel=1e-12, what=""):
    """Relative to the largest value that each coordinate has had: sums of updates of either sign cancel."""
    actual, expected = np.array(actual), np.array(expected)
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    size = np.maximum.accumulate(abs(expected), axis=0)
    worst = abs(actual - expected) - rel * size
    assert (worst <= 0).all(), f"{what}: off by {(abs(actual - expected) / np.where(size, size, 1)).max():.2e}"


def single(params, **options):
    return Anon(params, foreach=False, **options)


def grouped(params, key, values, **options):
    """One optimizer in which each parameter has its own value of one option."""
    groups = [{"params": [p], key: value} for p, value in zip(params, values, strict=True)]
    return single(groups, **options)


def guarded_history(gradients, theta, changes=None, **options):
    oracle = Guarded(theta, **options)
    history = []
    for t, g in enumerate(gradients, start=1):
        for name, value in (changes or {}).get(t, {}).items():
            setattr(oracle, name, value)
        oracle.step(g)
        history.append(oracle.theta)
    return oracle, history


def as_guard(options):
    """The oracle's flat options as Anon takes them."""
    options = dict(options)
    names = [name for name in ("clip", "floor", "touch", "brake", "follow") if name in options]
    guard = {name: options.pop(name) for name in names}
    return {**options, "guard": Guard(**guard)}


def random_theta(seed=1):
    return np.random.default_rng(seed).normal(size=SHAPE)


# The oracle itself


@pytest.mark.parametrize("growth", GROWTHS, ids=GROWTH_IDS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_printed_recursion_equals_the_closed_form(gamma, growth):
    gradients = heterogeneous_gradients()
    for beta3 in BETA3S:
        _, psi = printed(gradients, np.zeros(SHAPE), gamma=gamma, beta3=beta3, growth=growth)
        for t in (1, 2, 3, 8, 31, 64, STEPS):
            direct = closed_form_psi(gradients[:t], gamma=gamma, beta3=beta3, growth=growth)
            np.testing.assert_allclose(psi[t - 1], direct, rtol=1e-13)


def test_printed_is_the_papers_algorithm_by_hand():
    g = [np.array([2.0]), np.array([1.0]), np.array([3.0]), np.array([5.0])]
    theta, psi = printed(g, np.zeros(1), lr=1.0, gamma=1.0, betas=(0.5, 0.75), eps=0.0)
    sigma = [4.0, 1.0, (0.75 * 9 + 25) / 1.75]
    psi2 = [sigma[0], (sigma[0] + sigma[1]) / 2, ((sigma[0] + sigma[1]) / 2 + sigma[2]) / 2]
    np.testing.assert_allclose(psi, np.sqrt([[psi2[0]], [psi2[1]], [psi2[1]], [psi2[2]]]), rtol=1e-15)
    m_hat = [2.0, 4 / 3, (0.5 * 2 * 0.25 + 0.5 * 1 * 0.5 + 0.5 * 3) / 0.875]
    expected = -(m_hat[0] / psi2[0] ** 0.5 + m_hat[1] / psi2[1] ** 0.5 + m_hat[2] / psi2[1] ** 0.5)
    np.testing.assert_allclose(theta[2], [expected], rtol=1e-15)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_guarded_without_guards_is_printed(gamma):
    gradients = heterogeneous_gradients()
    _, history = guarded_history(gradients, np.zeros(SHAPE), gamma=gamma, growth=1.5, **UNGUARDED)
    thetas, _ = printed(gradients, np.zeros(SHAPE), gamma=gamma, growth=1.5)
    assert_close(history, thetas, rel=1e-13)


# With beta3=None the memory is beta2's alone


def at_every_step(t):
    return 1.0


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.8), (0.0, 0.0)])
@pytest.mark.parametrize("path", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_refreshed_at_every_step_with_adams_memory_it_is_adam(path, betas):
    theta, gradients = random_theta(), heterogeneous_gradients(dense=True)
    dtype = torch.float32 if "fused" in path else torch.float64
    ours, theirs = (torch.nn.Parameter(torch.tensor(theta, dtype=dtype)) for _ in range(2))
    options = {"lr": 0.01, "betas": betas, "eps": 0.0}
    anon = Anon([ours], guard=None, growth=at_every_step, beta3=None, **options, **path)
    adam = torch.optim.Adam([theirs], **options)
    for g in gradients:
        ours.grad, theirs.grad = torch.tensor(g, dtype=dtype), torch.tensor(g, dtype=dtype)
        anon.step()
        adam.step()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if "fused" in path else {"rtol": 1e-11, "atol": 0}
    torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("path", [{"foreach": False}, {"foreach": True}, {"capturable": True}, {"fused": True}])
@pytest.mark.parametrize("at", [1500, 1900])
def test_what_the_window_left_out_is_not_taken_for_old(path, at):
    """s was not accumulated before step 1891; psi2 is refreshed by hand some steps before that, or after."""
    p = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.float32 if "fused" in path else torch.float64))
    opt = Anon([p], betas=(0.9, 0.9), eps=0.0, guard=None, beta3=None, lr=0.0, **path)
    gradients = [np.full(SHAPE, 1.0 if t <= 1024 else 1 / 30) for t in range(1, at + 1)]
    for g in gradients:
        p.grad = torch.tensor(g, dtype=p.dtype)
        opt.step()
    refreshed = opt.refresh()
    assert refreshed == (at > 1890)
    expected = ema([g**2 for g in gradients], 0.9) if refreshed else np.ones(SHAPE)
    np.testing.assert_allclose(opt.state[p]["preconditioner"].numpy() ** -2.0, expected, rtol=1e-5)


def test_long_intervals_leave_as_little_of_the_old_as_adam_does():
    """A weight that is counted in float32 comes no nearer to 1 than 3e-5, at which so much of the old would stay."""
    p = torch.nn.Parameter(torch.zeros(4))
    opt = Anon([p], gamma=2.0, guard=None, beta3=None, lr=0.0)
    for t in range(1, 2**15 + 1):
        p.grad = torch.full((4,), 1.0 if t <= 2**14 else 1 / 30)
        opt.step()
    expected = torch.full((4,), 30.0**-4 + 0.999**2**14)
    torch.testing.assert_close(opt.state[p]["preconditioner"] ** -2.0, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("by_hand", [(), (5, 23, 24, 50)])
def test_at_a_refresh_psi_with_adams_memory_is_adams(by_hand):
    """Also where somebody refreshes within an interval: no sample counts twice, and none is lost."""
    p, gradients = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64)), heterogeneous_gradients(dense=True)
    opt = Anon([p], guard=None, beta3=None, eps=0.0)
    for t, g in enumerate(gradients, start=1):
        p.grad = torch.tensor(g)
        opt.step()
        if t in by_hand:
            opt.refresh()
        if t in by_hand or t in (1, 2, 4, 8, 16, 32, 64):
            psi2 = opt.state[p]["preconditioner"].numpy() ** -2
            np.testing.assert_allclose(psi2, ema([each**2 for each in gradients[:t]], 0.999), rtol=1e-9)


def test_adams_memory_of_an_adamw_that_was_taken_over():
    gradients = heterogeneous_gradients(steps=40, dense=True)
    p = parameter(random_theta())
    adamw = torch.optim.AdamW([p], betas=(0.9, 0.95), lr=0.0)
    for g in gradients[:21]:
        p.grad = torch.tensor(g)
        adamw.step()
    opt = single([p], betas=(0.9, 0.95), guard=None, beta3=None, eps=0.0)
    opt.load_adamw_state(adamw.state_dict())
    for g in gradients[21:32]:
        p.grad = torch.tensor(g)
        opt.step()
    psi2 = opt.state[p]["preconditioner"].numpy() ** -2
    np.testing.assert_allclose(psi2, ema([g**2 for g in gradients[:32]], 0.95), rtol=1e-9)


def test_on_the_step_on_which_beta3_becomes_none_psi_is_a_whole_average():
    for switch in (1025, 1300, 2040):
        p = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
        opt = single([p], lr=0.0, guard=None, eps=0.0)
        for t in range(1, 2049):
            if t == switch:
                opt.param_groups[0]["beta3"] = None
            p.grad = torch.full((4,), 1.0 if t <= 1024 else 1e-9, dtype=torch.float64)
            opt.step()
        old, new = 0.999 ** (2049 - switch), 1 - 0.999**1024
        np.testing.assert_allclose(opt.state[p]["preconditioner"].numpy() ** -2, old / (old + new), rtol=1e-9)


# Anon against the oracle


@pytest.mark.parametrize("growth", GROWTHS, ids=GROWTH_IDS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_unguarded_is_the_printed_algorithm(gamma, growth):
    gradients = heterogeneous_gradients()
    thetas = [np.zeros(SHAPE)] * len(BETA3S)
    options = {"lr": 0.01, "gamma": gamma, "growth": growth}
    opt, histories = run(lambda ps: grouped(ps, "beta3", BETA3S, guard=None, **options), thetas, gradients)
    for group, beta3, history in zip(opt.param_groups, BETA3S, histories, strict=True):
        expected, psi = printed(gradients, np.zeros(SHAPE), beta3=beta3, **options)
        assert_close(history, expected, what=f"beta3 {beta3}")
        v = opt.state[group["params"][0]]["preconditioner"].numpy()
        np.testing.assert_allclose(v, 1 / psi[-1], rtol=1e-12)


@pytest.mark.parametrize("growth", GROWTHS, ids=GROWTH_IDS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_guarded_is_the_guarded_oracle(gamma, growth):
    gradients = heterogeneous_gradients()
    thetas = [np.zeros(SHAPE)] * len(BETA3S)
    options = {"lr": 0.01, "gamma": gamma, "growth": growth}
    opt, histories = run(lambda ps: grouped(ps, "beta3", BETA3S, **options), thetas, gradients)
    for group, beta3, history in zip(opt.param_groups, BETA3S, histories, strict=True):
        oracle, expected = guarded_history(gradients, np.zeros(SHAPE), beta3=beta3, **options)
        assert_close(history, expected, what=f"beta3 {beta3}")
        assert_state_matches(opt.state[group["params"][0]], oracle)


def assert_state_matches(state, oracle):
    """The momentum and s are sums of terms of either sign or of one; only the latter have a relative error."""
    assert state["step"].item() == oracle.t
    np.testing.assert_allclose(state["preconditioner"].numpy(), oracle.v, rtol=1e-12)
    np.testing.assert_allclose(state["exp_avg_sq"].numpy(), oracle.s, rtol=1e-12)
    np.testing.assert_allclose(state["exp_avg"].numpy(), oracle.m, rtol=1e-10, atol=1e-14)
    assert state["level"].item() == pytest.approx(oracle.level, rel=1e-12)
    if oracle.foreseen:
        assert state["brake"].tolist() == pytest.approx([oracle.foreseen, oracle.average, oracle.excess], rel=1e-12)
    assert state["weight"].item() == pytest.approx(oracle.w, rel=1e-12)
    assert state["memory"].item() == pytest.approx(sum(oracle.weights), rel=1e-12)
    assert state["gamma"].item() == oracle.gamma_in_use


def geometric_mean(g, m):
    return abs(g * m)


VARIANTS = {
    "touch alone": {**UNGUARDED, "touch": True},
    "clip alone": {**UNGUARDED, "clip": 1.0},
    "a tight clip": {**UNGUARDED, "clip": 0.1},
    "floor alone": {**UNGUARDED, "floor": 0.01},
    "brake alone": {**UNGUARDED, "brake": True},
    "follow alone": {**UNGUARDED, "follow": True},
    "follow in others' place": {"clip": 3.0, "touch": False, "brake": False, "follow": True},
    "follow beside all": {"follow": True},
    "follow with beta2 0": {"follow": True, "betas": (0.9, 0.0)},
    "follow with a large eps": {**UNGUARDED, "follow": True, "eps": 1e-2},
    "follow beyond the last refresh": {**UNGUARDED, "follow": True, "total_steps": 40, "betas": (0.9, 0.2)},
    "follow after one refresh": {**UNGUARDED, "follow": True, "growth": math.inf},
    "a high floor": {"floor": 0.5},
    "no brake": {"brake": False},
    "brake and touch": {"clip": math.inf, "floor": 0.0},
    "lr_scale": {"lr_scale": "tensor"},
    "lr_scale, unguarded": {"lr_scale": "tensor", **UNGUARDED},
    "belief": {"statistic": "belief"},
    "belief, unguarded": {"statistic": "belief", **UNGUARDED},
    "callable statistic": {"statistic": geometric_mean},
    "decoupled decay": {"weight_decay": 0.3},
    "decoupled decay, unguarded": {"weight_decay": 0.3, **UNGUARDED},
    "coupled decay": {"weight_decay": 0.3, "decoupled_weight_decay": False},
    "coupled decay and belief": {"weight_decay": 0.3, "decoupled_weight_decay": False, "statistic": "belief"},
    "coupled decay, unguarded": {"weight_decay": 0.3, "decoupled_weight_decay": False, **UNGUARDED},
    "maximize": {"maximize": True},
    "maximize with coupled decay": {"maximize": True, "weight_decay": 0.3, "decoupled_weight_decay": False},
    "no bias correction": {"bias_correction": False},
    "no momentum": {"betas": (0.0, 0.9)},
    "other betas": {"betas": (0.5, 0.75)},
    "a large eps": {"eps": 1e-2},
}


@pytest.mark.parametrize("gamma", [-1.0, 0.0, 0.3, 1.0, 1.1, 2.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_option_is_the_oracles(variant, gamma):
    gradients = heterogeneous_gradients()
    theta = random_theta()
    options = {"lr": 0.01, "gamma": gamma, "growth": 1.5, **VARIANTS[variant]}
    opt, (history,) = run(lambda ps: single(ps, **as_guard(options)), [theta], gradients)
    oracle, expected = guarded_history(gradients, theta, **options)
    assert_close(history, expected)
    assert_state_matches(opt.state[opt.param_groups[0]["params"][0]], oracle)


def shrink_towards_zero(theta, psi):
    """A projection in the metric psi that works on tensors and arrays alike."""
    return theta / (1 + 0.01 / (1 + psi))


@pytest.mark.parametrize("gamma", [-0.5, 0.0, 1.0])
def test_projection_sees_psi_and_leaves_unseen_coordinates_alone(gamma):
    gradients = heterogeneous_gradients()
    theta = random_theta()
    options = {"lr": 0.01, "gamma": gamma, "project": shrink_towards_zero}
    _, (history,) = run(lambda ps: single(ps, **options), [theta], gradients)
    _, expected = guarded_history(gradients, theta, **options)
    assert_close(history, expected)
    never_starts = history[-1][3, 2]
    assert (never_starts == theta[3, 2]) == (gamma != 0)


def test_paper_is_unguarded():
    gradients = heterogeneous_gradients()
    for gamma in GAMMAS:
        _, (history,) = run(lambda ps, gamma=gamma: Anon.paper(ps, lr=0.01, gamma=gamma), [np.zeros(SHAPE)], gradients)
        expected, _ = printed(gradients, np.zeros(SHAPE), lr=0.01, gamma=gamma)
        assert_close(history, expected)


def test_each_parameter_counts_its_own_steps():
    gradients = heterogeneous_gradients(steps=40)
    often, seldom = parameter(np.zeros(SHAPE)), parameter(np.zeros(SHAPE))
    opt = single([often, seldom], lr=0.01, gamma=1.1)
    for t, g in enumerate(gradients):
        often.grad = torch.tensor(g)
        seldom.grad = torch.tensor(g) if t % 3 == 0 else None
        opt.step()
    for p, seen in ((often, gradients), (seldom, gradients[::3])):
        oracle, expected = guarded_history(seen, np.zeros(SHAPE), lr=0.01, gamma=1.1)
        np.testing.assert_allclose(p.detach().numpy(), expected[-1], rtol=1e-11)
        assert_state_matches(opt.state[p], oracle)


# The paths against each other


def several_tensors(dtype=torch.float64):
    shapes = [SHAPE, (), (1,), (0, 3), (7,), (2, 3, 2)]
    torch.manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def sparse_gradient(p, t):
    generator = torch.Generator().manual_seed(1000 * t + p.numel())
    g = torch.randn(p.shape, dtype=torch.float64, generator=generator)
    scale = 10.0 ** (4 * torch.rand(p.shape, dtype=torch.float64, generator=generator) - 2)
    alive = torch.rand(p.shape, generator=generator) < (0.6 if t > 3 else 0.2)
    return (g * scale * alive).to(p.dtype)


def drive(params, step, steps=40):
    for t in range(1, steps + 1):
        for p in params:
            p.grad = sparse_gradient(p, t)
        step(t)


def assert_same(ours, theirs, rtol=1e-14):
    for group, other_group in zip(ours.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(group["params"], other_group["params"], strict=True):
            torch.testing.assert_close(p, q, rtol=rtol, atol=0)
            assert ours.state[p].keys() == theirs.state[q].keys()
            for key, value in ours.state[p].items():
                torch.testing.assert_close(value, theirs.state[q][key], rtol=rtol, atol=0)


PATH_VARIANTS = {
    "guarded, below 0": {"gamma": -0.5},
    "guarded, 0": {"gamma": 0.0},
    "guarded, between": {"gamma": 0.5},
    "guarded, above 1": {"gamma": 1.1},
    "unguarded": {"gamma": 1.0, "guard": None},
    "lr_scale": {"gamma": 2.0, "lr_scale": "tensor"},
    "lr_scale, 0": {"gamma": 0.0, "lr_scale": "tensor"},
    "belief, decay": {"gamma": 1.0, "statistic": "belief", "weight_decay": 0.1},
    "coupled decay": {"gamma": 1.0, "weight_decay": 0.1, "decoupled_weight_decay": False, "bias_correction": False},
    "maximize": {"gamma": 1.5, "maximize": True, "beta3": 0.0, "growth": 1.1},
    "once": {"gamma": 1.0, "growth": math.inf, "statistic": geometric_mean},
    "Adam's memory": {"gamma": 1.5, "beta3": None, "growth": 1.25},
    "follow": {"gamma": 1.0, "guard": FOLLOW},
    "follow, between": {"gamma": 0.5, "guard": FOLLOW, "growth": 1.25},
    "follow, below 0": {"gamma": -0.5, "guard": FOLLOW},
    "follow after one refresh": {"gamma": 1.0, "guard": FOLLOW, "growth": math.inf},
}


def two_groups(params, **options):
    return [{"params": params[:3], **options}, {"params": params[3:], **options, "lr": 0.003}]


@pytest.mark.parametrize("variant", PATH_VARIANTS)
def test_foreach_equals_single(variant):
    options = PATH_VARIANTS[variant]
    optimizers = []
    for foreach in (False, True):
        params = several_tensors()
        opt = Anon(two_groups(params, **options), lr=0.01, foreach=foreach)
        drive(params, lambda _, opt=opt: opt.step())
        optimizers.append(opt)
    assert_same(*optimizers)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("variant", PATH_VARIANTS)
def test_capturable_equals_eager(variant, foreach):
    options = PATH_VARIANTS[variant]
    optimizers = []
    for capturable in (False, True):
        params = several_tensors()
        opt = Anon(two_groups(params, **options), lr=0.01, foreach=foreach, capturable=capturable)
        drive(params, lambda _, opt=opt: opt.step())
        optimizers.append(opt)
    assert_same(*optimizers, rtol=1e-12)


@pytest.mark.parametrize("gamma", [-0.5, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("lr_scale", [None, "tensor"])
def test_all_paths_agree_when_the_first_gradients_are_zero(gamma, lr_scale):
    """The level is then still unset at the first refreshes, and the first gradient comes between two."""
    results = []
    for path in ({"foreach": False}, {"foreach": True}, {"capturable": True, "foreach": False}):
        p = parameter(np.ones(3))
        opt = Anon([p], lr=0.01, gamma=gamma, lr_scale=lr_scale, **path)
        for t in range(1, 8):
            p.grad = torch.tensor([1e-3, -2e-3, 0.0], dtype=torch.float64) * (t >= 5)
            opt.step()
        results.append(p.detach())
    torch.testing.assert_close(results[1], results[0], rtol=1e-14, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=1e-12, atol=0)


def compiled_and_eager(backend, changes, **options):
    """Two optimizers after ten steps, one of them through torch.compile."""
    torch.compiler.reset()
    optimizers = []
    for compiled in (False, True):
        params = several_tensors()[:1]
        opt = Anon(params, lr=0.01, **options)
        step = torch.compile(opt.step, backend=backend) if compiled else opt.step

        def turn_and_step(t, opt=opt, step=step):
            opt.param_groups[0].update(changes.get(t, {}))
            step()

        drive(params, turn_and_step, steps=10)
        optimizers.append(opt)
    return optimizers


INDUCTOR_IMPORT = "ignore:.*torch.jit.script_method:DeprecationWarning"


@pytest.mark.filterwarnings(INDUCTOR_IMPORT)
def test_compiled_equals_eager():
    assert_same(*compiled_and_eager("inductor", {}, gamma=1.1), rtol=1e-12)


TRACED = {
    "single, unguarded": {"gamma": 1.0, "guard": None, "foreach": False},
    "foreach, capturable, decay": {"gamma": -0.5, "weight_decay": 0.1, "foreach": True, "capturable": True},
}


@pytest.mark.filterwarnings(INDUCTOR_IMPORT)
@pytest.mark.parametrize("variant", TRACED)
def test_traced_equals_eager_through_a_change_of_gamma(variant):
    """The graphs without their slow compilation. Their scalar state is where they are fragile: torch 2.13 loses what
    a compiled function writes straight into a 0-D float64 tensor on the CPU."""
    assert_same(*compiled_and_eager("aot_eager", {6: {"gamma": 0.25}}, **TRACED[variant]), rtol=1e-12)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("gamma", [-0.5, 0.0, 1.0])
def test_complex_parameters_are_their_real_view(gamma, foreach):
    torch.manual_seed(0)
    z = torch.nn.Parameter(torch.randn(5, dtype=torch.complex128))
    x = torch.nn.Parameter(torch.view_as_real(z.detach()).clone())
    options = {"lr": 0.01, "gamma": gamma, "weight_decay": 0.1, "foreach": foreach}
    opt_z, opt_x = Anon([z], **options), Anon([x], **options)
    for t in range(1, 20):
        g = torch.randn(5, 2, dtype=torch.float64) * torch.tensor([1.0, 1e-3])
        g[:, 1] *= t > 4
        x.grad, z.grad = g, torch.view_as_complex(g.clone())
        opt_x.step()
        opt_z.step()
        torch.testing.assert_close(torch.view_as_real(z), x, rtol=1e-14, atol=0)


# Special cases that have a name of their own


@pytest.mark.parametrize("growth", GROWTHS, ids=GROWTH_IDS)
@pytest.mark.parametrize("guard", [None, Guard(), Guard(clip=0.01, floor=0.9), Guard(touch=False)], ids=str)
def test_gamma_zero_is_sgd_on_the_average_gradient(guard, growth):
    gradients = heterogeneous_gradients()
    _, (history,) = run(
        lambda ps: single(ps, lr=0.01, gamma=0.0, guard=guard, growth=growth), [random_theta()], gradients
    )
    theta, expected = random_theta(), []
    for t in range(1, STEPS + 1):
        theta = theta - 0.01 * ema(gradients[:t], 0.9)
        expected.append(theta)
    assert_close(history, expected)


def test_gamma_one_refreshed_once_is_momentum_over_the_first_gradient():
    gradients = heterogeneous_gradients(dense=True)
    _, (history,) = run(
        lambda ps: single(ps, lr=0.01, gamma=1.0, guard=None, growth=math.inf), [np.zeros(SHAPE)], gradients
    )
    theta, expected = np.zeros(SHAPE), []
    for t in range(1, STEPS + 1):
        theta = theta - 0.01 * ema(gradients[:t], 0.9) / np.sqrt(gradients[0] ** 2 + 1e-16)
        expected.append(theta)
    assert_close(history, expected)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_from_sgd_at_gamma_zero_is_torchs_sgd(momentum, weight_decay):
    gradients = heterogeneous_gradients()
    theta = random_theta()
    options = {"lr": 0.05, "momentum": momentum, "weight_decay": weight_decay}
    _, (ours,) = run(lambda ps: Anon.from_sgd(ps, gamma=0.0, **options), [theta], gradients)
    _, (theirs,) = run(lambda ps: torch.optim.SGD(ps, **options), [theta], gradients)
    assert_close(ours, theirs)


@pytest.mark.parametrize("make", [Anon.paper, partial(Anon.from_sgd, lr=0.1)])
def test_named_constructors_take_how_a_step_is_computed(make):
    """All of Anon's options but those that make the constructor what it is."""
    names = {"total_steps", "max_grad_norm", "maximize", "storage", "foreach", "fused", "capturable", "differentiable"}
    assert names <= set(inspect.signature(make).parameters)
    p = parameter(random_theta())
    options = {"total_steps": 9, "max_grad_norm": 2.0, "maximize": True, "capturable": True, "foreach": False}
    group = make([p], storage=Storage(window_tol=0.1), **options).param_groups[0]
    assert {name: group[name] for name in options} == options
    assert group["window_tol"] == 0.1


# Changes during training


CHANGES = {
    "gamma 0 to 1": (0.0, {11: {"gamma": 0.5}, 30: {"gamma": 1.0}}),
    "gamma 1 to 0": (1.0, {11: {"gamma": 0.5}, 30: {"gamma": 0.0}}),
    "gamma 1 to -0.5": (1.0, {20: {"gamma": -0.5}}),
    "gamma -0.5 to 0 to 1.1": (-0.5, {10: {"gamma": 0.0}, 20: {"gamma": 1.1}}),
    "gamma there and back within an interval": (1.0, {18: {"gamma": 0.0}, 25: {"gamma": 1.0}}),
    "gamma back at a refresh": (1.0, {20: {"gamma": 2.0}, 33: {"gamma": 1.0}}),
    "lr": (1.0, {5: {"lr": 0.003}, 40: {"lr": 0.1}}),
    "clip": (1.0, {5: {"clip": math.inf}, 9: {"clip": 0.1}, 40: {"clip": 2.0}}),
    "floor": (0.5, {5: {"floor": 0.0}, 20: {"floor": 0.5}}),
    "follow on and off": (1.0, {5: {"follow": True}, 40: {"follow": False}}),
    "follow, gamma": (1.5, {5: {"follow": True}, 11: {"gamma": -0.5}, 30: {"gamma": 0.7}, 50: {"betas": (0.9, 0.9)}}),
    "touch off and on": (1.0, {5: {"touch": False}, 40: {"touch": True}}),
    "growth": (1.0, {5: {"growth": 1.1}, 40: {"growth": 2.0}}),
    "beta3": (1.0, {5: {"beta3": 0.0}, 20: {"beta3": 0.9}}),
    "beta3 to None": (1.5, {5: {"beta3": None}, 40: {"beta3": 0.5}}),
    "Adam's memory, gamma": (1.5, {2: {"beta3": None}, 20: {"gamma": 0.7}, 45: {"gamma": 1.2}}),
    "betas": (1.0, {5: {"betas": (0.5, 0.75)}, 20: {"betas": (0.95, 0.99)}}),
    "weight decay": (1.0, {5: {"weight_decay": 0.5}, 20: {"weight_decay": 0.0}}),
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("unguarded", [False, True])
def test_a_group_may_change_during_training(change, unguarded, foreach):
    gradients = heterogeneous_gradients()
    gamma, changes = CHANGES[change]
    theta = random_theta()
    options = {"lr": 0.01, "gamma": gamma, "growth": 2.0, **(UNGUARDED if unguarded else {})}

    def turn(t, opt):
        opt.param_groups[0].update(changes.get(t, {}))

    opt, (history,) = run(lambda ps: Anon(ps, foreach=foreach, **as_guard(options)), [theta], gradients, turn)
    oracle, expected = guarded_history(gradients, theta, changes, **options)
    assert_close(history, expected)
    assert_state_matches(opt.state[opt.param_groups[0]["params"][0]], oracle)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("gammas", [(0.0, 2.0), (2.0, 0.5), (1.5, -0.5), (2.0, 0.0)], ids=str)
def test_a_change_of_gamma_in_an_interval_without_gradient(gammas, foreach):
    """Nothing is then known in the new gamma's unit: coordinates wait as at the start, and the clip's r is 1 again."""
    gradients = [1e-3 * g for g in heterogeneous_gradients()]
    for g in gradients[16:32]:
        g[:] = 0.0
    theta = random_theta()
    options = {"lr": 0.01, "gamma": gammas[0]}
    changes = {20: {"gamma": gammas[1]}}

    def turn(t, opt):
        opt.param_groups[0].update(changes.get(t, {}))

    opt, (history,) = run(lambda ps: Anon(ps, foreach=foreach, **options), [theta], gradients, turn)
    oracle, expected = guarded_history(gradients, theta, changes, **options)
    assert_close(history, expected)
    assert_state_matches(opt.state[opt.param_groups[0]["params"][0]], oracle)


@pytest.mark.parametrize("new_gamma", [0.0, 1.0])
def test_coupled_decay_through_a_change_of_gamma(new_gamma):
    """While gamma 0 is in use and 1 is asked for, s already counts only true gradients: it serves the next gamma."""
    gradients = heterogeneous_gradients()
    theta = random_theta()
    options = {"lr": 0.01, "gamma": 1.0 - new_gamma, "weight_decay": 0.1, "decoupled_weight_decay": False}
    changes = {20: {"gamma": new_gamma}}

    def turn(t, opt):
        opt.param_groups[0].update(changes.get(t, {}))

    opt, (history,) = run(lambda ps: single(ps, **options), [theta], gradients, turn)
    oracle, expected = guarded_history(gradients, theta, changes, **options)
    assert_close(history, expected)
    assert_state_matches(opt.state[opt.param_groups[0]["params"][0]], oracle)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("gamma", [-0.5, 0.0, 1.0])
def test_refresh_now_uses_what_s_holds(gamma, foreach, capturable):
    gradients = heterogeneous_gradients()
    theta = random_theta()
    p = parameter(theta)
    opt = Anon([p], lr=0.01, gamma=gamma, foreach=foreach, capturable=capturable)
    oracle = Guarded(theta, lr=0.01, gamma=gamma)
    for t, g in enumerate(gradients, start=1):
        p.grad = torch.tensor(g)
        opt.step()
        oracle.step(g)
        if t in (6, 7, 25, 32, 60):
            if t == 25:
                opt.param_groups[0]["gamma"] = oracle.gamma = gamma + 0.5
            opt.refresh()
            oracle.refresh()
            assert opt.state[p]["weight"].item() == 0
            assert not opt.state[p]["exp_avg_sq"].any()
        assert_state_matches(opt.state[p], oracle)
    np.testing.assert_allclose(p.detach().numpy(), oracle.theta, rtol=1e-11)


def test_refresh_with_nothing_gathered_does_nothing():
    p = parameter(np.ones(3))
    opt = single([p], lr=0.01, gamma=1.0)
    opt.refresh()
    assert not opt.state
    p.grad = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    opt.step()
    before = {key: torch.as_tensor(value).clone() for key, value in opt.state[p].items()}
    assert before["weight"].item() == 0
    theta = p.detach().clone()
    opt.param_groups[0]["gamma"] = 0.5
    opt.refresh()
    assert torch.equal(p, theta)
    for key, value in before.items():
        assert torch.equal(torch.as_tensor(opt.state[p][key]), value), key


# Laziness: s is gathered only where a refresh will feel it


def windowed_gradients():
    """With beta2 = 1/2 the window is 24 steps: in the interval 33 .. 64 those before 41 do not count."""
    gradients = heterogeneous_gradients()
    for t, g in enumerate(gradients, start=1):
        if t > 40:
            g[1, 3] = 0.0
    return gradients


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("gamma", [-0.5, 0.0, 1.0])
def test_the_window_is_the_oracles(gamma, capturable, foreach):
    gradients, theta = windowed_gradients(), random_theta()
    options = {"lr": 0.01, "gamma": gamma, "betas": (0.9, 0.5)}
    opt, (history,) = run(lambda ps: Anon(ps, foreach=foreach, capturable=capturable, **options), [theta], gradients)
    oracle, expected = guarded_history(gradients, theta, **options)
    assert_close(history, expected)
    assert_state_matches(opt.state[opt.param_groups[0]["params"][0]], oracle)


@pytest.mark.parametrize("gamma", [-0.5, 1.0, 2.0])
def test_the_window_costs_less_than_its_tolerance(gamma):
    """sigma with and without the window differ by at most 2^-24 times the largest earlier sample, here 10 sigma."""
    rng = np.random.default_rng(11)
    gradients = list(rng.choice([-1.0, 1.0], (64, *SHAPE)) * rng.uniform(0.5, 1.5, (64, *SHAPE)))
    preconditioners = []
    for window_tol in (0.0, 2**-24):
        storage = Storage(window_tol=window_tol)
        opt, _ = run(
            lambda ps, storage=storage: single(
                ps, gamma=gamma, betas=(0.9, 0.5), guard=Guard(clip=math.inf), storage=storage
            ),
            [np.zeros(SHAPE)],
            gradients,
        )
        preconditioners.append(opt.state[opt.param_groups[0]["params"][0]]["preconditioner"])
    full, windowed = preconditioners
    assert not torch.equal(full, windowed)
    torch.testing.assert_close(windowed, full, rtol=10 * abs(gamma) / 2 * 2**-24, atol=0)


@pytest.mark.parametrize("beta2", [0.5, 0.999, 1 - 1e-7])
def test_the_device_knows_what_s_would_weigh(beta2):
    steps = torch.arange(1.0, 2000.0)
    expected = [-math.expm1(t * math.log(beta2)) for t in range(1, 2000)]
    found = _idu.bias_correction2_on_device(beta2, steps)
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)
    assert _idu.bias_correction2_on_device(0.0, steps).eq(1).all()


@pytest.mark.parametrize("foreach", [False, True])
def test_each_parameter_follows_by_its_own_step(foreach):
    """The second one joins at step 6."""
    gradients, theta = heterogeneous_gradients(steps=30), random_theta()
    params = [torch.nn.Parameter(torch.tensor(theta)) for _ in range(2)]
    opt = Anon(params, lr=0.01, guard=FOLLOW, foreach=foreach, fused=False)
    for t, g in enumerate(gradients):
        for p in params[: 1 if t < 5 else 2]:
            p.grad = torch.tensor(g)
        opt.step()
    for p, seen in zip(params, (gradients, gradients[5:]), strict=True):
        _, expected = guarded_history(seen, theta, lr=0.01, **vars_of(FOLLOW))
        assert_close(p.detach().numpy(), expected[-1])


def vars_of(guard):
    return {name: value for name, value in vars(guard).items() if name != "error_if_nonfinite"}


@pytest.mark.parametrize("guard", [Guard(), FOLLOW], ids=["default", "follow"])
@pytest.mark.parametrize("total_steps", [1, 20, 64, 72])
@pytest.mark.parametrize("capturable", [False, True])
def test_a_known_end_changes_no_bit(total_steps, capturable, guard):
    gradients = heterogeneous_gradients(steps=total_steps)
    histories = []
    for known in (None, total_steps):
        _, (history,) = run(
            lambda ps, known=known: single(
                ps, lr=0.01, gamma=1.1, total_steps=known, capturable=capturable, guard=guard
            ),
            [random_theta()],
            gradients,
        )
        histories.append(history)
    np.testing.assert_array_equal(*histories)


@pytest.mark.parametrize("unguarded", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("total_steps", [32, 40])
def test_a_run_past_its_known_end_starts_s_anew_and_says_so(total_steps, foreach, unguarded):
    gradients, theta = heterogeneous_gradients(), random_theta()
    options = {"lr": 0.01, "gamma": 1.1, "total_steps": total_steps, **(UNGUARDED if unguarded else {})}
    with pytest.warns(UserWarning, match="starts anew"):
        opt, (history,) = run(lambda ps: Anon(ps, foreach=foreach, **as_guard(options)), [theta], gradients)
    oracle, expected = guarded_history(gradients, theta, **options)
    assert_close(history, expected)
    assert_state_matches(opt.state[opt.param_groups[0]["params"][0]], oracle)


@pytest.mark.parametrize("unguarded", [False, True])
@pytest.mark.parametrize("stopped_at", [9, 11])
def test_refreshes_may_end_and_resume(stopped_at, unguarded):
    """At 9 s is empty, at 11 it holds two gradients, which are dropped with their weight."""
    gradients, theta = heterogeneous_gradients(), random_theta()
    options = {"lr": 0.01, "gamma": 1.1, **(UNGUARDED if unguarded else {})}
    changes = {stopped_at: {"growth": math.inf}, 50: {"growth": 1.5}}

    def turn(t, opt):
        opt.param_groups[0].update(changes.get(t, {}))

    opt, (history,) = run(lambda ps: single(ps, **as_guard(options)), [theta], gradients, turn)
    oracle, expected = guarded_history(gradients, theta, changes, **options)
    assert_close(history, expected)
    assert_state_matches(opt.state[opt.param_groups[0]["params"][0]], oracle)


@pytest.mark.parametrize("guard", [None, Guard()], ids=["unguarded", "guarded"])
def test_refresh_after_s_was_released_does_nothing(guard):
    p = parameter(np.ones(3))
    opt = single([p], lr=0.01, gamma=1.0, guard=guard)
    for t in range(1, 7):
        if t == 6:
            opt.param_groups[0]["growth"] = math.inf
        p.grad = torch.ones_like(p)
        opt.step()
    before = opt.state[p]["preconditioner"].clone()
    opt.refresh()
    assert torch.equal(opt.state[p]["preconditioner"], before)


# Taking over from AdamW


def test_another_optimizers_state_is_refused_in_a_sentence():
    p = parameter(random_theta())
    p.grad = torch.ones_like(p)
    states = {}
    for kind in (torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9)):
        theirs = kind([p])
        theirs.step()
        states[type(theirs).__name__] = theirs.state_dict()
    opt = single([p])
    with pytest.raises(ValueError, match="lacks brake, gamma, level, memory, preconditioner, weight, so it is another"):
        opt.load_state_dict(states["AdamW"])
    with pytest.raises(ValueError, match="its state has the entries momentum_buffer, expected step, exp_avg"):
        opt.load_adamw_state(states["SGD"])
    with pytest.raises(ValueError, match="it has the entries optimizer, expected state and param_groups"):
        opt.load_adamw_state({"optimizer": states["AdamW"]})
    assert not opt.state[p]
    assert set(fresh_state(p, opt.param_groups[0])) == ENTRIES


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("floor", [0.0, 0.01])
@pytest.mark.parametrize("gamma", [-0.5, 0.0, 1.0, 1.1])
def test_adamw_state_is_taken_over(gamma, floor, amsgrad):
    gradients = heterogeneous_gradients(steps=30)
    p = parameter(random_theta())
    adamw = torch.optim.AdamW([p], lr=0.01, betas=(0.8, 0.95), amsgrad=amsgrad)
    for g in gradients[:21]:
        p.grad = torch.tensor(g)
        adamw.step()
    theirs = adamw.state[p]
    opt = single([p], lr=0.01, gamma=gamma, guard=Guard(floor=floor))
    opt.load_adamw_state(adamw.state_dict())
    ours = opt.state[p]

    assert ours["step"].item() == 21
    assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
    second = theirs["max_exp_avg_sq" if amsgrad else "exp_avg_sq"].numpy()
    sigma = second / (1 - 0.95**21) + 1e-16
    unseen = second == 0
    assert unseen.any()
    assert not unseen.all()
    mean = sigma[~unseen].mean()
    v = np.maximum(sigma, floor * mean) ** (-gamma / 2)
    if gamma != 0:
        v[unseen] = 0.0
    np.testing.assert_allclose(ours["preconditioner"].numpy(), v, rtol=1e-12)
    assert not ours["exp_avg_sq"].any()
    assert ours["weight"].item() == 0
    assert ours["level"].item() == pytest.approx(mean, rel=1e-12)
    assert ours["memory"].item() == 1

    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    opt.step()
    assert torch.equal(p[torch.tensor(unseen)], before[torch.tensor(unseen)])
    assert not torch.equal(p, before)


def trained_adamw(params):
    params = list(params)
    for each in params:
        p = each[1] if isinstance(each, tuple) else each
        p.grad = torch.full_like(p, float(p.numel()))
    adamw = torch.optim.AdamW(params, lr=0.01)
    adamw.step()
    return adamw


def test_adamw_state_goes_by_name_where_groups_differ():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    theirs = trained_adamw(model.named_parameters())
    opt = Anon(decay_groups(model, 0.1), lr=0.01)
    opt.load_adamw_state(theirs.state_dict())
    assert [len(group["params"]) for group in opt.param_groups] == [1, 3]
    for p in model.parameters():
        assert torch.equal(opt.state[p]["exp_avg"], theirs.state[p]["exp_avg"])
    without_names = trained_adamw(model.parameters()).state_dict()
    with pytest.raises(ValueError, match=r"have \[4\] parameters, expected \[1, 3\]; where groups differ, give both"):
        opt.load_adamw_state(without_names)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.nn.Linear(3, 3), r"weight has the shape \(3, 3\) in it, expected \(2, 3\)"),
        (torch.nn.Linear(3, 2, bias=False), "'bias' is a parameter of one of the two optimizers alone"),
    ],
)
def test_adamw_state_of_another_network_is_refused(other, words):
    model = torch.nn.Linear(3, 2)
    opt = Anon(model.named_parameters())
    with pytest.raises(ValueError, match=words):
        opt.load_adamw_state(trained_adamw(other.named_parameters()).state_dict())
    assert not opt.state[model.weight]


def test_load_adamw_state_is_not_for_anons_own():
    p = parameter(random_theta())
    opt = single([p])
    p.grad = torch.ones_like(p)
    opt.step()
    with pytest.raises(ValueError, match="expected step, exp_avg and exp_avg_sq, as Adam and AdamW have"):
        single([p]).load_adamw_state(opt.state_dict())


def test_from_sgd_translates_groups():
    """A group's own lr and momentum are SGD's, too."""
    gradients = heterogeneous_gradients(dense=True)
    theta = random_theta()

    def groups(ps):
        return [{"params": ps[:1], "lr": 0.1}, {"params": ps[1:2]}, {"params": ps[2:], "momentum": 0.5}]

    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    _, ours = run(lambda ps: Anon.from_sgd(groups(ps), gamma=0.0, **options), [theta] * 3, gradients)
    _, theirs = run(lambda ps: torch.optim.SGD(groups(ps), **options), [theta] * 3, gradients)
    for mine, its in zip(ours, theirs, strict=True):
        assert_close(mine, its)
    (group,) = Anon.from_sgd([{"params": [parameter(theta)], "lr": 0.1, "betas": (0.5, 0.99)}], lr=1.0).param_groups
    assert (group["lr"], group["betas"]) == (pytest.approx(0.2), (0.5, 0.99))
    sgd = torch.optim.SGD([parameter(theta)], lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(sgd, 10)  # notes SGD's lr in the group
    sgd.param_groups[0].pop("nesterov")
    ours = Anon.from_sgd(
        [{name: sgd.param_groups[0][name] for name in ("params", "lr", "momentum", "initial_lr")}], 0.1
    )
    for last_epoch in (-1, 5):  # from the start, and where a run goes on
        assert torch.optim.lr_scheduler.StepLR(ours, 10, last_epoch=last_epoch).base_lrs == [pytest.approx(1.0)]
    for betas in ((1.0, 0.99), 0.9, ("a", 0.9), (2.0, 0.9)):
        with pytest.raises(ValueError, match=r"Invalid betas: .*, expected two numbers"):
            Anon.from_sgd([{"params": [parameter(theta)], "betas": betas}], lr=0.1)
    for name in ("nesterov", "dampening"):
        with pytest.raises(ValueError, match=f"Invalid {name}"):
            Anon.from_sgd([{"params": [parameter(theta)], name: True}], lr=0.1)


# Lower precision


def one_signed_gradients(steps, dtype, seed=5):
    """Each coordinate keeps its sign, so that every sum is of terms of one sign and relative errors only add up."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-3, 1, SHAPE) * rng.choice([-1, 1], SHAPE)
    g = scale * 10.0 ** rng.uniform(-1, 0.5, (steps, *SHAPE))
    g[:5, 1] = 0.0
    g[:20, 2] = 0.0
    g[:, 3, 2] = 0.0
    return [torch.tensor(x).to(dtype) for x in g]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("guard", [None, Guard()], ids=["unguarded", "guarded"])
@pytest.mark.parametrize("gamma", [-1.0, 0.0, 0.5, 1.0, 1.1, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_follows_the_oracle(dtype, gamma, guard, foreach):
    """Each single step against the float64 oracle's update, from the parameter that the step began with.

    With u = 2^-24 and gradients of one sign, the relative errors of the state, which is float32 for either dtype:
    m: three roundings a step and one of beta1, each fading as beta1^k: below 4u/(1 - beta1) = 40u;
    s/w: at most 32 steps in an interval, three roundings and that of beta2 in each: below 4 * 32u, times |gamma|/2;
    v: its logarithm, up to |gamma ln sigma| <= 37 |gamma|, is rounded four times at a refresh, and the refreshes are
    averaged with weights 2^-k: below 2 * 4 * 37 |gamma| u;
    r, m_hat and the product: some ten roundings more. A clipped v takes the errors of m_hat and r in place of its own.
    The sum bounds the update; the parameter adds the rounding of one subtraction in its own dtype.
    """
    u = 2.0**-24
    bound_update = (40 + abs(gamma) * (2 * 32 + 37 * 4 * 2) + 40 + 10) * u
    unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}[dtype]
    rng = np.random.default_rng(7)
    theta = torch.tensor(rng.normal(size=SHAPE)).to(dtype)
    p = torch.nn.Parameter(theta)
    opt = Anon([p], lr=0.01, gamma=gamma, guard=guard, foreach=foreach)
    options = UNGUARDED if guard is None else {}
    oracle = Guarded(theta.double().numpy(), lr=0.01, gamma=gamma, **options)
    for g in one_signed_gradients(40, dtype):
        before, p.grad = p.detach().double().numpy(), g
        opt.step()
        after = p.detach().double().numpy()
        oracle.theta = before
        oracle.step(g.double().numpy())
        update = abs(oracle.theta - before)
        error = abs(after - oracle.theta)
        largest = np.maximum(abs(oracle.theta), abs(after))
        assert (error <= unit * largest + bound_update * update).all()
        for key in ("exp_avg", "exp_avg_sq", "preconditioner"):
            assert opt.state[p][key].dtype == torch.float32
