"""Builds the parts of a Checkpointer that know its model, its optimizers and its staging area.

Each rank builds its own parts. The ranks communicate if a part depends on what other ranks have.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recpoint.catalog.staging.area import default_staging_root
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.cached_table import CachedTracker
from recpoint.embeddings.cache.lookup_hooks import cache_of
from recpoint.embeddings.cache.progress import CacheStats
from recpoint.embeddings.cache.reader_plans import planned_cache
from recpoint.embeddings.home.channel import GlooChannel
from recpoint.embeddings.home.initial import Initial
from recpoint.embeddings.tables.keyed import KeyCounts
from recpoint.embeddings.tables.marks import Tracker
from recpoint.embeddings.tables.optimizers import OptimizerWatch
from recpoint.embeddings.tables.tables import Table, TableSource
from recpoint.errors import SettingsError
from recpoint.lookahead.owned_rows import OwnedRows
from recpoint.trainer_plugin.batches.count import BatchCount
from recpoint.trainer_plugin.batches.signs import TrainingSigns
from recpoint.trainer_plugin.integrations import RateSchedule, take_apart
from recpoint.trainer_plugin.integrations.keyed import counts_by_table
from recpoint.trainer_plugin.loss.meter import LossMeter
from recpoint.trainer_plugin.loss.suitability import meter_of
from recpoint.trainer_plugin.loss_setting import LossFigures
from recpoint.trainer_plugin.named_tables import NamedTables
from recpoint.trainer_plugin.pipeline.coming_rows import ComingRows
from recpoint.trainer_plugin.ranks.agreement import Replicas, agree_on_settings
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.ranks.sharding import (
    HeldPiece,
    StoredShard,
    copies_of,
    held_pieces,
    lay_out,
    local_pieces,
)
from recpoint.trainer_plugin.restore.growth import Growth
from recpoint.trainer_plugin.restore.start import TrainingJob
from recpoint.trainer_plugin.schedule.outlook import keys_by_loss
from recpoint.trainer_plugin.settings import Precision, Settings
from recpoint.trainer_plugin.snapshot.cut import Cutter
from recpoint.trainer_plugin.snapshot.memory_bound import MemoryBound
from recpoint.trainer_plugin.snapshot.record_bound import RecordBound
from recpoint.trainer_plugin.snapshot.staging import StagingArea
from recpoint.trainer_plugin.state.lookahead import Lookahead
from recpoint.trainer_plugin.state.model import ModelState
from recpoint.trainer_plugin.state.optimizers import OptimizerState
from recpoint.trainer_plugin.state.reader import Stateful
from recpoint.trainer_plugin.state.second_moments import counts_of
from recpoint.trainer_plugin.state.training_state import TrainingState
from recpoint.trainer_plugin.state.unknown_optimizers import UnknownOptimizers
from recpoint.trainer_plugin.tables import find_tables, hold_pieces, optimizer_list

__all__ = ["Assembly", "Trained", "assemble", "look_at", "why_no_fulls_ahead"]

_log = logging.getLogger("recpoint")


@dataclass(frozen=True)
class Trained:
    """What this process trains: the model, its tables and its other state.

    Attributes:
        module: the model.
        optimizers: the optimizers, without those that train only tables of sources.
        tables: the rows that this process holds of each table.
        sources: the libraries that supply tables in their own form.
        model_state: the state of the model outside its tables.
        pieces: for each tensor that is split over ranks, by name, the piece that is held here.
        schedules: what sets learning rates around the optimizers.
    """

    module: nn.Module
    optimizers: tuple[Optimizer, ...]
    tables: tuple[Table, ...]
    sources: tuple[TableSource, ...]
    model_state: ModelState
    pieces: dict[str, HeldPiece]
    schedules: tuple[RateSchedule, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """The parts of a Checkpointer that know its model. They write nothing before `track`.

    Attributes:
        trained: what this process trains.
        shards: all tables of the job, in the order in which they are stored.
        trackers: `Table.key` -> tracker of the table's dirty rows, for tables that this rank
            stores.
        counting: trackers of tables that another rank stores, because lookups are counted.
        watch: watches the optimizers' steps.
        state: the training state outside the tables.
        tables: the tables by name.
        signs: see what training does.
        count: decides which batches are trained.
        job: the model and its ranks, for a restore.
        cutter: cuts snapshots of tables and state.
        area: the staging area.
        memory: the most memory that snapshots take there.
        records: estimates the records of coming checkpoints.
        replicas: checks the state that is equal on all ranks.
        cache: has the rows of cached tables; None: no table is cached.
        loss: measures the loss that rounding costs; None: nobody asked for that.
        coming: knows the rows of coming batches; None: the reader does not look ahead, or tables
            are in a cache: their rows are copied after the cut, not before it.
        fulls_window: how many batches before its cut a full is copied; 0: it is copied in the
            stall; None: that is measured.
    """

    trained: Trained
    shards: tuple[StoredShard, ...]
    trackers: dict[str, Tracker]
    counting: dict[str, Tracker]
    watch: OptimizerWatch
    state: TrainingState
    tables: NamedTables
    signs: TrainingSigns
    count: BatchCount
    job: TrainingJob
    cutter: Cutter
    area: StagingArea
    memory: MemoryBound
    records: RecordBound
    replicas: Replicas
    cache: Cache | None
    loss: LossMeter | None
    coming: ComingRows | None
    fulls_window: int | None

    def track(self, changed: Mapping[str, Tensor]) -> None:
        """Hook into the model, and note rows that change from now on.

        Args:
            changed: `Table.key` -> dirty bitmap of the rows that have changed already.
        """
        for name, tracker in self.trackers.items():
            tracker.forget(changed.get(name))
            tracker.install()
        for tracker in self.counting.values():
            tracker.install()
        for source in self.trained.sources:
            source.track(self.trackers)
        self.watch.install()
        self.signs.install()
        self.count.begin()

    def untrack(self) -> None:
        """Take the hooks out of the model."""
        self.watch.remove()
        for source in self.trained.sources:
            source.untrack()
        for tracker in (self.trackers | self.counting).values():
            tracker.remove()
        self.signs.remove()
        self.count.end()

    def follow_growth(self, table: Table, initial: Initial, entries: Mapping[str, Tensor]) -> None:
        """Follow a table that has more rows now.

        Args:
            table: the table.
            initial: computes the first values of the new rows.
            entries: name of a row state -> its entry of a new row.
        """
        self.job.growth.learn(table, initial, entries)
        (self.trackers | self.counting)[table.key].follow_growth()

    def check_room(self, *, jobs: int) -> None:
        """Refuse a staging area that is too small for the first checkpoints. Collective.

        Args:
            jobs: the most slots of this rank.

        Raises:
            SettingsError: it is too small.
        """
        if self.replicas.stored_elsewhere:
            self.memory.measure()  # less than before: other ranks store a part
        self.area.room.refuse_if_small(self.memory.agree(), jobs=jobs)

    @property
    def loss_figures(self) -> LossFigures | None:
        """What rounding costs in loss; None: nobody asked for that."""
        return None if self.loss is None else self.loss.figures

    @property
    def key_counts(self) -> dict[str, KeyCounts]:
        """What the keys of each keyed table did so far, by its name."""
        return counts_by_table(self.trained.tables)

    @property
    def cache_stats(self) -> CacheStats | None:
        """What the cache has done so far; None: no table is cached."""
        return None if self.cache is None else self.cache.stats


def look_at(model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]) -> Trained:
    """Find the tables, the other state and the optimizers of a model.

    Raises:
        SettingsError: the model cannot be checkpointed; see `find_tables`.
    """
    if isinstance(model, nn.Module):  # find_tables refuses anything else
        hold_pieces(model)
    inner_optimizers, schedules = take_apart(optimizer_list(optimizers))
    tables, trained, sources = find_tables(model, inner_optimizers)
    model_state = ModelState(model, tables, sources)
    pieces = held_pieces(model_state.tensors())
    return Trained(model, trained, tables, sources, model_state, pieces, tuple(schedules))


def _refuse_fulls_ahead(
    settings: Settings, why_no_window: str | None, *, looks_ahead: bool
) -> None:
    """Refuse a number in `Options.copy_fulls_ahead` that could not be followed.

    Args:
        settings: settings of the Checkpointer.
        why_no_window: why fulls cannot be copied before their cuts; None: they can.
        looks_ahead: whether the reader is a Lookahead.

    Raises:
        SettingsError: fulls cannot be copied before a cut, or a Lookahead has windows of its own.
    """
    batches = settings.options.copy_fulls_ahead
    if not batches:
        return
    if why_no_window is not None:
        raise SettingsError(
            f"Options(copy_fulls_ahead={batches})",
            found=why_no_window,
            expected="tables on the CPU or a CUDA device, in no cache, that are staged as they are",
            next_step="leave it out: checkpoints are the same",
        )
    if looks_ahead:
        raise SettingsError(
            f"Options(copy_fulls_ahead={batches})",
            found="a Lookahead as the reader, whose window says when the copy of a full begins",
            expected="None; or 0, which has fulls copied in their stalls",
            next_step="leave it out, or pass the reader inside without Lookahead",
        )


def _why_staged_later(settings: Settings, cache: Cache | None) -> str | None:
    """Return why rows are staged in or after a cut, wherever they are; None: they need not be."""
    if cache is not None:
        return "tables in a cache, whose rows are copied after the cut"
    if settings.precision.place == "device":
        return 'Precision(place="device"), which quantizes rows in the cut'
    return None


def _why_not_copied(trained: Trained, settings: Settings, cache: Cache | None) -> str | None:
    """Return why chosen rows cannot be copied before a cut; None: they can."""
    for table in trained.tables:
        if not table.weight.is_cpu:
            return f"table {table.name!r} on {table.weight.device}"
    return _why_staged_later(settings, cache)


def why_no_fulls_ahead(devices: Mapping[str, torch.device], precision: Precision) -> str | None:
    """Return why whole tables cannot be copied before a cut; None: they can.

    Args:
        devices: name of a table -> its device.
        precision: how the tables are stored.
    """
    widths = {precision.bits, *precision.tables.values()}
    for name, device in devices.items():
        if device.type not in ("cpu", "cuda"):
            return f"table {name!r} on {device}"
        # A plain cut would stage codes, which follow from the rows at the cut.
        if device.type == "cuda" and precision.place != "host" and widths != {"lossless"}:
            place = precision.place
            return f"table {name!r} on {device}, whose rows Precision({place=}) quantizes there"
    return None


def _refuse_ahead(trained: Trained, why_not_ahead: str | None) -> None:
    """Refuse a Lookahead where rows cannot be copied before a cut.

    Raises:
        SettingsError: a table is on a GPU; managed collisions map ids to its rows; or rows are
            quantized in this process.
    """
    unsupported = why_not_ahead
    for table in trained.tables:
        if unsupported is None and table.maps_ids and not table.own_states:
            unsupported = f"table {table.name!r}, to whose rows {table.id_map} map ids"
    if unsupported is not None:
        raise SettingsError(
            "Checkpointer(reader=Lookahead(...))",
            found=unsupported,
            expected="tables on the CPU, by row numbers or keys, that are staged as they are",
            next_step="pass the reader inside, without Lookahead: checkpoints are the same, and "
            "training waits until all rows are copied",
        )


def _refuse_keyed(trained: Trained) -> None:
    """Refuse keyed tables beside what cannot be trained with them yet.

    Raises:
        SettingsError: there are tables of another library.
    """
    keyed_tables = [table for table in trained.tables if table.own_states]
    libraries = [source.name for source in trained.sources if source.tables]
    if keyed_tables and len(libraries) > 1:
        raise SettingsError(
            f"keyed table {keyed_tables[0].name!r}",
            found=f"tables of {' and '.join(libraries)} in the same model",
            expected="no other tables than those of plain modules",
            next_step="train it without the others, or use an nn.Embedding with ids of its own",
        )
    _refuse_optimizers(trained, keyed_tables)


def _refuse_optimizers(trained: Trained, tables: Sequence[Table]) -> None:
    """Refuse optimizers that must not train these tables; see `Table.refuse_optimizer`."""
    for optimizer in trained.optimizers:
        for group in optimizer.param_groups:
            for table in tables:
                if any(table.weight is parameter for parameter in group["params"]):
                    table.refuse_optimizer(optimizer, group)


def _tables_of_features(ranks: Ranks, trained: Trained) -> dict[str, set[str]]:
    """Return the names of the tables of each feature, on whichever rank they are. Collective."""
    own_features = [(table.name, table.features) for table in trained.tables]
    tables: dict[str, set[str]] = {}
    for name, features in chain.from_iterable(ranks.gather(own_features)):
        for feature in features:
            tables.setdefault(feature, set()).add(name)
    return tables


def _coming_rows(
    ranks: Ranks, shards: Sequence[StoredShard], reader: Lookahead, settings: Settings
) -> ComingRows:
    """Return what knows the rows of coming batches. Collective."""
    if ranks.several and ranks.rank == 0 and settings.interval_batches is None:
        _log.warning(
            "Lookahead on %d ranks: found an interval in seconds, so no rank knows when the next "
            "checkpoint is due, and rows are copied in the stall. Next: pass interval_batches",
            ranks.count,
        )
    own_rows = [
        OwnedRows(shard.key, shard.name, shard.first_row, shard.held_rows)
        for shard in shards
        if shard.table is not None
    ]
    channel = None
    if ranks.several:
        seconds = settings.timeouts.ranks_seconds
        channel = GlooChannel("rows of coming batches", wait_seconds=seconds)
    return ComingRows(
        reader,
        ranks.gather(own_rows),
        rank=ranks.rank,
        channel=channel,
        rows_of_keys={
            shard.name: shard.table.rows_of
            for shard in shards
            if shard.table is not None and shard.table.own_states
        },
    )


def _look_at_cache(ranks: Ranks, trained: Trained) -> Cache | None:
    """Return the cache of the model's tables; None: no table is cached.

    Raises:
        SettingsError: an optimizer changes rows that were not looked up, or ranks do not share the
            home.
    """
    cache = cache_of(trained.module)
    if cache is None:
        return None
    if ranks.count != cache.home.trainers:
        raise SettingsError(
            "Checkpointer(model): recpoint.embeddings.cached(...)",
            found=f"{ranks.count} ranks, and a home of {cache.home.trainers}",
            expected="one home that all ranks share",
            next_step="initialize the process group before recpoint.embeddings.servers(...)",
        )
    _refuse_optimizers(trained, trained.tables)
    return cache


def _require_servers(cache: Cache | None) -> None:
    """Refuse a model whose rows no server has.

    Raises:
        SettingsError: there are no embedding servers.
    """
    if cache is None or not cache.home.staging_servers:
        raise SettingsError(
            "Staging(at_servers=True)",
            found="no tables in a cache" if cache is None else "a home that is no server",
            expected="tables whose rows are on embedding servers",
            next_step="cache the model in recpoint.embeddings.servers(...), or leave it out",
        )


def _tracker_of(table: Table, cache: Cache | None) -> Tracker:
    if cache is None or table.name_in_cache is None:
        return Tracker(table)
    return CachedTracker(table, cache.tables[table.name_in_cache])


def assemble(
    ranks: Ranks,
    trained: Trained,
    settings: Settings,
    *,
    run_url: str,
    reader: Stateful | None,
    schedulers: Sequence[Stateful],
    extras: Mapping[str, Stateful] | None,
) -> Assembly:
    """Build the parts. Collective: all ranks must call it.

    Args:
        ranks: the ranks of the job.
        trained: what this rank trains.
        settings: settings of the Checkpointer.
        run_url: the run URL as the store spells it.
        reader, schedulers, extras: as given to the Checkpointer.

    Raises:
        SettingsError: a setting does not fit the model or differs from another rank's; or part of
            the state cannot be stored.
        RankLost: another rank could not build its parts, and raised the reason there; or it did not
            answer.
    """
    window = reader.window if isinstance(reader, Lookahead) else None
    agree_on_settings(ranks, settings.common | {"run": run_url, "Lookahead.window": window})
    shards = lay_out(ranks, trained.tables)
    growth = Growth(settings.options.grow, {shard.name: shard.rows for shard in shards})
    with ranks.together("looking at the cache"):
        cache = _look_at_cache(ranks, trained)
        _refuse_keyed(trained)
        if settings.staging.at_servers:
            _require_servers(cache)
        why_not_ahead = _why_not_copied(trained, settings, cache)
        why_no_window = _why_staged_later(settings, cache) or why_no_fulls_ahead(
            {table.name: table.weight.device for table in trained.tables}, settings.precision
        )
        _refuse_fulls_ahead(settings, why_no_window, looks_ahead=isinstance(reader, Lookahead))
    # Tables on a GPU have a window only if a number asks for it.
    can_copy_fulls = why_not_ahead is None or (
        why_no_window is None and settings.options.copy_fulls_ahead is not None
    )
    if isinstance(reader, Lookahead):
        with ranks.together("looking at the reader"):
            if cache is None:
                _refuse_ahead(trained, why_not_ahead)
        features = _tables_of_features(ranks, trained)
        with ranks.together("attaching the reader"):
            reader.attach(
                {shard.name: shard.rows for shard in shards},
                planned_cache(trained.module),
                features,
            )
    with ranks.together("looking at the state of training"):
        by_loss = keys_by_loss(trained.tables, settings.precision)
        counts = counts_of(trained.tables, trained.optimizers, by_loss)
        state = TrainingState(
            model=trained.model_state,
            optimizers=OptimizerState(
                trained.module, trained.optimizers, trained.tables, counts=counts
            ),
            schedulers=[schedulers] if isinstance(schedulers, Stateful) else schedulers,
            schedules=trained.schedules,
            reader=reader,
            extras={} if extras is None else extras,
            sources=trained.sources,
            rank=ranks.rank,
            copies=[shard.copy.parameter_name for shard in shards if shard.copy is not None],
        )
        state.refuse_unwritable()
        loss = meter_of(
            settings.precision,
            trained.module,
            shards,
            trained.sources,
            state.optimizers,
            counts,
            cache,
            several=ranks.several,
        )
        state.loss = loss
        trackers = {
            shard.key: _tracker_of(shard.table, cache)
            for shard in shards
            if shard.table is not None
        }
        # Copies whose rows another rank stores are followed, too, where their lookups are counted.
        counting = {
            shard.key: Tracker(shard.copy)
            for shard in shards
            if shard.table is None and shard.copy is not None and shard.key in counts
        }
        for key, tracker in (trackers | counting).items():
            tracker.counts = counts.get(key)
        row_local = tuple(settings.options.row_local_optimizers)
        extra_objects = () if extras is None else tuple(extras.values())
        unknown = UnknownOptimizers(
            trained.module, trained.optimizers, trained.tables, extra_objects
        )
        watch = OptimizerWatch(
            trained.optimizers, trackers | counting, row_local=row_local, unknown=unknown
        )
        cutter = Cutter(
            shards=shards,
            trackers=trackers,
            watch=watch,
            state=state,
            settings=settings,
            rank=ranks.rank,
            cache=cache,
            prices=loss,
            rules=growth.rule,
        )
        directory = settings.staging.directory
        area = StagingArea(
            Path(directory) if directory else default_staging_root(),
            run_url,
            rank=ranks.rank,
        )
        memory = MemoryBound(
            ranks=ranks,
            area=area,
            cutter=cutter,
            optimizers=trained.optimizers,
            jobs=settings.staging.jobs,
        )
        memory.measure()
        forms = state.forms()
    replicas = Replicas(
        ranks,
        lambda: state.model.parameters() | copies_of(shards),
        forms,
        trained.pieces,
        lambda: local_pieces(state.model.tensors()),
    )
    state.leave_to_others(replicas.stored_elsewhere)
    coming = None
    if isinstance(reader, Lookahead) and cache is None:
        coming = _coming_rows(ranks, shards, reader, settings)
    signs = TrainingSigns(trained.module, trained.optimizers)
    return Assembly(
        trained=trained,
        shards=shards,
        trackers=trackers,
        counting=counting,
        watch=watch,
        state=state,
        tables=NamedTables(shards, trackers, state.optimizers),
        signs=signs,
        count=BatchCount(
            signs, trained.optimizers, reader, most_in_flight=settings.options.in_flight
        ),
        job=TrainingJob(
            ranks=ranks,
            tables=trained.tables,
            names=frozenset(shard.name for shard in shards),
            state=state,
            growth=growth,
            cache=cache,
        ),
        cutter=cutter,
        area=area,
        memory=memory,
        records=RecordBound(ranks, cutter),
        replicas=replicas,
        cache=cache,
        loss=loss,
        coming=coming,
        fulls_window=settings.options.copy_fulls_ahead if can_copy_fulls else 0,
    )
