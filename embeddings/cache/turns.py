"""Has ranks say what they are about to do, so that ranks which do different things learn of it.

A rank that leaves a step out asks for the next batch while the others make the step. Each would
take the other's bytes for something else. So a header goes before the bytes of each exchange: what
a rank does, for which batch, and how much it sends.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from recpoint.embeddings.home.channel import Channel
from recpoint.errors import RanksDiffer

__all__ = ["Act", "Turns", "refuse_other_counts"]


class Act(IntEnum):
    """What a rank does together with the others."""

    BEGIN_BATCH = 1
    READ_IDS = 2
    STEP = 3
    LATER_STEP = 4
    CUT = 5
    END_READ = 6
    RESTORE = 7
    END_RESTORE = 8
    MOVE_ROWS = 9
    COPY_TABLE = 10
    WRITE_CUT = 11
    FREEZE_CUT = 12
    AVERAGE = 13
    AGREE_ON_NORM = 14
    ANNOUNCE_CUT = 15
    LOOK_UP = 16
    SHARE_KEYS = 17


_SAID: Final = {
    Act.BEGIN_BATCH: "asks for batch {}",
    Act.READ_IDS: "asks for batch {}, of which it knows no ids",
    Act.STEP: "makes an optimizer's step after batch {}",
    Act.LATER_STEP: "makes the late part of an optimizer's step after batch {}",
    Act.CUT: "copies or reads rows after batch {}",
    Act.END_READ: "has read rows after batch {}",
    Act.RESTORE: "restores a checkpoint",
    Act.END_RESTORE: "has begun anew for a restore",
    Act.MOVE_ROWS: "moves the rows of batch {}",
    Act.COPY_TABLE: "copies a table to its home",
    Act.WRITE_CUT: "has written the rows of a checkpoint",
    Act.FREEZE_CUT: "has frozen the home for a checkpoint",
    Act.AVERAGE: "clips gradients after batch {}",
    Act.ANNOUNCE_CUT: "takes a checkpoint or ends after batch {}",
    Act.LOOK_UP: "looks up keys in batch {}",
    Act.SHARE_KEYS: "has restored keys",
    Act.AGREE_ON_NORM: "has averaged gradients to clip them after batch {}",
}

#: Before the numbers of a header: the act, and the number of the batch.
_FIXED: Final = 2


class Turns:
    """Compares what all ranks do next, for the thread that has a channel.

    Args:
        channel: of the thread, for whatever it exchanges.
        numbers: how many numbers an act may say. Headers of all acts have one size: ranks that do
            different things exchange them, too.
    """

    def __init__(self, channel: Channel, numbers: int = 0) -> None:
        self._channel = channel
        self._numbers = numbers

    def agree(self, act: Act, batch: int, numbers: Tensor | None = None) -> Tensor:
        """Wait until all ranks do the same. Collective.

        Args:
            act: what this rank does.
            batch: number of the batch, as the cache numbers batches: the first has number 2.
            numbers: what each rank is told with it: int64 [ranks, n].

        Returns:
            What each rank tells this rank: int64 [ranks, n].

        Raises:
            RanksDiffer: ranks do different things. All of them raise it.
            RankLost: a rank does not answer.
        """
        count = self._channel.count
        header = torch.zeros(count, _FIXED + self._numbers, dtype=torch.int64, device="cpu")
        header[:, 0], header[:, 1] = int(act), batch
        number_count = 0 if numbers is None else numbers.shape[1]
        if numbers is not None:
            header[:, _FIXED : _FIXED + number_count] = numbers
        parts = list(header.view(torch.uint8))
        received = self._channel.swap(parts, [part.numel() for part in parts])
        # Copied, because numbers must lie at addresses that fit their size.
        headers = torch.stack(
            [received_header.clone().view(torch.int64) for received_header in received]
        )
        acts = [(Act(act_number), number) for act_number, number in headers[:, :_FIXED].tolist()]
        if len(set(acts)) > 1:
            raise _differing(acts)
        return headers[:, _FIXED : _FIXED + number_count]


def _differing(acts: list[tuple[Act, int]]) -> RanksDiffer:
    by_act: dict[str, list[int]] = {}
    for rank, (act, batch) in enumerate(acts):
        by_act.setdefault(_SAID[act].format(batch - 1), []).append(rank)
    leaves_out = any(act in (Act.STEP, Act.AVERAGE) for act, _ in acts)
    return RanksDiffer(
        f"the training loops of {len(acts)} ranks",
        found="; ".join(f"rank {str(ranks)[1:-1]} {act}" for act, ranks in by_act.items()),
        expected="ranks that do the same at the same time, because they share rows",
        next_step="make each step on all ranks or on none: decide by a value that all ranks have "
        "reduced, as torch.distributed.all_reduce does. A GradScaler decides on each rank for "
        "itself: take torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, and call its "
        "unscale_(optimizer) before step(optimizer)"
        if leaves_out
        else "run the same loop on each rank: the same batches, evaluations, checkpoints and "
        "read_rows()",
    )


def refuse_other_counts(subject: str, sent: Tensor, awaited: Tensor) -> None:
    """Refuse to exchange rows of which ranks send another number than this rank waits for.

    Args:
        what: what is sent of the rows.
        sent: int64 [ranks, tables]: what each rank said.
        awaited: int64 [ranks, tables]: what this rank has planned.

    Raises:
        RanksDiffer: the numbers differ.
    """
    if torch.equal(sent, awaited):
        return
    ranks = torch.nonzero((sent != awaited).any(1)).view(-1).tolist()
    raise RanksDiffer(
        f"the {subject} that ranks exchange",
        found=f"{[int(sent[rank].sum()) for rank in ranks]} rows from ranks {ranks}",
        expected=f"{[int(awaited[rank].sum()) for rank in ranks]}, as this rank has planned",
        next_step="start the job again, which goes on from the newest checkpoint, and report this "
        "with the logs of all ranks",
    )
