"""What checkpoints of a fleet of trainer hosts cost, from what one machine does a second. Pure.

Everything is divided evenly: rows over ranks, ranks over hosts, and no host waits for another.
Which checkpoints are fulls, and what has to be kept, is decided by the trainer's own policy.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.dirty_trace import Checkpoint, replay
from benchmarks.exchanges import EXCHANGES
from recpoint.catalog.persist.plan import CHUNK_BYTES, GROUP_SPOOL_BYTES
from recpoint.trainer_plugin.policy import Policy
from recpoint.trainer_plugin.settings import FixedBits

__all__ = ["PAPER_FLEET", "Costs", "Fleet", "Rates", "costs", "dirty_share"]

#: Check-N-Run's fleet: its increments have 26 % of the rows after half an hour, and grow like this.
_SHARE, _INTERVAL_MINUTES, _EXPONENT = 0.26, 30, 0.289

_INTERVALS = 25

#: Of an agent that persists one run: a group that is encoded, and one that is uploaded.
_SPOOL_BYTES = 2 * GROUP_SPOOL_BYTES


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Hosts that train one model.

    Attributes:
        ranks: training processes, a GPU each.
        hosts: they run on.
        network_bytes: a second, of one host to the store.
        dim: F32 values of a row.
        state_bytes: of optimizer state of a row.
        staging_bytes: of a host's memory, that its staging area may take.
        hop_seconds: of a message between two hosts, beside what it takes on one.
    """

    ranks: int
    hosts: int
    network_bytes: float
    dim: int
    state_bytes: int
    staging_bytes: float
    hop_seconds: float

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its state, as it is trained."""
        return 4 * self.dim + self.state_bytes


#: The paper says neither how much memory a host has nor how fast messages are: assumed are 1.5 TB,
#: of which `/dev/shm` takes half unless it is mounted larger, and 50 µs.
PAPER_FLEET = Fleet(
    ranks=128,
    hosts=16,
    network_bytes=25e9 / 8,
    dim=64,
    state_bytes=4,
    staging_bytes=750e9,
    hop_seconds=50e-6,
)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What was measured on one machine.

    Attributes:
        cut_bytes: a second, of marked rows into the slot, by one training process.
        encode_bytes: by width: a second, of staged bytes into chunks in a store that costs nothing.
        store_bytes: a second, of chunks into an S3 server on the same machine.
        restore_bytes: by width: a second, of stored bytes read from memory, checked and decoded.
        stored_row_bytes: by width: of a row of 64 values without state, in a full, all counted.
        id_bytes: of a row's id in an increment, one more.
        entry_bytes: of a chunk in a manifest.
        hop_seconds: of an exchange between ranks of one host, for each other rank.
    """

    cut_bytes: float
    encode_bytes: Mapping[FixedBits, float]
    store_bytes: float
    restore_bytes: Mapping[FixedBits, float]
    stored_row_bytes: Mapping[FixedBits, float]
    id_bytes: float
    entry_bytes: float
    hop_seconds: float


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of one model, width, policy and interval.

    Attributes:
        stall_seconds: training waits for a full, the longest there is; coordination is in it.
        coordination_seconds: of that, what ranks need to agree.
        persist_seconds: from the cut of a full to its commit.
        lag_seconds: training that a crash costs at worst: an interval and the commit after it.
        write_share: of a host's network, on average.
        capacity: most bytes kept, over those of a full in F32.
        restore_seconds: reading the longest chain, all hosts at once.
        memory_bytes: of a host: the slots of its ranks as the trainer bounds them, a full for each
            staged job, two bits a row for what is marked, and what an agent has encoded.
        manifest_bytes: of a full's manifest.
        chunks: of a full.
        merge_seconds: one host that merges, at its network's speed, for each checkpoint.
        uses: limit -> how much of it is used; above 1 it does not work.
    """

    stall_seconds: float
    coordination_seconds: float
    persist_seconds: float
    lag_seconds: float
    write_share: float
    capacity: float
    restore_seconds: float
    memory_bytes: float
    manifest_bytes: float
    chunks: int
    merge_seconds: float
    uses: Mapping[str, float]

    @property
    def nearest(self) -> tuple[str, ...]:
        """The limits, the one that is nearest first, or that is exceeded most."""
        return tuple(sorted(self.uses, key=lambda name: -self.uses[name]))

    @property
    def first(self) -> str:
        """The nearest limit: what breaks first."""
        return self.nearest[0]


def dirty_share(minutes: float) -> float:
    """Of the rows, changed in so many minutes: 0.26 · (minutes / 30)^0.289, at most all.

    The paper shows it for 30 minutes to 5.5 hours; shorter is the curve's continuation.
    """
    grown: float = (minutes / _INTERVAL_MINUTES) ** _EXPONENT
    return min(1.0, _SHARE * grown)


def costs(
    fleet: Fleet,
    rates: Rates,
    *,
    model_bytes: float,
    bits: FixedBits,
    policy: Policy,
    minutes: float,
    machines: float,
    record_bytes: int,
    merge_every: int | None = None,
    staged_jobs: int = 1,
) -> Costs:
    """Of a run of 25 intervals.

    Args:
        fleet: what trains.
        rates: what one machine does.
        model_bytes: of all tables with their state.
        bits: how rows are stored.
        policy: of the trainer.
        minutes: from one checkpoint to the next.
        machines: measured ones that a host is worth, for all but the network.
        record_bytes: most that a manifest may have.
        merge_every: increments after which a chain is merged; None: never.
        staged_jobs: checkpoints that may be on their way at once.
    """
    rows = model_bytes / fleet.row_bytes
    stored_row = rates.stored_row_bytes[bits] * fleet.dim / 64 + fleet.state_bytes

    def size(since: int | None, to: int) -> int:
        if since is None:
            return round(rows * stored_row)
        changed = rows * dirty_share(minutes * (to - since))
        return round(changed * (stored_row + rates.id_bytes))

    taken = replay(policy, _INTERVALS, size, consolidate_every=merge_every)
    network = min(fleet.network_bytes, rates.store_bytes * machines)
    encode = model_bytes / fleet.hosts / (rates.encode_bytes[bits] * machines)
    upload = size(None, 0) / fleet.hosts / network
    persist = max(encode, upload)
    coordination = EXCHANGES * (fleet.ranks - 1) * (rates.hop_seconds + fleet.hop_seconds)
    stall = model_bytes / fleet.hosts / (rates.cut_bytes * machines) + coordination
    memory = staged_jobs * model_bytes / fleet.hosts + rows / fleet.hosts / 4 + _SPOOL_BYTES
    chunks = fleet.ranks * math.ceil(size(None, 0) / fleet.ranks / CHUNK_BYTES)
    manifest = chunks * rates.entry_bytes
    merged = _mean(taken, merged=True)
    kept = max(one.kept for one in taken)
    decode = rates.restore_bytes[bits] * machines
    written = _mean(taken, merged=False)
    seconds = 60 * minutes
    merge = merged / fleet.network_bytes
    return Costs(
        stall_seconds=stall,
        coordination_seconds=coordination,
        persist_seconds=persist,
        lag_seconds=seconds + stall + persist,
        write_share=written / fleet.hosts / seconds / fleet.network_bytes,
        capacity=kept / (rows * fleet.row_bytes),
        restore_seconds=kept / fleet.hosts / min(fleet.network_bytes, decode),
        memory_bytes=memory,
        manifest_bytes=manifest,
        chunks=chunks,
        merge_seconds=merge,
        uses={
            "memory": memory / fleet.staging_bytes,
            "manifest": manifest / record_bytes,
            "stall": stall / seconds,
            "encode": encode / seconds,
            "upload": upload / seconds,
            "merge": merge / seconds,
        },
    )


def _mean(taken: list[Checkpoint], *, merged: bool) -> float:
    return statistics.fmean(sum(one.merged) if merged else one.written for one in taken)
