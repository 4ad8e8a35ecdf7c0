"""All ranks learn what rank 0 has found, or that it failed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from recpoint.embeddings.home.ranks import rank_and_count
from recpoint.embeddings.server.rank_agreement import found_by_first_rank
from tests.forked_shell import forked_programs

_RANK = """
import json, sys
import torch.distributed as dist
from recpoint.embeddings.home.ranks import rank_and_count
from recpoint.embeddings.server.rank_agreement import found_by_first_rank

dist.init_process_group("gloo")
rank, count = rank_and_count()

def find(fails):
    assert rank == 0
    if fails:
        raise OSError("no such thing")
    return {"names": ["a", "\u00e9" * 1000], "owner": (1 << 63) - 1, "token": None}

said = [count]
for fails in (False, True, False):
    try:
        said.append(found_by_first_rank(lambda: find(fails), timeout_seconds=60))
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
said.append(len(dist.distributed_c10d._world.pg_map))
dist.destroy_process_group()
print(json.dumps(said))
"""


def test_every_rank_has_what_rank_0_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    programs = forked_programs()
    python = sys.executable if programs is None else str(programs / "python")
    ranks = [
        subprocess.Popen(
            [python, "-c", _RANK],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "RANK": str(rank),
                "WORLD_SIZE": "3",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(3)
    ]
    said = [json.loads(one.communicate(timeout=240)[0]) for one in ranks]
    found = {"names": ["a", "\u00e9" * 1000], "owner": (1 << 63) - 1, "token": None}
    for rank, (count, first, failure, last, groups) in enumerate(said):
        assert count == 3 and groups == 1
        assert first == last == found
        if rank == 0:
            assert failure == "OSError: no such thing"
        else:
            assert failure.startswith("ServerLost: embedding servers: found an error on rank 0: ")
            assert "no such thing" in failure


def test_one_process_asks_nobody() -> None:
    assert rank_and_count() == (0, 1)
    assert found_by_first_rank(lambda: {"a": 1}, timeout_seconds=1) == {"a": 1}
    with pytest.raises(OSError, match="no such thing"):
        found_by_first_rank(_fail, timeout_seconds=1)


def _fail() -> dict[str, object]:
    raise OSError("no such thing")
