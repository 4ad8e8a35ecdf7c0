"""Builds the meter of a training, and refuses by name what cannot be measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from recpoint.embeddings.tables.counted_lookups import LookupCounts
from recpoint.embeddings.tables.tables import Table, TableSource
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.loss.meter import LossMeter
from recpoint.trainer_plugin.ranks.sharding import StoredShard
from recpoint.trainer_plugin.schedule.outlook import keys_by_loss, table_widths
from recpoint.trainer_plugin.settings import Precision
from recpoint.trainer_plugin.snapshot.live_tables import LiveTables
from recpoint.trainer_plugin.state.optimizers import OptimizerState
from recpoint.trainer_plugin.state.second_moments import SecondMoments
from recpoint.trainer_plugin.tables import is_piece

__all__ = ["meter_of"]


def meter_of(
    precision: Precision,
    model: nn.Module,
    shards: Sequence[StoredShard],
    sources: Sequence[TableSource],
    optimizers: OptimizerState,
    counts: Mapping[str, LookupCounts],
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
    for table in tables:
        if table.key in priced | wide:
            _refuse_table(table, is_whole=table.key in whole)
        if table.key in priced:
            moments.require(table)
    moments.require_one_unit([table for table in tables if table.key in priced])
    return LossMeter(
        setting,
        model,
        live=partial(LiveTables(shards, optimizers).tables, None),
        priced=priced,
        wide=wide,
        moments=moments,
        counts=counts,
        several=several,
    )


def _inside(model: nn.Module) -> nn.Module:
    """Return what `DistributedDataParallel` wraps, whose forward pass tells other ranks nothing."""
    if isinstance(model, _wrapper()):
        wrapped: nn.Module = model.module
        return wrapped
    return model


def _wrapper() -> Any:
    # Code that has made one has imported this module.
    return getattr(sys.modules.get("torch.nn.parallel"), "DistributedDataParallel", ())


def _with_copy(shard: StoredShard) -> StoredShard:
    """Return the shard with this rank's copy of the table, if another rank stores it."""
    return shard if shard.table is not None else replace(shard, table=shard.copy)


def _refuse_table(table: Table, *, is_whole: bool) -> None:
    reason = None
    if table.cached:
        reason = "a table in a cache, of which only some rows are in memory"
    elif table.row_states is not None:
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
        raise SettingsError(
            f"Checkpointer(bits=Loss(...)): table {table.name!r}",
            found=reason,
            expected="an nn.Embedding or nn.EmbeddingBag on the CPU, without max_norm",
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
