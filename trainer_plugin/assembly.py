"""What a Checkpointer is built of: the parts that know its model, optimizers and staging area.

Each rank puts its own together, and they agree wherever one's depend on what the others have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from recpoint import kernels
from recpoint.catalog.staging.area import default_staging_root
from recpoint.embeddings.marks import Tracker
from recpoint.embeddings.optimizers import OptimizerWatch
from recpoint.embeddings.tables import Table, TableSource
from recpoint.trainer_plugin.ranks.agreement import Replicas, agree_on_settings
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.ranks.sharding import (
    HeldPiece,
    Shard,
    copies_of,
    held_pieces,
    lay_out,
    local_pieces,
)
from recpoint.trainer_plugin.settings import Settings
from recpoint.trainer_plugin.snapshot.cut import Cutter
from recpoint.trainer_plugin.snapshot.memory_bound import MemoryBound
from recpoint.trainer_plugin.snapshot.staging import StagingArea
from recpoint.trainer_plugin.state.model import ModelState
from recpoint.trainer_plugin.state.optimizers import OptimizerState
from recpoint.trainer_plugin.state.reader import Stateful
from recpoint.trainer_plugin.state.training_state import TrainingState
from recpoint.trainer_plugin.state.unknown_optimizers import UnknownOptimizers
from recpoint.trainer_plugin.tables import find_tables, hold_pieces, optimizer_list

__all__ = ["Assembly", "Trained", "assemble", "look_at"]


class Trained(NamedTuple):
    """What this process trains, and what of it is tables.

    Attributes:
        module: the model.
        optimizers: without those that train tables of sources alone.
        tables: what this process holds of each.
        sources: what supplies tables of another kind.
        model_state: what of the model is not tables.
        pieces: what this process has of tensors that are in pieces, by name.
    """

    module: nn.Module
    optimizers: tuple[Optimizer, ...]
    tables: tuple[Table, ...]
    sources: tuple[TableSource, ...]
    model_state: ModelState
    pieces: dict[str, HeldPiece]


class Assembly(NamedTuple):
    """The parts, not at work yet: nothing is hooked into the model, nothing written anywhere.

    Attributes:
        shards: all tables of the job, in the order in which they are stored.
        trackers: `Table.key` -> its dirty rows; of those that this rank stores.
        watch: the optimizers' steps.
        state: everything that is not tables.
        cutter: cuts snapshots of all that.
        area: where they are staged.
        memory: what they take there at most.
        replicas: what all ranks have alike.
    """

    shards: tuple[Shard, ...]
    trackers: dict[str, Tracker]
    watch: OptimizerWatch
    state: TrainingState
    cutter: Cutter
    area: StagingArea
    memory: MemoryBound
    replicas: Replicas


def look_at(model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]) -> Trained:
    """Find out what is trained.

    Raises:
        SettingsError: it cannot be checkpointed as it is; see `find_tables`.
    """
    if isinstance(model, nn.Module):  # what is none, the search for tables refuses
        hold_pieces(model)
    tables, trained, sources = find_tables(model, optimizer_list(optimizers))
    model_state = ModelState(model, tables, sources)
    return Trained(model, trained, tables, sources, model_state, held_pieces(model_state.tensors()))


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
    """Build the parts. Collective.

    Args:
        ranks: all of them.
        trained: by this one.
        settings: of the Checkpointer.
        run_url: as its store spells it.
        reader, schedulers, extras: what else has a state.

    Raises:
        SettingsError: a setting that does not fit what is trained, or another rank's; or something
            in the state cannot be stored.
        RankLost: another rank could not build its own, and raised why; or did not answer.
    """
    agree_on_settings(ranks, settings.common | {"run": run_url})
    shards = lay_out(ranks, trained.tables)
    with ranks.together("looking at the state of training"):
        state = TrainingState(
            model=trained.model_state,
            optimizers=OptimizerState(trained.module, trained.optimizers, trained.tables),
            schedulers=[schedulers] if isinstance(schedulers, Stateful) else schedulers,
            reader=reader,
            extras={} if extras is None else extras,
            sources=trained.sources,
            rank=ranks.rank,
            copies=[one.copy.parameter_name for one in shards if one.copy is not None],
        )
        state.refuse_inference()
        trackers = {shard.key: Tracker(shard.table) for shard in shards if shard.table is not None}
        row_local = tuple(settings.options.row_local_optimizers)
        others = () if extras is None else tuple(extras.values())
        unknown = UnknownOptimizers(trained.module, trained.optimizers, trained.tables, others)
        watch = OptimizerWatch(trained.optimizers, trackers, row_local=row_local, unknown=unknown)
        cutter = Cutter(
            shards=shards,
            trackers=trackers,
            watch=watch,
            state=state,
            settings=settings,
            rank=ranks.rank,
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
        kernels.warm_up()
    replicas = Replicas(
        ranks,
        lambda: state.model.parameters() | copies_of(shards),
        forms,
        trained.pieces,
        lambda: local_pieces(state.model.tensors()),
    )
    state.leave_to_others(replicas.stored_elsewhere)
    return Assembly(shards, trackers, watch, state, cutter, area, memory, replicas)
