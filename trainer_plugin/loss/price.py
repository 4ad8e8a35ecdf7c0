"""Finds the price of a stored bit that keeps the loss of a restored model within a bound.

Only prices whose cost in loss was measured are used. The search tries one price at a time: the
checkpoints go on with the newest price that was shown to hold, and each measured batch costs a
price on trial. There are four prices to each doubling (`price_steps`).

    8 bits      the trial at the start; what is stored until a price holds
    holds       the upper bound of the cost is within the bound: the price is used from now on. If
                even twice the cost would be, a higher price goes on trial; after `MOST_PAIRS`
                batches, the highest price whose predicted upper bound is within the bound
    too much    the lower bound is above: a lower price goes on trial. If the price was in use, all
                rows get 8 bits until a lower price holds. If 8 bits cost too much: no rounding
    undecided   after `MOST_PAIRS` batches: the price in use goes on trial again; or, if there is
                none, half the price that was on trial

The cost of a price follows the price nearly in proportion, so one trial may go several doublings up
or down. That is a guess about what to try, and never about what to use. Short steps wait until a
trial ends, because each new trial begins without a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from recpoint.trainer_plugin.loss.price_steps import STEPS_AN_OCTAVE, price_of, step_at_most
from recpoint.trainer_plugin.loss.ratio_interval import PairSums, RatioBounds

__all__ = ["MOST_PAIRS", "LossPair", "PriceSearch", "TrialSums"]

#: A trial ends after so many measured batches, because training changes the model meanwhile.
MOST_PAIRS: Final = 200
_MOST_DOUBLINGS: Final = 8
#: Prices stay in this range, so that products with importances are ordinary numbers.
_LEAST_EXPONENT, _MOST_EXPONENT = -120, 60


@dataclass(frozen=True, kw_only=True)
class LossPair:
    """What one batch says about rounding its rows: two changes of its loss, and the loss.

    With w the rows and e their errors of rounding:

    Attributes:
        loss: L(w).
        even: ½·[L(w+e) + L(w-e)] - L(w): what rounding costs whatever the signs of the errors are.
        odd: ½·[L(w+e) - L(w-e)]: what these signs cost or save here. `even + odd` is the loss of a
            restored model, less that of this one.
    """

    loss: float
    even: float
    odd: float


@dataclass(kw_only=True)
class TrialSums:
    """What is known of one price: the changes of the loss as shares of the loss.

    Attributes:
        even, odd, total: sums of the parts of `LossPair`, and of both together, with the losses.
    """

    even: PairSums = field(default_factory=PairSums)
    odd: PairSums = field(default_factory=PairSums)
    total: PairSums = field(default_factory=PairSums)

    def add(self, pair: LossPair) -> None:
        """Add a measured batch."""
        self.even.add(pair.even, pair.loss)
        self.odd.add(pair.odd, pair.loss)
        self.total.add(pair.even + pair.odd, pair.loss)

    def merge(self, sums: TrialSums) -> None:
        """Add what others have measured at the same price."""
        self.even.merge(sums.even)
        self.odd.merge(sums.odd)
        self.total.merge(sums.total)


class PriceSearch:
    """Finds the highest price whose cost in loss was shown to be within a bound.

    Args:
        increase: the bound: the most by which rounding may raise the loss, as a share of the loss.
        first_price: returns the price to try first once 8 bits hold; None: it is not known yet.
        may_raise: whether a price above that on trial would save anything.

    Attributes:
        price: the price in use; None: all rows get 8 bits, or are stored exactly.
        is_lossless: even 8 bits cost too much.
        trial_price: the price on trial; None: 8 bits for all rows.
        measured: batches measured so far, for all prices.
    """

    def __init__(
        self,
        increase: float,
        first_price: Callable[[], float | None],
        *,
        may_raise: Callable[[], bool] = lambda: True,
    ) -> None:
        self._increase = increase
        self._first_price = first_price
        self._may_raise = may_raise
        self.price: float | None = None
        self.is_lossless = False
        self.trial_price: float | None = None
        self.measured = 0
        self._trial = TrialSums()
        self._in_use: RatioBounds | None = None

    @property
    def awaits_first_price(self) -> bool:
        """Whether 8 bits hold, and no price was tried."""
        is_untried = self.price is None and self.trial_price is None
        return is_untried and self._in_use is not None and not self.is_lossless

    @property
    def pairs(self) -> int:
        """Batches measured for the price on trial."""
        return self._trial.even.pairs

    @property
    def ratio(self) -> float | None:
        """The even part of the cost as measured so far; None: nothing is."""
        return self._trial.even.ratio

    @property
    def even(self) -> RatioBounds:
        """The bounds of the even part of the cost of the price on trial, as a share of the loss."""
        return self._trial.even.bounds()

    @property
    def odd(self) -> RatioBounds:
        """The bounds of the odd part."""
        return self._trial.odd.bounds()

    @property
    def in_use(self) -> RatioBounds | None:
        """The bounds of the even part as last shown for what is in use; None: nothing was shown."""
        return self._in_use

    def add(self, pair: LossPair) -> None:
        """Take note of a measured batch, and decide what to use and to try next.

        Args:
            pair: finite values, measured at `trial_price`.
        """
        self._trial.add(pair)
        self.measured += 1
        self._decide()

    def merge(self, sums: TrialSums) -> None:
        """Take note of all that was measured at `trial_price` since the last call, and decide."""
        self._trial.merge(sums)
        self.measured += sums.even.pairs
        if sums.even.pairs:
            self._decide()

    def _decide(self) -> None:
        even = self.even
        if max(even.low, self._trial.total.bounds().low) > self._increase:
            self._lower(even)
        elif even.high <= self._increase:
            self._hold(even)
        elif self.pairs >= MOST_PAIRS:
            self._leave_undecided()

    def fail(self) -> None:
        """Take note that the price on trial costs too much, without a number: a loss was NaN."""
        self.measured += 1
        self._lower(RatioBounds(math.inf, math.inf))

    def _hold(self, even: RatioBounds) -> None:
        self._in_use = even
        if self.trial_price is None:
            self.is_lossless = False
            first_price = self._first_price() if self.price is None else None
            if first_price is not None:
                self._try(_in_range(first_price))
            return
        self.price = self.trial_price
        most_times = 2.0**_MOST_DOUBLINGS
        times = min(self._increase / even.high, most_times) if even.high > 0 else most_times
        ends = self.pairs >= MOST_PAIRS
        steps = step_at_most(times)
        if not ends:
            steps -= steps % STEPS_AN_OCTAVE
        higher = _in_range(price_of(step_at_most(self.price) + steps))
        if higher > self.price and self._may_raise():
            self._try(higher)
        elif ends:
            self._try(self.price)

    def _leave_undecided(self) -> None:
        if self.price is None and self.trial_price is not None:
            self._try(self.trial_price / 2)
        else:
            self._try(self.price)

    def _lower(self, even: RatioBounds) -> None:
        trial = self.trial_price
        if trial is None:
            self.is_lossless, self.price, self._in_use = True, None, even
            self._try(None)
            return
        ratio = even.low / self._increase if math.isfinite(even.low) else math.inf
        halvings = math.ceil(math.log2(min(max(ratio, 2.0), 2.0**_MOST_DOUBLINGS)))
        lower = trial * 2.0**-halvings
        if self.price is not None and trial <= self.price:
            self.price = self._in_use = None
        if self.price is not None:
            self._try(max(lower, self.price))
        else:
            self._try(lower if lower >= 2.0**_LEAST_EXPONENT else None)

    def _try(self, price: float | None) -> None:
        self.trial_price = price
        self._trial = TrialSums()

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs to go on: numbers, and sums of each pair of numbers."""
        bounds = self._in_use
        return {
            "increase": self._increase,
            "price": self.price,
            "is_lossless": self.is_lossless,
            "trial_price": self.trial_price,
            "measured": self.measured,
            "in_use": None if bounds is None else list(bounds),
            "trial": {
                part: {entry.name: getattr(sums, entry.name) for entry in fields(PairSums)}
                for part, sums in self._parts().items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; with another `increase`, begin anew.

        Args:
            state: as stored; the figures of a trial do not depend on `increase`, and what is in use
                does.
        """
        if state["increase"] != self._increase:
            return
        self.price, self.trial_price = state["price"], state["trial_price"]
        self.is_lossless, self.measured = bool(state["is_lossless"]), int(state["measured"])
        self._in_use = None if state["in_use"] is None else RatioBounds(*state["in_use"])
        parts = {part: PairSums(**sums) for part, sums in state["trial"].items()}
        self._trial = TrialSums(**parts)

    def _parts(self) -> dict[str, PairSums]:
        trial = self._trial
        return {"even": trial.even, "odd": trial.odd, "total": trial.total}


def _in_range(price: float) -> float:
    """Return the highest of the prices that is at most this one, within their range."""
    if price < 2.0**_LEAST_EXPONENT:
        return 2.0**_LEAST_EXPONENT
    return price_of(min(step_at_most(price), _MOST_EXPONENT * STEPS_AN_OCTAVE))
