"""How much memory a consolidation takes: bounded, whatever the size of the tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recpoint.catalog.persist.persist import persist_job
from recpoint.catalog.run.run import Run
from recpoint.format.manifest import Manifest
from tests.catalog_builder import Table, build, new_run, publish
from tests.job_builder import Links, stage
from tests.torch_interpreter import run_program

# The peak is that of the process alone, after everything has been imported and warmed up.
_PROGRAM = """
import json, sys, threading
import psutil
from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.plan import plan_consolidation
from recpoint.format.naming import ManifestName
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store

run = Run.open(open_store(sys.argv[1]))
process = psutil.Process()
consolidate(run, plan_consolidation(run, ManifestName(2, 1)))
idle = peak = process.memory_info().rss
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, process.memory_info().rss)

watcher = threading.Thread(target=watch)
watcher.start()
merged = consolidate(run, plan_consolidation(run, ManifestName(12, 1)))
done.set()
watcher.join()
found = {"outcome": merged.outcome, "read": merged.read_bytes, "extra_mb": (peak - idle) / 1e6}
print(json.dumps(found))
"""


@pytest.mark.parametrize(("bits", "ranks"), [(None, 10), (4, 1)])
def test_a_large_chain_takes_bounded_memory(tmp_path: Path, bits: int | None, ranks: int) -> None:
    """Of several ranks too, whose rows share no chunk and wait for one each."""
    run = new_run(tmp_path / "run")
    run.claim(None)
    # A small chain of 1 and 2 to warm up, and a large one of 11 and 12.
    for first, rows in ((1, 1000), (11, ranks * 120_000 if ranks > 1 else 4 << 20)):
        values = torch.zeros(rows, 64 if bits is None else 16)
        values[:, 0] = torch.arange(rows)
        table = Table(f"t{first}", values, (torch.ones(rows),), bits=bits)
        if ranks > 1:
            publish_chain(run, table, first, ranks)
        else:
            persist_chain(run, tmp_path / "staging", table, first)
        del values, table
    answer = run_program(_PROGRAM, run.url)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["outcome"] == "created" and report["read"] > 60e6
    # Three chunks of 32 MiB that were read, 48 MiB of all ranks' that wait, one being built, two on
    # their way.
    assert report["extra_mb"] < 400


def persist_chain(run: Run, staging: Path, table: Table, first: int) -> None:
    """A full and an increment of one rank, as a trainer's."""
    links = Links()
    for step in (first, first + 1):
        table.values[:, 1] = step
        dirty = None if step == first else [torch.arange(0, table.rows, 3)]
        job = stage(
            run, staging, [table], step=step, generation=1, slot=0, dirty=dirty, links=links
        )
        persist_job(job)


def publish_chain(run: Run, table: Table, first: int, ranks: int) -> None:
    """A full and an increment of ranks that have as many rows each: one chunk's, nearly."""
    each = table.rows // ranks
    parent: Manifest | None = None
    for step in (first, first + 1):
        checkpoint = build(
            run,
            [table],
            step=step,
            generation=1,
            parent=parent,
            dirty=[None if parent is None else torch.arange(0, table.rows, 50)],
            state={},
            rows_per_chunk=each,
            ranks=ranks,
            owners=[torch.arange(table.rows) // each],
        )
        parent = publish(run, checkpoint)
