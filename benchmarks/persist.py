"""Measures persisting to a real S3 server against bare s3fs that uploads as many bytes.

The server is SeaweedFS on this machine, so it takes the same cores from both sides. Bare s3fs
uploads objects of the same sizes with as many requests in flight; it computes and checks nothing.
Peak memory is measured in a separate process that only persists: its growth, plus the bytes in the
spool.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

import psutil

from benchmarks.report import Report, Spread, ratio
from benchmarks.workload import Tables, scratch, staged_run
from recpoint.catalog.persist.persist import persist_job
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.job_files import read_job
from recpoint.catalog.store.store import Store, open_store
from recpoint.testing.seaweed import SeaweedServer
from recpoint.trainer_plugin.settings import FixedBits

__all__ = ["KEYS", "run"]

KEYS = ("vs_raw_s3fs", "vs_raw_s3fs_4bit", "peak_extra_mb")

_DIM = 64
_IN_FLIGHT = 4

#: The case that measures only memory: narrow rows, which shrink least when quantized, and a store
#: that takes so few bytes a second that encoded chunks must wait.
_NARROW_DIM = 8
_SLOW_BYTES = 100e6


def run(*, smoke: bool) -> Report:
    """Measure lossless and 4-bit rows, and the memory for narrow rows and a slow store.

    The figure `vs_raw_s3fs` is for lossless rows; `peak_extra_mb` is the worst of all cases.
    """
    mebibytes, rounds = (4, 1) if smoke else (1024, 3)
    report = Report(
        name="persist",
        columns=(
            "rows as",
            "staged MB",
            "stored MB",
            "persist s",
            "bare s3fs s",
            "ratio",
            "peak MB",
        ),
    )
    ratios: dict[tuple[FixedBits, int], Spread] = {}
    peaks: list[float] = []
    with scratch(in_memory=False) as disk, SeaweedServer(disk / "weed") as server:
        os.environ.update(server.environment())
        cases: tuple[tuple[FixedBits, int], ...] = (
            ("lossless", mebibytes // 4),
            ("lossless", mebibytes),
            (4, mebibytes),
        )
        for bits, size in cases:
            with scratch() as memory:
                ratios[bits, size], peak = _measure(
                    report, server, memory, bits, size << 20, rounds
                )
            peaks.append(peak)
        with scratch() as memory:
            row, peak = _measure_slow(server, memory, mebibytes << 20)
        report.rows.append(row)
        peaks.append(peak)
    report.put("vs_raw_s3fs", ratios["lossless", mebibytes])
    report.put("vs_raw_s3fs_4bit", ratios[4, mebibytes])
    report.figures["peak_extra_mb"] = max(peaks)
    report.notes.append(
        "ratio: seconds of bare s3fs over seconds of persist, for the same number of stored bytes. "
        "At 4 bits persist reads and quantizes seven times what it stores. "
        f"Slow: {_NARROW_DIM} values a row, and a store that takes {_SLOW_BYTES / 1e6:.0f} MB/s."
    )
    return report


def _measure(
    report: Report,
    server: SeaweedServer,
    memory: Path,
    bits: FixedBits,
    size_bytes: int,
    rounds: int,
) -> tuple[Spread, float]:
    """Return seconds of bare s3fs over seconds of persist, and the peak memory in megabytes."""
    model = Tables(count=2, rows=size_bytes // (2 * 4 * _DIM), dim=_DIM)
    persists, uploads, peaks = [], [], []
    stored = staged_bytes = 0
    with staged_run(
        model,
        model.optimizers(state=False),
        url=server.run_url(),
        staging=memory / "staging",
        bits=bits,
    ) as tracked:
        for turn in range(rounds):
            for name in ("tables.0", "tables.1"):
                tracked.checkpointer.mark_all(name)
            tracked.checkpointer.step()
            committed = tracked.checkpointer.stats.committed
            job_file = tracked.cut()
            staged_bytes = sum(segment.bytes for segment in read_job(job_file).segments)
            seconds, peak, sizes = _in_own_process(job_file)
            tracked.wait_for_commit(committed)
            raw = _bare_s3fs(f"{server.bucket}/bare-{bits}-{size_bytes}-{turn}", sizes)
            persists.append(seconds)
            uploads.append(raw)
            peaks.append(peak)
            stored = sum(sizes)
    upload_ratio = ratio(uploads, persists)
    name = f"{bits}, {size_bytes >> 20} MiB"
    report.rows.append(
        (
            f"{bits}",
            staged_bytes / 1e6,
            stored / 1e6,
            report.timed(f"persist, {name}", persists),
            report.timed(f"bare s3fs, {name}", uploads),
            upload_ratio.median,
            max(peaks),
        )
    )
    return upload_ratio, max(peaks)


def _measure_slow(
    server: SeaweedServer, memory: Path, size_bytes: int
) -> tuple[tuple[object, ...], float]:
    model = Tables(count=2, rows=size_bytes // (2 * 4 * _NARROW_DIM), dim=_NARROW_DIM)
    with staged_run(
        model,
        model.optimizers(state=False),
        url=server.run_url(),
        staging=memory / "staging",
        bits=8,
    ) as tracked:
        job_file = tracked.cut()
        staged_bytes = sum(segment.bytes for segment in read_job(job_file).segments)
        seconds, peak, sizes = _in_own_process(job_file, _SLOW_BYTES)
        tracked.wait_for_commit(0)
    return ("8, slow", staged_bytes / 1e6, sum(sizes) / 1e6, seconds, "–", "–", peak), peak


def _bare_s3fs(prefix: str, sizes: list[int]) -> float:
    """Return the seconds in which s3fs uploads objects of these sizes."""
    import s3fs

    filesystem = s3fs.S3FileSystem(
        use_listings_cache=False,
        skip_instance_cache=True,
        client_kwargs={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
    )
    objects = {f"{prefix}/{number}": os.urandom(size) for number, size in enumerate(sizes)}
    filesystem.ls(prefix.split("/")[0])  # connected, as the persist's own store is
    start = perf_counter()
    filesystem.pipe(objects, batch_size=_IN_FLIGHT)
    seconds = perf_counter() - start
    filesystem.rm(prefix, recursive=True)
    return seconds


def _in_own_process(
    job_file: Path, most_bytes: float | None = None
) -> tuple[float, float, list[int]]:
    """Return (seconds, peak MB above the idle process, sizes of the chunks).

    `most_bytes`: the most bytes that the store takes a second; None: no limit.
    """
    # The fork server has imported all modules, and does nothing else.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.persist", "s3fs"])
    own_end, their_end = context.Pipe()
    process = context.Process(target=_persist, args=(str(job_file), most_bytes, their_end))
    process.start()
    if own_end.recv() != "ready":
        raise RuntimeError("the persisting process did not start")
    watched = psutil.Process(process.pid)
    spool = StagedRun(job_file.parent.parent).spool_directory
    idle = _own_bytes(watched)
    own_end.send("go")
    peak = 0
    while not own_end.poll(0.02):
        # Own memory and the spool are counted; the slot's pages belong to the trainer.
        peak = max(peak, _own_bytes(watched) + _bytes_in(spool) - idle)
    seconds, sizes = json.loads(own_end.recv())
    process.join()
    return seconds, peak / 1e6, sizes


def _persist(job_file: str, most_bytes: float | None, pipe: Connection) -> None:
    job = read_job(job_file)
    store = open_store(job.run_url)
    list(store.list("generations/"))  # connected, as the peer is
    if most_bytes is not None:
        _slow_down(store, most_bytes)
    pipe.send("ready")
    pipe.recv()
    start = perf_counter()
    outcome = persist_job(job_file, store=store)
    seconds = perf_counter() - start
    if outcome.result != "committed":
        raise RuntimeError(outcome.error)
    prefix = f"chunks/{job.step:012d}-"
    pipe.send(json.dumps([seconds, [info.size_bytes for info in store.list(prefix)]]))


def _slow_down(store: Store, most_bytes: float) -> None:
    """Slow each put as if all concurrent puts shared a line of `most_bytes` a second."""
    put = store.put

    def slow(key: str, data: bytes) -> None:
        time.sleep(_IN_FLIGHT * len(data) / most_bytes)
        put(key, data)

    store.put = slow  # type: ignore[method-assign]


def _own_bytes(process: psutil.Process) -> int:
    """Return resident memory that is not of files; adding up all mappings would busy a core."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def _bytes_in(folder: Path) -> int:
    total = 0
    for directory, _, names in os.walk(folder):  # passes over directories that are gone
        for name in names:
            try:
                total += os.stat(os.path.join(directory, name)).st_size
            except FileNotFoundError:
                pass  # removed in the meantime
    return total
