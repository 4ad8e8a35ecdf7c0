"""A Ray cluster on this machine, and drivers that use it from other processes.

Ran as a program, this is a driver. It makes a home for a run, writes rows, and prints one line of
JSON. What it does then depends on its first argument:

- `waits`: it waits, so that a test can kill it.
- `ends`: it closes the home and ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import recpoint.embeddings
from recpoint.embeddings.server.home import ServedHome
from recpoint.testing.homes import ids_of, records_of

__all__ = [
    "MISSING",
    "NODE_MEMORY_BYTES",
    "RECORD_BYTES",
    "add_node",
    "driver",
    "greetings",
    "is_running",
    "ray_cluster",
    "said",
]

MISSING = None if find_spec("ray") else "not run: ray is not installed (pip install 'ray==2.60.*')"
RECORD_BYTES = 64
NODE_MEMORY_BYTES = 1 << 30
_NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "memory": NODE_MEMORY_BYTES}
#: A lost node is noticed after some seconds; half a minute is usual.
_HEAD = {
    "include_dashboard": False,
    "_system_config": {"health_check_initial_delay_ms": 1_000, "health_check_period_ms": 1_000},
}


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """Yield a `ray.cluster_utils.Cluster` of one node; this process is not connected to it."""
    from ray.cluster_utils import Cluster

    handler = signal.getsignal(signal.SIGTERM)  # Ray takes it
    cluster = Cluster()
    try:
        add_node(cluster, **_HEAD)
        signal.signal(signal.SIGTERM, handler)
        yield cluster
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, handler)


def add_node(cluster: Any, **options: object) -> Any:
    """Add a node that listens on the loopback device, and return it."""
    # Ray takes 127.0.0.1 for the machine's own address.
    address = f"127.0.0.{2 + len(cluster.list_all_nodes())}"
    return cluster.add_node(node_ip_address=address, **_NODE, **options)


def greetings(home: Any) -> list[Any]:
    """Return what each server of a home says of itself."""
    assert isinstance(home, ServedHome)
    return [server.transport.hello() for server in home._servers]


def is_running(pid: int) -> bool:
    """Whether a process is there that has not ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def driver(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start this program."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.ray_cluster", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | (environment or {}),
    )


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what a driver says next. Ray prints other lines between."""
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("{"))
    document: dict[str, Any] = json.loads(line)
    return document


def _main(what: str, address: str, *runs: str) -> None:
    """Make a home for each run ("-": no run), and say what its servers are."""
    terminations = []

    def terminated(number: int, frame: FrameType | None) -> None:
        terminations.append(number)

    signal.signal(signal.SIGTERM, terminated)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    homes = []
    for run in runs:
        home = recpoint.embeddings.ray(
            None if address == "-" else address,
            run=None if run == "-" else run,
            transport="ray" if run == "-" else "tcp",
        )
        homes.append(home)
        home.add_table("t", rows=100, record_bytes=RECORD_BYTES)
        rows = range(50 * rank, 50 * rank + 10)
        home.write_back("t", ids_of(rows), records_of(rows, RECORD_BYTES), batch=0)
    os.kill(os.getpid(), signal.SIGTERM)
    if dist.is_initialized():
        dist.barrier()  # all have written
    print(json.dumps(_seen(homes) | {"terminations": len(terminations)}), flush=True)
    if what == "waits":
        time.sleep(3_600)
    if dist.is_initialized():
        dist.barrier()  # all have read
    for home in homes:
        home.close()
    import ray

    print(json.dumps({"is_connected": ray.is_initialized()}), flush=True)


def _seen(homes: Sequence[Any]) -> dict[str, Any]:
    import ray

    rows = []
    for home in homes:
        out = torch.zeros(100, RECORD_BYTES, dtype=torch.uint8, device="cpu")
        is_present = home.fetch("t", ids_of(range(100)), out)
        present_ids = is_present.nonzero().view(-1)
        assert torch.equal(out[present_ids], records_of(present_ids.tolist(), RECORD_BYTES))
        rows.append(present_ids.tolist())
    return {
        "pids": [[greeting.pid for greeting in greetings(home)] for home in homes],
        "rows": rows,
        "store_bytes": int(ray.cluster_resources()["object_store_memory"]),
    }


if __name__ == "__main__":
    _main(*sys.argv[1:])
