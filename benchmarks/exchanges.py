"""Measures an exchange between ranks; a checkpoint needs two exchanges to be agreed on.

An exchange is an all-gather of gloo, a ring: one hop after the other, as many as there are other
ranks. It is measured between processes of this machine, which share its cores.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from recpoint.trainer_plugin.ranks.ranks import Ranks

__all__ = ["EXCHANGES", "hop_seconds"]

#: Exchanges of a checkpoint: one before the cut and one after it (decision 29).
EXCHANGES = 2

_PATIENCE_SECONDS = 600.0


def hop_seconds(ranks: int, count: int) -> float:
    """Return the median seconds of an exchange between so many ranks, divided by its hops."""
    with tempfile.TemporaryDirectory(prefix="recpoint-exchanges-") as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.exchanges", folder]
                + [str(number) for number in (rank, ranks, count)],
                stdout=subprocess.PIPE,
            )
            for rank in range(ranks)
        ]
        outputs = [process.communicate(timeout=_PATIENCE_SECONDS)[0] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError("a rank failed")
    return float(outputs[0].split()[-1]) / (ranks - 1)


def _rank(folder: Path, rank: int, ranks: int, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks
    )
    own_ranks = Ranks(wait_seconds=_PATIENCE_SECONDS)
    seconds = []
    for number in range(count):
        start = perf_counter()
        own_ranks.exchange("a cut", [rank], batches_done=number)
        seconds.append(perf_counter() - start)
    own_ranks.close()
    print(statistics.median(seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), *map(int, sys.argv[2:]))
