"""Seals a cut that lies in its slot: adds sample and digests, and makes the job (format §7).

The stall makes a `Snapshot`, which says what was copied. `seal` runs in the background thread: it
writes into the slot what training need not wait for, and returns the content of the job file.
"""

from __future__ import annotations

from dataclasses import dataclass

from recpoint.catalog.staging.sample import Sample, place_sample
from recpoint.catalog.staging.slot import Placed, Slot, digest_segments
from recpoint.catalog.store.contract import now_ms
from recpoint.format.history import History
from recpoint.format.job import Job, StagedTable
from recpoint.format.manifest import CacheUse, CopiedAhead
from recpoint.format.records import CheckpointRef
from recpoint.kernels import implementation
from recpoint.trainer_plugin.policy import Link, PolicyName
from recpoint.trainer_plugin.snapshot.codes import DeviceDrain
from recpoint.trainer_plugin.snapshot.settle import Move, settle

__all__ = ["Snapshot", "seal"]


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
        cache: what the cache did since the cut before; None: no table is in a cache.
        full_bytes: bytes of this rank's part of a full, exact checkpoint.
        interval_batches: batches since the checkpoint before.
        history: history of the training state.
    """

    ref: CheckpointRef
    link: Link
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
    cache: CacheUse | None
    full_bytes: int
    interval_batches: int
    history: History

    @property
    def used_bytes(self) -> int:
        """The most bytes that the snapshot takes of its slot, before and after it is settled."""
        ends = [move.source.end for move in self.moves]
        return max(self.slot_bytes + self.sample.size_bytes, *ends, 0)


def seal(snapshot: Snapshot, *, run: str, run_url: str, rank: int, ranks: int) -> Job:
    """Make a snapshot complete and durable in its slot.

    Args:
        snapshot: what the cut has copied.
        run: id of the run.
        run_url: the run URL as the store spells it.
        rank: rank of this process.
        ranks: number of ranks of the job.

    Returns:
        The content of its job file.
    """
    snapshot.device.drain()
    settle(snapshot.slot.data, snapshot.moves)
    sampled, slot_bytes = place_sample(
        snapshot.sample, snapshot.tables, snapshot.placed, snapshot.slot.data, snapshot.slot_bytes
    )
    segments = digest_segments(snapshot.slot, (*snapshot.placed, *sampled))
    snapshot.slot.sync()
    ref, link = snapshot.ref, snapshot.link
    return Job(
        run_url=run_url,
        run=run,
        step=ref.step,
        generation=ref.generation,
        attempt=ref.attempt,
        kind=link.kind,
        base=link.base,
        parent=link.parent,
        chain_length=link.chain_length,
        policy=snapshot.policy,
        rank=rank,
        ranks=ranks,
        tables=snapshot.tables,
        slot=snapshot.slot.path.name,
        slot_bytes=slot_bytes,
        segments=segments,
        snapshot_ms=snapshot.snapshot_ms,
        staged_ms=now_ms(),
        stall_us=snapshot.stall_us,
        copied_ahead=snapshot.copied_ahead,
        cache=snapshot.cache,
        stripes=snapshot.device.stripes,
        full_bytes=snapshot.full_bytes,
        quantized_by=implementation.on_devices(snapshot.quantized_on)[:255],
        interval_batches=snapshot.interval_batches,
        history=snapshot.history,
    )
