"""Has all ranks make the same step: of which tables, which of their rows late, with which scale.

A script may differ between ranks in what decides whether a step can be delayed, for instance by a
hook on rank 0 that logs. The rows of a table are stepped late only if all ranks can do that.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from recpoint.embeddings.cache.exchange import counts_of, divided
from recpoint.embeddings.cache.later_step import OF_GRAD_SCALER, LaterStep
from recpoint.embeddings.cache.turns import refuse_other_counts
from recpoint.errors import RanksDiffer
from recpoint.lookahead.shared_oracle import Exchange

__all__ = ["AgreedStep", "TableStep", "agree_on_step", "numbers_of_step"]

_NOT_TRAINED: Final = 0
_AT_ONCE: Final = 1
_CAN_WAIT: Final = 2
_AVERAGED: Final = 3

#: Numbers that a rank says of each table: one of the above, and how many rows' gradients it sends
#: if all are sent at once, and if some wait.
_OF_TABLE: Final = 3


@dataclass(frozen=True, kw_only=True)
class TableStep:
    """What a step does with one table.

    Attributes:
        exchange: rows whose gradients ranks exchange.
        at_once: those that the next batch looks up, or all.
        late: the others; None: the step cannot be delayed.
        later_step: makes the step of the others.
        is_averaged: ranks have exchanged the gradients already, to clip them.
    """

    exchange: Exchange
    at_once: Exchange
    late: Exchange | None = None
    later_step: LaterStep | None = None
    is_averaged: bool = False

    @classmethod
    def of(
        cls, exchange: Exchange, later_step: LaterStep | None, next_ids: Callable[[], Tensor]
    ) -> TableStep:
        """Divide an exchange.

        Args:
            exchange: rows whose gradients ranks exchange.
            later_step: None: the step cannot be delayed.
            next_ids: returns the rows that the next batch looks up, int64 [k], ascending.
        """
        if later_step is None:
            return cls(exchange=exchange, at_once=exchange)
        at_once, late = divided(exchange, next_ids())
        return cls(exchange=exchange, at_once=at_once, late=late, later_step=later_step)

    def undivided(self) -> TableStep:
        """Return the step that waits for all gradients."""
        return TableStep(
            exchange=self.exchange, at_once=self.exchange, is_averaged=self.is_averaged
        )


class AgreedStep(NamedTuple):
    """What all ranks do in a step.

    Attributes:
        steps: by table. Some of them are no longer divided.
        differing_ranks: ranks whose gradients of dense layers differ from those of rank 0.
    """

    steps: dict[str, TableStep]
    differing_ranks: list[int]


def numbers_of_step(tables: int) -> int:
    """Return how many numbers a rank says before a step."""
    return _OF_TABLE * tables + len(OF_GRAD_SCALER) + 1


def agree_on_step(
    agree: Callable[[Tensor], Tensor],
    optimizer: Optimizer | None,
    tables: Sequence[str],
    steps: Mapping[str, TableStep],
    *,
    digest: int,
) -> AgreedStep:
    """Return what all ranks do in a step. Collective.

    Args:
        agree: tells each rank numbers, int64 [ranks, n], and returns what each rank tells this.
        optimizer: is about to make the step; None: gradients are averaged before a step.
        tables: names of all tables, in the same order on all ranks.
        steps: name of a table that the optimizer trains -> what this rank could do.
        digest: of the gradients of dense layers, `digest_of_gradients`.

    Raises:
        RanksDiffer: ranks make other steps.
        RankLost: a rank does not answer.
    """
    ranks = len(next(iter(steps.values())).exchange.lent)
    own_numbers = torch.zeros(ranks, numbers_of_step(len(tables)), dtype=torch.int64, device="cpu")
    by_table = own_numbers[:, : _OF_TABLE * len(tables)].view(ranks, len(tables), _OF_TABLE)
    awaited = torch.zeros_like(by_table)
    for number, name in enumerate(tables):
        step = steps.get(name)
        if step is None:
            continue
        if step.is_averaged:
            by_table[:, number, 0] = _AVERAGED
            continue
        by_table[:, number, 0] = _AT_ONCE if step.late is None else _CAN_WAIT
        for column, exchange in ((1, step.exchange), (2, step.at_once)):
            by_table[:, number, column] = counts_of([exchange.borrowed], ranks)[:, 0]
            awaited[:, number, column] = counts_of([exchange.lent], ranks)[:, 0]
    own_numbers[:, _OF_TABLE * len(tables) : -1] = _bits_of_scale(optimizer)
    own_numbers[:, -1] = digest
    answers = agree(own_numbers)
    announced = answers[:, : _OF_TABLE * len(tables)].view(ranks, len(tables), _OF_TABLE)
    _refuse_other_tables(tables, announced[:, :, 0])
    _refuse_other_scales(answers[:, _OF_TABLE * len(tables) : -1])
    can_wait = (announced[:, :, 0] == _CAN_WAIT).all(0)
    columns = torch.where(can_wait, 2, 1).expand(ranks, len(tables))[:, :, None]
    refuse_other_counts(
        "gradients of rows",
        announced.gather(2, columns)[:, :, 0],
        awaited.gather(2, columns)[:, :, 0],
    )
    waiting = {
        name for name, table_waits in zip(tables, can_wait.tolist(), strict=True) if table_waits
    }
    agreed = {name: step if name in waiting else step.undivided() for name, step in steps.items()}
    return AgreedStep(agreed, torch.nonzero(answers[:, -1] != answers[0, -1]).view(-1).tolist())


def _bits_of_scale(optimizer: Optimizer | None) -> Tensor:
    """Return what a GradScaler has given a fused optimizer: int64 [2], the bits of floats."""
    bits = []
    for name in OF_GRAD_SCALER:
        value = getattr(optimizer, name, None)
        bits.append(0 if value is None else struct.unpack("<q", struct.pack("<d", float(value)))[0])
    return torch.tensor(bits, dtype=torch.int64, device="cpu")


def _refuse_other_tables(tables: Sequence[str], kinds: Tensor) -> None:
    for is_of_kind, subject, next_step in (
        (
            kinds != _NOT_TRAINED,
            "steps",
            "build the optimizers of all ranks alike, and call their steps in one order",
        ),
        (
            kinds == _AVERAGED,
            "gradients that clip_grad_norm_ has averaged",
            "between clip_grad_norm_ and the step, call zero_grad() on all ranks or on none",
        ),
    ):
        if bool((is_of_kind == is_of_kind[0]).all()):
            continue
        by_rank = [
            [name for name, is_table in zip(tables, is_of_rank, strict=True) if is_table]
            for is_of_rank in is_of_kind.tolist()
        ]
        raise RanksDiffer(
            f"an optimizer's step on {len(by_rank)} ranks",
            found=f"{subject} of other tables: "
            + "; ".join(f"rank {rank} of {names!r:.200}" for rank, names in enumerate(by_rank)),
            expected="the same tables, in the same order on all ranks",
            next_step=next_step,
        )


def _refuse_other_scales(bits: Tensor) -> None:
    if bool((bits == bits[0]).all()):
        return
    by_rank = [
        struct.unpack("<dd", struct.pack("<qq", *scale_bits)) for scale_bits in bits.tolist()
    ]
    raise RanksDiffer(
        "the GradScaler of a fused optimizer",
        found="other values on the ranks: "
        + "; ".join(
            f"rank {rank} has scale {scale:g} and {'an overflow' if overflow else 'no overflow'}"
            for rank, (scale, overflow) in enumerate(by_rank)
        ),
        expected="one scale, and an overflow that all ranks know of, because they share rows",
        next_step="take torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler on all ranks, "
        "and call its unscale_(optimizer) before step(optimizer)",
    )
