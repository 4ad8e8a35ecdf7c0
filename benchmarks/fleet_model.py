"""Computes the costs of checkpoints for a fleet of trainer hosts from the rates of one machine.

Everything is divided evenly: rows over ranks, ranks over hosts, and no host waits for another. The
trainer's own policy decides which checkpoints are fulls and what must be kept. The functions are
pure.
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

#: In Check-N-Run's fleet, an increment has 26 % of the rows after half an hour; it grows with time
#: by this exponent.
_SHARE, _INTERVAL_MINUTES, _EXPONENT = 0.26, 30, 0.289

_INTERVALS = 25

#: An agent that persists one run holds two groups of chunks: one being encoded, one being uploaded.
_SPOOL_BYTES = 2 * GROUP_SPOOL_BYTES


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Hosts that train one model.

    Attributes:
        ranks: training processes, with one GPU each.
        hosts: machines on which the ranks run.
        network_bytes: bytes a second from one host to the store.
        dim: F32 values in a row.
        state_bytes: bytes of a row's optimizer state.
        staging_bytes: bytes of a host's memory that its staging area may take.
        hop_seconds: time of a message between two hosts beyond its time within one host.
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
        """Bytes of a row with its state, in the trainer's memory."""
        return 4 * self.dim + self.state_bytes


#: The paper gives neither the memory of a host nor the time of a message. Assumed are 1.5 TB, of
#: which `/dev/shm` takes half by default, and 50 µs.
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
    """The rates measured on one machine.

    Attributes:
        cut_bytes: bytes a second of marked rows that one training process cuts into the slot.
        encode_bytes: by width, staged bytes a second encoded into chunks in a store in memory.
        store_bytes: bytes a second of chunks uploaded to an S3 server on the same machine.
        restore_bytes: by width, stored bytes a second read from memory, checked and decoded.
        stored_row_bytes: by width, bytes of a row of 64 values without state in a full, with its
            share of headers and manifest.
        id_bytes: additional bytes of a row's id in an increment.
        entry_bytes: bytes of a chunk's entry in a manifest.
        hop_seconds: time of an exchange between ranks of one host, divided by the other ranks.
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
    """The costs of one model, width, policy and interval.

    Attributes:
        stall_seconds: the stall of a full, which is the longest; includes coordination.
        coordination_seconds: the part of the stall in which ranks agree.
        persist_seconds: from the cut of a full to its commit.
        lag_seconds: training that a crash loses at worst: an interval, and the time to the commit.
        write_share: average share of a host's network that writing takes.
        capacity: the most bytes kept, over the bytes of a full in F32.
        restore_seconds: time to read the longest chain, all hosts at once.
        memory_bytes: of a host: the slots of its ranks as the trainer bounds them, with a full for
            each staged job; two bits a row for marks; and the chunks that an agent has encoded.
        manifest_bytes: size of a full's manifest.
        chunks: number of chunks in a full.
        merge_seconds: time for each checkpoint in which one host merges, at its network's speed.
        uses: limit -> share of it that is used; above 1, the fleet does not work.
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
        """The limits, from the one that is used most to the one that is used least."""
        return tuple(sorted(self.uses, key=lambda name: -self.uses[name]))

    @property
    def first(self) -> str:
        """The nearest limit, which is exceeded first."""
        return self.nearest[0]


def dirty_share(minutes: float) -> float:
    """Return the share of rows changed in so many minutes: 0.26 · (minutes / 30)^0.289, at most 1.

    The paper shows the curve for 30 minutes to 5.5 hours; for shorter times it is extrapolated.
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
    """Compute the costs of a run of 25 intervals.

    Args:
        fleet: the hosts that train.
        rates: measured on one machine.
        model_bytes: bytes of all tables with their state.
        bits: width in which rows are stored.
        policy: of the trainer.
        minutes: from one checkpoint to the next.
        machines: number of measured machines that equal one host in all but the network.
        record_bytes: the most bytes that a manifest may have.
        merge_every: number of increments after which a chain is merged; None: never.
        staged_jobs: the most checkpoints that may be on their way at once.
    """
    rows = model_bytes / fleet.row_bytes
    stored_row = rates.stored_row_bytes[bits] * fleet.dim / 64 + fleet.state_bytes

    def size(base: int | None, interval: int) -> int:
        if base is None:
            return round(rows * stored_row)
        changed = rows * dirty_share(minutes * (interval - base))
        return round(changed * (stored_row + rates.id_bytes))

    intervals = replay(policy, _INTERVALS, size, consolidate_every=merge_every)
    network = min(fleet.network_bytes, rates.store_bytes * machines)
    encode = model_bytes / fleet.hosts / (rates.encode_bytes[bits] * machines)
    upload = size(None, 0) / fleet.hosts / network
    persist = max(encode, upload)
    coordination = EXCHANGES * (fleet.ranks - 1) * (rates.hop_seconds + fleet.hop_seconds)
    stall = model_bytes / fleet.hosts / (rates.cut_bytes * machines) + coordination
    memory = staged_jobs * model_bytes / fleet.hosts + rows / fleet.hosts / 4 + _SPOOL_BYTES
    chunks = fleet.ranks * math.ceil(size(None, 0) / fleet.ranks / CHUNK_BYTES)
    manifest = chunks * rates.entry_bytes
    merged = _mean(intervals, merged=True)
    kept_bytes = max(interval.kept for interval in intervals)
    decode = rates.restore_bytes[bits] * machines
    written = _mean(intervals, merged=False)
    seconds = 60 * minutes
    merge = merged / fleet.network_bytes
    return Costs(
        stall_seconds=stall,
        coordination_seconds=coordination,
        persist_seconds=persist,
        lag_seconds=seconds + stall + persist,
        write_share=written / fleet.hosts / seconds / fleet.network_bytes,
        capacity=kept_bytes / (rows * fleet.row_bytes),
        restore_seconds=kept_bytes / fleet.hosts / min(fleet.network_bytes, decode),
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


def _mean(intervals: list[Checkpoint], *, merged: bool) -> float:
    return statistics.fmean(
        sum(interval.merged) if merged else interval.written for interval in intervals
    )
