"""Builds the meter of a training, and refuses by name what cannot be measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from recpoint.catalog.persist.priced_codes import priced_method
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.tables.counted_lookups import LookupCounts
from recpoint.embeddings.tables.managed_collisions import has_torchrec_base
from recpoint.embeddings.tables.tables import Table, TableSource
from recpoint.errors import SettingsError
from recpoint.kernels.quantize import ASYMMETRIC
from recpoint.trainer_plugin.loss.measure import MeasuredModel
from recpoint.trainer_plugin.loss.meter import LossMeter
from recpoint.trainer_plugin.ranks.sharding import StoredShard
from recpoint.trainer_plugin.schedule.outlook import keys_by_loss, table_widths
from recpoint.trainer_plugin.settings import Precision
from recpoint.trainer_plugin.snapshot.live_tables import LiveTables
from recpoint.trainer_plugin.state.optimizers import OptimizerState
from recpoint.trainer_plugin.state.second_moments import SecondMoments
from recpoint.trainer_plugin.tables import is_piece

__all__ = ["meter_of"]


@runtime_checkable
class _BatchedSource(Protocol):
    """A source whose tables FBGEMM looks up; `integrations.torchrec_source` has it.

    Attributes:
        tables: as `TableSource.tables`.
    """

    tables: Sequence[Table]

    def pass_counts(self) -> Sequence[Tensor]:
        """Return tensors outside the model's buffers that forward passes change."""


def meter_of(
    precision: Precision,
    model: nn.Module,
    shards: Sequence[StoredShard],
    sources: Sequence[TableSource],
    optimizers: OptimizerState,
    counts: Mapping[str, LookupCounts],
    cache: Cache | None,
    *,
    several: bool,
) -> LossMeter | None:
    """Return what measures the loss that rounding costs; None: no loss decides about widths.

    Args:
        precision: the user's setting.
        model: the model.
        shards: the tables of the job.
        sources: the libraries that supply tables in their own form.
        optimizers: the state of the optimizers.
        counts: `Table.key` -> counts of lookups, of tables without squared gradients.
        cache: has the rows of cached tables; None: no table is cached.
        several: whether the job has several ranks.

    Raises:
        SettingsError: the cost of rounding a table cannot be measured in this model.
    """
    setting = precision.by_loss
    if setting is None:
        return None
    model = _inside(model)
    shards = [_with_copy(shard) for shard in shards]
    tables = [shard.table for shard in shards if shard.table is not None]
    whole = {shard.key for shard in shards if shard.copy is not None or not several}
    priced = keys_by_loss(tables, precision)
    widths = table_widths(tables, precision)
    wide = frozenset(table.key for table in tables if widths[table.key] == 8) - priced
    moments = SecondMoments(optimizers.optimizers, sources, counted=counts.keys())
    _refuse_model(model, several=several)
    batched_sources = [source for source in sources if isinstance(source, _BatchedSource)]
    batched = {table.key for source in batched_sources for table in source.tables}
    for table in tables:
        if table.cached and several and table.own_states:
            raise SettingsError(
                f"Checkpointer(bits=Loss(...)): keyed table {table.name!r}",
                found="a cache that ranks share, in which they make each lookup together",
                expected="lookups that a measurement can repeat on one rank",
                next_step="pass bits=8, or leave the keyed table out of cached()",
            )
        if table.key in priced | wide:
            is_batched = table.key in batched
            _refuse_table(table, is_batched=is_batched, is_whole=is_batched or table.key in whole)
            if table.cached and several:
                raise _refused_table(table, "a table in a cache that several ranks share")
            if is_batched and table.key in counts:
                raise _refused_table(table, "a table of TorchRec without squared gradients")
        if table.key in priced:
            moments.require(table)
    moments.require_one_unit([table for table in tables if table.key in priced])
    return LossMeter(
        setting,
        MeasuredModel(
            module=model,
            is_sharded=bool(batched_sources),
            pass_counts=partial(_pass_counts, batched_sources),
            staying=nullcontext if cache is None else cache.staying,
        ),
        live=partial(LiveTables(shards, optimizers).tables, None),
        priced=priced,
        wide=wide,
        moments=moments,
        method=priced_method(precision.quantizer) or ASYMMETRIC,
        counts=counts,
        several=several,
    )


def _pass_counts(sources: Sequence[_BatchedSource]) -> list[Tensor]:
    return [count for source in sources for count in source.pass_counts()]


def _inside(model: nn.Module) -> nn.Module:
    """Return what `DistributedDataParallel` wraps, alone or in TorchRec's wrapper.

    Its forward pass tells other ranks nothing, or only what lookups in sharded tables need.
    """
    wrapped: Any = model
    if isinstance(model, _wrapper()) or has_torchrec_base(model, "DistributedModelParallel"):
        wrapped = model.module
    inner: nn.Module = wrapped
    return inner


def _wrapper() -> Any:
    # Code that has made one has imported this module.
    return getattr(sys.modules.get("torch.nn.parallel"), "DistributedDataParallel", ())


def _with_copy(shard: StoredShard) -> StoredShard:
    """Return the shard with this rank's copy of the table, if another rank stores it."""
    return shard if shard.table is not None else replace(shard, table=shard.copy)


def _refuse_table(table: Table, *, is_batched: bool, is_whole: bool) -> None:
    reason = None
    if table.row_states is not None and not is_batched:
        reason = "a table of a library, whose lookups are its own"
    elif not is_whole:
        reason = "a table that not all ranks hold whole"
    elif table.maps_ids:
        reason = f"{table.id_map}, which give rows to ids as these are looked up"
    elif table.changed_by_lookup:
        reason = "max_norm, with which a lookup rewrites rows"
    elif not table.weight.is_cpu:
        reason = f"a table on {table.weight.device}"
    if reason is not None:
        raise _refused_table(table, reason)


def _refused_table(table: Table, reason: str) -> SettingsError:
    return SettingsError(
        f"Checkpointer(bits=Loss(...)): table {table.name!r}",
        found=reason,
        expected="an nn.Embedding or nn.EmbeddingBag, or a table of TorchRec, on the CPU, without "
        "max_norm",
        next_step=f"pass Precision(bits=Loss(...), tables={{{table.name!r}: 'lossless'}}), or "
        "bits=8 for all tables",
    )


def _refuse_model(model: nn.Module, *, several: bool) -> None:
    talks_to_ranks = (_wrapper(), nn.SyncBatchNorm) if several else _wrapper()
    reason = None
    for name, module in model.named_modules():
        if isinstance(module, talks_to_ranks):
            kind = type(module).__name__
            reason = f"module {name!r}, a {kind}, which exchanges with other ranks"
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_piece(tensor):
            reason = f"{name!r}, of which this process holds a piece"
        elif not tensor.is_cpu:
            reason = f"{name!r} on {tensor.device}"
    if reason is not None:
        raise SettingsError(
            "Checkpointer(bits=Loss(...)): the model",
            found=reason,
            expected="a whole model on the CPU, itself or in one DistributedDataParallel",
            next_step="pass a number of bits, such as bits=8",
        )
