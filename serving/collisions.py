"""Maps raw ids of requests to rows as the shards of TorchRec's managed collisions did in training.

A served model has one managed collision module for each table. Of a run whose tables were not
sharded, its buffers are dense tensors of the checkpoint. Of a run whose tables were sharded by
rows, raw ids are row states, and each version fills the module from these:

    an id that a row has     is mapped to that row, if lookups of that id went to the row's shard
    any other id             is mapped to the last row of the shard to which its lookups went

TorchRec's module knows only one last row, so `_ShardedRemap` stands in for its method `remap`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.restore.rows import LogicalTable
from recpoint.embeddings.tables.managed_collisions import NO_ID, IdShards, MappedTable
from recpoint.errors import IncompatibleModel
from recpoint.format.manifest import Manifest

__all__ = ["ServedCollisions"]

#: What is read and written of a module.
_ATTRIBUTES = ("_input_hash_size", "_mch_remapped_ids_mapping", "_mch_sorted_raw_ids", "remap")


class _ShardOfIds(NamedTuple):
    """What a checkpoint says of one shard's module.

    Attributes:
        first_row: first row of the shard.
        rows: number of its rows.
        number: number of the shard, from 0, in the order of rows and of ids.
        shards: number of shards.
        input_hash_size: input hash size of the module.
    """

    first_row: int
    rows: int
    number: int
    shards: int
    input_hash_size: int

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _ShardOfIds | None:
        """Return a shard by its stored state; None if that is of another form."""
        settings = state.get("settings")
        values: list[Any] = [state.get(key) for key in ("first_row", "rows", "shard", "shards")]
        values.append(settings.get("input hash size") if isinstance(settings, dict) else None)
        return cls(*values) if all(type(value) is int for value in values) else None


@dataclass(frozen=True, kw_only=True)
class _RowShards:
    """The shards in which a table was trained.

    Attributes:
        ids: says which shard maps an id.
        first_rows: first row of each shard.
    """

    ids: IdShards
    first_rows: tuple[int, ...]


class ServedCollisions:
    """Fills the module that maps the raw ids of one served table.

    Args:
        mapped: the table and its module, in evaluation mode.
    """

    def __init__(self, mapped: MappedTable) -> None:
        self._name = mapped.module_name
        self._module: Any = mapped.module
        self._shards: _RowShards | None = None

    @property
    def tensor_prefix(self) -> str:
        """Beginning of the names of the module's tensors."""
        return f"{self._name}."

    def check(self, manifest: Manifest, table: LogicalTable, state: Mapping[int, object]) -> None:
        """Find the shards in which a table was trained.

        Args:
            manifest: manifest of the checkpoint, for errors.
            table: the table, with raw ids.
            state: the state trees of all ranks.

        Raises:
            IncompatibleModel: the shards are not known, or the module here divides ids otherwise.
        """
        missing = [name for name in _ATTRIBUTES if not hasattr(self._module, name)]
        if missing:
            raise self._refused(
                manifest,
                f"a {type(self._module).__name__} without {', '.join(missing)} in the model",
                "an MCHManagedCollisionModule, as in the checkpoint",
                "build the served model as the trainer builds it",
            )
        shards = sorted(self._stored_shards(state))
        stops = [shard.first_row + shard.rows for shard in shards]
        numbers = [(shard.number, shard.shards) for shard in shards]
        if [shard.first_row for shard in shards] + [table.rows] != [0, *stops] or numbers != [
            (number, len(shards)) for number in range(len(shards))
        ]:
            raise self._refused(
                manifest,
                f"{len(shards)} shards, {shards!r:.300}",
                f"shards that make up {table.rows} rows, numbered in their order",
                "serve another checkpoint: recpoint list URL names them",
            )
        hash_sizes = {shard.input_hash_size for shard in shards}
        if hash_sizes != {self._module._input_hash_size}:
            raise self._refused(
                manifest,
                f"the input hash size {', '.join(map(str, hash_sizes))} in the checkpoint and "
                f"{self._module._input_hash_size} in the model",
                "the same, because it decides which shard maps an id",
                "build the served model as the trainer builds it",
            )
        ids = IdShards(self._module._input_hash_size, len(shards))
        first_rows = tuple(shard.first_row for shard in shards)
        self._shards = _RowShards(ids=ids, first_rows=first_rows)

    def _stored_shards(self, state: Mapping[int, object]) -> list[_ShardOfIds]:
        shards = []
        for tree in state.values():
            sources = tree.get("sources") if isinstance(tree, dict) else None
            modules = sources.get("managed_collisions") if isinstance(sources, dict) else None
            module_state = modules.get(self._name) if isinstance(modules, dict) else None
            shard = _ShardOfIds.of(module_state) if isinstance(module_state, dict) else None
            if shard is not None:
                shards.append(shard)
        return shards

    def fill(self, raw_ids: Tensor) -> None:
        """Map ids as the shards did that `check` has found.

        Args:
            raw_ids: raw id of each row, int64 [rows], on the CPU.
        """
        assert self._shards is not None  # `check` has found them
        rows = torch.arange(len(raw_ids), device="cpu")
        first_rows = torch.tensor(self._shards.first_rows, device="cpu")
        shard_of_row = torch.searchsorted(first_rows, rows, right=True) - 1
        # Lookups of an id go to one shard, and what another shard knows of it is never read.
        is_looked_up = self._shards.ids.of(raw_ids) == shard_of_row
        ids = torch.where(is_looked_up, raw_ids, NO_ID)
        order = ids.argsort(stable=True)
        module = self._module
        with torch.no_grad():
            module._mch_sorted_raw_ids.copy_(ids[order])
            module._mch_remapped_ids_mapping.copy_(order)
        no_free_row = torch.full((len(first_rows),), len(raw_ids), dtype=torch.int64, device="cpu")
        free_rows = no_free_row.scatter_reduce(
            0, shard_of_row, torch.where(raw_ids == NO_ID, rows, len(raw_ids)), "amin"
        )
        last_rows = torch.cat([first_rows[1:], torch.tensor([len(raw_ids)], device="cpu")]) - 1
        device = module._mch_sorted_raw_ids.device
        module.remap = _ShardedRemap(
            module, self._shards.ids, last_rows.to(device), free_rows.to(device)
        )

    def use_buffers(self) -> None:
        """Map ids by the module's buffers alone, as a module that is not sharded does."""
        vars(self._module).pop("remap", None)

    def _refused(
        self, manifest: Manifest, found: str, expected: str, next_step: str
    ) -> IncompatibleModel:
        return IncompatibleModel(
            f"the managed collisions of {self._name!r} in {manifest.ref}",
            found=found,
            expected=expected,
            next_step=next_step,
        )


class _ShardedRemap:
    """Takes the place of the method `remap` of a module that has the ids of several shards.

    Args:
        module: the module; its last row has no id.
        id_shards: says which shard maps an id.
        last_rows: row of each shard to which ids without a row are mapped, int64 [shards].
        free_rows: row of each shard to which `NO_ID` is mapped if it is looked up: the first row
            without id; int64 [shards].
    """

    def __init__(
        self, module: Any, id_shards: IdShards, last_rows: Tensor, free_rows: Tensor
    ) -> None:
        self._module, self._id_shards = module, id_shards
        self._last_rows, self._free_rows = last_rows, free_rows

    def __call__(self, features: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return features with rows for raw ids; arguments are those of TorchRec's method."""
        mapped: dict[str, Any] = type(self._module).remap(self._module, features, *args, **kwargs)
        for name, feature in features.items():
            ids, rows = feature.values(), mapped[name].values()
            shards = self._id_shards.of(ids)
            # The module has mapped ids that it does not know to its last row.
            rows = torch.where(rows == self._last_rows[-1], self._last_rows[shards], rows)
            rows = torch.where(ids == NO_ID, self._free_rows[shards], rows)
            mapped[name].values().copy_(rows)
        return mapped
