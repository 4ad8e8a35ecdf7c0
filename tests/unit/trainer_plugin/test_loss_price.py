"""Which price is used follows from what was measured, and never from what was guessed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recpoint.trainer_plugin.loss.price import MOST_PAIRS, LossPair, PriceSearch
from recpoint.trainer_plugin.loss.price_steps import STEPS_AN_OCTAVE, price_of, step_at_most

INCREASE = 1e-4
#: Relative cost of 8 bits for all rows, in the models of these tests.
OF_8_BITS = 1e-6


def measured(
    search: PriceSearch,
    cost: Callable[[float | None], float],
    batches: int,
    *,
    seed: int = 0,
    noise: float = 0.3,
) -> list[float | None]:
    """Measure so many batches at what is on trial; return the price in use after each."""
    chance = np.random.default_rng(seed)
    prices = []
    for _ in range(batches):
        loss = float(0.5 + 0.02 * chance.standard_normal())
        even = loss * cost(search.trial_price) * float(1 + noise * chance.standard_normal())
        odd = loss * 1e-5 * float(chance.standard_normal())
        search.add(LossPair(loss=loss, even=even, odd=odd))
        prices.append(search.price)
    return prices


def in_proportion(per_price: float) -> Callable[[float | None], float]:
    """Return a model: a price costs this many times the price, and 8 bits cost `OF_8_BITS`."""
    return lambda price: OF_8_BITS if price is None else per_price * price


@pytest.mark.parametrize("first", (1e-30, 1e-6, 1.0, 1e9))
def test_the_price_comes_close_to_the_bound_from_any_first_price(first: float) -> None:
    search = PriceSearch(INCREASE, lambda: first)
    prices = measured(search, in_proportion(3.0), 1_500)
    assert prices[0] is None
    assert search.price is not None
    assert INCREASE / 4 <= 3.0 * search.price <= INCREASE
    assert all(price is None or 3.0 * price <= INCREASE for price in prices)
    assert search.in_use is not None and search.in_use.high <= INCREASE


@given(st.lists(st.floats(-3, 12), min_size=1, max_size=4), st.integers(0, 1 << 30))
def test_a_price_is_used_only_while_its_own_bounds_held(costs: list[float], seed: int) -> None:
    search = PriceSearch(INCREASE, lambda: 1e-6)
    chance = np.random.default_rng(seed)
    for power in costs:
        for _ in range(40):
            trial, used = search.trial_price, search.price
            cost = OF_8_BITS if trial is None else trial * 10.0**power
            even = 0.5 * cost * float(1 + 0.1 * chance.standard_normal())
            search.add(LossPair(loss=0.5, even=even, odd=0.0))
            if search.price not in (used, None):
                assert search.price == trial
                assert search.in_use is not None and search.in_use.high <= INCREASE


def test_eight_bits_are_stored_until_a_lower_price_holds_again() -> None:
    search = PriceSearch(INCREASE, lambda: 1e-5)
    measured(search, in_proportion(1.0), 800)
    price_before = search.price
    assert price_before is not None
    prices = measured(search, in_proportion(64.0), 1_200, seed=1)  # the model has changed
    assert None in prices
    assert search.price is not None and search.price < price_before
    assert 64.0 * search.price <= INCREASE


def test_nothing_is_rounded_if_eight_bits_cost_too_much() -> None:
    search = PriceSearch(INCREASE, lambda: 1e-5)
    prices = measured(search, lambda _: 5 * INCREASE, 60)
    assert search.is_lossless and set(prices) == {None}
    measured(search, in_proportion(1.0), 600, seed=1)
    assert not search.is_lossless and search.price is not None


def test_a_loss_that_is_no_number_lowers_the_price() -> None:
    search = PriceSearch(INCREASE, lambda: 1e-5)
    search.fail()
    assert search.is_lossless
    measured(search, in_proportion(1.0), 400)
    trial = search.trial_price
    assert trial is not None
    search.fail()
    assert search.trial_price is not None and search.trial_price < trial


def test_errors_that_all_raise_the_loss_lower_the_price() -> None:
    search = PriceSearch(INCREASE, lambda: 1e-5)
    for _ in range(40):
        search.add(LossPair(loss=0.5, even=0.0, odd=0.0))
    assert search.trial_price is not None
    price_before = search.trial_price
    for number in range(12):
        odd = 0.5 * (4 + 0.01 * (number % 3)) * INCREASE
        search.add(LossPair(loss=0.5, even=0.6 * INCREASE * (number % 2), odd=odd))
    assert search.trial_price < price_before


def test_an_undecided_trial_ends() -> None:
    search = PriceSearch(INCREASE, lambda: 2.0**-10)
    while search.trial_price is None:
        measured(search, in_proportion(1.0), 1)
    trial = search.trial_price
    assert search.price is None
    for number in range(MOST_PAIRS - search.pairs):
        wave = 50 * (1 if number % 2 else -1)
        search.add(LossPair(loss=0.5, even=0.5 * INCREASE * (1 + wave), odd=0.0))
    assert search.trial_price == trial / 2 and search.pairs == 0


@given(st.integers(0, 300), st.integers(1, 60))
def test_a_restart_goes_on_where_training_was(price_before: int, after: int) -> None:
    search, restarted = (PriceSearch(INCREASE, lambda: 1e-6) for _ in range(2))
    measured(search, in_proportion(2.0), price_before)
    state = search.state_dict()
    restarted.load_state_dict(json.loads(json.dumps(state)))
    assert restarted.state_dict() == state
    assert measured(search, in_proportion(2.0), after, seed=9) == measured(
        restarted, in_proportion(2.0), after, seed=9
    )
    assert restarted.state_dict() == search.state_dict()


def test_another_bound_begins_anew() -> None:
    search = PriceSearch(INCREASE, lambda: 1e-6)
    measured(search, in_proportion(2.0), 300)
    other = PriceSearch(INCREASE / 10, lambda: 1e-6)
    other.load_state_dict(search.state_dict())
    assert other.price is None and other.measured == 0


@pytest.mark.parametrize("per_price", (3.0, 3.5, 4.2, 5.0, 5.9))
def test_a_price_ends_within_two_short_steps_of_the_bound(per_price: float) -> None:
    search = PriceSearch(INCREASE, lambda: 2.0**-20)
    prices = measured(search, in_proportion(per_price), 4_000, noise=0.2)
    assert search.price is not None
    assert INCREASE / 2**0.5 <= per_price * search.price <= INCREASE
    assert all(price is None or per_price * price <= INCREASE for price in prices)


def test_short_steps_wait_until_a_trial_ends() -> None:
    search = PriceSearch(INCREASE, lambda: 2.0**-14)  # costs 0.61 of the bound
    while search.trial_price is None:
        measured(search, in_proportion(1.0), 1)
    measured(search, in_proportion(1.0), MOST_PAIRS - 1)
    assert search.price == search.trial_price == 2.0**-14
    measured(search, in_proportion(1.0), 1)
    assert search.trial_price == price_of(step_at_most(2.0**-14) + 2)


@given(st.integers(-400, 200))
def test_four_prices_make_a_doubling(step: int) -> None:
    price = price_of(step)
    assert price_of(step + STEPS_AN_OCTAVE) == 2 * price
    assert price == pytest.approx(2.0 ** (step / 4), rel=1e-15)
    assert step_at_most(price) == step
    assert step_at_most(math.nextafter(price, 0.0)) == step - 1
