"""copy_stochastic_: the mean is exact, only neighbours occur, and what bfloat16 can hold is left alone."""

import math

import pytest
import torch

from anon_optim._rounding import copy_stochastic_

INF = math.inf
LARGEST = torch.finfo(torch.bfloat16).max
DENORMAL = 2.0**-133  # the smallest positive bfloat16


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def rounded(source, target=None):
    target = torch.empty(source.shape, dtype=torch.bfloat16) if target is None else target
    assert copy_stochastic_(target, source) is None
    return target


def neighbours(source):
    """The bfloat16 values next to each float32 towards zero and away from it."""
    bits = source.view(torch.int32) & ~0xFFFF
    return bits.view(torch.float32), (bits + 0x10000).view(torch.float32)


def assorted(n=20_000):
    """Random bit patterns of finite float32: every exponent, both signs, denormals among them."""
    bits = torch.randint(-(2**31), 2**31, (n,), dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    return values[values.isfinite() & (values.abs() < LARGEST)]


@pytest.mark.parametrize("value", [1.001, -1.001, math.pi * 1e20, -1e-20 / 3, 1.9990234375, 0.3 * DENORMAL, 2.7e-39])
def test_is_unbiased(value):
    draws = 200_000
    source = torch.full((draws,), value)
    below, above = (v[0].double().item() for v in neighbours(source))
    exact = source[0].double().item()
    p = (exact - below) / (above - below)
    mean = rounded(source).double().mean().item()
    standard_error = abs(above - below) * math.sqrt(p * (1 - p) / draws)
    assert 0 < p < 1
    assert abs(mean - exact) <= 4 * standard_error


def test_is_unbiased_in_every_fraction_of_the_gap():
    # 1 + k/2^23 for all k in [0, 2^16): the share rounded up must be k/2^16.
    source = 1 + torch.arange(1 << 16, dtype=torch.float32) / 2**23
    draws = 40
    up = sum((rounded(source).float() > 1).double() for _ in range(draws)) / draws
    p = torch.arange(1 << 16, dtype=torch.float64) / 2**16
    blocks = (up - p).reshape(64, -1).mean(1)
    standard_error = (p * (1 - p) / draws).reshape(64, -1).mean(1).div(1024).sqrt()
    assert (blocks.abs() <= 4 * standard_error).all()


def test_small_updates_add_up():
    # Rounding to nearest would leave 1 where it is: the update is a 26th of the gap to the next number.
    weight = torch.ones(4096, dtype=torch.bfloat16)
    for _ in range(100):
        copy_stochastic_(weight, weight.float() + 3e-4)
    mean = weight.double().mean().item()
    # Each step adds noise of at most half the gap, 2^-7 above 1.
    assert abs(mean - 1.03) <= 4 * 0.5 * 2**-7 * math.sqrt(100 / 4096)


def test_only_neighbours_occur():
    source = assorted()
    below, above = neighbours(source)
    result = rounded(source).float()
    is_below, is_above = result == below, result == above
    assert (is_below | is_above).all()
    assert is_below.sum() > len(source) // 4
    assert is_above.sum() > len(source) // 4


def test_the_sign_only_mirrors():
    source = assorted()
    torch.manual_seed(1)
    positive = rounded(source)
    torch.manual_seed(1)
    assert torch.equal(rounded(-source), -positive)


def test_what_is_representable_stays():
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    result = rounded(every.float())
    nan = every.isnan()
    assert torch.equal(result[~nan].view(torch.int16), every[~nan].view(torch.int16))  # -0.0, denormals and ±inf too
    assert result[nan].isnan().all()


def test_values_that_are_not_finite_stay():
    # The last ones are NaN whose bits would carry into the sign.
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    for _ in range(100):
        assert rounded(nans).isnan().all()
        assert rounded(torch.tensor([INF, -INF])).tolist() == [INF, -INF]


def test_does_not_overflow_where_rounding_to_nearest_does_not():
    bits = torch.arange(0x7F7F0000, 0x7F800000, 7, dtype=torch.int32)
    source = bits.view(torch.float32)
    for sign in (1, -1):
        nearest = (sign * source).bfloat16()
        assert torch.equal(rounded(sign * source), nearest)
    assert (nearest == -LARGEST).any()
    assert (nearest == -INF).any()


def test_zero_and_denormals():
    assert math.copysign(1, rounded(torch.tensor([-0.0])).item()) == -1
    source = torch.full((10_000,), 0.25 * DENORMAL)
    assert set(rounded(source).double().tolist()) == {0.0, DENORMAL}


def test_is_reproducible():
    source = torch.randn(1000)
    torch.manual_seed(7)
    first = rounded(source)
    second = rounded(source)
    torch.manual_seed(7)
    assert torch.equal(rounded(source), first)
    assert not torch.equal(second, first)


@pytest.mark.parametrize("strided", ["target", "source", "both", "transposed", "offset"])
def test_layout(strided):
    values = torch.randn(6, 10)
    source, target = values, torch.zeros(6, 10, dtype=torch.bfloat16)
    if strided in ("source", "both"):
        source = torch.stack([values, values], -1)[..., 0]
    if strided in ("target", "both"):
        target = torch.zeros(12, 10, dtype=torch.bfloat16)[::2]
    if strided == "transposed":
        target = torch.zeros(10, 6, dtype=torch.bfloat16).T
    if strided == "offset":
        source = torch.cat([torch.zeros(1), values.flatten()])[1:].view(6, 10)
    below, above = neighbours(values)
    copy_stochastic_(target, source)
    assert ((target.float() == below) | (target.float() == above)).all()
    assert torch.equal(source, values)


def test_no_element_and_no_dimension():
    assert rounded(torch.empty(0, 3)).shape == (0, 3)
    assert rounded(torch.tensor(2.0)).item() == 2.0


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float64),
    ],
)
def test_other_dtypes_are_plainly_copied(target, source):
    values = torch.randn(100, dtype=torch.float64).to(source)
    state = torch.get_rng_state()
    result = torch.empty(100, dtype=target)
    copy_stochastic_(result, values)
    assert torch.equal(result, values.to(target))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_parameter_can_be_the_target():
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    with torch.no_grad():
        copy_stochastic_(parameter, torch.ones(3))
    assert parameter.tolist() == [1.0, 1.0, 1.0]
    assert parameter.requires_grad


def test_compiles_into_one_graph():
    torch.compiler.reset()
    source, target = torch.randn(100), torch.empty(100, dtype=torch.bfloat16)
    torch.compile(copy_stochastic_, fullgraph=True, backend="eager")(target, source)
    below, above = neighbours(source)
    assert ((target.float() == below) | (target.float() == above)).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_can_be_captured_and_draws_anew_at_each_replay():
    source = torch.randn(1000, device="cuda")
    target = torch.empty(1000, device="cuda", dtype=torch.bfloat16)
    copy_stochastic_(target, source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_stochastic_(target, source)
    graph.replay()
    first = target.clone()
    graph.replay()
    assert not torch.equal(first, target)
    below, above = neighbours(source)
    assert ((target.float() == below) | (target.float() == above)).all()
