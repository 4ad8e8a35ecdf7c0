"""Lets ranks share only tables that are alike on all of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from recpoint.embeddings.cache.residents import CachedRows
from recpoint.embeddings.home.channel import Channel
from recpoint.errors import SettingsError

__all__ = ["capacities_of_ranks", "refuse_differing"]


def capacities_of_ranks(channel: Channel, tables: Mapping[str, CachedRows]) -> dict[str, list[int]]:
    """Return the number of slots of each table on each rank. Collective."""
    own_capacities = torch.tensor(
        [cached_rows.slots.capacity for cached_rows in tables.values()],
        dtype=torch.int64,
        device="cpu",
    )
    answers = channel.gather(own_capacities.view(torch.uint8))
    by_rank = [answer.clone().view(torch.int64).tolist() for answer in answers]
    return {
        name: [capacities[position] for capacities in by_rank]
        for position, name in enumerate(tables)
    }


def refuse_differing(channel: Channel, tables: Mapping[str, CachedRows]) -> None:
    """Refuse tables that are not alike on all ranks. Collective.

    Raises:
        SettingsError: says which ranks differ.
    """
    descriptions = []
    for name, cached_rows in tables.items():
        slots, storage = cached_rows.slots, cached_rows.storage
        values = 0 if storage is None else _checksum(storage)
        rules = "" if cached_rows.reserved is None else f", {cached_rows.reserved.rules}"
        descriptions.append(
            f"{name}: {slots.rows} x {slots.dim} {slots.weight.dtype}, values {values:08x}{rules}"
        )
    description = "\n".join(descriptions).encode()
    all_descriptions = channel.gather(torch.frombuffer(bytearray(description), dtype=torch.uint8))
    differing = [
        rank
        for rank, rank_description in enumerate(all_descriptions)
        if not torch.equal(rank_description, all_descriptions[0])
    ]
    if differing:
        raise SettingsError(
            "cached(model)",
            found=f"other tables, or other values in them, on ranks {differing} than on rank 0",
            expected="the same model on all ranks",
            next_step="seed the generators of all ranks alike before the model is built, or load "
            "the same values",
        )


def _checksum(storage: Tensor) -> int:
    return zlib.crc32(storage.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
