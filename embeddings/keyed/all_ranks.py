"""Has all ranks of a data-parallel training look up the keys of each of them.

Each rank has the whole table, or a cache of its rows. Keys, slots and the next evictions follow
from the lookups, so ranks that look up the same keys give them the same slots.
"""

from __future__ import annotations

import zlib
from typing import Final

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from recpoint.catalog.restore.keyed_rows import KEY
from recpoint.embeddings.keyed.key_slots import KeySlots
from recpoint.errors import RanksDiffer, SettingsError

__all__ = ["keys_of_all_ranks"]

#: Steps, the checksum of the table's name, and six numbers that say which keys have which slots.
_HEADER: Final = 8


def keys_of_all_ranks(keys: Tensor, *, slots: KeySlots) -> Tensor:
    """Return the keys that all ranks look up now. Collective, if there are several ranks.

    Args:
        keys: int64 [n], those of this rank; keys may come several times.
        slots: those of the table.

    Returns:
        int64 [m], all different; of a single rank, `keys` as they are.

    Raises:
        SettingsError: a rank may end before the others, and they would wait for its lookups.
        RanksDiffer: the ranks are in lookups of different tables, at different steps, or have given
            other keys rows before.
        RankLost: a rank does not answer.
    """
    memory = slots.rows.memory
    if memory.ranks == 1:
        return keys
    name = slots.rows.subject
    _refuse_join(name)
    own_header = [slots.steps, zlib.crc32(name.encode()), *_summary(slots)]
    own_part = torch.cat([keys.new_tensor(own_header), torch.unique(keys)])
    parts = [part.clone().view(torch.int64) for part in memory.gather(own_part.view(torch.uint8))]
    headers = [part[:_HEADER].tolist() for part in parts]
    if any(header != own_header for header in headers):
        raise RanksDiffer(
            f"{name}, looked up on {len(parts)} ranks",
            found=f"other tables, steps, numbers of slots or keys on ranks "
            f"{[rank for rank, header in enumerate(headers) if header != own_header]}",
            expected="the same lookups and steps on all ranks, because each has the whole table",
            next_step="look the same keyed tables up in the same order on each rank, each as "
            "often; delete keys, and load states that have keys, on all ranks: "
            "DistributedDataParallel copies weights from rank 0, and no keys",
        )
    all_keys: Tensor = torch.unique(torch.cat([part[_HEADER:] for part in parts]))
    return all_keys


def _summary(slots: KeySlots) -> list[int]:
    """Return numbers that are equal, as good as always, if equal keys have the slots."""
    # Once only, because it reads all slots. Then ranks do the same, or the counts differ.
    is_first = slots.looked_up_step < 0
    checksum = zlib.crc32(slots.row_states[KEY].numpy().data) if is_first else 0
    counts = [slots.rows_used, slots.inserted, slots.evicted, slots.refused]
    return [slots.capacity_rows, checksum, *counts]


def _refuse_join(name: str) -> None:
    wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
    join = getattr(wrapper, "_join_config", None)
    if join is not None and join.enable and not join.throw_on_early_termination:
        raise SettingsError(
            name,
            found="a lookup within DistributedDataParallel.join(), where ranks without batches "
            "answer for their gradients, and for no keys",
            expected="as many batches on each rank",
            next_step="use join(throw_on_early_termination=True), or a batch without samples on "
            "ranks that have none left",
        )
