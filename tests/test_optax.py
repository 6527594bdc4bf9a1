"""The JAX twin: equal to the oracle step by step, and a good citizen of optax."""

import math
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402
from optax._src import alias_test  # noqa: E402

from anon_optim import Anon, Guard  # noqa: E402
from anon_optim._idu import refresh_times  # noqa: E402
from anon_optim.optax import ScaleByAnonState, anon, measure_adaptivity, scale_by_anon  # noqa: E402
from oracle import printed  # noqa: E402
from test_oracle import (  # noqa: E402
    SHAPE,
    UNGUARDED,
    assert_close,
    guarded_history,
    heterogeneous_gradients,
    random_theta,
)

GAMMAS = (-1.0, 0.0, 0.3, 1.0, 1.1, 2.0)
OPTIONS = {
    "default": {},
    "printed": UNGUARDED,
    "touch alone": {**UNGUARDED, "touch": True},
    "a tight clip": {**UNGUARDED, "clip": 0.1},
    "a high floor": {"floor": 0.5},
    "brake alone": {**UNGUARDED, "brake": True},
    "follow alone": {**UNGUARDED, "follow": True},
    "follow beside all": {"follow": True},
    "follow after one refresh": {**UNGUARDED, "follow": True, "growth": math.inf},
    "follow with a large eps": {**UNGUARDED, "follow": True, "eps": 1e-2},
    "lr_scale": {"lr_scale": "tensor"},
    "belief": {"statistic": "belief"},
    "belief, printed": {"statistic": "belief", **UNGUARDED},
    "a function as statistic": {"statistic": lambda g, m: abs(g * m)},
    "decay": {"weight_decay": 0.3},
    "no bias correction": {"bias_correction": False},
    "other betas": {"betas": (0.0, 0.75)},
    "beta3 0": {"beta3": 0.0},
    "beta3 None": {"beta3": None},
    "beta3 0.9": {"beta3": 0.9},
    "growth 1.1": {"growth": 1.1},
    "one refresh": {"growth": math.inf},
    "growth as a function": {"growth": lambda t: 1.2 if t < 20 else 2.5},
}


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def as_optax(options):
    """The oracle's options under optax's names."""
    options = dict(options)
    names = ("clip", "floor", "touch", "brake", "follow")
    guard = Guard(**{name: options.pop(name) for name in names if name in options})
    b1, b2 = options.pop("betas", (0.9, 0.999))
    return {"b1": b1, "b2": b2, "b3": options.pop("beta3", 0.5), "guard": guard, **options}


def follow(optimizer, theta, gradients):
    """Every theta_t, and the state after the last step."""

    def take(carry, g):
        params, state = carry
        updates, state = optimizer.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    (_, state), thetas = jax.jit(partial(jax.lax.scan, take))((theta, optimizer.init(theta)), gradients)
    return thetas, state


def of_anon(state) -> ScaleByAnonState:
    return next(each for each in state if isinstance(each, ScaleByAnonState))


# The same algorithm.


@pytest.mark.parametrize("name", OPTIONS)
def test_is_the_oracles(name, x64):
    gradients, theta = heterogeneous_gradients(), random_theta()
    options = {"growth": 1.5, **OPTIONS[name]}

    def at(gamma):
        return follow(anon(0.01, gamma, **as_optax(options)), jnp.array(theta), jnp.array(gradients))

    thetas, state = jax.vmap(at)(jnp.array(GAMMAS))
    for i, gamma in enumerate(GAMMAS):
        oracle, expected = guarded_history(gradients, theta, lr=0.01, gamma=gamma, **options)
        assert_close(thetas[i], expected, what=f"gamma {gamma}")
        inner = jax.tree.map(lambda x, i=i: x[i], of_anon(state))
        assert inner.count == oracle.t
        np.testing.assert_allclose(inner.v, oracle.v, rtol=1e-12)
        np.testing.assert_allclose(inner.level, oracle.level, rtol=1e-12)
        if oracle.w:  # with no refresh to come, torch's Anon lets s be
            np.testing.assert_allclose(inner.nu, oracle.s, rtol=1e-12)
        if oracle.foreseen:
            np.testing.assert_allclose(inner.brake, [oracle.foreseen, oracle.average, oracle.excess], rtol=1e-12)


@pytest.mark.parametrize("gamma", [-0.5, 0.0, 1.0, 2.0])
def test_without_guards_is_the_printed_algorithm(gamma, x64):
    gradients, theta = heterogeneous_gradients(), np.zeros(SHAPE)
    expected, _ = printed(gradients, theta, lr=0.01, gamma=gamma)
    thetas, _ = follow(anon(0.01, gamma, guard=None), jnp.array(theta), jnp.array(gradients))
    assert_close(thetas, expected)


def test_is_torchs_in_float32_on_several_tensors():
    shapes = {"matrix": SHAPE, "vector": (7,), "number": (), "nothing": (0, 3)}
    rng = np.random.default_rng(0)
    gradients = {name: rng.normal(size=(300, *shape)).astype(np.float32) for name, shape in shapes.items()}
    options = {"gamma": 1.5, "lr_scale": "tensor", "weight_decay": 0.1}
    thetas, _ = follow(
        anon(0.01, **options),
        {name: jnp.ones(shape) for name, shape in shapes.items()},
        {name: jnp.array(each) for name, each in gradients.items()},
    )
    params = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    optimizer = Anon(params.values(), lr=0.01, foreach=False, **options)
    for t in range(300):
        for name, p in params.items():
            p.grad = torch.tensor(gradients[name][t])
        optimizer.step()
    for name, p in params.items():
        # Each of 300 steps adds a rounding of a number of about 1.
        np.testing.assert_allclose(thetas[name][-1], p.detach().numpy(), atol=300 * 2**-24)


def test_at_gamma_0_is_a_recipe_for_sgd(x64):
    gradients, theta = jnp.array(heterogeneous_gradients(dense=True)), jnp.array(random_theta())
    sgd = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(0.1, momentum=0.9))
    ours = optax.chain(
        optax.add_decayed_weights(5e-4),
        scale_by_anon(0.0, 0.9, bias_correction=False),
        optax.scale_by_learning_rate(0.1 / (1 - 0.9)),
    )
    assert_close(follow(ours, theta, gradients)[0], follow(sgd, theta, gradients)[0])


# Numbers that change.


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("beta3", [0.5, None])
def test_gamma_and_lr_may_change(beta3, follow, x64):
    gradients, theta = heterogeneous_gradients(), random_theta()
    changes = {10: {"gamma": 0.5, "lr": 0.02}, 30: {"gamma": 0.0}, 50: {"gamma": 1.5}}
    _, expected = guarded_history(gradients, theta, changes, lr=0.01, gamma=1.0, beta3=beta3, follow=follow)

    optimizer = optax.inject_hyperparams(anon)(learning_rate=0.01, gamma=1.0, b3=beta3, guard=Guard(follow=follow))
    update = jax.jit(optimizer.update)
    params = jnp.array(theta)
    state, thetas = optimizer.init(params), []
    for t, g in enumerate(gradients, start=1):
        for name, value in changes.get(t, {}).items():
            name = "learning_rate" if name == "lr" else name
            state.hyperparams[name] = jnp.full_like(state.hyperparams[name], value)
        updates, state = update(jnp.array(g), state, params)
        params = optax.apply_updates(params, updates)
        thetas.append(params)
    assert_close(thetas, expected, rel=1e-11)
    assert update._cache_size() == 1


def test_learning_rate_may_be_a_schedule(x64):
    gradients = heterogeneous_gradients(steps=20)
    changes = {t: {"lr": 0.01 * 0.9 ** (t - 1)} for t in range(1, 21)}
    _, expected = guarded_history(gradients, random_theta(), changes, lr=0.01)
    thetas, _ = follow(anon(lambda count: 0.01 * 0.9**count), jnp.array(random_theta()), jnp.array(gradients))
    assert_close(thetas, expected)


@pytest.mark.parametrize("growth", [1.1, 1.5, 2.0, 3.0, math.inf])
def test_refresh_times_of_an_array_are_those_of_the_number(growth):
    """Float32 makes 11.000001 of 1.1 times 10."""
    optimizer = optax.inject_hyperparams(scale_by_anon)(growth=growth)

    def take(state, g):
        return optimizer.update(g, state)[1], state.inner_state.refreshed

    _, seen = jax.lax.scan(take, optimizer.init(jnp.zeros(())), jnp.ones(3000))
    assert sorted(set(seen.tolist()) - {0}) == refresh_times(2999, growth)


# A citizen of optax.


def some_tree():
    params = {"a": jnp.ones((8, 8)), "b": (jnp.ones(3), None)}
    grads = {"a": jnp.full((8, 8), 2.0), "b": (jnp.array([1.0, 0.0, -1.0]), None)}
    return params, grads


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: inner,
        lambda inner: optax.chain(optax.clip_by_global_norm(1.0), inner),
        lambda inner: optax.masked(inner, {"a": True, "b": False}),
        lambda inner: optax.partition({"x": inner, "y": optax.sgd(0.1)}, {"a": "x", "b": "y"}),
        lambda inner: optax.MultiSteps(inner, 2),
        lambda inner: optax.apply_if_finite(inner, 3),
        lambda inner: optax.flatten(inner),
    ],
    ids=["bare", "chain", "masked", "partition", "MultiSteps", "apply_if_finite", "flatten"],
)
def test_works_inside(wrap):
    optimizer = wrap(anon(0.1, gamma=1.0))
    params, grads = some_tree()
    state = optimizer.init(params)
    for _ in range(3):
        updates, after = jax.jit(optimizer.update)(grads, state, params)
        assert jax.tree.structure(after) == jax.tree.structure(state)
        state, params = after, optax.apply_updates(params, updates)
    assert (params["a"] < 1).all()


def test_state_survives_being_taken_apart():
    optimizer, (params, grads) = anon(0.1), some_tree()
    _, state = optimizer.update(grads, optimizer.init(params), params)
    leaves, tree = jax.tree.flatten(state)
    restored = tree.unflatten([jnp.array(np.asarray(leaf)) for leaf in leaves])
    for one, other in zip(*(jax.tree.leaves(optimizer.update(grads, each)) for each in (state, restored)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_step_may_write_into_the_state_it_is_given():
    optimizer, (params, grads) = anon(0.1), some_tree()
    update = jax.jit(optimizer.update, donate_argnums=1)
    _, state = update(grads, optimizer.init(params), params)
    assert of_anon(state).count == 1


def test_runs_are_vectorised():
    optimizer, rng = anon(0.1, gamma=1.1), np.random.default_rng(0)
    gradients = jnp.array(rng.normal(size=(4, 20, 9)), jnp.float32)
    together, _ = jax.vmap(partial(follow, optimizer))(jnp.zeros((4, 9)), gradients)
    for alone, one in zip(gradients, together, strict=True):
        np.testing.assert_allclose(follow(optimizer, jnp.zeros(9), alone)[0], one, rtol=1e-5, atol=1e-7)


def test_state_of_narrow_parameters_is_float32():
    optimizer, params = anon(1e-3), jnp.ones(4, jnp.bfloat16)
    state = optimizer.init(params)
    updates, after = optimizer.update(jnp.full(4, 1e-3, jnp.bfloat16), state, params)
    assert updates.dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(after) if x.dtype != jnp.int32} == {jnp.dtype(jnp.float32)}


def test_a_tree_without_leaves():
    optimizer = anon(1e-3)
    updates, _ = optimizer.update({}, optimizer.init({}), {})
    assert updates == {}


def test_zero_gradients_move_nothing():
    optimizer, params = anon(1e-3, gamma=1.5), jnp.ones(100)
    state = optimizer.init(params)
    for _ in range(5):
        updates, state = optimizer.update(jnp.zeros(100), state, params)
        assert not updates.any()
    assert not of_anon(state).v.any()


def test_complex_parameters_are_torchs():
    """Pairs of real numbers, of one tensor."""
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(40, 8, 9)).astype(np.float32) * (1 + 0.1j) + 1j
    thetas, _ = follow(anon(0.01), jnp.zeros((8, 9), jnp.complex64), jnp.array(gradients, jnp.complex64))
    p = torch.nn.Parameter(torch.zeros(8, 9, dtype=torch.complex64))
    optimizer = Anon([p], lr=0.01, foreach=False)
    for g in gradients:
        p.grad = torch.tensor(g, dtype=torch.complex64)
        optimizer.step()
    np.testing.assert_allclose(thetas[-1], p.detach().numpy(), atol=40 * 2**-24)


def test_integers_are_no_parameters():
    with pytest.raises(ValueError, match="an array of int32, expected floating point or complex"):
        anon(0.1).init(jnp.zeros(3, jnp.int32))


# What optax asks of its own optimizers, by its own tests.

PROBLEMS = {"parabola": alias_test._setup_parabola, "rosenbrock": alias_test._setup_rosenbrock}


def ask(name: str, monkeypatch: pytest.MonkeyPatch, **options) -> None:
    """A test of optax's, on anon in place of one of its own."""
    monkeypatch.setattr(alias_test.alias, "anon", anon, raising=False)
    test = next(each for key, each in vars(alias_test.AliasTest).items() if key.startswith(name)).__wrapped__
    test(alias_test.AliasTest(), opt_name="anon", **{"opt_kwargs": {"learning_rate": 1e-2}, **options})


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
@pytest.mark.parametrize("gamma", [0.5, 1.0])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_optax_test_optimization(problem, gamma, dtype, monkeypatch):
    options = {"learning_rate": 1e-2, "gamma": gamma}
    ask("test_optimization", monkeypatch, opt_kwargs=options, target=PROBLEMS[problem], dtype=dtype)


@pytest.mark.parametrize("name", ["test_optimizers_accept_extra_args", "test_optimizers_can_be_wrapped"])
def test_optax_test(name, monkeypatch):
    ask(name, monkeypatch)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["test_preserve_dtype", "test_gradient_accumulation"])
def test_optax_test_of_dtype(name, dtype, monkeypatch):
    ask(name, monkeypatch, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_optax_test_state_shape_dtype_shard_stability(dtype, monkeypatch):
    ask("test_state_shape_dtype_shard_stability", monkeypatch, dtype=getattr(jnp, dtype))


def test_optax_tests_of_sharding():
    """In a process of their own, because they want eight devices."""
    code = (
        "from absl.testing import absltest; from optax._src import sharding_test; from anon_optim.optax import anon\n"
        "class T(absltest.TestCase): pass\n"
        "for key, each in vars(sharding_test.ShardingTest).items():\n"
        "    if key.endswith('_adam'): setattr(T, key, lambda self, f=each.__wrapped__: f(self, anon(1.0)))\n"
        "absltest.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Ran 3 tests" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"learning_rate": -1.0}, "learning_rate: -1.0"),
        ({"gamma": math.nan}, "gamma: nan"),
        ({"b1": 1.0}, "b1: 1.0"),
        ({"b2": -0.1}, "b2: -0.1"),
        ({"b3": 1.0}, "b3: 1.0"),
        ({"eps": -1.0}, "eps: -1.0"),
        ({"growth": 1.0}, "growth: 1.0"),
        ({"guard": "none"}, "guard: 'none'"),
        ({"guard": Guard(error_if_nonfinite=True)}, "apply_if_finite"),
        ({"lr_scale": "row"}, "lr_scale: 'row'"),
        ({"statistic": "hessian"}, "statistic: 'hessian'"),
        ({"weight_decay": -1.0}, "weight_decay: -1.0"),
        ({"learning_rate": 20.0, "weight_decay": 0.1}, "add_decayed_weights"),
    ],
)
def test_what_cannot_be_right_is_an_error(options, words):
    with pytest.raises(ValueError, match=words):
        anon(**{"learning_rate": 1e-3, **options})


# Adaptivity, measured.


@pytest.mark.parametrize("gamma", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_adaptivity_is_gamma(gamma):
    gradients = jnp.array(np.random.default_rng(0).normal(size=(20, 8, 12)), jnp.float32)
    np.testing.assert_allclose(measure_adaptivity(anon(0.1, gamma), gradients), gamma, atol=1e-4)


def test_adaptivity_of_others():
    gradients = {"w": jnp.array(np.random.default_rng(0).normal(size=(20, 5)), jnp.float32)}
    for optimizer, expected in ((optax.sgd(0.1, 0.9), 0.0), (optax.adam(0.1), 1.0), (optax.lion(0.1), 1.0)):
        np.testing.assert_allclose(measure_adaptivity(optimizer, gradients)["w"], expected, atol=1e-4)


def test_adaptivity_wants_a_transformation():
    with pytest.raises(ValueError, match=r"expected a transformation, such as optax\.adam"):
        measure_adaptivity(optax.adam, jnp.ones((3, 2)))


def test_without_jax_the_error_says_what_to_install():
    code = "import sys; sys.modules['jax'] = None; import anon_optim.optax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: anon_optim.optax needs JAX and optax: pip install 'anon-optim[jax]'" in done.stderr


def test_docstrings_hold():
    import doctest

    from anon_optim import optax as module

    assert doctest.testmod(module).failed == 0
