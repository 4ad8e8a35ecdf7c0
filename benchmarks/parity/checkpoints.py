"""Measures checkpoints of a trainer whose rows are on servers: stall, storing, and a restore."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

from benchmarks.parity.gate import SERVERS
from benchmarks.report import Report
from benchmarks.servers.network import ShapedNetwork
from benchmarks.servers.nodes import Servers
from benchmarks.servers.rounds import DELAY_SECONDS, GBIT
from benchmarks.servers.trainers import Job, PeerForm, Trainers, tables_of
from benchmarks.workload import scratch

__all__ = ["CheckpointRates", "CheckpointSizes", "measure_checkpoints"]

_PEER = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class CheckpointSizes:
    """How large everything is.

    Attributes:
        rows: most rows of a table.
        dim: values of a row.
        capacity: slots of the cache.
        lines: samples of a batch.
        window: window of the Lookahead.
        warm: batches before the checkpoint.
    """

    rows: int = 150_000
    dim: int = 48
    capacity: int = 400_000
    lines: int = 2048
    window: int = 20
    warm: int = 20


@dataclass(frozen=True, kw_only=True)
class CheckpointRates:
    """What a checkpoint takes.

    Attributes:
        stall_seconds: training stands still.
        stored_bytes: rows and states, stored in a second.
        restored_bytes: the same, restored into the servers in a second.
    """

    stall_seconds: float
    stored_bytes: float
    restored_bytes: float


def measure_checkpoints(
    report: Report, network: ShapedNetwork, sizes: CheckpointSizes
) -> CheckpointRates:
    """Take a full checkpoint without bounds on links, and restore it at 1 Gbit/s.

    Raises:
        NoNetwork: a node cannot be made.
    """
    with ExitStack() as stack:
        nodes = network.add_nodes(1 + SERVERS)
        servers = stack.enter_context(Servers(nodes[1:], homes=1))
        form = PeerForm(
            access=servers.access[0],
            window=sizes.window,
            capacity=sizes.capacity,
            is_filled=True,
        )
        job = Job(
            rows=sizes.rows,
            lines=sizes.lines,
            dim=sizes.dim,
            batches=sizes.warm + sizes.window + 2,
            delay_seconds=DELAY_SECONDS,
            peers={_PEER: form},
        )
        folder = stack.enter_context(scratch())
        with Trainers(job, nodes[:1]) as trainers:
            trainers.play(_PEER, sizes.warm, wait=0)
            trainers.begin_checkpoints(_PEER, folder, 1)
            (stall,) = trainers.checkpoint()
            persist_seconds = trainers.persist()
        network.shape(GBIT)
        # The servers work for the new trainer from now on, and forget what they have.
        empty_job = replace(job, peers={_PEER: replace(form, is_filled=False)})
        trainers = stack.enter_context(Trainers(empty_job, nodes[:1]))
        (restore_seconds,) = trainers.begin_checkpoints(_PEER, folder, 1)
    total_bytes = sum(tables_of(job).values()) * (4 * sizes.dim + 4)
    rates = CheckpointRates(
        stall_seconds=stall.whole_ms / 1e3,
        stored_bytes=total_bytes / persist_seconds,
        restored_bytes=total_bytes / restore_seconds,
    )
    report.notes.append(
        f"a full checkpoint of {1e-6 * total_bytes:,.0f} MB: stall {stall.whole_ms:,.0f} ms, "
        f"{1e-6 * rates.stored_bytes:,.0f} MB/s stored, restored over a link of 1 Gbit/s with "
        f"{1e-6 * rates.restored_bytes:,.0f} MB/s"
    )
    return rates
