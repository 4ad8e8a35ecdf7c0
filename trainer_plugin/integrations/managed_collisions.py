"""Stores and restores what TorchRec's managed collision modules know about raw ids.

An `MCHManagedCollisionModule` maps the raw ids of one table to its rows. It counts the ids of each
batch, and every few batches it gives the rows of the ids that are worth least to new ids. All this
decides how training goes on, so all of it is in the checkpoint:

    of a table that TorchRec has sharded   row states: the raw id of each row, and what the eviction
                                           policy knows of it (`CollisionRows`)
    of a table that it has not sharded     the module's buffers, which are dense state of the model
    of both                                the ids since the last eviction, and counts of batches,
                                           under the source `managed_collisions`, of each rank

A module keeps raw ids sorted, so that an eviction moves most of them. In row states each
stays with its row, and an increment holds the rows whose id or count has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHManagedCollisionModule,
)

from recpoint.catalog.restore.state import canonical_name
from recpoint.embeddings.tables.managed_collisions import (
    NO_ID,
    RAW_ID,
    IdShards,
    has_torchrec_base,
)
from recpoint.embeddings.tables.tables import Marker, Table
from recpoint.errors import IncompatibleModel, SettingsError
from recpoint.trainer_plugin import mismatches
from recpoint.trainer_plugin.integrations.torchrec_names import check_attributes

__all__ = ["CollisionRows", "CollisionSource", "find", "taken_apart"]

_POLICIES = (LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy)
#: Why nobody has tried to store a module's state, by its class.
_WHY_UNKNOWN: Final = {
    "HashZchManagedCollisionModule": " (on a CPU its operator fbgemm::zero_collision_hash only "
    "reads: it refuses readonly=False, so that no batch can be trained there and compared)"
}

#: What a module has from the start, beside its buffers; it makes others in its first batch.
_ATTRIBUTES: Final = (
    "_mch_sorted_raw_ids",
    "_mch_remapped_ids_mapping",
    "_mch_metadata",
    "_history_metadata",
    "_input_history_buffer_size",
    "_current_history_buffer_offset",
    "_current_iter",
    "_current_iter_tensor",
    "_last_eviction_iter",
    "_evicted",
    "_evicted_emb_indices",
    "_eviction_interval",
    "_input_hash_size",
    "_output_global_offset",
    "_output_segments_tensor",
    "_zch_size",
    "_buckets",
)


def find(model: nn.Module) -> CollisionSource | None:
    """Return the source of a model's managed collisions; None if it has none.

    Raises:
        SettingsError: a module or its eviction policy is not supported; the message names it.
    """
    collisions: dict[str, _Collisions] = {}
    sharded_names: list[str] = []
    for name, module in model.named_modules():
        if has_torchrec_base(module, "ShardedModule"):
            sharded_names.append(f"{name}." if name else "")
        if has_torchrec_base(module, "ManagedCollisionModule"):
            is_sharded = name.startswith(tuple(sharded_names))
            if not is_sharded:
                _refuse_overwritten(model, name)
            collisions[name] = _Collisions(canonical_name(model, name), module, sharded=is_sharded)
    return CollisionSource(collisions) if collisions else None


def taken_apart(name: str, module: nn.Module) -> tuple[str, nn.Module, Mapping[str, nn.Module]]:
    """Return the lookup module in a sharded module, and the modules that map ids to its rows.

    Args:
        name: name of the sharded module.
        module: the sharded module.

    Returns:
        Name and module of the part that holds the tables, and name of the table -> the module that
        maps its ids. A module without managed collisions is returned as it is, with no such module.
    """
    if not has_torchrec_base(module, "BaseShardedManagedCollisionEmbeddingCollection"):
        return name, module, {}
    whole: Any = module
    collision_modules = whole._managed_collision_collection._managed_collision_modules
    inner = "_embedding_module"
    return f"{name}.{inner}" if name else inner, whole._embedding_module, dict(collision_modules)


class CollisionRows:
    """Keeps the raw ids of the rows of one shard, and what evictions know of them, in row order.

    These are copies. `follow` brings them up to date, and marks rows whose entries have changed.

    Args:
        name: name of the table, for messages.
        module: the shard's managed collision module.
        rows: the rows of the table that the shard holds.

    Attributes:
        marker: is told of rows that have changed; None: nobody is.

    Raises:
        SettingsError: the module is not supported, or maps ids to other rows than the shard's.
    """

    def __init__(self, name: str, module: nn.Module, rows: range) -> None:
        self._collisions = _Collisions(name, module, sharded=True)
        self._rows = rows
        self.marker: Marker | None = None
        self._copies: dict[str, Tensor] = {}
        self._versions = _TensorVersions(())
        self._is_out_of_order = False
        self._refuse_other_rows()

    def _refuse_other_rows(self) -> None:
        mapped_rows = self._collisions.mapped_rows.sort().values
        own_rows = torch.arange(self._rows.start, self._rows.stop, device=mapped_rows.device)
        if not torch.equal(mapped_rows, own_rows):
            raise _refused(
                self._collisions.name,
                f"a managed collision module whose ids are not mapped to rows {self._rows.start} … "
                f"{self._rows.stop - 1}, each once",
                "a module that TorchRec has cut as the table is cut",
                "shard table and module together, in a ManagedCollisionEmbeddingBagCollection",
            )

    @property
    def states(self) -> Mapping[str, Tensor]:
        """Row states by name, each int64 [rows]: the same tensors in each call, brought up to date.

        Raises:
            SettingsError: rows without id are not in order, and would be given to other ids after a
                restore.
        """
        self.follow()
        if self._is_out_of_order:
            raise _refused(
                self._collisions.name,
                "a managed collision module whose free rows are not in ascending order",
                "the order that TorchRec gives them",
                "build the module anew, and restore a checkpoint",
            )
        return self._copies

    def follow(self) -> None:
        """Bring the copies up to date, and mark the rows whose entries differ.

        It is called before each lookup, after TorchRec's eviction. So a row whose id goes to
        another one and comes back is marked, although it has the same id as before. Its weight was
        initialised in between.
        """
        entries = self._collisions.by_position()
        rows = self._collisions.mapped_rows
        tensors = (rows, *entries.values())
        if self._versions.are_those_of(tensors):
            return
        with torch.no_grad():
            places = rows - self._rows.start
            is_changed = torch.zeros(len(places), dtype=torch.bool, device=places.device)
            for name, values in entries.items():
                in_row_order = torch.empty_like(values)
                in_row_order[places] = values
                copy = self._copies.get(name)
                if copy is None:
                    self._copies[name] = in_row_order
                    is_changed.fill_(True)
                else:
                    is_changed |= copy != in_row_order
                    copy.copy_(in_row_order)
            free_rows = rows[entries[RAW_ID] == NO_ID]
            self._is_out_of_order = bool((free_rows.diff() < 0).any())
        self._versions = _TensorVersions(tensors)
        if self.marker is not None:
            self.marker.mark(is_changed.nonzero().flatten())

    def write_back(self) -> None:
        """Give the module what was restored into `states`.

        The order of raw ids is that of TorchRec's own stable sort. Rows without id are in ascending
        order, as `states` has checked.
        """
        raw_ids = self._copies[RAW_ID]
        order = raw_ids.argsort(stable=True)
        with torch.no_grad():
            self._collisions.mapped_rows.copy_(order + self._rows.start)
            for name, tensors in self._collisions.every_tensor().items():
                for tensor in tensors:
                    tensor.copy_(self._copies[name][order])
        self.follow()


class _TensorVersions:
    """Remembers tensors, and how often torch has counted a change of each."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._versions = [(tensor, tensor._version) for tensor in tensors]

    def are_those_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors, and none has changed."""
        # Buffers may be replaced, and a new tensor may have the count of the old one.
        return len(tensors) == len(self._versions) and all(
            tensor is earlier_tensor and tensor._version == version
            for tensor, (earlier_tensor, version) in zip(tensors, self._versions, strict=True)
        )


class CollisionSource:
    """Stores and restores the managed collision modules of one model; see `tables.TableSource`.

    It has no tables: those are plain tables of the model, or those of `TorchRecSource`.
    """

    name = "managed_collisions"
    settings_step = mismatches.COLLISION_SETTINGS

    def __init__(self, collisions: Mapping[str, _Collisions]) -> None:
        self.tables: Sequence[Table] = ()
        self.modules: Collection[str] = tuple(
            name for name, of_module in collisions.items() if of_module.sharded
        )
        self._collisions = tuple(collisions.values())

    def stores_buffer(self, module: nn.Module, name: str) -> bool:
        """Whether this is a buffer that the module makes in its first batch.

        A new model lacks it. See `tables.TableSource.stores_buffer`.
        """
        return type(module) is MCHManagedCollisionModule and name.startswith("_history_")

    def optimizers(self, given: Sequence[Optimizer]) -> Sequence[Optimizer]:
        """Return the optimizers that were given; see `tables.TableSource.optimizers`."""
        return given

    def track(self, markers: Mapping[str, Marker]) -> None:
        """Do nothing: who lists a table reports its changes."""

    def untrack(self) -> None:
        """Do nothing, as `track` does."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all modules on this rank; see `tables.TableSource.state_dict`."""
        return {collisions.name: collisions.state() for collisions in self._collisions}

    def lacks_states(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the ids of a shard here are not all in these ranks' states.

        See `tables.TableSource.lacks_states`.
        """
        return any(
            collisions.sharded and not collisions.matching(states)
            for collisions in self._collisions
        )

    def differences(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return why the states cannot be loaded; see `tables.TableSource.differences`."""
        names = {collisions.name for collisions in self._collisions}
        stored_names = {name for state in states for name in state}
        return [
            *(
                f"the managed collisions of {name!r} are only "
                f"{'here' if name in names else 'in the checkpoint'}"
                for name in sorted(names ^ stored_names)
            ),
            *(
                text
                for collisions in self._collisions
                if collisions.name in stored_names
                for text in collisions.differences(states)
            ),
        ]

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the state of all modules; see `tables.TableSource.load_state_dicts`."""
        for collisions in self._collisions:
            collisions.load(collisions.matching(states))


class _Collisions:
    """Reads and writes one module; follows it, because its tensors may be replaced.

    Raises:
        SettingsError: the module or its eviction policy is not supported.
    """

    def __init__(self, name: str, module: nn.Module, *, sharded: bool) -> None:
        if type(module) is not MCHManagedCollisionModule:
            kind = type(module).__name__
            raise _refused(
                name,
                f"a {kind}, whose state recpoint does not know{_WHY_UNKNOWN.get(kind, '')}",
                "an MCHManagedCollisionModule",
                "use MCHManagedCollisionModule, or train these ids without managed collisions",
            )
        self.name, self.sharded = name, sharded
        self._module: Any = module
        check_attributes(module, _ATTRIBUTES, of=f"the managed collisions of {name!r}")
        policy = self._module._eviction_policy
        if type(policy) not in _POLICIES:
            raise _refused(
                name,
                f"the eviction policy {type(policy).__name__}, whose state recpoint does not know",
                " or ".join(kind.__name__ for kind in _POLICIES),
                "choose one of these policies",
            )

    @property
    def raw_ids(self) -> Tensor:
        """The raw ids in ascending order, int64 [rows]; `NO_ID` stands for none."""
        tensor: Tensor = self._module._mch_sorted_raw_ids
        return tensor

    @property
    def mapped_rows(self) -> Tensor:
        """The row of the table that each of `raw_ids` has, int64 [rows]."""
        tensor: Tensor = self._module._mch_remapped_ids_mapping
        return tensor

    def by_position(self) -> dict[str, Tensor]:
        """Return what there is of each of `raw_ids`: name of the row state -> int64 [rows]."""
        # `.to()` replaces the buffers, and evictions go on with the tensors of this dict.
        metadata = self._module._mch_metadata
        return {RAW_ID: self.raw_ids} | {
            f"collisions.{name}": tensor for name, tensor in metadata.items()
        }

    def every_tensor(self) -> dict[str, list[Tensor]]:
        """Return the same as `by_position`, with the module's buffers where these are others."""
        return {
            name: [tensor, *self._replaced_buffer(name, tensor)]
            for name, tensor in self.by_position().items()
        }

    def _replaced_buffer(self, name: str, tensor: Tensor) -> list[Tensor]:
        buffer = self._module._buffers.get(f"_mch_{name.removeprefix('collisions.')}")
        return [] if buffer is None or buffer is tensor else [buffer]

    def _settings(self) -> dict[str, Any]:
        """Return what must be the same in the checkpoint, for evictions to go on as they would."""
        policy = self._module._eviction_policy
        return {
            "eviction policy": type(policy).__name__,
            "decay exponent": float(getattr(policy, "_decay_exponent", 0.0)),
            "eviction interval": int(self._module._eviction_interval),
            "input hash size": int(self._module._input_hash_size),
            "sharded": self.sharded,
        }

    def state(self) -> dict[str, Any]:
        """Return the module's state without row states, with live tensors."""
        module = self._module
        length = module._current_history_buffer_offset
        is_begun = module._input_history_buffer_size >= 0
        return {
            "settings": self._settings(),
            "rank": _rank(),
            "first_row": int(module._output_global_offset),
            "rows": int(module._zch_size),
            "shard": self._shard if self.sharded else 0,
            "shards": int(module._buckets),
            "batches": int(module._current_iter_tensor),
            "current_iter": int(module._current_iter),
            "last_eviction_iter": int(module._last_eviction_iter),
            "history_size": int(module._input_history_buffer_size),
            "history": module._history_accumulator[:length] if is_begun else None,
            "history_of": {
                name: tensor[:length] for name, tensor in module._history_metadata.items()
            },
            "evicted": module._evicted_emb_indices if module._evicted else None,
            "replaced": {} if self.sharded else self._replaced(),
        }

    def _replaced(self) -> dict[str, Tensor]:
        """Return the tensors of evictions that are no buffers any more, with live tensors."""
        return {name: tensors[0] for name, tensors in self.every_tensor().items() if tensors[1:]}

    def matching(self, states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the stored states that this module goes on from; [] if some are not there.

        Those of a shard hold its rows, from one rank or several; a module that is whole takes that
        of this rank, or the first.
        """
        stored = [state[self.name] for state in states if self.name in state]
        if not self.sharded:
            own_states = [state for state in stored if state["rank"] == _rank()]
            return (own_states or stored)[:1]
        start = int(self._module._output_global_offset)
        states_inside = [
            state
            for state in stored
            if start <= state["first_row"]
            and state["first_row"] + state["rows"] <= start + self._size
        ]
        # Shards of one checkpoint are disjoint, so as many rows are all rows.
        is_all = sum(state["rows"] for state in states_inside) == self._size
        return sorted(states_inside, key=lambda state: int(state["first_row"])) if is_all else []

    def differences(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return why the module cannot go on from these states, one sentence each."""
        stored = [state[self.name] for state in states if self.name in state]
        first = stored[0]["settings"]
        texts = [
            f"the managed collisions of {self.name!r} have the {setting} {value} here and "
            f"{first.get(setting)} in the checkpoint"
            for setting, value in self._settings().items()
            if first.get(setting) != value
        ]
        if texts:
            return texts
        if not self.sharded:
            return []  # the buffers are compared with those of the model
        shards_inside = self.matching(states)
        if not shards_inside or not self._gets_ids_of(shards_inside):
            start = int(self._module._output_global_offset)
            ranges = ", ".join(
                f"{state['first_row']} … {state['first_row'] + state['rows'] - 1}"
                for state in sorted(stored, key=lambda state: int(state["first_row"]))
            )
            return [
                f"the managed collisions of {self.name!r} have rows {start} … "
                f"{start + self._size - 1} on this rank, and rows {ranges} on the checkpoint's: "
                "TorchRec decides by a raw id which rank maps it, so a rank here must have all ids "
                "of one or several ranks there, as one rank has"
            ]
        if len({(state["batches"], state["last_eviction_iter"]) for state in shards_inside}) > 1:
            return [f"ranks of the checkpoint have evicted ids of {self.name!r} at other batches"]
        return []

    def _id_shards(self, count: int) -> IdShards:
        """Return how raw ids are divided among as many shards."""
        return IdShards(int(self._module._input_hash_size), count)

    def _gets_ids_of(self, shards_inside: Sequence[Mapping[str, Any]]) -> bool:
        """Whether lookups on this rank get the ids below the hash size that these shards map."""
        count, stored_count = int(self._module._buckets), int(shards_inside[0]["shards"])
        if count in (1, stored_count):
            return True
        ids = self._id_shards(count).ids_of(self._shard)
        stored_shards = self._id_shards(stored_count)
        first_ids = stored_shards.ids_of(shards_inside[0]["shard"])
        last_ids = stored_shards.ids_of(shards_inside[-1]["shard"])
        return bool(ids) and (ids.start, ids.stop) == (first_ids.start, last_ids.stop)

    @property
    def _shard(self) -> int:
        """Number of the shard, from 0; TorchRec has the first row of each."""
        first_rows: list[int] = self._module._output_segments_tensor.tolist()
        return first_rows.index(self._module._output_global_offset)

    @property
    def _size(self) -> int:
        return int(self._module._zch_size)

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load what `matching` returned, which `differences` has checked.

        Raises:
            IncompatibleModel: a raw id is above the input hash size, and another rank would look
                for it after a cut in another number of shards.
        """
        module, device = self._module, self.raw_ids.device
        first = states[0]
        if self.sharded and module._buckets not in (1, first["shards"]):
            self._refuse_strays()
        module._current_iter_tensor.fill_(first["batches"])
        module._current_iter = first["current_iter"]
        module._last_eviction_iter = first["last_eviction_iter"]
        evicted_rows = [state["evicted"] for state in states if state["evicted"] is not None]
        module._evicted = bool(evicted_rows)
        if evicted_rows:
            module._evicted_emb_indices = torch.cat(evicted_rows).to(device)
        self._load_history([state for state in states if state["history_size"] >= 0], device)
        if not self.sharded:
            with torch.no_grad():
                for name, tensors in self.every_tensor().items():
                    # The buffer comes last, and has been restored.
                    values = first["replaced"].get(name, tensors[-1])
                    for tensor in tensors:
                        tensor.copy_(values)

    def _load_history(self, states: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        """Load the ids since the last eviction; the module makes these buffers in its first batch.

        What is behind them in the buffers is never read, and their order changes nothing: an
        eviction counts each id.
        """
        module = self._module
        module._input_history_buffer_size = -1
        module._current_history_buffer_offset = 0
        if not states:
            return
        size = sum(state["history_size"] for state in states)
        history = torch.cat([state["history"] for state in states])
        module._input_history_buffer_size = size
        module._current_history_buffer_offset = len(history)
        module._history_accumulator = _padded(history, size, device)
        for name in states[0]["history_of"]:
            values = torch.cat([state["history_of"][name] for state in states])
            buffer = _padded(values, size, device)
            module.register_buffer(f"_history_{name}", buffer, persistent=False)
            module._history_metadata[name] = buffer

    def _refuse_strays(self) -> None:
        raw_ids = self.raw_ids[self.raw_ids != NO_ID]
        shards = self._id_shards(int(self._module._buckets)).of(raw_ids)
        strays = raw_ids[shards != self._shard]
        if strays.numel():
            raise IncompatibleModel(
                f"the managed collisions of {self.name!r}",
                found=f"raw id {int(strays[0])}, which another rank looks for here",
                expected=f"raw ids below the input hash size, {self._module._input_hash_size}",
                next_step="go on with as many ranks as the checkpoint has, or with one",
            )


def _refuse_overwritten(model: nn.Module, name: str) -> None:
    """Refuse a module whose buffers other ranks get from rank 0, but not what is outside buffers.

    `DistributedDataParallel` gives them those that it has found when it was built. A new process
    finds others, because a module makes buffers in its first batch.

    Raises:
        SettingsError: the module is in such a wrapper.
    """
    for above, wrapper in model.named_modules():
        is_inside = name.startswith(f"{above}." if above else "")
        if (
            is_inside
            and isinstance(wrapper, DistributedDataParallel)
            and wrapper.broadcast_buffers
            and dist.get_world_size(wrapper.process_group) > 1
        ):
            raise _refused(
                name,
                "DistributedDataParallel, which overwrites a part of what each rank has counted "
                "with that of rank 0",
                "managed collisions of each rank's own, or sharded ones",
                "pass broadcast_buffers=False, or shard the tables with DistributedModelParallel",
            )


def _padded(values: Tensor, size: int, device: torch.device) -> Tensor:
    buffer = torch.zeros(size, dtype=torch.int64, device=device)
    buffer[: len(values)] = values.to(device)
    return buffer


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _refused(name: str, found: str, expected: str, next_step: str) -> SettingsError:
    return SettingsError(
        f"the managed collisions of {name!r}", found=found, expected=expected, next_step=next_step
    )
