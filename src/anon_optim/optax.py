"""Anon for JAX: the algorithm, guards and defaults of :class:`anon_optim.Anon` as an optax transformation.

The twin of `_idu`, in its symbols: `v` is 1/psi (0 marks a coordinate that has not seen a gradient yet), `nu` and `w`
the running second moment and its weight, `sigma` = nu/w + eps, `level` the mean of sigma over an array, `brake` three
numbers of one. Needs the extra `jax`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax import Array
except ImportError as error:
    raise ImportError(f"anon_optim.optax needs JAX and optax: pip install 'anon-optim[jax]' ({error})") from None

from anon_optim._check import BELOW_ONE, CHECKS, NOT_NEGATIVE, Check, check, check_decay
from anon_optim._idu import BRAKED, LAST_EXACT_STEP, TAIL, Growth, refresh_times
from anon_optim._options import NO_GUARD, Guard

__all__ = ["ScaleByAnonState", "anon", "measure_adaptivity", "scale_by_anon"]

Number = float | Array
Statistic = str | Callable[[Array, Array], Array]


class ScaleByAnonState(NamedTuple):
    """All of float32 at least, so that parameters of lower precision lose nothing; of complex ones the real and the
    imaginary part along a last axis."""

    count: Array  # pyright: ignore[reportIncompatibleMethodOverride] - optax's name for the step
    refreshed: Array
    """The step of the last refresh."""
    memory: Array
    """The weight that what v was made of had in Adam's average then; 1 where b3 is a number."""
    gamma: Array
    """The one that v was made with."""
    mu: optax.Updates
    nu: optax.Updates
    """Of the interval since the last refresh."""
    v: optax.Updates
    level: optax.Updates
    """A number an array."""
    brake: optax.Updates
    """Three numbers an array: the power that a refresh foresees, its average since, the largest ratio of the two."""


def scale_by_anon(
    gamma: Number = 1.0,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-16,
    *,
    b3: Number | None = 0.5,
    growth: Growth | Array = 2.0,
    guard: Guard | None = Guard(),  # noqa: B008 - frozen, so sharing it is safe
    lr_scale: str | None = None,
    statistic: Statistic = "gradient",
    bias_correction: bool = True,
) -> optax.GradientTransformation:
    """Rescale updates by Anon. With `t` the step::

        mu <- b1 mu + (1 - b1) g
        nu <- b2 nu + (1 - b2) g^2
        if t is a refresh time (1, 2, 4, 8, ... for growth 2), with n steps since the one before:
            sigma = nu / (1 - b2^n) + eps
            psi2 <- sigma^gamma                          at the first refresh, or the first after gamma changed
            psi2 <- b3 psi2 + (1 - b3) sigma^gamma       later
            nu <- 0
        update = mu / (1 - b1^t) / sqrt(psi2)

    **Arguments:**
    - `gamma`: the adaptivity: 0 is momentum SGD, 1 like Adam. A change takes effect at the next refresh.
    - `b1`, `b2`: decay of the averages of the gradient and of its square.
    - `eps`: added to the second moment, on the squared scale.
    - `b3`: weight of the old psi2 at a refresh; None: what Adam's average would keep, (b2^n - b2^t) / (1 - b2^t).
    - `growth`: ratio of successive refresh times, or a function of the step; inf: only the first step.
    - `guard`: see :class:`anon_optim.Guard`; None gives the printed algorithm.
    - `lr_scale`: "tensor" divides the update of each array by mean(sigma)^((1 - gamma)/2), so that the learning rate
      has about Adam's unit at every gamma.
    - `statistic`: what nu averages: "gradient", "belief" or a function `(g, mu) -> array >= 0`.
    - `bias_correction`: divide mu by 1 - b1^t.

    Numbers may be JAX arrays, as `optax.inject_hyperparams` makes them. Functions that are no schedules, `growth` and
    `statistic`, are named in its `static_args`.
    """
    if guard is not None and not isinstance(guard, Guard):
        raise ValueError(f"Invalid guard: {guard!r}, expected Guard(...) or None")
    if guard is not None and guard.error_if_nonfinite:
        raise ValueError(
            "Invalid error_if_nonfinite: True, expected False: wrap the optimizer in optax.apply_if_finite"
        )
    guard = guard or NO_GUARD
    entries = {"gamma": gamma, "eps": eps, "growth": growth, "lr_scale": lr_scale, "statistic": statistic}
    for name, value in entries.items():
        _check(name, value, CHECKS[name])
    for name, value in {"b1": b1, "b2": b2}.items():
        _check(name, value, BELOW_ONE)
    _check("b3", b3, CHECKS["beta3"])
    step = partial(_step, _Rule(gamma, b1, b2, eps, b3, guard, lr_scale, statistic, bias_correction))
    after = _schedule(growth)

    def init(params: optax.Params) -> ScaleByAnonState:
        # Each has arrays of its own, so that a step may be given them to write into (donate_argnums).
        count, refreshed = (jnp.zeros((), jnp.int32) for _ in range(2))
        mu, nu, v = (jax.tree.map(_zeros, params) for _ in range(3))
        level = jax.tree.map(lambda x: jnp.zeros((), x.dtype), v)
        brake = jax.tree.map(lambda x: jnp.array([0, 0, 1], x.dtype), v)
        memory = jnp.zeros((), float)
        return ScaleByAnonState(count, refreshed, memory, jnp.array(gamma, float), mu, nu, v, level, brake)

    def update(
        updates: optax.Updates, state: ScaleByAnonState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAnonState]:
        del params
        state = state._replace(count=optax.safe_increment(state.count))
        due = state.count == after(state.refreshed)
        return jax.lax.cond(due, partial(step, True), partial(step, False), updates, state)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def anon(
    learning_rate: optax.ScalarOrSchedule,
    gamma: Number = 1.0,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-16,
    weight_decay: Number = 0.0,
    mask: Any = None,
    *,
    b3: Number | None = 0.5,
    growth: Growth | Array = 2.0,
    guard: Guard | None = Guard(),  # noqa: B008
    lr_scale: str | None = None,
    statistic: Statistic = "gradient",
    bias_correction: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Anon with decoupled weight decay: `optax.adamw` with one more number to turn. See :func:`scale_by_anon`.

    `mask` says which parameters decay, as in `optax.adamw`. For decay that is a part of the gradient, as in SGD's
    recipes, chain `optax.add_decayed_weights`, `scale_by_anon` and `optax.scale_by_learning_rate`.

    Example::

        >>> import jax.numpy as jnp
        >>> import optax
        >>> from anon_optim.optax import anon
        >>> optimizer = anon(1e-3, gamma=1.0, weight_decay=0.01)
        >>> params = {"w": jnp.ones(3)}
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update({"w": jnp.array([1.0, -2.0, 3.0])}, state, params)
        >>> params = optax.apply_updates(params, updates)
    """
    _check("weight_decay", weight_decay, NOT_NEGATIVE)
    if not callable(learning_rate):
        _check("learning_rate", learning_rate, NOT_NEGATIVE)
    if isinstance(learning_rate, int | float) and isinstance(weight_decay, int | float):
        check_decay(learning_rate, weight_decay, "optax.add_decayed_weights before scale_by_anon")
    without = not isinstance(weight_decay, jax.Array) and weight_decay == 0  # and so without need of params
    return optax.chain(
        scale_by_anon(
            gamma,
            b1,
            b2,
            eps,
            b3=b3,
            growth=growth,
            guard=guard,
            lr_scale=lr_scale,
            statistic=statistic,
            bias_correction=bias_correction,
        ),
        optax.identity() if without else optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def measure_adaptivity(optimizer: optax.GradientTransformation, gradients: optax.Updates) -> optax.Updates:
    """A = 1 - d ln|update(k g_1, ..., k g_t)| / d ln k at k = 1, of each coordinate, of any optax transformation.

    Every leaf of `gradients` has the steps as its first axis; parameters stand at zero. The derivative is exact, and
    NaN where nothing moved."""
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(f"Invalid optimizer: {optimizer!r}, expected a transformation, such as optax.adam(1e-3)")
    start = jax.tree.map(lambda g: jnp.zeros_like(g[0]), gradients)

    def log_update(k: Array) -> optax.Updates:
        def take(carry: Any, g: optax.Updates) -> tuple[Any, None]:
            state, _ = carry
            update, state = optimizer.update(jax.tree.map(lambda x: k.astype(x.dtype) * x, g), state, start)
            return (state, update), None

        (_, update), _ = jax.lax.scan(take, (optimizer.init(start), start), gradients)
        return jax.tree.map(lambda x: jnp.log(abs(x)), update)

    one = jnp.ones(())
    _, slopes = jax.jvp(log_update, (one,), (one,))
    return jax.tree.map(lambda slope: 1 - slope, slopes)


def _check(name: str, value: Any, right: Check) -> None:
    if not isinstance(value, jax.Array | np.ndarray):  # of which nothing is known while a step is traced
        check(name, value, right)


class _Rule(NamedTuple):
    gamma: Number
    b1: Number
    b2: Number
    eps: Number
    b3: Number | None
    guard: Guard
    lr_scale: str | None
    statistic: Statistic
    bias_correction: bool

    def of(self, dtype: Any) -> "_Rule":
        """With numbers that do not widen an array of this type."""
        return self._replace(**{name: _narrow(getattr(self, name), dtype) for name in ("b1", "b2", "eps", "b3")})


class _Clock(NamedTuple):
    due: bool
    """Known when a step is traced, because a refresh and the steps between are two programs."""
    w: Array
    memory: Array
    """The state's, as it has faded by now."""
    bias_correction1: Number
    bias_correction2: Array
    gamma_before: Array
    gamma: Array
    """In force on this step: the rule's from a refresh on."""


class _Leaf(NamedTuple):
    """The state of one array."""

    mu: Array
    nu: Array
    v: Array
    level: Array
    brake: Array


def _narrow(number: Any, dtype: Any) -> Any:
    return number.astype(dtype) if isinstance(number, jax.Array) else number


NEVER = 2**31 - 1


def _schedule(growth: Growth | Array) -> Callable[[Array], Array]:
    """The refresh time after a given one."""
    if not isinstance(growth, jax.Array):
        times = np.array([*refresh_times(LAST_EXACT_STEP, growth), NEVER], np.int32)
        return lambda last: jnp.min(times, where=times > last, initial=NEVER)

    def after(last: Array) -> Array:
        # A little less, so that 1.1 times 10 is not above 11 in float32.
        product = growth.astype(jnp.float32) * (1 - 2**-22) * last
        later = jnp.ceil(jnp.minimum(product, 2.0**30)).astype(jnp.int32)
        return jnp.where(last == 0, 1, jnp.maximum(last + 1, later))

    return after


def _as_real(x: Array) -> Array:
    return jnp.stack([x.real, x.imag], axis=-1) if jnp.iscomplexobj(x) else x


def _zeros(p: Any) -> Array:
    if not jnp.issubdtype(p.dtype, jnp.inexact):
        raise ValueError(f"Invalid params: an array of {p.dtype}, expected floating point or complex numbers")
    return _as_real(jnp.zeros_like(p, dtype=jnp.promote_types(p.dtype, jnp.float32)))


def _weight(b: Number, n: Array) -> Array:
    """1 - b^n, where b is so near to 1 that float32 could not subtract."""
    if isinstance(b, jax.Array):
        return 1 - b**n
    return -jnp.expm1(n * (math.log(b) if b > 0 else -math.inf))


def _step(
    rule: _Rule, due: bool, updates: optax.Updates, state: ScaleByAnonState
) -> tuple[optax.Updates, ScaleByAnonState]:
    count, refreshed, memory, gamma_before, *trees = state
    gamma = jnp.asarray(rule.gamma, gamma_before.dtype) if due else gamma_before
    bias_correction1 = _weight(rule.b1, count) if rule.bias_correction else 1.0
    w, faded = _weight(rule.b2, count - refreshed), memory * rule.b2 ** (count - refreshed)
    clock = _Clock(due, w, faded, bias_correction1, _weight(rule.b2, count), gamma_before, gamma)
    grads, tree = jax.tree.flatten(updates)
    leaves = map(_Leaf._make, zip(*map(tree.flatten_up_to, trees), strict=True))
    stepped = [_step_one(rule, clock, g, leaf) for g, leaf in zip(grads, leaves, strict=True)]
    scaled = tree.unflatten([update for update, _ in stepped])
    columns = zip(*(leaf for _, leaf in stepped), strict=True) if stepped else [()] * len(_Leaf._fields)
    if due:
        refreshed = count
        memory = (faded + w).astype(memory.dtype) if rule.b3 is None else jnp.ones_like(memory)
    return scaled, ScaleByAnonState(count, refreshed, memory, gamma, *map(tree.unflatten, columns))


def _step_one(rule: _Rule, clock: _Clock, grad: Array, leaf: _Leaf) -> tuple[Array, _Leaf]:
    mu, nu, v, level, brake = leaf
    dtype, guard = mu.dtype, rule.guard
    g, rule = _as_real(grad).astype(dtype), rule.of(dtype)
    gamma, w = clock.gamma.astype(dtype), clock.w.astype(dtype)
    bias_correction1 = _narrow(clock.bias_correction1, dtype)

    mu = rule.b1 * mu + (1 - rule.b1) * g
    sample = _second_moment(rule, g, mu)
    nu = rule.b2 * nu + (1 - rule.b2) * sample
    if clock.due:
        v, level = _refresh(rule, clock, nu, w, v, level)
    elif guard.touch:
        sigma = jnp.maximum(sample + rule.eps, guard.floor * level)
        v = jnp.where((v == 0) & (g != 0), _exp(-gamma / 2 * _log(sigma)), v)
    if guard.follow and not clock.due:
        sigma = nu / clock.bias_correction2.astype(dtype) + rule.eps
        v = jnp.where(gamma > 0, jnp.fmin(v, _exp(-gamma / 2 * _log(sigma))), v)
    if guard.clip < math.inf:
        v = jnp.minimum(v, _clip_limit(mu, guard.clip * bias_correction1, gamma))

    update = v * mu / bias_correction1
    if rule.lr_scale == "tensor":
        update = update / _scale_of(level, gamma)
    if guard.brake and v.size >= BRAKED:
        factor, brake = _braked(rule, clock, sample, nu / w, v, level, brake)
        update = update * factor
    if clock.due:
        nu = jnp.zeros_like(nu)
    if jnp.iscomplexobj(grad):
        update = jax.lax.complex(update[..., 0], update[..., 1])
    return update.astype(grad.dtype), _Leaf(mu, nu, v, level, brake)


# What follows says in jnp what `_idu` says in torch, where each piece is explained.


def _log(x: Array) -> Array:
    limits = jnp.finfo(x.dtype)
    return jnp.log(jnp.clip(x, limits.tiny, limits.max))


def _exp(x: Array) -> Array:
    limits = jnp.finfo(x.dtype)
    return jnp.clip(jnp.exp(x), limits.tiny, limits.max)


def _finite_positive(x: Array) -> Array:
    return (x > 0) & (x < math.inf)


def _second_moment(rule: _Rule, g: Array, mu: Array) -> Array:
    if rule.statistic == "gradient":
        return g * g
    sample = jnp.square(g - mu) if rule.statistic == "belief" else rule.statistic(g, mu)  # pyright: ignore
    if rule.guard.touch:  # a coordinate without a gradient teaches nothing
        return jnp.where((g != 0) | (rule.gamma == 0), sample, 0)
    return sample


def _refresh(rule: _Rule, clock: _Clock, nu: Array, w: Array, v: Array, level: Array) -> tuple[Array, Array]:
    gamma, guard = clock.gamma.astype(v.dtype), rule.guard
    first_seen = v == 0
    v = jnp.where(clock.gamma_before != clock.gamma, 0, v)
    sigma = nu / w + rule.eps
    taught = _finite_positive(nu)
    mean = jnp.where(taught, sigma, 0).sum() / jnp.maximum(taught.sum(), 1).astype(v.dtype)
    b3 = rule.b3
    if b3 is None:
        b3 = (clock.memory / (clock.memory + clock.w)).astype(v.dtype)
    level = _mix_level(level, mean, b3)

    sigma = jnp.where(first_seen, nu / (1 - rule.b2) + rule.eps, sigma)
    sigma = jnp.maximum(sigma, guard.floor * mean)
    new = gamma * _log(sigma)
    mixed = jnp.logaddexp(-2 * _log(v) + jnp.log(b3), new + jnp.log1p(-b3))
    refreshed = _exp(jnp.where(v == 0, new, mixed) / -2)
    if guard.touch:
        refreshed = jnp.where(taught, refreshed, v)
    return jnp.where(gamma == 0, 1, refreshed), level


def _mix_level(level: Array, mean: Array, b3: Number) -> Array:
    limits = jnp.finfo(level.dtype)
    mixed = jnp.clip(jnp.where(level > 0, b3 * level + (1 - b3) * mean, mean), limits.tiny, limits.max)
    return jnp.where(mean > 0, mixed, level)


def _scale_of(level: Array, gamma: Array) -> Array:
    return jnp.where(level > 0, _exp((1 - gamma) / 2 * _log(level)), 1)


def _clip_limit(mu: Array, bound: Number, gamma: Array) -> Array:
    tiny = jnp.finfo(mu.dtype).tiny
    limit = (bound / jnp.maximum(abs(mu), tiny)) ** gamma
    return jnp.where(gamma > 0, jnp.maximum(limit, tiny), math.inf)


def _braked(
    rule: _Rule, clock: _Clock, sample: Array, sigma: Array, v: Array, level: Array, brake: Array
) -> tuple[Array, Array]:
    """What the update is multiplied by, and the brake after the step."""
    gamma = clock.gamma.astype(v.dtype)
    foreseen, average, excess = brake
    if clock.due:
        powers = sigma * v * v
        power = (jnp.where(powers < math.inf, powers, 0) / v.size).sum()
        foreseen = jnp.maximum(power, _scale_of(level, gamma) ** 2)
        foreseen = jnp.where(_finite_positive(power) & (foreseen < math.inf), foreseen, 0)
        fresh = jnp.stack([foreseen, foreseen, jnp.ones_like(foreseen)])
        return jnp.ones_like(excess), fresh
    factor = jnp.where(gamma > 0, jnp.maximum(excess, 1) ** (-gamma / 2), 1)
    power = (jnp.fmin(sample * v * v, TAIL * foreseen) / v.size).sum()
    average = average + (1 - rule.b1) * (power - average)
    ratio = average / foreseen
    risen = jnp.where((foreseen > 0) & (ratio < math.inf), jnp.maximum(excess, ratio), excess)
    return factor, jnp.where(gamma > 0, jnp.stack([foreseen, average, risen]), brake)
