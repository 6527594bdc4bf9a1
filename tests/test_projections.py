"""The projections solve min over F of Σ ψ (x - θ)²: checked by the KKT conditions, in exact arithmetic."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from anon_optim import Box, HalfSpace, L2Ball, Simplex

INF = math.inf
DTYPES = [torch.float32, torch.float64]
SETS = {
    "box": Box(-0.25, 0.5),
    "ball": L2Ball(0.75),
    "simplex": Simplex(),
    "half-space": HalfSpace(torch.tensor([1.0, -2.0, 0.5, 3.0]), -30.0),
}
each_set = pytest.mark.parametrize("project", SETS.values(), ids=SETS.keys())
deterministic = settings(derandomize=True, deadline=None, max_examples=100)

values = st.floats(-10, 10, width=32).map(lambda v: 0.0 if abs(v) < 1e-6 else v)
decades = st.floats(-30, 30)
problems = st.lists(st.tuples(values, decades, values), min_size=1, max_size=8)


def tensors(problem, dtype):
    """θ, ψ and a third vector, in the dtype under test."""
    theta, exponents, a = zip(*problem, strict=True)
    return (
        torch.tensor(theta, dtype=dtype),
        torch.tensor([10.0**e for e in exponents], dtype=dtype),
        torch.tensor(a, dtype=dtype),
    )


def exact(*vectors):
    return [[Fraction(v) for v in vector.tolist()] for vector in vectors]


def tolerance(dtype):
    """Relative, 4e-15 in float64; and the size below which underflow on the way costs digits."""
    return Fraction(16 * torch.finfo(dtype).eps), Fraction(1024 * torch.finfo(dtype).tiny)


def same_bits(x, y):
    assert x.dtype == y.dtype
    assert x.shape == y.shape
    return x.numpy().tobytes() == y.numpy().tobytes()


def metric(x, theta, psi):
    return (psi * (x - theta) ** 2).sum()


def samples(dtype=torch.float32, shape=(200, 4), spread=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(shape, generator=generator, dtype=torch.float64)
    psi = 10 ** (spread * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1))
    return theta.to(dtype), psi.to(torch.promote_types(dtype, torch.float32))


# --- the KKT conditions ---------------------------------------------------------------------------------------------
# The multiplier is read off the coordinate that determines it best, and must then explain every other coordinate.


def check_ball(x, theta, psi, radius, tol, tiny):
    x, theta, psi = exact(x, theta, psi)
    square = sum(v * v for v in x)
    radius = Fraction(radius)
    assert abs(square - radius**2) <= 2 * tol * radius**2
    moved = [j for j in range(len(x)) if theta[j] != 0]
    best = max(moved, key=lambda j: (theta[j] - x[j]) / theta[j])
    if x[best] == 0:  # underflow: the multiplier is only known to be enormous
        return
    multiplier = psi[best] * (theta[best] - x[best]) / x[best]
    assert multiplier >= 0
    tol *= 1 + tiny / abs(x[best])
    for xi, ti, pi in zip(x, theta, psi, strict=True):
        assert abs(xi * (1 + multiplier / pi) - ti) <= tol * (1 + tiny / max(abs(xi), tiny * tol)) * abs(ti)


def check_simplex(x, theta, psi, tol):
    x, theta, psi = exact(x, theta, psi)
    assert min(x) >= 0
    assert abs(sum(x) - 1) <= tol
    active = [j for j in range(len(x)) if x[j] > 0]
    best = min(active, key=lambda j: psi[j] * (1 + abs(theta[j])))
    tau = psi[best] * (theta[best] - x[best])
    blur = tol * psi[best] * (1 + abs(theta[best]))
    for xi, ti, pi in zip(x, theta, psi, strict=True):
        if xi > 0:
            assert abs(pi * (ti - xi) - tau) <= tol * pi * (1 + abs(ti)) + blur
        else:
            assert pi * ti - tau <= tol * pi * (1 + abs(ti)) + blur


def check_half_space(x, theta, psi, a, b, tol, tiny):
    x, theta, psi, a = exact(x, theta, psi, a)
    b = Fraction(b)
    size = sum(abs(ai * xi) for ai, xi in zip(a, x, strict=True)) + abs(b)
    rounding = tol**2 * sum(abs(ai * ti) for ai, ti in zip(a, theta, strict=True))
    assert abs(sum(ai * xi for ai, xi in zip(a, x, strict=True)) - b) <= tol * size + rounding
    scale = [abs(ti) + abs(xi) + tiny for ti, xi in zip(theta, x, strict=True)]
    best = min((j for j in range(len(x)) if a[j] != 0), key=lambda j: psi[j] * scale[j] / abs(a[j]))
    multiplier = psi[best] * (theta[best] - x[best]) / a[best]
    assert multiplier >= 0
    for xi, ti, pi, ai, si in zip(x, theta, psi, a, scale, strict=True):
        assert abs(ti - multiplier * ai / pi - xi) <= 2 * tol * si


@pytest.mark.parametrize("dtype", DTYPES)
@given(problem=problems, radius=st.sampled_from([1e-3, 0.5, 1.0, 4.0]))
@deterministic
def test_ball_satisfies_the_kkt_conditions(dtype, problem, radius):
    theta, psi, _ = tensors(problem, dtype)
    assume(theta.double().norm() > 1.001 * radius)
    check_ball(L2Ball(radius)(theta, psi), theta, psi, radius, *tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@given(problem=problems)
@deterministic
def test_simplex_satisfies_the_kkt_conditions(dtype, problem):
    theta, psi, _ = tensors(problem, dtype)
    check_simplex(Simplex()(theta, psi), theta, psi, tolerance(dtype)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@given(problem=problems, b=st.sampled_from([0.0, -1.5, 0.25]))
@deterministic
def test_half_space_satisfies_the_kkt_conditions(dtype, problem, b):
    theta, psi, a = tensors(problem, dtype)
    assume(a.any())
    assume((a.double() * theta.double()).sum() > b + 1e-3)
    check_half_space(HalfSpace(a, b)(theta, psi), theta, psi, a, b, *tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@given(problem=problems)
@deterministic
def test_box_is_the_nearest_point_whatever_the_metric(dtype, problem):
    theta, psi, bound = tensors(problem, dtype)
    hi = bound.abs()
    expected = [min(max(t, -0.5), h) for t, h in zip(theta.tolist(), hi.tolist(), strict=True)]
    assert Box(-0.5, hi)(theta, psi).tolist() == expected


@pytest.mark.parametrize(("dtype", "spread"), [(torch.float32, 37), (torch.float64, 300)])
@pytest.mark.parametrize("radius", [1e-6, 0.1, 1.9])
def test_ball_is_reached_over_the_whole_range_of_the_dtype(dtype, spread, radius):
    for seed in range(20):
        theta, psi = samples(dtype, shape=(30,), spread=spread, seed=seed)
        x = L2Ball(radius)(theta, psi)
        assert abs(x.double().norm().item() / radius - 1) <= 4 * torch.finfo(dtype).eps
        assert (x * theta >= 0).all()
        assert (x.abs() <= theta.abs()).all()


def test_a_long_simplex_still_sums_to_one():
    theta, psi = samples(torch.float32, shape=(100_000,), spread=1)
    x = Simplex()(theta / 1000, psi)
    assert (x > 0).sum() > 100
    assert abs(x.double().sum().item() - 1) < 4 * torch.finfo(torch.float32).eps


def test_simplex_survives_values_that_swallow_one():
    # In float32 1e9 - 1 is 1e9, so that τ itself cannot be represented.
    x = Simplex()(torch.tensor([1e9, 1e9, -1e9]), torch.tensor([1.0, 3.0, 1e20]))
    assert x.sum() == 1
    assert x[2] == 0


# --- what the metric does -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ball", "simplex", "half-space"])
def test_it_is_not_the_euclidean_projection(name):
    project = SETS[name]
    theta = torch.tensor([1.0, -0.5, 2.0, 1.5])
    psi = torch.tensor([1.0, 10.0, 0.1, 3.0])
    x, euclidean = project(theta, psi), project(theta, torch.ones(4))
    assert (x - euclidean).abs().max() > 0.1
    assert metric(x, theta, psi) < 0.9 * metric(euclidean, theta, psi)
    assert metric(euclidean, theta, 1.0) < 0.9 * metric(x, theta, 1.0)


def test_worked_examples():
    one_and_three = torch.tensor([1.0, 3.0])
    x = HalfSpace(torch.ones(2), 0.0)(torch.ones(2), one_and_three)
    torch.testing.assert_close(x, torch.tensor([-0.5, 0.5]))
    x = Simplex()(torch.ones(2), one_and_three)
    torch.testing.assert_close(x, torch.tensor([0.25, 0.75]))
    # With λ = 3: 4 / (1 + 3/1) and 2 / (1 + 3/3).
    x = L2Ball(math.sqrt(2))(torch.tensor([4.0, 2.0]), one_and_three)
    torch.testing.assert_close(x, torch.ones(2))


def test_a_common_factor_of_psi_does_not_matter():
    theta, psi = samples(torch.float64, spread=6)
    for project in SETS.values():
        for factor in (1e-20, 1e20):
            torch.testing.assert_close(project(theta, factor * psi), project(theta, psi), rtol=1e-13, atol=1e-15)


# --- points that must not move --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float16])
@each_set
def test_projecting_twice_changes_no_bit(project, dtype):
    for seed in range(8):
        theta, psi = samples(dtype, shape=(5, 4), seed=seed)
        x = project(theta, psi)
        assert not torch.equal(x, theta)
        assert torch.equal(project(x, psi), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_points_inside_come_back_bit_for_bit(dtype):
    psi = torch.tensor([1e-30, 1.0, 1e30, INF], dtype=dtype)
    inside = torch.tensor([-0.0, 0.1, 0.2, 0.0], dtype=dtype)
    for project in (Box(0.0, 0.2), Box(), L2Ball(0.5), HalfSpace(torch.tensor([1.0, 1, 1, 1]), 0.4)):
        assert same_bits(project(inside, psi), inside)
    for seed in range(20):
        point = torch.softmax(samples(dtype, shape=(4,), seed=seed)[0], -1)
        assert same_bits(Simplex()(point, psi), point)


# --- unseen coordinates ---------------------------------------------------------------------------------------------


@each_set
def test_unseen_coordinates_keep_their_bits(project):
    theta, psi = samples(shape=(6, 4))
    unseen = torch.arange(24).reshape(6, 4) % 3 == 0
    psi[unseen] = INF
    x = project(theta, psi)
    assert torch.equal(x[unseen], theta[unseen])
    assert not torch.equal(x[~unseen], theta[~unseen])
    assert x.isfinite().all()
    assert torch.equal(project(theta, torch.full_like(theta, INF)), theta)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_others_are_projected_onto_the_slice(dtype):
    eps = torch.finfo(dtype).eps
    theta = torch.tensor([3.0, -8.0, 6.0, 2.0], dtype=dtype)
    psi = torch.tensor([INF, 1e-3, 7.0, 1e2], dtype=dtype)
    a = torch.tensor([2.0, -1.0, 0.5, 1.0], dtype=dtype)

    def close(x, rest):
        torch.testing.assert_close(x[1:], rest, rtol=16 * eps, atol=16 * eps)

    close(L2Ball(5.0)(theta, psi), L2Ball(4.0)(theta[1:], psi[1:]))
    close(HalfSpace(a, 4.0)(theta, psi), HalfSpace(a[1:], -2.0)(theta[1:], psi[1:]))
    close(Box(-1.0, 1.0)(theta, psi), Box(-1.0, 1.0)(theta[1:], psi[1:]))
    theta[0] = 0.75
    close(Simplex()(theta, psi), Simplex()(4 * theta[1:], psi[1:]) / 4)


def test_empty_slices_give_what_is_documented():
    theta, psi = torch.tensor([3.0, 0.5, -0.25]), torch.tensor([INF, 2.0, 1e30])
    assert L2Ball(1.0)(theta, psi).tolist() == [3.0, 0.0, 0.0]
    assert L2Ball(3.0)(theta, psi).tolist() == [3.0, 0.0, 0.0]
    assert Simplex()(theta, psi).tolist() == [3.0, 0.0, 0.0]
    assert HalfSpace(torch.tensor([1.0, 0.0, 0.0]), 1.0)(theta, psi).tolist() == [3.0, 0.5, -0.25]
    assert Box(0.0, 1.0)(theta, psi).tolist() == [3.0, 0.5, 0.0]
    # Not empty, but only because the sign of what is held does not count.
    x = Simplex()(torch.tensor([-1.0, 0.5, 0.5]), torch.tensor([INF, 1.0, 1.0]))
    assert x.tolist() == [-1.0, 1.0, 1.0]


# --- shapes, dtypes, devices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_set
def test_half_precision_is_projected_in_float32(project, dtype):
    theta, psi = samples(dtype, shape=(4,), spread=1)
    x = project(theta, psi)
    assert x.dtype == dtype
    assert torch.equal(x, project(theta.float(), psi).to(dtype))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), ()])
@pytest.mark.parametrize("project", [Box(0.0, 1.0), L2Ball(1.0), Simplex(), HalfSpace(torch.ones(()), 1.0)])
def test_no_element_and_no_dimension(project, shape):
    x = project(torch.full(shape, 3.0), torch.full(shape, 2.0))
    assert x.shape == shape
    assert torch.equal(x, torch.ones(shape))


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_simplex_treats_each_slice_on_its_own(dim):
    theta, psi = samples(torch.float64, shape=(3, 4, 5), spread=4)
    theta.select(dim, 0).fill_(0.1)
    psi.select(dim, 0).flatten()[::2] = INF
    x = Simplex(dim)(theta, psi)

    def rows(v):
        return v.movedim(dim, -1).reshape(-1, v.shape[dim])

    one_by_one = [Simplex()(t, p) for t, p in zip(rows(theta), rows(psi), strict=True)]
    assert torch.equal(rows(x), torch.stack(one_by_one))


@each_set
def test_layout_does_not_matter(project):
    theta, psi = samples(shape=(8, 4))
    strided = torch.stack([theta, theta], -1)[..., 0]
    assert not strided.is_contiguous()
    torch.testing.assert_close(project(strided, psi), project(theta, psi), rtol=1e-6, atol=1e-6)


def test_ball_and_half_space_are_of_the_whole_tensor():
    theta, psi = samples(torch.float64, shape=(3, 4), spread=4)
    a = torch.ones(3, 4)
    for project, flat in ((L2Ball(1.0), L2Ball(1.0)), (HalfSpace(a, -1.0), HalfSpace(a.flatten(), -1.0))):
        assert torch.equal(project(theta, psi).flatten(), flat(theta.flatten(), psi.flatten()))


@each_set
def test_nothing_is_read_back_from_the_device(project):
    # A fake tensor has no values, so any `.item()` or branch on one raises.
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert project(torch.empty(3, 4), torch.empty(3, 4)).shape == (3, 4)


@each_set
def test_compiles_into_one_graph(project):
    torch.compiler.reset()
    theta, psi = samples(shape=(5, 4))
    psi[0, 0] = INF
    compiled = torch.compile(project, fullgraph=True, backend="eager")
    assert torch.equal(compiled(theta, psi), project(theta, psi))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_set
def test_can_be_captured(project):
    theta, psi = (v.cuda() for v in samples(shape=(5, 4)))
    if isinstance(project, HalfSpace):
        project = HalfSpace(project.a.cuda(), project.b)
    expected = project(theta, psi)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = project(theta, psi)
    x.zero_()
    graph.replay()
    assert torch.equal(x, expected)


# --- derivatives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0, 0.5, 2])
@pytest.mark.parametrize("unseen", [False, True])
@pytest.mark.parametrize(
    "project", [*SETS.values(), L2Ball(100.0), HalfSpace(torch.ones(()), 100.0)], ids=[*SETS, "inside", "inside'"]
)
def test_derivatives(project, spread, unseen):
    hole = torch.tensor([False, False, unseen, False])
    for seed in range(2):
        theta, psi = samples(torch.float64, shape=(4,), spread=spread, seed=seed)

        def masked(theta, psi):
            return project(theta, torch.where(hole, INF, psi))

        torch.autograd.gradcheck(masked, (theta.requires_grad_(), psi.requires_grad_()), atol=1e-7)


@pytest.mark.parametrize("theta", [[0.0, 0, 0, 0], [1.0, 1, 1, 1], [1.0, -1, 0, 1e20], [-1e20, 1e-20, 1.0, 2.0]])
@pytest.mark.parametrize("psi", [[1.0, 1, 1, 1], [INF, INF, INF, INF], [1e-30, 1e30, INF, 1], [0.0, 1e38, 1e-38, 1]])
@each_set
def test_extremes_give_finite_values_and_derivatives(project, theta, psi):
    theta = torch.tensor(theta, requires_grad=True)
    psi = torch.tensor(psi, requires_grad=True)
    x = project(theta, psi)
    (x.sum() + 0 * psi[psi.isfinite()].sum()).backward()
    assert x.isfinite().all()
    assert theta.grad.isfinite().all()
    assert psi.grad.isfinite().all()


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Box(2, 1), "lo must not exceed hi, got lo=2 and hi=1"),
        (lambda: Box(torch.tensor([0.0, 3.0]), 1.5), "got lo=3.0 and hi=1.5"),
        (lambda: Box(torch.zeros(2, 1), torch.tensor([1.0, -1.0])), "got lo=0.0 and hi=-1.0"),
        (lambda: Box(math.nan, 1), "lo must be a number below inf, got nan"),
        (lambda: Box(INF), "lo must be a number below inf, got inf"),
        (lambda: Box(0, torch.tensor([1.0, math.nan])), "hi must be a number above -inf, got nan"),
        (lambda: Box(hi=-INF), "hi must be a number above -inf, got -inf"),
        (lambda: L2Ball(0), "radius must be positive and finite, got 0"),
        (lambda: L2Ball(-1.5), "got -1.5"),
        (lambda: L2Ball(math.nan), "got nan"),
        (lambda: L2Ball(INF), "got inf"),
        (lambda: Simplex(0.5), "dim must be an integer, got 0.5"),
        (lambda: Simplex(True), "dim must be an integer, got True"),
        (lambda: HalfSpace(torch.zeros(2), 1.0), r"a must have a non-zero element, got tensor\(\[0., 0.\]\)"),
        (lambda: HalfSpace(torch.tensor([1.0, math.nan]), 1.0), "a must be finite, got nan"),
        (lambda: HalfSpace(torch.ones(2), math.nan), "b must be finite, got nan"),
        (lambda: HalfSpace(torch.ones(2), -INF), "b must be finite, got -inf"),
    ],
)
def test_constructors_name_the_argument_and_its_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_bound_may_not_enlarge_the_parameter():
    for project in (Box(torch.zeros(3, 1), None), HalfSpace(torch.ones(3, 1), 0.0)):
        with pytest.raises(RuntimeError, match="expand"):
            project(torch.ones(4), torch.ones(4))


def test_equality_and_hash():
    assert L2Ball(1.0) == L2Ball(1.0) != L2Ball(2.0)
    assert Simplex(0) == Simplex(0) != Simplex(1)
    assert len({L2Ball(1.0), L2Ball(1.0), Box(0.0, 1.0), HalfSpace(torch.ones(2), 1.0)}) == 3
