"""How much memory a persist takes: bounded, whatever the size of the checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.catalog_builder import Table, new_run
from tests.job_builder import stage

# The peak is that of the process alone, after everything has been imported and warmed up.
_PROGRAM = """
import json, sys
from pathlib import Path
import psutil, threading
from recpoint.catalog.persist import persist_job

process = psutil.Process()
persist_job(sys.argv[1])
idle = peak = process.memory_info().rss
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, process.memory_info().rss)

watcher = threading.Thread(target=watch)
watcher.start()
outcome = persist_job(sys.argv[2])
done.set()
watcher.join()
print(json.dumps({"result": outcome.result, "extra_mb": (peak - idle) / 1e6}))
"""


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
    answer = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *map(str, jobs)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=240,
    )
    report = json.loads(answer.stdout)
    assert report["result"] == "committed"
    # 320 MiB were staged; four chunks of 32 MiB in flight are 134 MB.
    assert report["extra_mb"] < 250
