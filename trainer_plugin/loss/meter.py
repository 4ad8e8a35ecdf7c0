"""Measures batches while training goes on, and gives each cut the price that was shown to hold."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from recpoint.embeddings.cache.slot_lookups import NotInSlots
from recpoint.embeddings.tables.counted_lookups import LookupCounts
from recpoint.format.job import Allocation
from recpoint.format.manifest import MeasuredLoss
from recpoint.interrupts import came_from_handler
from recpoint.kernels.allocation import WIDTHS
from recpoint.kernels.quantize import Method
from recpoint.trainer_plugin.loss.measure import MeasuredModel, RoundedTable, measure
from recpoint.trainer_plugin.loss.pace import MeasuringPace
from recpoint.trainer_plugin.loss.price import PriceSearch
from recpoint.trainer_plugin.loss.rank_sums import RankMeasurements
from recpoint.trainer_plugin.loss.rounded_rows import RoundedRows, rounded_rows
from recpoint.trainer_plugin.loss_setting import Loss, LossFigures
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable
from recpoint.trainer_plugin.state.second_moments import SecondMoment, SecondMoments

__all__ = ["LossMeter"]

_log = logging.getLogger("recpoint")

#: Rows of each table by which the cost of a price is predicted.
_SAMPLE_ROWS: Final = 2048
#: The first price is predicted to cost at most this share of the bound.
_FIRST_SHARE: Final = 0.5
#: The cost of the first price is at most so many times that of 8 bits.
_MOST_TIMES: Final = 1024.0
_EXPONENTS: Final = range(-120, 60)


class _Prediction(NamedTuple):
    """What a sample of rows says about a price.

    Attributes:
        damage: importance times squared error, of all rows.
        widths: bits -> share of the rows; 0 bits: kept exactly.
    """

    damage: float
    widths: Mapping[int, float]

    @property
    def is_narrowest(self) -> bool:
        """Whether no row could have fewer bits."""
        return set(self.widths) <= {min(WIDTHS)}


class LossMeter:
    """Measures what rounding costs in loss, and finds the price of a bit.

    Args:
        setting: the bound, and whose loss it is.
        model: the model. On several ranks with sharded tables, an error on one rank must end
            training, because the others would wait for its forward passes.
        live: returns the tables as they are now.
        priced: keys of the tables whose rows get widths by the price.
        wide: keys of the other tables whose rows get 8 bits.
        moments: finds the second moments of tables.
        method: finds the codes of rows that have a price.
        counts: `Table.key` -> counts of lookups, of tables without second moments.
        several: whether the job has several ranks: prices then change when these agree on a
            checkpoint, and not after each measured batch.

    Attributes:
        batches_done: returns the batches that the run has trained, for optimizers that do not count
            their steps.
    """

    def __init__(
        self,
        setting: Loss,
        model: MeasuredModel,
        *,
        live: Callable[[], Sequence[LiveTable]],
        priced: frozenset[str],
        wide: frozenset[str],
        moments: SecondMoments,
        method: Method,
        counts: Mapping[str, LookupCounts] | None = None,
        several: bool = False,
    ) -> None:
        self._setting = setting
        self._model = model
        self._live = live
        self._priced = priced
        self._rounded = priced | wide
        self._moments = moments
        self._method = method
        self._counts = dict(counts or {})
        self._pace = MeasuringPace(setting.share, in_step=several, skips_first=model.is_sharded)
        self._must_raise = several and model.is_sharded
        self._has_missed = False  # a batch was not measured, because its rows were in no slot
        self._own_sums: RankMeasurements | None = RankMeasurements() if several else None
        self._search = PriceSearch(
            setting.increase, self._next_first_price, may_raise=self._may_raise
        )
        self._prediction: _Prediction | None = None
        self._predicted_price: float | None = None
        self._factor: float | None = None  # measured cost for each predicted one
        self._mean_loss: float | None = None
        self._error: str | None = None
        self._looked_up: set[str] = set()  # keys of the tables that a measured batch looked up
        self.batches_done: Callable[[], int] = lambda: 0

    def look(self, batch: Any) -> None:
        """Measure a batch that is about to be trained, if its time is within the share.

        Raises:
            SettingsError: at the first batch, or where passes exchange: it cannot be measured.
            Exception: there: `Loss.of` raised it.
        """
        if self._error is not None:
            return
        is_first = not self._pace.has_begun
        if not self._pace.is_due():
            return
        try:
            with self._pace.measuring():
                self._measure(batch)
        except NotInSlots:
            self._warn_of_missing()
        except Exception as error:
            if is_first or self._must_raise or came_from_handler(error):
                raise
            self._give_up(f"{type(error).__name__}: {error}")

    def _warn_of_missing(self) -> None:
        if not self._has_missed:
            self._has_missed = True
            _log.warning(
                "bits=Loss(...): a batch was not measured, because rows that it looks up are in no "
                "slot of the cache. Next: loop over a Lookahead whose ids are all that a batch "
                "looks up, and see whether stats.cache.unplanned grows: then give more slots"
            )

    def _give_up(self, error: str) -> None:
        self._error = error
        _log.warning(
            "what rounding costs in loss is measured no more, and rows get 8 bits from now on: %s",
            error,
        )

    def told(self) -> tuple[int, ...]:
        """Return what this rank tells the others when they agree on a checkpoint.

        Returns:
            Integers of 64 bits, equally many on all ranks; none if there are no others.
        """
        own, search = self._own_sums, self._search
        if own is None:
            return ()
        proposed_price = None
        if self._error is None and search.awaits_first_price:
            try:
                proposed_price = self._first_price()
            except Exception as error:  # the other ranks wait for an answer
                self._give_up(f"{type(error).__name__}: {error}")
        return own.integers(
            has_error=self._error is not None,
            may_raise=self._is_raise_worth(),
            first_price=proposed_price,
            stride=self._pace.wanted_stride,
        )

    def agree(self, told: Sequence[Sequence[int]]) -> None:
        """Decide about the price as all ranks do.

        Args:
            told: what each rank's `told` returned, in rank order.
        """
        own, search = self._own_sums, self._search
        if own is None:
            return
        agreed = own.agree(told)
        self._pace.stride = agreed.stride
        if agreed.has_error and self._error is None:
            self._give_up("another rank cannot measure, see its log")
        price = search.price
        if agreed.has_failed:
            search.fail()
        else:
            search.merge(agreed.sums)
            self._calibrate()
        if search.price != price:
            self._tell()

    def allocation(self, live: LiveTable) -> Allocation | None:
        """Return how the agent gives widths to the rows of a table; None: 8 bits for all.

        Args:
            live: the table, in a cut.
        """
        price = self._search.price
        if price is None or self._error is not None:
            return None
        if live.key not in self._priced & self._looked_up:
            return None  # what no measured batch has looked up has shown no cost
        moment = self._moment(live)
        if moment is None:
            return None
        return Allocation(
            price=price.hex(),
            state=moment.state,
            scale=moment.scale.hex(),
            initial=moment.initial.hex() if moment.initial > 0 else None,
        )

    def is_exact(self, live: LiveTable) -> bool:
        """Whether the rows of a table are stored exactly, because 8 bits cost too much."""
        return self._search.is_lossless and self._error is None and live.key in self._priced

    @property
    def figures(self) -> LossFigures:
        """What is known now."""
        search, prediction, mean_loss = self._search, self._prediction, self._mean_loss
        predicted = None
        if prediction is not None and mean_loss is not None and self._factor is not None:
            predicted = self._factor * prediction.damage / mean_loss
        return LossFigures(
            increase=self._setting.increase,
            price=None if self._error is not None else search.price,
            is_lossless=search.is_lossless and self._error is None,
            shown=search.in_use,
            trial_price=search.trial_price,
            trial_even=search.even,
            trial_odd=search.odd,
            trial_batches=search.pairs,
            predicted=predicted,
            widths={} if prediction is None else dict(prediction.widths),
            batches=search.measured,
            measured_share=self._pace.measured_share,
            error=self._error,
        )

    @property
    def record(self) -> MeasuredLoss:
        """What is known of what checkpoints store now, as records have it."""
        figures, search = self.figures, self._search
        shown = figures.shown if figures.error is None else None
        is_finite = shown is not None and all(map(math.isfinite, shown))
        # Any rank may write the manifest, and each predicts from batches of its own.
        is_predicted = self._own_sums is None and self._predicted_price == search.price
        return MeasuredLoss(
            increase=figures.increase.hex(),
            price=None if figures.price is None else figures.price.hex(),
            low=shown[0].hex() if shown is not None and is_finite else None,
            high=shown[1].hex() if shown is not None and is_finite else None,
            predicted=figures.predicted.hex()
            if figures.predicted is not None and is_predicted
            else None,
            batches=figures.batches,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs to go on."""
        state = {"search": self._search.state_dict(), "factor": self._factor}
        counted = {key: counts.counted for key, counts in self._counts.items()}
        return state | ({"counted": counted} if counted else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._search.load_state_dict(state["search"])
        if self._own_sums is not None:
            self._own_sums = RankMeasurements()
        for key, counted in state.get("counted", {}).items():
            if key in self._counts:
                self._counts[key].counted = int(counted)
        factor = state["factor"]
        self._factor = None if factor is None else float(factor)
        self._prediction = self._predicted_price = self._mean_loss = None

    def _measure(self, batch: Any) -> None:
        search = self._search
        price, trial = search.price, search.trial_price
        lives = [live for live in self._live() if live.key in self._rounded and len(live.held)]
        pair = measure(
            self._model,
            batch,
            self._setting.of,
            [
                RoundedTable(
                    name=live.spec.name,
                    weight=live.weight,
                    decoded=partial(self._decoded, live, self._moment(live), trial),
                )
                for live in lives
            ],
        )
        if not math.isfinite(pair.loss):
            return  # says nothing about rounding
        self._mean_loss = pair.loss if self._mean_loss is None else self._mean_loss
        self._mean_loss += 0.05 * (pair.loss - self._mean_loss)
        if not self._is_predicted(trial):
            self._predict(trial)
        taker = search if self._own_sums is None else self._own_sums
        if math.isfinite(pair.even) and math.isfinite(pair.odd):
            taker.add(pair)
            self._calibrate()
        else:
            taker.fail()
        if search.price != price:
            self._tell()

    def _decoded(
        self, live: LiveTable, moment: SecondMoment | None, price: float | None, ids: Tensor
    ) -> Tensor:
        own_price = price if live.key in self._priced else None
        if len(ids):
            self._looked_up.add(live.key)
        return rounded_rows(live, ids, moment, own_price, self._method).values

    def _moment(self, live: LiveTable) -> SecondMoment | None:
        if live.table is None or live.key not in self._priced:
            return None
        return self._moments.of(live.table, live.spec, max(self.batches_done(), 1))

    def _next_first_price(self) -> float | None:
        return self._first_price() if self._own_sums is None else self._own_sums.first_price

    def _first_price(self) -> float:
        """Return the highest power of two that is predicted to cost a part of the bound.

        Importances are right up to one factor for all rows. What 8 bits cost at most, as shown,
        bounds the factor.
        """
        most = self._search.even.high
        times, widest = _MOST_TIMES, self._predicted(None)
        if most > 0:
            times = min(_FIRST_SHARE * self._setting.increase / most, times)
        bound = times * widest.damage
        low_exponent, high_exponent = _EXPONENTS[0], _EXPONENTS[-1]
        if not widest.widths:  # other ranks have the rows, and the least proposal counts
            low_exponent = high_exponent
        while low_exponent < high_exponent:  # the cost grows with the price
            middle = (low_exponent + high_exponent + 1) // 2
            predicted = self._predicted(2.0**middle)
            if predicted.damage <= bound and not predicted.is_narrowest:
                low_exponent = middle
            else:
                high_exponent = middle - 1
        return 2.0**low_exponent

    def _may_raise(self) -> bool:
        return self._is_raise_worth() if self._own_sums is None else self._own_sums.may_raise

    def _is_raise_worth(self) -> bool:
        """Whether a higher price than that on trial would save bits."""
        return self._prediction is None or not self._prediction.is_narrowest

    def _calibrate(self) -> None:
        """Learn what is measured for each predicted cost, if that can be told from nothing."""
        search, prediction, ratio = self._search, self._prediction, self._search.ratio
        if prediction is None or self._predicted_price != search.trial_price:
            return
        if search.even.low > 0 and ratio is not None and prediction.damage > 0 and self._mean_loss:
            self._factor = ratio * self._mean_loss / prediction.damage

    def _is_predicted(self, price: float | None) -> bool:
        """Whether the prediction is of this price, and of second moments that are known."""
        prediction = self._prediction
        return prediction is not None and prediction.damage > 0 and self._predicted_price == price

    def _predict(self, price: float | None) -> None:
        self._prediction, self._predicted_price = self._predicted(price), price

    def _predicted(self, price: float | None) -> _Prediction:
        damage = 0.0
        rows_of_width: Counter[int] = Counter()
        for live in self._live():
            # Of a table in a cache, the rows at home are left out: few of them matter.
            slots = None if live.table is None else live.table.filled_slots
            rows = len(live.held) if slots is None else len(slots)
            if live.key not in self._priced or not rows:
                continue
            count = min(rows, _SAMPLE_ROWS)
            ids = torch.arange(count, device="cpu") * rows // count
            ids = ids if slots is None else slots[ids]
            moment = self._moment(live)
            rounded: RoundedRows = rounded_rows(live, ids, moment, price, self._method)
            if rounded.damage is not None:
                damage += float(rounded.damage.sum()) * rows / count
            for width, number in zip(
                *(part.tolist() for part in rounded.widths.unique(return_counts=True)), strict=True
            ):
                rows_of_width[width] += number * rows // count
        total = sum(rows_of_width.values())
        shares = {width: number / total for width, number in sorted(rows_of_width.items())}
        return _Prediction(damage, shares)

    def _tell(self) -> None:
        search = self._search
        if search.is_lossless:
            _log.warning("bits=Loss: 8 bits cost too much loss, so rows are stored exactly")
        elif search.price is None:
            _log.info("bits=Loss: rows get 8 bits until a price is shown to hold")
        elif search.in_use is not None:
            _log.info(
                "bits=Loss: a bit may cost %.3g: rounding costs at most %.3g of the loss, as %d "
                "batches have shown",
                search.price,
                search.in_use.high,
                search.measured,
            )
