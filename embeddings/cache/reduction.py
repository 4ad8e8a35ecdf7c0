"""Adds the gradients of all ranks at the owners of rows, before an optimizer's step.

Gradients of rows that the next batch does not look up are sent while that batch is trained, and the
owner makes their step then (`LaterStep`). Gradients that are clipped are averaged before the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from recpoint.embeddings.cache.data_parallel import DenseLayers
from recpoint.embeddings.cache.exchange import LocalGradient, Outgoing, Reduced
from recpoint.embeddings.cache.later_step import LaterStep
from recpoint.embeddings.cache.membership import Membership
from recpoint.embeddings.cache.mover import Mover
from recpoint.embeddings.cache.planned_exchanges import PlannedExchanges
from recpoint.embeddings.cache.progress import Progress
from recpoint.embeddings.cache.residents import NO_IDS, CachedRows
from recpoint.embeddings.cache.slots import TableSlots
from recpoint.embeddings.cache.step_agreement import TableStep, agree_on_step
from recpoint.embeddings.cache.turns import Act, refuse_other_counts
from recpoint.errors import RanksDiffer, SettingsError
from recpoint.lookahead.shared_oracle import Exchange

__all__ = ["Reduction"]

#: By which norms of the same float32 values may differ, if ranks add them in another order.
_ROUNDING: Final = 1e-5


class Reduction:
    """The gradients of tables that ranks share.

    Args:
        mover: the home thread, which later steps keep from moving rows.
        progress: at which batch this rank is.
        membership: the other ranks.
        exchanges: the rows that ranks exchange.

    Attributes:
        dense_layers: what the model has beside the tables.
    """

    def __init__(
        self,
        mover: Mover,
        progress: Progress,
        membership: Membership,
        exchanges: PlannedExchanges,
    ) -> None:
        self._tables = mover.tables
        self._mover = mover
        self._progress = progress
        self._membership = membership
        self._exchanges = exchanges
        self.dense_layers = DenseLayers(
            {name: rows.slots.weight for name, rows in self._tables.items()}
        )
        #: Slots of the rows that the step that is being made changes, now or later, by table.
        self._changing: dict[str, Tensor] = {}
        #: What the step that is being made does later; None: nothing.
        self._to_follow: tuple[Outgoing, list[LaterStep]] | None = None
        self._following: list[Future[None]] = []
        self._following_batch = 0  # the batch of these steps

    def reduce(self, optimizer: Optimizer) -> None:
        """Put the gradients of all ranks in place of this rank's. Collective.

        Those of rows that the next batch does not look up are zero or left out.

        Raises:
            RanksDiffer: ranks make other steps.
            RankLost: a rank does not answer.
        """
        pending = self._pending(_parameter_ids(optimizer))
        with self._membership.leaving():
            self.wait_for_later_steps()
            if pending:
                self._reduce(optimizer, pending)

    def _pending(self, parameter_ids: set[int]) -> dict[str, Exchange]:
        """Return what is exchanged of those tables whose slots are among these parameters."""
        pending = {}
        for name, rows in self._tables.items():
            if id(rows.slots.weight) not in parameter_ids:
                continue
            exchange = self._exchanges.pending(name, self._progress.batch)
            if exchange is not None:
                rows.gradients.refuse_applied()
                pending[name] = exchange
        return pending

    def _reduce(self, optimizer: Optimizer, pending: Mapping[str, Exchange]) -> None:
        coming, next_batch = self._membership.coming, self._progress.batch + 1
        next_ids = coming.of(next_batch) if coming.last_known >= next_batch else None
        steps, differing_ranks = agree_on_step(
            partial(self._membership.agree, Act.STEP),
            optimizer,
            list(self._tables),
            {
                name: self._step(optimizer, self._tables[name], exchange, next_ids)
                for name, exchange in pending.items()
            },
            digest=self.dense_layers.digest_of_gradients(optimizer),
        )
        if differing_ranks:
            self.dense_layers.notice_other_gradients(differing_ranks)
        now: list[tuple[LocalGradient, Exchange]] = []
        late: list[tuple[LocalGradient, Exchange]] = []
        later_steps: list[LaterStep] = []
        for name, step in steps.items():
            self._changing[name] = step.exchange.own.slots
            if step.is_averaged:
                continue
            local = LocalGradient(self._tables[name].slots, self._membership.channels.count)
            now.append((local, step.at_once))
            if step.late is not None and step.later_step is not None:
                late.append((local, step.late))
                later_steps.append(step.later_step)
            self._count(step.exchange, step.at_once)
        to_follow = self._outgoing(late)  # before gradients are replaced
        for name in self._put_averages(now, steps):
            del self._changing[name]
        if later_steps:
            self._to_follow = to_follow, later_steps

    def _step(
        self,
        optimizer: Optimizer,
        rows: CachedRows,
        exchange: Exchange,
        next_ids: Mapping[str, Sequence[Tensor]] | None,
    ) -> TableStep:
        """Return what this rank could do with a table in a step.

        Args:
            optimizer: is about to make the step.
            rows: the table.
            exchange: rows whose gradients ranks exchange.
            next_ids: ids of the next batch by table and rank; None: they are not known yet.
        """
        if rows.gradients.is_averaged:
            return TableStep(exchange=exchange, at_once=exchange, is_averaged=True)
        if next_ids is None or rows.reserved is not None:
            # Which rows the next batch looks up is not known before its lookups give slots to keys.
            return TableStep(exchange=exchange, at_once=exchange)
        later_step = LaterStep.of(optimizer, rows.slots)
        return TableStep.of(exchange, later_step, partial(_together, next_ids[rows.slots.name]))

    def _count(self, exchange: Exchange, at_once: Exchange) -> None:
        self._progress.stats.reduced_rows += _count_lent(exchange)
        self._progress.stats.reduced_at_once += _count_lent(at_once)

    def _outgoing(self, gradients: Sequence[tuple[LocalGradient, Exchange]]) -> Outgoing:
        channels = self._membership.channels
        return Outgoing(channels.rank, channels.count, gradients)

    def _put_averages(
        self,
        gradients: Sequence[tuple[LocalGradient, Exchange]],
        steps: Mapping[str, TableStep],
    ) -> list[str]:
        """Exchange gradients, and put averages in their place; tables of which there are none."""
        if not gradients:
            return []
        tables_without = []
        averages = self._outgoing(gradients).reduce(self._membership.channels.rows)
        for (local, _), reduced in zip(gradients, averages, strict=True):
            if reduced is None:
                tables_without.append(local.slots.name)
            else:
                _put_gradient(local.slots, steps[local.slots.name].exchange, reduced)
        return tables_without

    def average_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Put the gradients of all ranks in place of this rank's before the step. Collective.

        The step exchanges none of them. `scale_averaged` must follow.

        Args:
            parameters: those among them that are slots.

        Returns:
            The gradients of the rows that this rank owns, for each table.
        """
        pending = self._pending({id(parameter) for parameter in parameters})
        if not pending:
            return []
        steps = {
            name: TableStep(
                exchange=exchange,
                at_once=exchange,
                is_averaged=self._tables[name].gradients.is_averaged,
            )
            for name, exchange in pending.items()
        }
        with self._membership.leaving():
            agree_on_step(
                partial(self._membership.agree, Act.AVERAGE),
                None,
                list(self._tables),
                steps,
                digest=0,  # the norms of dense gradients are compared next
            )
            now = []
            for name, step in steps.items():
                if not step.is_averaged:
                    count = self._membership.channels.count
                    now.append((LocalGradient(self._tables[name].slots, count), step.exchange))
                    self._count(step.exchange, step.exchange)
            self._put_averages(now, steps)
        gradients = (self._tables[name].slots.weight.grad for name in pending)
        return [gradient for gradient in gradients if gradient is not None]

    def agree_on_norms(self, tables: float, dense: float) -> tuple[list[float], float]:
        """Return the norms of the tables' gradients on all ranks, and that of all others.

        Collective.

        Args:
            tables: norm of the gradients of rows that this rank owns.
            dense: norm of all other gradients, of which all ranks have the averages.

        Raises:
            RanksDiffer: norms of the other gradients differ.
            RankLost: a rank does not answer.
        """
        count = self._membership.channels.count
        own_norms = torch.tensor([tables, dense], dtype=torch.float64, device="cpu").view(
            torch.int64
        )
        with self._membership.leaving():
            norms = self._membership.agree(Act.AGREE_ON_NORM, own_norms.expand(count, 2))
            of_tables, of_dense = norms.contiguous().view(torch.float64).T.tolist()
            if not all(_is_like(norm, of_dense[0]) for norm in of_dense):
                raise RanksDiffer(
                    "clip_grad_norm_()",
                    found=f"gradients of dense layers with the norms {of_dense} on the ranks",
                    expected="averaged gradients, which are the same on all ranks",
                    next_step="train the dense layers with DistributedDataParallel, or average "
                    "their gradients before clip_grad_norm_()",
                )
        return of_tables, of_dense[0]

    def scale_averaged(self, parameters: Iterable[Tensor], factor: Tensor) -> None:
        """Multiply the gradients that `average_gradients` has put into place.

        Args:
            parameters: as there.
            factor: a scalar.
        """
        parameter_ids = {id(parameter) for parameter in parameters}
        for name, rows in self._tables.items():
            gradient = rows.slots.weight.grad
            if id(rows.slots.weight) not in parameter_ids or gradient is None:
                continue
            if self._exchanges.pending(name, self._progress.batch) is not None:
                values = gradient._values() if gradient.is_sparse else gradient
                values.mul_(factor.to(values.device))
                rows.gradients.note_averaged()

    def to_change(self, rows: CachedRows) -> Tensor:
        """Return the slots of rows of this rank that the next step may change: int64 [n].

        Raises:
            SettingsError: the gradients are not those of the batches since the last step.
        """
        slots = self._changing.get(rows.slots.name)
        if slots is None:
            raise SettingsError(
                f"cached table {rows.slots.name!r}, which {self._membership.channels.count} ranks "
                "share",
                found="a gradient of an earlier batch, whose step was made already",
                expected="one step with the gradients of a batch, or of several",
                next_step="call optimizer.zero_grad() after each step",
            )
        return slots

    def stepped(self, optimizer: Optimizer) -> list[str]:
        """Take note that a step was made, and begin its later part.

        Returns:
            The tables of which any rank had gradients.
        """
        parameter_ids = _parameter_ids(optimizer)
        changed = [
            name for name in self._changing if id(self._tables[name].slots.weight) in parameter_ids
        ]
        for name in changed:
            del self._changing[name]
        return changed

    def follow_up(self) -> None:
        """Begin the later part of the step that was made, if there is one."""
        if self._to_follow is None:
            return
        following = self._membership.later_thread.submit(
            partial(self._follow_up, self._progress.batch, *self._to_follow)
        )
        self._to_follow = None
        self._following.append(following)
        self._following_batch = self._progress.batch
        # Rows that leave their slots next are written back as they are after that.
        self._mover.submit(following.result)

    def _follow_up(self, batch: int, outgoing: Outgoing, steps: Sequence[LaterStep]) -> None:
        channels = self._membership.channels
        try:
            sent = channels.later_turns.agree(Act.LATER_STEP, batch, outgoing.sent_rows)
            refuse_other_counts("late gradients of rows", sent, outgoing.awaited_rows)
            for step, reduced in zip(steps, outgoing.reduce(channels.later), strict=True):
                if reduced is not None:
                    step.make(reduced)
        except BaseException:
            channels.later.close()  # the other ranks must not wait for the next exchange
            raise

    def wait_for_later_steps(self) -> None:
        """Wait until the later parts of all steps are made."""
        following, self._following = self._following, []
        self._mover.wait(following)

    def wait_before_batch(self) -> None:
        """Wait for later steps of batches before: their rows may be in the batch that comes."""
        if self._following_batch < self._progress.batch:
            with self._membership.leaving():
                self.wait_for_later_steps()

    def begin_anew(self) -> None:
        """Forget the step that is being made."""
        self._changing.clear()
        self._to_follow = None


def _put_gradient(slots: TableSlots, exchange: Exchange, reduced: Reduced) -> None:
    weight, is_reduced = slots.weight, reduced.has_gradient
    reduced_slots = reduced.slots[is_reduced].to(weight.device)
    values = reduced.values[is_reduced].to(weight.device)
    if reduced.is_sparse:
        weight.grad = torch.sparse_coo_tensor(
            reduced_slots[None], values, weight.shape, is_coalesced=True, check_invariants=False
        )
        return
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    for rows in (exchange.own, *exchange.borrowed):
        weight.grad.index_fill_(0, rows.slots.to(weight.device), 0)
    weight.grad.index_copy_(0, reduced_slots, values)


def _count_lent(exchange: Exchange) -> int:
    lent_ids = torch.unique(torch.cat([rows.ids for rows in exchange.lent]))
    return len(lent_ids)


def _is_like(norm: float, other_norm: float) -> bool:
    """Whether two ranks may have computed both from the same gradients."""
    return math.isclose(norm, other_norm, rel_tol=_ROUNDING) or (
        not math.isfinite(norm) and not math.isfinite(other_norm)
    )


def _together(ids: Sequence[Tensor]) -> Tensor:
    unique_ids: Tensor = torch.unique(torch.cat([NO_IDS, *ids]))
    return unique_ids


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
