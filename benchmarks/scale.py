"""Finds recpoint's limits by simulating the paper's fleet with rates measured in the same run.

Measured here: bytes a second of the cut, of quantizing and encoding in each width into a store in
memory, of uploading to a real S3 server, of restoring; bytes of a stored row, of an id, of a chunk
in a manifest; seconds of an exchange between ranks. Taken from the paper: 128 GPUs on 16 hosts,
models of 1 to 8 TB, 25 Gbit/s from a host to the store, 26 % of the rows in half an hour. Assumed,
because the paper does not say: a host's memory, and the time that a network adds to a message.
Everything else is arithmetic in `fleet_model.py`.
"""

from __future__ import annotations

import math
import os
import statistics
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from benchmarks.dirty_trace import fleet_masks
from benchmarks.exchanges import hop_seconds
from benchmarks.fleet_model import PAPER_FLEET, Costs, Rates, costs, dirty_share
from benchmarks.report import Report
from benchmarks.workload import Tables, scratch, staged_run
from recpoint import Consecutive, Continuous, Intermittent
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.job_files import read_job
from recpoint.catalog.store.scheduler import WriteBudget, WriteScheduler
from recpoint.catalog.store.store import open_store
from recpoint.format.manifest import ChunkEntry
from recpoint.format.naming import row_chunk_key
from recpoint.format.records import MAX_RECORD_BYTES
from recpoint.kernels import row_set
from recpoint.testing.seaweed import SeaweedServer
from recpoint.trainer_plugin.policy import Policy
from recpoint.trainer_plugin.settings import FixedBits

__all__ = ["KEYS", "run"]

_DIM = PAPER_FLEET.dim
_IN_FLIGHT = 4
_WIDTHS: tuple[FixedBits, ...] = ("lossless", 8, 4, 2)
_TERABYTES = (1, 2, 4, 8)
#: A host of the fleet equals this machine, or has the speed of this machine for each of its 8 GPUs.
_MACHINES = (1, 8)
KEYS = (
    *(
        f"{figure}_x{machines}"
        for machines in _MACHINES
        for figure in (
            "stall_s_8tb",
            "persist_s_8tb_4bit",
            "restore_s_8tb_4bit",
            "shortest_min_8tb_4bit",
        )
    ),
    "coordination_s_128",
    "host_memory_gb_8tb",
    "largest_tb_by_memory",
    "largest_tb_by_manifest_lossless",
    "largest_tb_by_manifest_4",
)


class _Plan(NamedTuple):
    name: str
    policy: Policy
    merge_every: int | None = None


_PLANS = (
    _Plan("interm.", Intermittent()),
    _Plan("consec.", Consecutive()),
    _Plan("contin./8", Continuous(), 8),
)
_SHORTEST_MINUTES = (1, 2, 3, 5, 7, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 360, 720)


def run(*, smoke: bool) -> Report:
    """Measure the rates, note them in the report, and simulate the fleet."""
    report = Report(
        name="scale",
        columns=(
            "policy", "host", "TB", "bits", "min", "stall s", "persist", "lag min", "net %",
            "kept x", "read s", "mem GB", "limit", "then",
        ),
    )  # fmt: skip
    rows, rounds = (4_000, 1) if smoke else (1_000_000, 3)
    rates = _measure(report, rows=rows, rounds=rounds)
    for machines in _MACHINES:
        for terabytes in _TERABYTES:
            for bits in _WIDTHS:
                report.rows.append(_row(rates, terabytes, bits, _PLANS[0], 30, machines))
        for plan in _PLANS[1:]:
            report.rows.append(_row(rates, 8, 4, plan, 30, machines))
        for minutes in (5, 120):
            report.rows.append(_row(rates, 8, 4, _PLANS[0], minutes, machines))
    figures = _figures(rates)
    for key in [key for key, value in figures.items() if math.isnan(value)]:
        del figures[key]
        report.leave_out(
            [key], f"none of the intervals up to {_SHORTEST_MINUTES[-1]} min is enough"
        )
    report.figures = figures
    report.notes += _measured(rates) + _explained()
    return report


def _costs(
    rates: Rates, terabytes: float, bits: FixedBits, plan: _Plan, minutes: float, machines: float
) -> Costs:
    return costs(
        PAPER_FLEET,
        rates,
        model_bytes=terabytes * 1e12,
        bits=bits,
        policy=plan.policy,
        minutes=minutes,
        machines=machines,
        record_bytes=MAX_RECORD_BYTES,
        merge_every=plan.merge_every,
    )


def _row(
    rates: Rates, terabytes: int, bits: FixedBits, plan: _Plan, minutes: int, machines: int
) -> tuple[object, ...]:
    cost = _costs(rates, terabytes, bits, plan, minutes, machines)
    return (
        plan.name,
        machines,
        terabytes,
        "fp32" if bits == "lossless" else str(bits),
        minutes,
        *(
            f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
            for value in (
                cost.stall_seconds,
                cost.persist_seconds,
                cost.lag_seconds / 60,
                100 * cost.write_share,
                cost.capacity,
                cost.restore_seconds,
                cost.memory_bytes / 1e9,
            )
        ),
        *(f"{name} {100 * cost.uses[name]:.0f}%" for name in cost.nearest[:2]),
    )


def _figures(rates: Rates) -> dict[str, float]:
    figures: dict[str, float] = {}
    for machines in _MACHINES:
        eight = _costs(rates, 8, 4, _PLANS[0], 30, machines)
        figures |= {
            f"stall_s_8tb_x{machines}": eight.stall_seconds,
            f"persist_s_8tb_4bit_x{machines}": eight.persist_seconds,
            f"restore_s_8tb_4bit_x{machines}": eight.restore_seconds,
            f"shortest_min_8tb_4bit_x{machines}": _shortest(rates, 8, 4, machines),
        }
    figures["coordination_s_128"] = eight.coordination_seconds
    figures["host_memory_gb_8tb"] = eight.memory_bytes / 1e9
    figures["largest_tb_by_memory"] = 8 / eight.uses["memory"]
    widths: tuple[FixedBits, ...] = ("lossless", 4)
    for bits in widths:
        cost = _costs(rates, 1, bits, _PLANS[0], 30, 1)
        figures[f"largest_tb_by_manifest_{bits}"] = 1 / cost.uses["manifest"]
    return figures


def _shortest(rates: Rates, terabytes: float, bits: FixedBits, machines: float) -> float:
    """Return minutes of the shortest tried interval in which a full is encoded and uploaded."""
    for minutes in _SHORTEST_MINUTES:
        uses = _costs(rates, terabytes, bits, _PLANS[0], minutes, machines).uses
        if max(uses["encode"], uses["upload"]) <= 1:
            return minutes
    return float("nan")


def _measure(report: Report, *, rows: int, rounds: int) -> Rates:
    encode, read, stored, cuts = {}, {}, {}, []
    for bits in _WIDTHS:
        with scratch() as memory:
            encode[bits], read[bits], stored[bits], cut = _one_width(
                report, memory, bits, rows, rounds
            )
            cuts.append(cut)
    with scratch(in_memory=False) as disk, SeaweedServer(disk / "weed") as server:
        os.environ.update(server.environment())
        upload = _upload(report, server.run_url(), rows, rounds)
    return Rates(
        cut_bytes=statistics.median(cuts),
        encode_bytes=encode,
        store_bytes=upload,
        restore_bytes=read,
        stored_row_bytes=stored,
        id_bytes=_id_bytes(rows),
        entry_bytes=_entry_bytes(),
        hop_seconds=hop_seconds(2, 200 * rounds),
    )


def _one_width(
    report: Report, folder: Path, bits: FixedBits, rows: int, rounds: int
) -> tuple[float, float, float, float]:
    """Return rates a second of staged bytes encoded, stored bytes restored and bytes cut.

    The third of the four values is not a rate: the stored bytes of a row.
    """
    model = Tables(count=1, rows=rows, dim=_DIM)
    encodes: list[float] = []
    cuts: list[float] = []
    url = str(folder / "run")
    with staged_run(
        model, model.optimizers(state=False), url=url, staging=folder / "staging", bits=bits
    ) as tracked:
        for _ in range(rounds + 1):  # the first round fills the slot's pages and compiles
            tracked.checkpointer.mark_all("tables.0")
            tracked.checkpointer.step()
            job = read_job(tracked.cut())
            staged_bytes = sum(segment.bytes for segment in job.segments)
            start = perf_counter()
            outcome = tracked.persist()
            encodes.append(perf_counter() - start)
            cuts.append(tracked.checkpointer.stats.stalls_ms[-1] / 1e3)
    opened = Run.open(open_store(url))
    reads = []
    for _ in range(rounds):
        start = perf_counter()
        restored = restore(opened, MemoryTarget())
        reads.append(perf_counter() - start)
    return (
        staged_bytes / report.timed(f"encode, {bits} bits", encodes[1:]),
        restored.bytes_read / report.timed(f"restore, {bits} bits", reads),
        outcome.stored_bytes / rows,
        staged_bytes / report.timed(f"cut, {bits} bits", cuts[1:]),
    )


def _upload(report: Report, url: str, rows: int, rounds: int) -> float:
    """Return the bytes a second of uploads of 32 MiB chunks, several at once as in a persist."""
    store = open_store(url)
    data = os.urandom(min(32 << 20, rows * 4 * _DIM))
    seconds = []
    for turn in range(rounds):
        start = perf_counter()
        keys = [f"probe/{turn:016x}{number:016x}" for number in range(_IN_FLIGHT)]
        with WriteScheduler(WriteBudget(_IN_FLIGHT)) as uploads:
            for key in keys:
                uploads.begin(uploads.reserve(len(data)), partial(store.put, key, data))
            uploads.finish()
        seconds.append(perf_counter() - start)
    return _IN_FLIGHT * len(data) / report.timed(f"upload of {_IN_FLIGHT} chunks", seconds)


def _id_bytes(rows: int) -> float:
    """Return the bytes of an id if 26 % of the rows have changed as in the fleet's trace."""
    changed = fleet_masks(rows, 1, seed=0)[0].nonzero()[0]
    coded = row_set.encode(torch.from_numpy(changed))
    return 0.0 if coded.payload is None else len(coded.payload) / len(changed)


def _entry_bytes() -> float:
    """Return the bytes of a row chunk's entry in a manifest of many ranks and tables."""
    key = row_chunk_key(10**6, 10, "0" * 32, rank=127, table=100, number=10)
    entry = ChunkEntry(
        key=key, bytes=32 << 20, crc32c=2**32 - 1, content="rows", rank=127, table=100,
        row_count=120_000, first_row=10**9, last_row=10**9 + 10**6, bits=4, scheme="asymmetric",
    )  # fmt: skip
    return len(entry.model_dump_json()) + 1


def _measured(rates: Rates) -> list[str]:
    def megabytes(value: float) -> str:
        return f"{value / 1e6:,.0f} MB/s"

    lines = [
        f"measured: cut {megabytes(rates.cut_bytes)}, upload {megabytes(rates.store_bytes)}, "
        f"{8 * rates.id_bytes:.2f} bits an id, {rates.entry_bytes:.0f} bytes a chunk in a "
        f"manifest, {1e6 * rates.hop_seconds:.0f} microseconds an exchange between 2 ranks"
    ]
    lines += [
        f"measured at {bits} bits: encode {megabytes(rates.encode_bytes[bits])} of staged bytes, "
        f"restore {megabytes(rates.restore_bytes[bits])} of stored bytes, "
        f"{rates.stored_row_bytes[bits]:.1f} bytes a row of {_DIM} values"
        for bits in _WIDTHS
    ]
    return lines


def _explained() -> list[str]:
    return [
        f"simulated: {PAPER_FLEET.ranks} ranks on {PAPER_FLEET.hosts} hosts, all evenly loaded; "
        f"{100 * dirty_share(30):.0f} % of the rows in 30 minutes, {100 * dirty_share(5):.0f} % in "
        "5 (the curve's continuation); 25 intervals; row-wise optimizer state of 4 bytes.",
        "policy: intermittent, consecutive (a full every 16), continuous with 8 merged. host: "
        "machines like this one that equal a host, except for its network. stall and "
        "persist are for a full; lag: an interval and both; read: a restore of the longest "
        "chain. "
        "net %: of a host's network, on average. kept: over a full in F32, at its peak. "
        "limit, then: the two nearest, and how much of them a full uses; above 100 % it does not "
        "work. memory, mem: slots of one staged job, marks and the agent's spool, of the "
        f"{PAPER_FLEET.staging_bytes / 1e9:.0f} GB that a staging area may take (assumed: 1.5 TB a "
        "host, a tmpfs of half of it; tables on the GPUs). stall: has two exchanges in it, 127 "
        "hops each, of the measured time and "
        f"{1e6 * PAPER_FLEET.hop_seconds:.0f} microseconds of network (assumed).",
        "left out: the store's own limits, the digests before a job is staged, Prefect's share "
        "(`prefect_overhead`), listing (1,000 keys a request), and hosts that are slower than "
        "others.",
    ]
