"""Builds the meter of a training, and refuses by name what cannot be measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
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
) -> LossMeter | None:
    """Return what measures the loss that rounding costs; None: no loss decides about widths.

    Args:
        precision: the user's setting.
        model: the model.
        shards: the tables of the job, which has one rank.
        sources: the libraries that supply tables in their own form.
        optimizers: the state of the optimizers.
        counts: `Table.key` -> counts of lookups, of tables without squared gradients.

    Raises:
        SettingsError: the cost of rounding a table cannot be measured in this model.
    """
    setting = precision.by_loss
    if setting is None:
        return None
    tables = [shard.table for shard in shards if shard.table is not None]
    priced = keys_by_loss(tables, precision)
    widths = table_widths(tables, precision)
    wide = frozenset(table.key for table in tables if widths[table.key] == 8) - priced
    moments = SecondMoments(optimizers.optimizers, sources, counted=counts.keys())
    _refuse_model(model)
    for table in tables:
        if table.key in priced | wide:
            _refuse_table(table, fused=table.row_states is not None)
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
    )


def _refuse_table(table: Table, *, fused: bool) -> None:
    reason = None
    if table.cached:
        reason = "a table in a cache, of which only some rows are in memory"
    elif fused:
        reason = "a table of a library, whose lookups are its own"
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


def _refuse_model(model: nn.Module) -> None:
    wrapper: Any = getattr(sys.modules.get("torch.nn.parallel"), "DistributedDataParallel", ())
    reason = None
    for name, module in model.named_modules():
        if isinstance(module, wrapper):
            reason = f"module {name!r}, a DistributedDataParallel, which exchanges with other ranks"
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_piece(tensor):
            reason = f"{name!r}, of which this process holds a piece"
        elif not tensor.is_cpu:
            reason = f"{name!r} on {tensor.device}"
    if reason is not None:
        raise SettingsError(
            "Checkpointer(bits=Loss(...)): the model",
            found=reason,
            expected="a whole model on the CPU, in one process",
            next_step="pass a number of bits, such as bits=8",
        )
