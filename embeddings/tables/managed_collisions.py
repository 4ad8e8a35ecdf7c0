"""Finds the tables whose raw ids TorchRec maps, and says which shard maps an id.

A managed collision module of TorchRec maps raw ids to the rows of one table. Of a table that is
sharded by rows, each shard has a module, and TorchRec decides by the id which shard maps it.
Trainers store such maps and followers read them. Nothing of TorchRec is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from recpoint.catalog.restore.rows import LogicalTable
from recpoint.catalog.restore.state import canonical_name

__all__ = [
    "NO_ID",
    "RAW_ID",
    "IdShards",
    "MappedTable",
    "has_raw_ids",
    "has_torchrec_base",
    "mapped_tables",
]

#: Row state of a sharded table: the raw id of each row, int64.
RAW_ID: Final = "collisions.raw_id"
#: The raw id of a row that no id has.
NO_ID: Final = torch.iinfo(torch.int64).max


class IdShards(NamedTuple):
    """Divides raw ids among the shards of a table as TorchRec's `RwSparseFeaturesDist` does.

    Ids below the input hash size are divided in equal blocks, others by their remainder. FBGEMM
    takes ids for numbers of 64 bits without sign.

    Attributes:
        input_hash_size: input hash size of the modules.
        shards: number of shards.
    """

    input_hash_size: int
    shards: int

    @property
    def block(self) -> int:
        """Number of raw ids in the block of a shard; 0: all ids are divided by remainder."""
        return -(-self.input_hash_size // self.shards)

    def ids_of(self, shard: int) -> range:
        """Return the block of a shard."""
        return range(shard * self.block, (shard + 1) * self.block)

    def of(self, ids: Tensor) -> Tensor:
        """Return the shard that maps each of `ids`, int64 of any shape, on their device."""
        remainders = ids.remainder(self.shards)
        # An id below 0 stands for the number that is 2**64 larger.
        unsigned = remainders.add(2**64 % self.shards).remainder(self.shards)
        by_remainder = torch.where(ids < 0, unsigned, remainders)
        if not self.block:
            return by_remainder
        blocks = ids.div(self.block, rounding_mode="floor")
        by_block = torch.where((ids >= 0) & (blocks < self.shards), blocks, by_remainder)
        # The last block may end a few ids above 2**63.
        stop = self.block * self.shards - 2**64
        if stop <= -(2**63):
            return by_block
        return torch.where(ids < stop, self.shards - 1, by_block)


class MappedTable(NamedTuple):
    """A table that is not sharded, and the module that maps its raw ids.

    Attributes:
        name: canonical name of the table's module.
        module_name: canonical name of the module that maps its ids.
        module: that module.
    """

    name: str
    module_name: str
    module: nn.Module


def mapped_tables(model: nn.Module) -> Iterator[MappedTable]:
    """Yield the tables of a model whose raw ids a module of TorchRec maps, and that are whole."""
    for name, module in model.named_modules():
        if not has_torchrec_base(module, "BaseManagedCollisionEmbeddingCollection"):
            continue
        whole: Any = module
        prefix = f"{name}." if name else ""
        paths = {
            path.rsplit(".", 1)[-1]: path for path, _ in whole._embedding_module.named_modules()
        }
        collisions = "_managed_collision_collection._managed_collision_modules"
        for table, mapping in module.get_submodule(collisions).named_children():
            if table in paths:
                yield MappedTable(
                    canonical_name(model, f"{prefix}_embedding_module.{paths[table]}"),
                    canonical_name(model, f"{prefix}{collisions}.{table}"),
                    mapping,
                )


def has_raw_ids(table: LogicalTable) -> bool:
    """Whether row states of a stored table say which raw id each row belongs to."""
    return any(state.name == RAW_ID for state in table.row_states)


def has_torchrec_base(module: nn.Module, kind: str) -> bool:
    """Whether a class of this name is among the bases; versions define it in other modules."""
    return any(
        base.__name__ == kind and base.__module__.startswith("torchrec.")
        for base in type(module).__mro__
    )
