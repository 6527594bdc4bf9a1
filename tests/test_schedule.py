"""Refresh times, in exact integers: which steps refresh the preconditioner, and how far off the next one is."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anon_optim._idu import is_refresh, steps_to_refresh
from oracle import refresh_set

GROWTHS = st.floats(min_value=1.0, max_value=10.0, exclude_min=True)


def times(growth, last):
    return [t for t in range(1, last + 1) if is_refresh(t, growth)]


def test_growth_two_gives_the_powers_of_two():
    assert times(2.0, 5000) == [2**k for k in range(13)]


def test_integer_growth_means_the_same_as_its_float():
    assert times(3, 1000) == times(3.0, 1000) == [1, 3, 9, 27, 81, 243, 729]


def test_growth_is_read_as_the_decimal_the_user_wrote():
    # In floats 1.1 * 170 exceeds 187, so that its ceiling would be 188.
    assert math.ceil(1.1 * 170) == 188
    times_of_eleven_tenths = times(1.1, 200)
    assert 170 in times_of_eleven_tenths
    assert 187 in times_of_eleven_tenths
    assert 188 not in times_of_eleven_tenths


def test_a_growth_near_one_still_moves_on_by_a_step():
    assert times(1.01, 100) == list(range(1, 101))
    assert times(1.1, 15) == [*range(1, 12), 13, 15]


def test_infinite_growth_refreshes_once():
    assert times(math.inf, 1000) == [1]
    assert steps_to_refresh(0, math.inf) == 1
    assert steps_to_refresh(1, math.inf) == math.inf
    assert steps_to_refresh(10**9, math.inf) == math.inf


def test_a_callable_growth_is_asked_at_each_refresh():
    asked = []

    def growth(t):
        asked.append(t)
        return 1.5 if t < 10 else 3.0

    assert times(growth, 200) == [1, 2, 3, 5, 8, 12, 36, 108]
    assert set(asked) <= {1, 2, 3, 5, 8, 12, 36, 108}


def test_a_callable_growth_may_end_the_refreshes():
    def growth(t):
        return 2.0 if t < 16 else math.inf

    assert times(growth, 500) == [1, 2, 4, 8, 16]
    assert steps_to_refresh(9, growth) == 7
    assert steps_to_refresh(16, growth) == math.inf


def test_large_steps_stay_exact():
    assert is_refresh(2**52, 2.0)
    assert not is_refresh(2**52 + 1, 2.0)
    a = 1
    while a < 10**12:
        a = max(a + 1, math.ceil(Fraction(3, 2) * a))
    assert is_refresh(a, 1.5)
    assert not is_refresh(a - 1, 1.5)


@pytest.mark.parametrize("growth", [2.0, 1.1, 1.5, math.inf, lambda t: 1.25 if t < 50 else 2.0])
def test_the_answer_does_not_depend_on_the_order_of_questions(growth):
    forwards = [is_refresh(t, growth) for t in range(1, 300)]
    backwards = [is_refresh(t, growth) for t in range(299, 0, -1)]
    assert forwards == backwards[::-1]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(growth=GROWTHS)
def test_times_equal_the_rational_recursion(growth):
    assert set(times(growth, 400)) == refresh_set(growth, 400)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(growth=GROWTHS, t=st.integers(0, 3000))
def test_steps_to_refresh_points_at_the_next_refresh_after_t(growth, t):
    ahead = steps_to_refresh(t, growth)
    assert ahead == min(a for a in refresh_set(growth, 11 * t + 20) if a > t) - t


@settings(max_examples=60, deadline=None, derandomize=True)
@given(growth=GROWTHS)
def test_intervals_grow_with_t_and_never_beyond_the_growth(growth):
    a = times(growth, 2000)
    assert a[0] == 1
    gaps = [y - x for x, y in itertools.pairwise(a)]
    # ceil(growth a) - a rises with a, up to the rounding of the ceiling.
    assert all(later >= earlier - 1 for earlier, later in itertools.pairwise(gaps))
    assert all(y - 1 <= max(x, Fraction(str(growth)) * x) for x, y in itertools.pairwise(a))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(pair=st.tuples(GROWTHS, GROWTHS).map(sorted))
def test_a_larger_growth_never_refreshes_more_often(pair):
    slower, faster = pair
    a, b = times(slower, 1000), times(faster, 1000)
    assert len(b) <= len(a)
    assert all(x <= y for x, y in zip(a, b, strict=False))
