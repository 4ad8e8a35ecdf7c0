"""Compares tables larger than memory: a planned cache, an LRU cache, no cache, and all in memory.

The tables have Criteo's shape: 26 with 33.8 M rows, of 16 values with row-wise Adagrad's state. All
homes are in files of one directory and have all rows from the start. A home reads and writes past
the page cache. Rounds begin once rows leave the cache, so that each row that comes is read. No home
merges while another peer runs.

A timed wait stands for the dense layers on an accelerator: a batch takes at least 47 or 162 ms from
the moment when its rows are there. Planning and waits for rows add to that.

- `bit_identical`: tables, optimizer state and losses equal those of training without a cache, for
  four optimizers, several windows and capacities, and for the other peers. It is checked first.
- `misses`: rows that a lookup of the planned cache did not find in their slots.
- `vs_no_cache`, `vs_lru`: samples a second at 47 ms over reading each batch's rows when it comes,
  and over the least recently used rows in as many slots, with the rows of a batch read at once.
- `vs_bound_*`: of the bound max(batch of the tables in memory, reads / random reads a second +
  bytes written / bytes a second). The disk is measured in each round, with the native kernel of
  homes, which has up to 128 reads under way.
- `vs_memory_162ms`: samples a second over tables that are all in memory.
- `moved_2k`, `moved_16k`: rows that the oracle fetches with 4 M slots and a window of 200, of the
  rows that are fetched without a cache, for 2,048 and 16,384 samples a batch. `…_least`: the rows
  that come for the first time, which every cache has to move.
- `oracle_ids_per_s`, `oracle_share`: ids that the oracle plans a second on one thread; its part of
  the processor's time of a batch.
- `vs_10m_rows`: samples a second of one table of 10^9 rows over one of 10^7 with the same lookups.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cache_peers import (
    DIM,
    INITIAL,
    OPTIMIZERS,
    AllInMemory,
    Batch,
    CachedPeer,
    Peer,
    Uncached,
    any_values,
    fill_home,
    row_wise,
    same_bits,
    state_in_cache,
    state_in_memory,
)
from benchmarks.criteo_plan import criteo_reader, drawn, new_rows, plan_alone
from benchmarks.report import Report, ratio, seconds_text
from recpoint.embeddings import fill, local
from recpoint.embeddings.home.directory import HomeDirectory, page_memory
from recpoint.embeddings.home.homes import FileLimits
from recpoint.kernels.row_blocks import BlockForm, Channel

__all__ = ["KEYS", "run"]

KEYS = (
    "bit_identical",
    "misses",
    "vs_no_cache",
    "vs_lru",
    "vs_bound_47ms",
    "vs_bound_162ms",
    "vs_memory_162ms",
    "moved_2k",
    "moved_16k",
    "moved_2k_least",
    "moved_16k_least",
    "oracle_ids_per_s",
    "oracle_share",
    "vs_10m_rows",
)

_MB = 1_000_000
#: Bytes of a row with row-wise Adagrad's state.
_RECORD_BYTES = 4 * (DIM + 1)


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """How large everything is.

    Attributes:
        lines: samples of a batch.
        rows: most rows of a table.
        capacity: slots of a cache.
        window: window of the Lookahead.
        warm: batches before the first round.
        batches: batches of a round.
        rounds: number of rounds.
        waits: seconds of the timed waits.
        disk_bytes: length of the file by which the disk is measured.
        oracle_rows: most rows of a table for the oracle alone.
        oracle_capacity: slots of the oracle alone.
        oracle_batches: batches for the oracle alone, of the smaller and the larger size.
        oracle_lines: these sizes.
        one_table: rows of the larger and of the smaller single table.
    """

    lines: int = 2048
    rows: int = 1 << 30
    capacity: int = 1_000_000
    window: int = 200
    warm: int = 260
    batches: int = 60
    rounds: int = 3
    waits: tuple[float, float] = (0.047, 0.162)
    disk_bytes: int = 1 << 30
    oracle_rows: int = 1 << 30
    oracle_capacity: int = 4_000_000
    oracle_batches: tuple[int, int] = (600, 400)
    oracle_lines: tuple[int, int] = (2048, 16_384)
    one_table: tuple[int, int] = (1_000_000_000, 10_000_000)


_FULL = _Sizes()
_SMOKE = _Sizes(
    lines=64,
    rows=1 << 10,
    capacity=3_000,
    window=10,
    warm=16,
    batches=4,
    rounds=2,
    waits=(0.002, 0.004),
    disk_bytes=8 << 20,
    oracle_rows=1 << 12,
    oracle_capacity=20_000,
    oracle_batches=(30, 20),
    oracle_lines=(64, 256),
    one_table=(10_000_000, 100_000),
)


def run(*, smoke: bool, directory: Path | None = None) -> Report:
    """Compare the peers.

    Args:
        smoke: with tiny sizes.
        directory: a directory is made in this one for the homes, and removed at the end; None: in
            the working directory.

    Raises:
        RuntimeError: results differ from those without a cache, or the directory is in memory.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()  # otherwise torch warns of the default
    report = Report(
        name="cache",
        columns=("peer", "samples/s", "ms a batch", "own ms", "rows read", "rows written"),
    )
    sizes = _SMOKE if smoke else _FULL
    with _scratch(directory or Path.cwd()) as folder:
        system = _file_system(folder)
        if system in ("tmpfs", "ramfs") and not smoke:
            raise RuntimeError(f"{folder} is in memory ({system}); pass --directory of a disk")
        _gate(report, folder, smoke=smoke)
        cpu_seconds = _compare(report, folder, sizes, system)
        _plan_alone(report, sizes, cpu_seconds)
        _one_table(report, folder, sizes)
    return report


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=".recpoint-bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _file_system(path: Path) -> str:
    """Return the type of the file system that a path is on; "unknown" where nothing says it."""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:  # not Linux
        return "unknown"
    mounts = [line.split()[1:3] for line in lines]
    on = [(len(mount), kind) for mount, kind in mounts if path.resolve().is_relative_to(mount)]
    return max(on, default=(0, "unknown"))[1]


#: Tables of the comparison. The first ones are large and small.
_GATE_TABLES = 8


def _gate(report: Report, folder: Path, *, smoke: bool) -> None:
    """Compare training through each peer with training in memory, bit for bit.

    Raises:
        RuntimeError: something differs, or a planned lookup missed.
    """
    lines, count = 16, 12 if smoke else 40
    reader = criteo_reader(lines=lines, rows=200)
    tables = dict(itertools.islice(reader.tables.items(), _GATE_TABLES))
    batches = [
        Batch(batch.sparse[:_GATE_TABLES].contiguous(), batch.label)
        for batch in drawn(reader, range(count))
    ]
    # What one batch may need, little more, and everything.
    capacities = [{f"tables.{n}": min(c, r) for n, r in tables.items()} for c in (16, 40, 200)]
    windows = (1, 7, 300)
    names = itertools.count()
    runs = 0
    for name, make in OPTIMIZERS.items():
        memory = AllInMemory(tables, batches, lambda model: fill(model, INITIAL), make)
        losses = memory.play(count, wait=0)
        expected = state_in_memory(memory)
        pairs = list(itertools.product(capacities, windows))
        if smoke:
            pairs = list(zip(capacities, windows, strict=True))
        for capacity, window in [*pairs, *([(capacities[0], None)] if make is row_wise else [])]:
            # With little room for the index, so that rows are merged meanwhile.
            limits = FileLimits(index_rows=500, buffer_bytes=4096)
            home = local(folder / f"gate-{next(names)}", limits=limits)
            peer = CachedPeer(tables, batches, home, capacity, window=window, make=make)
            is_equal = peer.play(count, wait=0) == losses
            is_equal = is_equal and same_bits(state_in_cache(peer.cache), expected)
            is_planned = window is not None and capacity is not capacities[0]
            missed = peer.cache.stats.misses if is_planned else 0
            peer.close()
            if not is_equal or missed:
                raise RuntimeError(
                    f"{name}, window {window}, capacity {max(capacity.values())} a table: "
                    f"{'equal' if is_equal else 'other'} results, {missed} lookups missed"
                )
            runs += 1
        if make is row_wise:
            uncached = Uncached(tables, batches, local(folder / f"gate-{next(names)}"))
            if uncached.play(count, wait=0) != losses:
                raise RuntimeError("without a cache: other losses than in memory")
            uncached.close()
    report.figures["bit_identical"] = 1.0
    report.notes.append(f"bit_identical: {runs} runs of {count} batches through a cache")


@dataclass
class _Rounds:
    """What a peer did in each round.

    Attributes:
        seconds: of a round.
        own: seconds of lookups, gradients and steps.
        read: rows that were read from the home.
        written: rows that were written back.
        cpu: seconds of the processor, of all threads.
    """

    seconds: list[float]
    own: list[float]
    cpu: list[float]
    read: list[int]
    written: list[int]

    @classmethod
    def none(cls) -> _Rounds:
        return cls([], [], [], [], [])

    def play(self, peer: Peer, batches: int, wait: float) -> None:
        """Play a round."""
        own_before, (read, written) = peer.own_seconds, peer.moved()
        start_s, cpu = time.perf_counter(), time.process_time()
        peer.play(batches, wait=wait)
        self.seconds.append(time.perf_counter() - start_s)
        self.cpu.append(time.process_time() - cpu)
        now = peer.moved()
        self.own.append(peer.own_seconds - own_before)
        self.read.append(now[0] - read)
        self.written.append(now[1] - written)


def _compare(report: Report, folder: Path, sizes: _Sizes, system: str) -> float:
    """Compare the peers; return the processor's seconds of a batch with the planned cache."""
    reader = criteo_reader(lines=sizes.lines, rows=sizes.rows)
    tables: dict[str, int] = reader.tables
    played = sizes.warm + 2 * sizes.rounds * sizes.batches
    batches = drawn(reader, range(played + sizes.window + 2))
    with ExitStack() as stack:
        disk = stack.enter_context(_Disk(folder / "disk", sizes.disk_bytes))
        peers: dict[str, Peer] = {"all in memory": AllInMemory(tables, batches, any_values)}
        filled = []
        for number, name in enumerate(("planned cache", "LRU cache", "no cache")):
            home = local(folder / f"home-{number}")
            start_s = time.perf_counter()
            fill_home(home, tables)
            filled.append(time.perf_counter() - start_s)
            peers[name] = (
                Uncached(tables, batches, home)
                if name == "no cache"
                else CachedPeer(
                    tables, batches, home, sizes.capacity, is_filled=True,
                    window=sizes.window if name == "planned cache" else None,
                )
            )  # fmt: skip
            stack.callback(peers[name].close)
        report.timed("a home is filled", filled)
        planned = peers["planned cache"]
        assert isinstance(planned, CachedPeer)
        for name, peer in peers.items():
            peer.play(5 if name == "no cache" else sizes.warm, wait=0)
            peer.finish_merges()
        if not planned.cache.stats.written_rows:
            raise RuntimeError("no row has left the cache before the first round")
        per_wait = [
            _rounds(report, peers, disk, sizes, wait, only=only)
            for wait, only in zip(
                sizes.waits, (tuple(peers), ("all in memory", "planned cache")), strict=True
            )
        ]
        report.figures["misses"] = float(planned.cache.stats.misses)
        home_bytes = sum(tables.values()) * _RECORD_BYTES
        memory = planned.cache.size_bytes()
        report.notes += [
            f"homes on {system}: {disk.text}; {sum(tables.values()):,} rows of {_RECORD_BYTES} "
            f"bytes, {home_bytes / _MB:,.0f} MB; capacity {sizes.capacity:,} rows",
            "memory of the planned cache, MB: "
            + ", ".join(f"{k} {v / _MB:,.1f}" for k, v in memory.items()),
        ]
    fast, slow = per_wait
    rounds = fast["planned cache"].seconds
    report.put("vs_no_cache", ratio(fast["no cache"].seconds, rounds))
    report.put("vs_lru", ratio(fast["LRU cache"].seconds, rounds))
    report.put(
        "vs_memory_162ms", ratio(slow["all in memory"].seconds, slow["planned cache"].seconds)
    )
    return statistics.median(fast["planned cache"].cpu) / sizes.batches


def _rounds(
    report: Report,
    peers: Mapping[str, Peer],
    disk: _Disk,
    sizes: _Sizes,
    wait: float,
    *,
    only: Sequence[str],
) -> dict[str, _Rounds]:
    """Play rounds in turns; add rows, times and the share of the bound to the report."""
    rounds_by_name = {name: _Rounds.none() for name in only}
    merged = {name: 0.0 for name in only}
    bounds = []
    for number in range(sizes.rounds):
        reads_per_s, bytes_per_s = disk.measure()
        # Every other round the other way round, so that no peer always follows the same one.
        for name in only if number % 2 == 0 else only[::-1]:
            rounds_by_name[name].play(peers[name], sizes.batches, wait)
            start_s = time.perf_counter()
            peers[name].finish_merges()
            merged[name] += time.perf_counter() - start_s
        planned = rounds_by_name["planned cache"]
        slot_bytes = BlockForm.of(_RECORD_BYTES).slot_bytes
        disk_seconds = (
            planned.read[-1] / reads_per_s + planned.written[-1] * slot_bytes / bytes_per_s
        )
        bounds.append(max(rounds_by_name["all in memory"].seconds[-1], disk_seconds))
    milliseconds = round(1000 * wait)
    label = "47ms" if wait == sizes.waits[0] else "162ms"
    report.put(f"vs_bound_{label}", ratio(bounds, rounds_by_name["planned cache"].seconds))
    for name, peer_rounds in rounds_by_name.items():
        batch = report.timed(
            f"{label}: {name}, a batch",
            [seconds / sizes.batches for seconds in peer_rounds.seconds],
        )
        report.rows.append(
            (
                f"{name}, {milliseconds} ms",
                sizes.lines / batch,
                1000 * batch,
                1000 * statistics.median(peer_rounds.own) / sizes.batches,
                round(statistics.median(peer_rounds.read) / sizes.batches),
                round(statistics.median(peer_rounds.written) / sizes.batches),
            )
        )
    waited = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in merged.items())
    report.notes.append(f"{label}: merges that were waited for after rounds: {waited}")
    return rounds_by_name


class _Disk:
    """Measures random reads and sequential writes of a directory, with the kernel of homes."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._directory = HomeDirectory(path)
        self._file = self._directory.make("table-0001.base")
        self._memory = page_memory(min(size_bytes, 1 << 20))
        # No record has a right checksum. The blocks are read all the same.
        self._memory.random_(1, 256)
        self._size_bytes = size_bytes
        self._form = BlockForm.of(_RECORD_BYTES)
        self._channel = Channel()
        self._write(size_bytes)
        self._reads: list[float] = []
        self._writes: list[float] = []

    def __enter__(self) -> _Disk:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.remove()
        self._directory.close()

    def _write(self, size_bytes: int) -> None:
        for offset in range(0, size_bytes, len(self._memory)):
            self._file.write(self._memory, offset)

    def measure(self) -> tuple[float, float]:
        """Return random reads of 4 KiB a second, and bytes written in order a second."""
        written = self._size_bytes // 4
        start_s = time.perf_counter()
        self._write(written)
        self._writes.append(written / (time.perf_counter() - start_s))
        blocks = self._size_bytes // self._form.block_bytes
        # Far apart, so that no read has two of them.
        apart = max(1, blocks // 32_768)
        chosen = torch.arange(0, blocks, max(4, apart), dtype=torch.int64, device="cpu")
        slots = chosen[torch.randperm(len(chosen))] * self._form.slots
        out = torch.empty(len(slots), _RECORD_BYTES, dtype=torch.uint8, device="cpu")
        start_s = time.perf_counter()
        self._channel.read(
            torch.full_like(slots, self._file.descriptor), slots, slots, out,
            torch.arange(len(slots), dtype=torch.int64, device="cpu"),
            table=1, form=self._form,
        )  # fmt: skip
        self._reads.append(len(slots) / (time.perf_counter() - start_s))
        return self._reads[-1], self._writes[-1]

    @property
    def text(self) -> str:
        """What was measured."""
        reads, writes = statistics.median(self._reads), statistics.median(self._writes)
        kind = "up to 128 at once" if self._channel.is_asynchronous else "one by one"
        return f"{reads:,.0f} random reads a second ({kind}), {writes / _MB:,.0f} MB/s in order"


def _plan_alone(report: Report, sizes: _Sizes, cpu_seconds: float) -> None:
    """Plan with the oracle alone; `cpu_seconds` are of a whole batch of the smaller size."""
    for key, lines, count in zip(
        ("moved_2k", "moved_16k"), sizes.oracle_lines, sizes.oracle_batches, strict=True
    ):
        reader = criteo_reader(lines=lines, rows=sizes.oracle_rows)
        batches = drawn(reader, range(count))
        plan = plan_alone(
            reader.tables,
            [batch.sparse for batch in batches],
            capacity=sizes.oracle_capacity,
            window=sizes.window,
        )
        moved, seconds = plan.fetched, plan.seconds
        rows = [[ids.unique() for ids in batch.sparse] for batch in batches]
        unique = [sum(len(ids) for ids in ids_of_batch) for ids_of_batch in rows]
        # The first half fills the cache.
        half = count // 2
        report.figures[key] = sum(moved[half:]) / sum(unique[half:])
        new = sum(new_rows(table, half) for table in zip(*rows, strict=True))
        report.figures[f"{key}_least"] = new / sum(unique[half:])
        ids = len(reader.tables) * lines * count
        report.notes.append(
            f"{key}: {report.figures[key]:.4f} in batches {half:,} to {count:,}, "
            f"{sum(moved) / sum(unique):.4f} in all, of {statistics.fmean(unique):,.0f} rows a "
            f"batch; {ids / seconds:,.0f} ids a second. {report.figures[f'{key}_least']:.4f} come "
            "for the first time, so no cache moves fewer"
        )
        if key == "moved_2k":
            report.figures["oracle_ids_per_s"] = ids / seconds
            report.figures["oracle_share"] = seconds / count / cpu_seconds
            report.timed("the oracle, a batch", [seconds / count])


#: Lookups of a batch in the one table, for each sample of Criteo's shape.
_LOOKUPS = 4


def _one_table(report: Report, folder: Path, sizes: _Sizes) -> None:
    """Compare a table of very many rows with one of fewer, on the same lookups."""
    count = sizes.warm + sizes.rounds * sizes.batches + sizes.window + 2
    # Few enough that rows which have left come back, and are read.
    ranks = min(sizes.one_table[1], 2 * sizes.capacity)
    drawn = []
    for number in range(count):
        generator = np.random.default_rng([11, number])
        skewed = (ranks * generator.random(_LOOKUPS * sizes.lines) ** 3).astype(np.int64)
        # Rows are not in the order of their frequency. The factor is prime, so rows stay distinct.
        places = torch.from_numpy(skewed * 1_000_003 % ranks)
        label = torch.from_numpy((generator.random(len(skewed)) < 0.5).astype(np.float32))
        drawn.append(Batch(places[None], label))
    peers: list[CachedPeer] = []
    starts = []
    with ExitStack() as stack:
        for rows in sizes.one_table:
            # The same rows, spread over the table.
            spread = _Spread(drawn, rows // ranks)
            start_s = time.perf_counter()
            home = local(folder / f"one-{rows}")
            peer = CachedPeer({"one": rows}, spread, home, sizes.capacity, window=sizes.window)
            starts.append(time.perf_counter() - start_s)
            stack.callback(peer.close)
            peers.append(peer)
        for peer in peers:
            peer.play(sizes.warm, wait=0)
            peer.finish_merges()
        rounds = [_Rounds.none() for _ in peers]
        for number in range(sizes.rounds):
            for index in (0, 1) if number % 2 == 0 else (1, 0):
                rounds[index].play(peers[index], sizes.batches, 0)
                peers[index].finish_merges()
        for rows, peer, peer_rounds, start in zip(
            sizes.one_table, peers, rounds, starts, strict=True
        ):
            batch = report.timed(
                f"one table of {rows:,} rows, a batch",
                [seconds / sizes.batches for seconds in peer_rounds.seconds],
            )
            report.rows.append(
                (
                    f"{rows:,} rows, no wait",
                    _LOOKUPS * sizes.lines / batch,
                    1000 * batch,
                    1000 * statistics.median(peer_rounds.own) / sizes.batches,
                    round(statistics.median(peer_rounds.read) / sizes.batches),
                    round(statistics.median(peer_rounds.written) / sizes.batches),
                )
            )
            report.notes.append(
                f"one table of {rows:,} rows: started in {seconds_text(start)}; MB: "
                + ", ".join(f"{k} {v / _MB:,.1f}" for k, v in peer.cache.size_bytes().items())
            )
    report.put("vs_10m_rows", ratio(rounds[1].seconds, rounds[0].seconds))


class _Spread(Sequence[Batch]):
    """Batches whose ids are multiplied when a batch is taken.

    Args:
        batches: the batches.
        factor: of the ids.
    """

    def __init__(self, batches: Sequence[Batch], factor: int) -> None:
        self._batches, self._factor = batches, factor

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: Any) -> Any:
        batch = self._batches[number]
        return Batch(batch.sparse * self._factor, batch.label)
