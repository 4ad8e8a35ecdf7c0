"""The examples with a cache train to the same bits wherever rows are, on one rank and on two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import train_larger_than_memory
import train_with_servers
from tests.forked_program import run_script

STEPS = 12
#: On this host's loopback, at a free port.
TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=127.0.0.1:0",
    "--local-addr=127.0.0.1",
    "--nproc-per-node=2",
    "--",
)


def result(module: Any, *arguments: str, launcher: tuple[str, ...] = ()) -> dict[str, Any]:
    script = [module.__file__, f"--steps={STEPS}", "--rows=20000", *arguments]
    if launcher:
        command = [sys.executable, *launcher, *script]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    else:
        ended = run_script(*script)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert found["steps"] == STEPS
    return found


def test_one_process_trains_to_the_same_bits_wherever_rows_are(tmp_path: Path) -> None:
    in_memory = result(train_larger_than_memory)
    assert in_memory["ranks"] == 1
    assert result(train_larger_than_memory, f"--home={tmp_path / 'rows'}") == in_memory
    assert result(train_with_servers, "--servers=3", "--parity=2+1") == in_memory


def test_ranks_that_share_rows_train_to_the_bits_of_ddp_with_whole_tables() -> None:
    whole = result(train_with_servers, launcher=TORCHRUN)
    assert whole["ranks"] == 2
    assert result(train_with_servers, "--servers=2", launcher=TORCHRUN) == whole
