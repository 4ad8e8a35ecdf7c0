"""Presents the shards of TorchRec's `DistributedModelParallel` as tables, with fused optimizers.

Tables are named as in the model before it was sharded: table t1 of a collection at `ebc` is
`ebc.embedding_bags.t1`, whatever the sharding plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from recpoint.catalog.restore.state import canonical_name
from recpoint.embeddings.tables.tables import Marker, Table
from recpoint.errors import SettingsError
from recpoint.format.manifest import Columns
from recpoint.trainer_plugin import mismatches
from recpoint.trainer_plugin.fused_optimizers import same_rate
from recpoint.trainer_plugin.integrations.fbgemm import Kernel
from recpoint.trainer_plugin.integrations.managed_collisions import CollisionRows, taken_apart
from recpoint.trainer_plugin.integrations.torchrec_names import check_attributes
from recpoint.trainer_plugin.integrations.torchrec_optimizers import torch_optimizers

__all__ = ["ShardTable", "TorchRecSource"]

#: Entries of a fused optimizer's state that are not hyperparameters, or follow from one.
_FOLLOWS = frozenset(("iter", "lr"))
#: Class of a sharded module -> attribute of the plain module that holds its tables.
_COLLECTIONS = {
    ShardedEmbeddingBagCollection: "embedding_bags",
    ShardedEmbeddingCollection: "embeddings",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardTable(Table):
    """The rows and columns of one table that one TBE of this process holds.

    Attributes:
        kernel: the TBE (table-batched embeddings).
        position: position of the shard in the TBE.
        slice: the parameter that a torch optimizer trains; None: the table is fused.
        collisions: the raw ids of the rows; None: ids are rows.
    """

    kernel: Kernel
    position: int
    slice: Tensor | None
    collisions: CollisionRows | None = None

    @property
    def weight(self) -> Tensor:
        """The rows in the TBE's buffer, or the parameter that holds the same rows."""
        if self.slice is not None:
            return self.slice
        return self.kernel.weights()[self.position]

    @property
    def first_row(self) -> int:
        """First row, from TorchRec's plan."""
        return self._offsets[0]

    @property
    def table_rows(self) -> int:
        """Number of rows of the whole table, from its configuration."""
        return int(self._config.num_embeddings)

    @property
    def columns(self) -> Columns | None:
        """Columns of the shard, from TorchRec's plan; None: all."""
        whole = int(self._config.embedding_dim)
        return None if self.dim == whole else Columns(first=self._offsets[1], of=whole)

    @property
    def trained(self) -> bool:
        """Whether training changes rows; a fused TBE trains all rows looked up in training mode."""
        return self.fused or self.weight.requires_grad

    @property
    def fused(self) -> bool:
        """Whether the TBE updates rows in backward."""
        return self.kernel.fused

    @property
    def counts_changes(self) -> bool:
        """False: all tables of a TBE are one tensor, whose changes torch counts together."""
        return False

    @property
    def features(self) -> tuple[str, ...]:
        """Features of the table, from its configuration."""
        return tuple(getattr(self._config, "feature_names", ()))

    @property
    def row_states(self) -> Mapping[str, Tensor] | None:
        """Row states of the fused optimizer; None: a torch optimizer trains the table."""
        if not self.fused:
            return None
        states = self.kernel.row_states()[self.position]
        return states if self.collisions is None else {**states, **self.collisions.states}

    @property
    def id_map(self) -> str:
        """Managed collisions, or nothing."""
        return "" if self.collisions is None else "managed collisions"

    @property
    def _config(self) -> Any:
        return self.kernel.tables[self.position]

    @property
    def _offsets(self) -> tuple[int, int]:
        # A replicated table has no shard metadata.
        place = self._config.local_metadata
        return (0, 0) if place is None else (place.shard_offsets[0], place.shard_offsets[1])


class TorchRecSource:
    """Supplies the tables of one model's sharded modules; see `tables.TableSource`.

    Args:
        model: the model.
        sharded: full names and sharded modules; no module is part of another.
    """

    name = "torchrec"
    settings_step = mismatches.SOURCE_SETTINGS

    def __init__(self, model: nn.Module, sharded: Sequence[tuple[str, nn.Module]]) -> None:
        self.modules: Collection[str] = [name for name, _ in sharded]
        self._kernels: list[Kernel] = []
        tables: list[ShardTable] = []
        for name, module in sharded:
            tables += self._shards(canonical_name(model, name), module)
        self._tables = tables
        self.tables: Sequence[Table] = [table for table in tables if table.rows]
        self._handles: list[RemovableHandle] = []

    def _shards(self, name: str, module: nn.Module) -> list[ShardTable]:
        name, module, collision_modules = taken_apart(name, module)
        attribute = _COLLECTIONS.get(type(module))
        if attribute is None:
            raise _refused(
                f"module {name!r}",
                f"a {type(module).__name__}",
                " or ".join(kind.__name__ for kind in _COLLECTIONS),
                "remove it from the sharding plan, or use EmbeddingBagCollection",
            )
        prefix = f"{name}.{attribute}" if name else attribute
        tables = []
        for kernel in _kernels(name, module):
            self._kernels.append(kernel)
            for position, config in enumerate(kernel.tables):
                if config.local_metadata is not None:
                    check_attributes(
                        config.local_metadata, ("shard_offsets",), of=f"module {name!r}"
                    )
                holder = getattr(module, attribute)[config.name]
                table = f"{prefix}.{config.name}"
                shard = ShardTable(
                    name=table,
                    parameter_name=f"{table}.weight",
                    kernel=kernel,
                    position=position,
                    slice=None if kernel.fused else holder.weight,
                )
                if config.name in collision_modules:
                    if not kernel.fused:
                        raise _refused(
                            f"table {table!r}",
                            "managed collisions in a TBE that a torch optimizer trains, in which "
                            "TorchRec cannot initialise rows",
                            "a fused optimizer",
                            "use apply_optimizer_in_backward on the tables before they are sharded",
                        )
                    rows = range(shard.first_row, shard.first_row + shard.rows)
                    collisions = CollisionRows(table, collision_modules[config.name], rows)
                    shard = replace(shard, collisions=collisions)
                tables.append(shard)
        return tables

    def pass_counts(self) -> Sequence[Tensor]:
        """Return the counts of forward passes that FBGEMM keeps beside the model's buffers."""
        return [count for kernel in self._kernels for count in kernel.pass_counts()]

    def stores_buffer(self, module: nn.Module, name: str) -> bool:
        """Whether it stores a buffer of another module; never."""
        return False

    def optimizers(self, optimizers: Sequence[Optimizer]) -> Sequence[Optimizer]:
        """Return the torch optimizers among `optimizers`; see `tables.TableSource.optimizers`.

        Raises:
            SettingsError: an optimizer of TorchRec has state that cannot be stored.
        """
        return torch_optimizers(optimizers)

    def track(self, markers: Mapping[str, Marker]) -> None:
        """Report changes of fused tables; gradients show changes of the others.

        See `tables.TableSource.track`.
        """
        self.untrack()
        for kernel in self._kernels:
            if kernel.fused:
                kernel_tables = [table for table in self._tables if table.kernel is kernel]
                self._handles.append(
                    kernel.track([_marker(table, markers) for table in kernel_tables])
                )
        for table in self._tables:
            if table.collisions is not None:
                table.collisions.marker = _marker(table, markers)
                self._handles.append(table.kernel.before_lookup(table.collisions.follow))

    def untrack(self) -> None:
        """Take the hooks out of the model; see `tables.TableSource.untrack`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for table in self._tables:
            if table.collisions is not None:
                table.collisions.marker = None

    def state_dict(self) -> dict[str, Any]:
        """Return step counts and hyperparameters of the fused optimizers, by table name."""
        states = {id(kernel): kernel.state() for kernel in self._kernels if kernel.fused}
        return {table.name: states[id(table.kernel)] for table in self._tables if table.fused}

    def lacks_states(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Whether there is a fused table of which none of these ranks held a shard.

        See `tables.TableSource.lacks_states`.
        """
        fused = {table.name for table in self._tables if table.fused}
        return not fused <= {name for state in states for name in state}

    def differences(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return why the states cannot be loaded: a TBE has one value of each hyperparameter.

        See `tables.TableSource.differences`.
        """
        stored = _joined(states)
        differences = []
        for kernel in self._kernels if stored else ():
            names = dict.fromkeys(t.name for t in self._tables if t.kernel is kernel)
            saved_states = [(name, stored[name]) for name in names if name in stored]
            if not kernel.fused or not saved_states:
                continue
            first, saved_state = saved_states[0]
            for name, state in saved_states[1:]:
                differences += [
                    f"tables {first!r} and {name!r} were trained with "
                    f"{setting.removeprefix('group_')} {saved_state[setting]} and "
                    f"{state[setting]}, and are in "
                    "one module here, which has only one value"
                    for setting in sorted(saved_state.keys() & state.keys() - _FOLLOWS)
                    if not _same(saved_state[setting], state[setting])
                ]
            differences += kernel.differences(first, saved_state)
        return differences

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load step counts and hyperparameters; see `tables.TableSource.load_state_dicts`."""
        stored = _joined(states)
        for kernel in self._kernels:
            names = [table.name for table in self._tables if table.kernel is kernel]
            saved_states = [stored[name] for name in names if name in stored]
            if kernel.fused and saved_states:
                # A TBE has one count of steps. If its tables come from several TBEs, counts differ
                # only if a TBE took no part in some batches; take the largest, as FBGEMM would.
                kernel.load_state(max(saved_states, key=lambda state: state["iter"] or 0))
        for table in self._tables:
            if table.collisions is not None:
                table.collisions.write_back()


def _joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    joined: dict[str, Mapping[str, Any]] = {}
    for state in states:
        joined |= state
    return joined


def _same(value: Any, other_value: Any) -> bool:
    are_floats = isinstance(value, float) and isinstance(other_value, float)
    return same_rate(value, other_value) if are_floats else bool(value == other_value)


class _NoRows:
    """Replaces a marker for a shard without rows, of which nothing can be looked up."""

    def looked_up(self, ids: Tensor) -> None:
        pass

    def applied(self) -> None:
        pass

    def mark(self, ids: Tensor) -> None:
        pass

    def mark_all(self) -> None:
        pass


def _marker(table: ShardTable, markers: Mapping[str, Marker]) -> Marker:
    return markers[table.key] if table.rows else _NoRows()


def _kernels(name: str, module: nn.Module) -> Iterator[Kernel]:
    check_attributes(module, ("_lookups",), of=f"module {name!r}")
    lookups: Any = module._lookups
    for lookup in lookups:
        while isinstance(lookup, DistributedDataParallel):
            lookup = lookup.module
        check_attributes(lookup, ("_emb_modules",), of=f"module {name!r}")
        for wrapper in lookup._emb_modules:
            kernel = Kernel(name, wrapper)
            names = [config.name for config in kernel.tables]
            if not kernel.fused and len(set(names)) < len(names):
                raise _refused(
                    f"tables of {name!r}",
                    "several column shards of one table in one module of compute kernel 'dense'",
                    "one shard of each table",
                    "choose the compute kernel 'fused' for tables that are sharded by columns",
                )
            yield kernel


def _refused(subject: str, found: str, expected: str, next_step: str) -> SettingsError:
    return SettingsError(subject, found=found, expected=expected, next_step=next_step)
