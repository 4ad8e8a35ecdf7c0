"""Seals a cut that lies in its slot: adds sample and digests, and makes the job (format §7).

The stall makes a `Snapshot`, which says what was copied. `seal` runs in the background thread: it
writes into the slot what training need not wait for, and returns the content of the job file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recpoint.catalog.staging.area import slot_name
from recpoint.catalog.staging.sample import Sample, place_sample
from recpoint.catalog.staging.slot import Placed, Slot, digest_segments
from recpoint.catalog.store.contract import now_ms
from recpoint.embeddings.server.served_part import ServedPart
from recpoint.format.history import History
from recpoint.format.job import Job, StagedTable
from recpoint.format.keyed_use import KeyedUse
from recpoint.format.manifest import CacheUse, CopiedAhead, MeasuredLoss
from recpoint.format.records import CheckpointRef
from recpoint.kernels import implementation
from recpoint.trainer_plugin.policy import ChainLink, PolicyName
from recpoint.trainer_plugin.snapshot.codes import DeviceDrain
from recpoint.trainer_plugin.snapshot.final_places import Move, move_to_final_places

__all__ = ["ServedTables", "Snapshot", "seal"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedTables:
    """What embedding servers stage of a checkpoint.

    Attributes:
        part: has the servers stage it.
        tables: the tables as the servers' jobs describe them, without rows. Those that servers
            stage are scattered; a table of which this rank has no rows may not be.
    """

    part: ServedPart
    tables: tuple[StagedTable, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """Describes what a cut has copied.

    Attributes:
        ref: the checkpoint.
        link: its place in the chain.
        policy: name of the policy.
        tables: the tables as the job describes them.
        slot: the slot that holds the copy.
        placed: places of all arrays except the sample's.
        slot_bytes: first byte behind these arrays.
        device: brings rows from a GPU to the slot; must be drained before the slot is read.
        moves: bring rows that were copied ahead to their places; must be made before the slot is
            read.
        sample: the sampled rows.
        quantized_on: types of the devices on which rows were quantized.
        snapshot_ms: wall-clock time of the cut, in milliseconds since the epoch.
        stall_us: how long training stood still for the cut, in microseconds.
        copied_ahead: the rows that were copied before the stall and in it; None: none was before.
        loss: what rounding costs in loss, as measured; None: nobody asked for that.
        keyed: what the keys of keyed tables did; None: there is no such table.
        cache: what the cache did since the cut before; None: no table is in a cache.
        full_bytes: bytes of this rank's part of a full, exact checkpoint.
        interval_batches: batches since the checkpoint before.
        history: history of the training state.
        served: what embedding servers stage of the checkpoint; None: nothing.
    """

    ref: CheckpointRef
    link: ChainLink
    policy: PolicyName
    tables: tuple[StagedTable, ...]
    slot: Slot
    placed: tuple[Placed, ...]
    slot_bytes: int
    device: DeviceDrain
    moves: tuple[Move, ...]
    sample: Sample
    quantized_on: frozenset[str]
    snapshot_ms: int
    stall_us: int
    copied_ahead: CopiedAhead | None
    loss: MeasuredLoss | None
    keyed: tuple[KeyedUse, ...] | None
    cache: CacheUse | None
    full_bytes: int
    interval_batches: int
    history: History
    served: ServedTables | None

    @property
    def used_bytes(self) -> int:
        """The most bytes that the snapshot takes of its slot, before and after rows move in it."""
        ends = [move.source.end for move in self.moves]
        return max(self.slot_bytes + self.sample.size_bytes, *ends, 0)


def seal(
    snapshot: Snapshot,
    *,
    run: str,
    run_url: str,
    rank: int,
    ranks: int,
    root: Path,
    jobs: int,
    ranks_seconds: Callable[[], float],
) -> Job:
    """Make a snapshot complete and durable in its slot, and those of embedding servers in theirs.

    Args:
        snapshot: what the cut has copied.
        run: id of the run.
        run_url: the run URL as the store spells it.
        rank: rank of this process.
        ranks: number of ranks of the job.
        root: the staging area.
        jobs: how many jobs of a rank or server may be staged at the same time.
        ranks_seconds: returns how long servers wait for the rows of other ranks.

    Returns:
        The content of its job file.

    Raises:
        HomeError: rows cannot be read from their home, or staged there.
    """
    described = _described(snapshot, run=run, run_url=run_url, ranks=ranks)
    served = snapshot.served
    if served is None:
        snapshot.device.drain()
    else:
        job = _without_rows(described, served, ranks=ranks)
        snapshot.device.drain(
            lambda rows: served.part.stage(
                job,
                rows,
                root=root,
                most=jobs + 1,  # its agent may answer a little later than this rank's
                trainer=rank,
                patience_seconds=ranks_seconds,
            )
        )
    move_to_final_places(snapshot.slot.data, snapshot.moves)
    sampled, slot_bytes = place_sample(
        snapshot.sample, snapshot.tables, snapshot.placed, snapshot.slot.data, snapshot.slot_bytes
    )
    segments = digest_segments(snapshot.slot, (*snapshot.placed, *sampled))
    snapshot.slot.sync()
    fields = described | {
        "rank": rank,
        "tables": snapshot.tables,
        "slot": snapshot.slot.path.name,
        "slot_bytes": slot_bytes,
        "segments": segments,
        "staged_ms": now_ms(),
        # The record has no place for the figures of several parts (format §4).
        "copied_ahead": snapshot.copied_ahead if ranks == 1 else None,
        "loss": snapshot.loss,
        "keyed": snapshot.keyed,
        "cache": snapshot.cache,
        "stripes": snapshot.device.stripes,
        "full_bytes": snapshot.full_bytes,
        "quantized_by": implementation.on_devices(snapshot.quantized_on)[:255],
    }
    return Job(**fields)


def _described(snapshot: Snapshot, *, run: str, run_url: str, ranks: int) -> dict[str, Any]:
    """Return what the jobs of this rank and of embedding servers have in common."""
    ref, link = snapshot.ref, snapshot.link
    return {
        "run_url": run_url,
        "run": run,
        "step": ref.step,
        "generation": ref.generation,
        "attempt": ref.attempt,
        "kind": link.kind,
        "base": link.base,
        "parent": link.parent,
        "chain_length": link.chain_length,
        "policy": snapshot.policy,
        "ranks": ranks,
        "servers": None if snapshot.served is None else snapshot.served.part.servers,
        "snapshot_ms": snapshot.snapshot_ms,
        "stall_us": snapshot.stall_us,
        "interval_batches": snapshot.interval_batches,
        "history": snapshot.history,
    }


def _without_rows(described: Mapping[str, Any], served: ServedTables, *, ranks: int) -> Job:
    """Return the job that each embedding server completes; it is of the first of them."""
    fields = dict(described) | {
        "rank": ranks,
        "tables": served.tables,
        "slot": slot_name(ranks, 0),
        "slot_bytes": 0,
        "segments": (),
        "staged_ms": now_ms(),
        "full_bytes": 0,
        "quantized_by": "",
    }
    return Job(**fields)
