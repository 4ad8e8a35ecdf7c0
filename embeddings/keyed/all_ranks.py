"""Has all ranks of a data-parallel training look up the keys of each of them.

Each rank has the whole table. Keys, slots and the next evictions follow from the lookups, so ranks
that look up the same keys have the same rows, as `DistributedDataParallel` has it of any parameter.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from recpoint.embeddings.home.channel import Channel, GlooChannel
from recpoint.embeddings.home.ranks import rank_and_count
from recpoint.errors import RanksDiffer

__all__ = ["keys_of_all_ranks"]

#: The longest time that a rank may be behind the others in a lookup.
_WAIT_SECONDS: Final = 600.0
#: Steps, the name's checksum and the number of slots.
_HEADER: Final = 3

#: The process group of the training, and the channel in it; one for all tables, because all ranks
#: look them up in the same order.
_opened: list[tuple[Any, Channel]] = []


def keys_of_all_ranks(keys: Tensor, *, name: str, steps: int, capacity_rows: int) -> Tensor:
    """Return the keys that all ranks look up now. Collective, if there are several ranks.

    Args:
        keys: int64 [n], those of this rank; keys may come several times.
        name: the table, as messages name it.
        steps: steps of the table's optimizer so far.
        capacity_rows: slots of the table.

    Returns:
        int64 [m], all different; of a single rank, `keys` as they are.

    Raises:
        RanksDiffer: the ranks are in lookups of different tables, or at different steps.
        RankLost: a rank does not answer.
    """
    if rank_and_count()[1] == 1:
        return keys
    own_header = [steps, zlib.crc32(name.encode()), capacity_rows]
    own_part = torch.cat([keys.new_tensor(own_header), torch.unique(keys)])
    parts = [
        part.clone().view(torch.int64) for part in _channel().gather(own_part.view(torch.uint8))
    ]
    headers = [part[:_HEADER].tolist() for part in parts]
    if any(header != own_header for header in headers):
        raise RanksDiffer(
            f"{name}, looked up on {len(parts)} ranks",
            found=f"other tables, steps or numbers of slots on ranks "
            f"{[rank for rank, header in enumerate(headers) if header != own_header]}",
            expected="the same lookups and steps on all ranks, because each has the whole table",
            next_step="look the same keyed tables up in the same order on each rank, each as often",
        )
    all_keys: Tensor = torch.unique(torch.cat([part[_HEADER:] for part in parts]))
    return all_keys


def _channel() -> Channel:
    group = dist.group.WORLD
    if not _opened or _opened[0][0] is not group:
        _opened[:] = [(group, GlooChannel("keys of a lookup", wait_seconds=_WAIT_SECONDS))]
    return _opened[0][1]
