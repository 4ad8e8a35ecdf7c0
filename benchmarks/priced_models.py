"""Trains models, and measures what restores of them cost at one price of a bit, and at others.

Each model is trained once. A full is cut when three quarters of its batches are trained, and an
increment at the end. Then its tables are replaced by what a restore from both would return, by one
rule after another. The price is chosen as `bits=Loss(increase=1e-4)` does, without residuals and on
samples that are neither trained nor tested: the highest of its prices at which the even part of
what the errors cost is at most 1e-4 of the log loss, at the upper end of a 95 % interval.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.coded_chain import (
    ChainRows,
    Rule,
    TableCopy,
    chain_rows,
    stored_bits,
    value_bits,
)
from benchmarks.learning import Learned, Score, Task, evaluate, logits_of, score_of
from recpoint.catalog.persist.row_widths import importance
from recpoint.kernels import moments
from recpoint.trainer_plugin.loss.price_steps import STEPS_AN_OCTAVE, price_of
from recpoint.trainer_plugin.settings import Precision

__all__ = [
    "INCREASE",
    "RESTORES",
    "RULE_NAMES",
    "EndOutcome",
    "OptimizerName",
    "PriceOutcome",
    "RulePoint",
    "TrainedModel",
    "measure",
    "measure_end",
]

OptimizerName = Literal["Adagrad", "row-wise Adagrad"]

#: The most by which a restore may raise the log loss, as a share of it.
INCREASE: Final = 1e-4
#: Restores on the way; 0: none, but rows move once by a rounding error of F32, which shows chance.
RESTORES: Final = (0, 1, 3, 20)
#: Powers of two between which the price lies.
_EXPONENTS: Final = (-60, -28)
#: The other rules of a curve: multiples of the chosen price, and one width for all rows.
_MULTIPLES: Final = (4.0, 16.0)
_WIDTHS: Final = (2, 3, 4, 8)
#: The rules of the points of a `PriceOutcome`; without a curve it has the first two.
RULE_NAMES: Final = (
    "price",
    "price / 4",
    "price x 4",
    "price x 16",
    "price, no residuals",
    "price, plain codes",
    *(f"{bits} bits" for bits in _WIDTHS),
    *(f"{bits} bits, residuals" for bits in _WIDTHS),
)
#: The share of its batches after which a model's full is cut.
_FULL_AT: Final = 0.75
#: Samples whose mean loss is one value of the interval.
_SAMPLES_EACH: Final = 2048
#: Half a 95 % interval, in standard errors.
_ERRORS: Final = 2.0


class RulePoint(NamedTuple):
    """What a rule stores of a model, and what a restore costs.

    Attributes:
        rule: of the full and the increment.
        full_bits: bits of a value in the full, the mean over all rows that were ever trained.
        increment_bits: the same of the rows of the increment.
        stored_mb: megabytes of codes, parameters and exact values of both.
        rms: the root mean square of what changes in the logits of the test set.
        loss: of the test set, against the model before the restore.
    """

    rule: Rule
    full_bits: float
    increment_bits: float
    stored_mb: float
    rms: float
    loss: Score


class PriceOutcome(NamedTuple):
    """What restores of one model cost at once.

    Attributes:
        task: name of the task.
        optimizer: of the tables.
        seed: of data and model.
        never: the score of the model before a restore.
        changed_share: rows of the increment, as a share of all rows that were ever trained.
        even_high: the upper bound of the even part at the chosen price, as a share of the loss.
        points: one for each of `RULE_NAMES`, or for the first two.
    """

    task: str
    optimizer: OptimizerName
    seed: int
    never: Score
    changed_share: float
    even_high: float
    points: list[RulePoint]


class EndOutcome(NamedTuple):
    """What restores on the way cost at the end of a run.

    Attributes:
        task: name of the task.
        optimizer: of the tables.
        seed: of data and model.
        restores: one of `RESTORES`.
        loss: at the end, against the same run without restores.
    """

    task: str
    optimizer: OptimizerName
    seed: int
    restores: int
    loss: Score


def measure(task: Task, optimizer: OptimizerName, seed: int, *, curve: bool) -> PriceOutcome:
    """Train a model, choose its price, and measure what a restore costs.

    Args:
        task: the task.
        optimizer: of the tables.
        seed: of data and model.
        curve: whether higher prices, and one width for all rows, are measured too.
    """
    trained = TrainedModel(task, optimizer, seed)
    price, even_high = trained.highest_price()
    rules = [Rule(price=price, residual=True), Rule(price=price / 4, residual=True)]
    if curve:
        rules += [Rule(price=price * multiple, residual=True) for multiple in _MULTIPLES]
        rules += [Rule(price=price), Rule(price=price, residual=True, quantizer="asymmetric")]
        rules += [
            Rule(bits=bits, residual=is_residual)
            for is_residual, bits in itertools.product((False, True), _WIDTHS)
        ]
    return PriceOutcome(
        task.name,
        optimizer,
        seed,
        trained.never,
        trained.changed_share(),
        even_high,
        [trained.point(rule) for rule in rules],
    )


class TrainedModel:
    """A trained model with the full and the increment of its run.

    Args:
        task: the task.
        optimizer: of the tables.
        seed: of data and model.
        full_at: shares of the batches after which fulls are cut; each restore is from one of them.

    Attributes:
        never: the score of the model.
        trained: ids of the rows of each table that were ever trained, int64, ascending.
    """

    def __init__(
        self,
        task: Task,
        optimizer: OptimizerName,
        seed: int,
        *,
        full_at: Sequence[float] = (_FULL_AT,),
    ) -> None:
        batches = task.batches(seed)
        self._task, self._steps = task, len(batches)
        share_of = {int(share * self._steps): share for share in full_at}
        self._fulls: dict[float, list[TableCopy]] = {}

        def cut_full(learned: Learned, step: int) -> None:
            self._fulls[share_of[step]] = _copies_of(learned, step)

        learned = task.learn(
            seed, row_wise=optimizer == "row-wise Adagrad", restores=share_of, restore=cut_full
        )
        self._model = learned.model
        self._newest = _copies_of(learned, self._steps)
        tables = range(len(self._newest))
        self._changed = {
            share: [_looked_up(batches[step:], table) for table in tables]
            for step, share in share_of.items()
        }
        self.trained = [_looked_up(batches, table) for table in tables]
        self._tested = [_looked_up((task.test, task.held_out), table) for table in tables]
        self._logits = logits_of(self._model, task.test)
        self.never = score_of(self._logits, task.test)

    def changed_share(self, full_at: float = _FULL_AT) -> float:
        """Return the rows that changed since a full, as a share of all that were ever trained."""
        return sum(map(len, self._changed[full_at])) / sum(map(len, self.trained))

    def highest_price(self) -> tuple[float, float]:
        """Return the highest price that holds, and the upper bound of its even part."""
        losses_before = self._held_out_losses()
        low, high = (exponent * STEPS_AN_OCTAVE for exponent in _EXPONENTS)
        bounds: dict[int, float] = {low: math.inf}
        while low < high:  # the cost grows with the price
            middle = (low + high + 1) // 2
            bounds[middle] = self._even_high(Rule(price=price_of(middle)), losses_before)
            if bounds[middle] <= INCREASE:
                low = middle
            else:
                high = middle - 1
        return price_of(low), bounds[low]

    def point(self, rule: Rule) -> RulePoint:
        """Return what a restore by a rule stores and costs; leave the model unchanged."""
        chains = self.chains(rule)
        with self._replaced(chains, 1):
            logits = logits_of(self._model, self._task.test)
        full = [chain.full_forms[self.trained[table].numpy()] for table, chain in chains.items()]
        increment = [chain.increment_forms for chain in chains.values()]
        stored = [
            stored_bits(forms, self._newest[table].rows.shape[1])
            for table, chain in chains.items()
            for forms in (chain.full_forms, chain.increment_forms)
        ]
        return RulePoint(
            rule=rule,
            full_bits=value_bits(np.concatenate(full)),
            increment_bits=value_bits(np.concatenate(increment)),
            stored_mb=sum(stored) / 8e6,
            rms=float((logits.double() - self._logits.double()).square().mean().sqrt()),
            loss=score_of(logits, self._task.test).worse_than(self.never),
        )

    def chains(self, rule: Rule, full_at: float = _FULL_AT) -> dict[int, ChainRows]:
        """Return the restored rows that the test sets look up, by number of the table."""
        return {
            number: chain_rows(
                self._fulls[full_at][number],
                self._newest[number],
                self._changed[full_at][number],
                self._tested[number],
                rule,
                seed=self._steps,
            )
            for number, table in enumerate(self._model.tables.values())
            if _is_rounded(table)
        }

    def _even_high(self, rule: Rule, losses_before: Tensor) -> float:
        chains = self.chains(rule)
        losses: list[Tensor] = []
        for sign in (1, -1):
            with self._replaced(chains, sign):
                losses.append(self._held_out_losses())
        shares = (0.5 * (losses[0] + losses[1]) - losses_before) / losses_before.mean()
        error = shares.std(correction=0) / math.sqrt(len(shares))
        return float(shares.mean() + _ERRORS * error)

    def _held_out_losses(self) -> Tensor:
        """Return the mean loss of each `_SAMPLES_EACH` samples that are held out, F64 [n]."""
        samples = self._task.held_out
        logits = logits_of(self._model, samples).double()
        losses = F.binary_cross_entropy_with_logits(
            logits, samples.label.double(), reduction="none"
        )
        return torch.stack([part.mean() for part in losses.split(_SAMPLES_EACH)])

    @contextmanager
    def _replaced(self, chains: Mapping[int, ChainRows], sign: int) -> Iterator[None]:
        """Have the model use restored rows; `sign` -1: rows with the opposite errors."""
        tables = list(self._model.tables.values())
        with torch.no_grad():
            for number, chain in chains.items():
                ids = self._tested[number]
                rows = self._newest[number].rows[ids]
                opposite = (2 * rows.double() - chain.values.double()).float()
                tables[number].weight[ids] = chain.values if sign > 0 else opposite
        try:
            yield
        finally:
            with torch.no_grad():
                for number in chains:
                    ids = self._tested[number]
                    tables[number].weight[ids] = self._newest[number].rows[ids]


def measure_end(of: PriceOutcome, task: Task, restores: int) -> EndOutcome:
    """Train a measured model again, with restores on the way at even distances.

    The full of each restore is cut halfway since the restore before. All rounded tables have the
    chosen price and residuals, and Adagrad's sums of several values a row come from 8 bits.

    Args:
        of: the measured model.
        task: its task.
        restores: one of `RESTORES`.
    """
    rule, batches = of.points[0].rule, task.batches(of.seed)
    parts = max(restores, 1) + 1
    steps = sorted({number * len(batches) // parts for number in range(1, parts)} - {0})
    full_of = {step: (before + step) // 2 for before, step in itertools.pairwise((0, *steps))}
    full: list[TableCopy] = []

    def look(learned: Learned, step: int) -> None:
        if step in full_of and not restores:
            _move_slightly(learned)
        elif step in full_of:
            changed = batches[full_of[step] : step]
            # No other rows are looked up from here on.
            _restore(learned, step, full, changed, [*batches[step:], task.test], rule)
        if step in full_of.values():
            full[:] = _copies_of(learned, step)

    learned = task.learn(
        of.seed,
        row_wise=of.optimizer == "row-wise Adagrad",
        restores={*full_of, *full_of.values()},
        restore=look,
    )
    loss = evaluate(learned.model, task.test).worse_than(of.never)
    return EndOutcome(task.name, of.optimizer, of.seed, restores, loss)


def _restore(
    learned: Learned,
    step: int,
    full: Sequence[TableCopy],
    changed: Sequence[Any],
    later: Sequence[Any],
    rule: Rule,
) -> None:
    """Replace sums, and the rows that later batches look up, by what a restore returns."""
    newest = _copies_of(learned, step)
    for number, table in enumerate(learned.model.tables.values()):
        sums = learned.optimizers[0].state[table.weight]["sum"]
        if sums.dim() == 2:
            codes, grids, refused = moments.encode(sums)
            if bool(refused.any()):
                raise RuntimeError("Adagrad's sums have rows without codes")
            sums.copy_(moments.decode(codes, grids))
        if _is_rounded(table):
            ids = _looked_up(later, number)
            changed_ids = _looked_up(changed, number)
            chain = chain_rows(full[number], newest[number], changed_ids, ids, rule, seed=step)
            with torch.no_grad():
                table.weight[ids] = chain.values


def _move_slightly(learned: Learned) -> None:
    """Move each value of each table to the next number of F32."""
    with torch.no_grad():
        for table in learned.model.tables.values():
            table.weight.copy_(torch.nextafter(table.weight, torch.tensor(math.inf)))


def _copies_of(learned: Learned, step: int) -> list[TableCopy]:
    """Return copies of all tables, with importances as an agent computes them after `step`."""
    of_tables = learned.optimizers[0]
    return [
        TableCopy(
            table.weight.detach().clone(),
            importance(of_tables.state[table.weight]["sum"], 0.5 / max(step, 1)),
        )
        for table in learned.model.tables.values()
    ]


def _looked_up(batches: Sequence[Any], table: int) -> Tensor:
    """Return the ids of the rows of a table that batches look up: int64, ascending."""
    ids: Tensor = torch.cat([batch.sparse[:, table] for batch in batches]).unique()
    return ids


def _is_rounded(table: Any) -> bool:
    """Whether `bits=Loss`, or one width for all tables, rounds the rows of a table."""
    return bool(table.weight.numel() > Precision().small_table_values)
