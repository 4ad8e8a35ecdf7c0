"""Seals a cut that lies in its slot: sample, digests, and the job that describes it (format §7).

A `Snapshot` is made in the stall, and says what was copied. `seal` is for the background thread: it
writes into the slot what training need not wait for, and returns what the job file is to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import crc32c
import torch

from recpoint.catalog.store.contract import now_ms
from recpoint.format.dtypes import dtype_name
from recpoint.format.history import History
from recpoint.format.job import Job, Segment, StagedTable
from recpoint.format.records import CheckpointRef
from recpoint.format.state_values import booleans
from recpoint.kernels import implementation
from recpoint.trainer_plugin.policy import Link, PolicyName
from recpoint.trainer_plugin.snapshot.codes import DeviceDrain
from recpoint.trainer_plugin.snapshot.copy import Sample, StagedRows
from recpoint.trainer_plugin.snapshot.plan import Placed, place_behind
from recpoint.trainer_plugin.snapshot.staging import Slot

__all__ = ["Snapshot", "digest_segments", "place_sample", "seal"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """What a cut has copied, as its job says it.

    `quantized_on`: types of the devices on which rows were quantized.
    """

    ref: CheckpointRef
    link: Link
    policy: PolicyName
    tables: tuple[StagedTable, ...]
    slot: Slot
    placed: tuple[Placed, ...]
    slot_bytes: int
    device: DeviceDrain
    sample: Sample
    quantized_on: frozenset[str]
    snapshot_ms: int
    stall_us: int
    full_bytes: int
    interval_batches: int
    history: History


def seal(snapshot: Snapshot, *, run: str, run_url: str, rank: int, ranks: int) -> Job:
    """Make a snapshot complete and durable in its slot.

    Args:
        run: its id.
        run_url: as the store spells it.
        rank: of this process.
        ranks: how many take part.

    Returns:
        What its job file is to say.
    """
    snapshot.device.drain()
    sampled, slot_bytes = place_sample(snapshot)
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
        full_bytes=snapshot.full_bytes,
        quantized_by=implementation.on_devices(snapshot.quantized_on)[:255],
        interval_batches=snapshot.interval_batches,
        history=snapshot.history,
    )


def place_sample(snapshot: Snapshot) -> tuple[tuple[Placed, ...], int]:
    """Write the sample into the slot, behind the snapshot; where it is, and the end of it all.

    Everything on a device has been drained. Booleans are settled first:
    the sample, its digests and the chunk are of the same bytes.
    """
    data = snapshot.slot.data
    views = {spot.name: spot.view(data) for spot in snapshot.placed}
    for spot in snapshot.placed:
        if spot.dtype == "BOOL":
            views[spot.name].copy_(booleans(views[spot.name]))
    staged: list[StagedRows | None] = []
    for index, table in enumerate(snapshot.tables):
        names = [f"t{index}.values"]
        names += [f"t{index}.state.{number}" for number in range(len(table.spec.row_states))]
        if table.row_count == 0 or table.codes:  # no values to draw from and to digest
            staged.append(None)
            continue
        arrays = tuple(views[name] for name in names)
        staged.append(StagedRows(ids=views.get(f"t{index}.ids"), arrays=arrays))
    placed: list[Placed] = []
    end = snapshot.slot_bytes
    for name, array in snapshot.sample.parts(staged):
        array = booleans(array) if array.dtype == torch.bool else array
        spot = place_behind(name, dtype_name(array.dtype), tuple(array.shape), end)
        spot.view(data).copy_(array)
        placed.append(spot)
        end = spot.end
    return tuple(placed), end


def digest_segments(slot: Slot, placed: tuple[Placed, ...]) -> tuple[Segment, ...]:
    """The arrays in a slot as its job names them, each with the digest of its bytes."""
    data = slot.data.numpy()
    return tuple(
        Segment(
            name=spot.name,
            dtype=spot.dtype,
            shape=spot.shape,
            offset=spot.offset,
            bytes=spot.size_bytes,
            crc32c=crc32c.crc32c(data[spot.offset : spot.end].data),
        )
        for spot in placed
    )
