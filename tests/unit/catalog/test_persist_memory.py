"""How much memory a persist takes, the spool's included: bounded, whatever the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recpoint.catalog.persist.plan import GROUP_SPOOL_BYTES
from tests.catalog_builder import Table, new_run
from tests.job_builder import stage
from tests.torch_interpreter import run_program

# The peak is that of the process alone, after everything has been imported and warmed up.
_PROGRAM = """
import json, os, sys, time
from pathlib import Path
import psutil, threading
from recpoint.catalog.persist.persist import persist_job
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.job_files import read_job
from recpoint.catalog.store.store import open_store

process = psutil.Process()
persist_job(sys.argv[1])
spool = StagedRun.of_job(Path(sys.argv[2])).spool_directory
idle = process.memory_info().rss
own = spooled = both = 0
done = threading.Event()

def in_spool():
    total = 0
    for folder, _, names in os.walk(spool):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                pass
    return total

def watch():
    global own, spooled, both
    while not done.wait(0.002):
        now, then = process.memory_info().rss - idle, in_spool()
        own, spooled, both = max(own, now), max(spooled, then), max(both, now + then)

# What is encoded waits for the store.
store = open_store(read_job(sys.argv[2]).run_url)
put = store.put

def slow(key, data):
    time.sleep(len(data) / 100e6)
    put(key, data)

store.put = slow
watcher = threading.Thread(target=watch)
watcher.start()
outcome = persist_job(sys.argv[2], store=store)
done.set()
watcher.join()
took = {"own": own, "spooled": spooled, "both": both}
print(json.dumps({"result": outcome.result, "took": took}))
"""


def _persisted(jobs: list[Path]) -> dict[str, int]:
    """Bytes that the second of the jobs took: of its own, in the spool, and of both at once."""
    answer = run_program(_PROGRAM, *map(str, jobs))
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["result"] == "committed"
    took: dict[str, int] = report["took"]
    return took


@pytest.mark.parametrize("bits", [None, 4])
def test_a_large_checkpoint_takes_bounded_memory(tmp_path: Path, bits: int | None) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    jobs = []
    for step, rows in ((1, 1000), (2, (320 << 20) // 260)):
        values = torch.zeros(rows, 64)
        values[:, 0] = torch.arange(rows)
        table = Table(f"t{step}", values, (torch.ones(rows),), bits=bits)
        staging = tmp_path / "staging"
        jobs.append(stage(run, staging, [table], step=step, generation=1, slot=step))
    # 320 MiB were staged; four chunks of 32 MiB in flight are 134 MB.
    assert _persisted(jobs)["own"] < 250e6


@pytest.mark.parametrize(
    ("dim", "states", "wide_each", "staged_mib"), [(8, False, 0, 480), (16, True, 997, 320)]
)
def test_what_waits_in_the_spool_is_bounded_too(
    tmp_path: Path, dim: int, states: bool, wide_each: int, staged_mib: int
) -> None:
    """Of narrow rows most is left once they are quantized; few wide ones part chunks in two."""
    run = new_run(tmp_path / "run")
    run.claim(None)
    jobs = []
    for step, staged_bytes in ((1, 1 << 20), (2, staged_mib << 20)):
        generator = torch.Generator().manual_seed(step)
        values = torch.rand(staged_bytes // (4 * dim * (1 + states)), dim, generator=generator)
        if wide_each:
            few = values[::wide_each]
            few.mul_(1e-3).add_(1000)  # binary16 has no such offset
        table = Table(f"t{step}", values, (values,) if states else (), bits=8)
        staging = tmp_path / "staging"
        jobs.append(stage(run, staging, [table], step=step, generation=1, slot=step))
    report = _persisted(jobs)
    assert 0 < report["spooled"] <= 2 * GROUP_SPOOL_BYTES
    assert report["both"] <= 512e6
    schemes = sum(chunk.scheme == "asymmetric" for chunk in run.manifest(2, 1).chunks)
    assert schemes > 4
