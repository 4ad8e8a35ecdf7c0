"""Ranks that end without `close()`, and those that are left."""

from __future__ import annotations

from pathlib import Path

from tests.torch_interpreter import TorchInterpreter

_PROGRAM = """
import atexit, sys, threading

def say():
    print([thread.name for thread in threading.enumerate() if thread.name.startswith("recpoint")])

atexit.register(say)  # called after those of what is imported below
import torch.distributed as dist
from recpoint.trainer_plugin.ranks.ranks import Ranks

dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2
)
ranks = Ranks(wait_seconds=60)
ranks.watch()
say()
dist.barrier()
"""


def test_nobody_looks_for_a_signal_of_others_when_the_interpreter_ends(tmp_path: Path) -> None:
    both = [TorchInterpreter(_PROGRAM, str(tmp_path / "met"), str(rank)) for rank in range(2)]
    said = [one.communicate(timeout=120) for one in both]
    for one, (out, err) in zip(both, said, strict=True):
        assert one.returncode == 0, err
        assert out.splitlines() == ["['recpoint-ranks']", "[]"]


_LOST = """
import os, sys

import torch.distributed as dist
from recpoint.errors import RankLost
from recpoint.trainer_plugin.ranks.ranks import Ranks
from tests.no_threads import no_threads

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
ranks = Ranks(wait_seconds=60)
if rank == 1:
    os._exit(0)
with no_threads():
    try:
        ranks.watch()
    except RuntimeError as error:
        print(error)
    try:
        ranks.exchange("a checkpoint", [1])
    except RankLost as error:
        print(error.subject)
ranks.close()
"""


def test_a_rank_that_is_gone_is_named_where_no_thread_can_look_for_it(tmp_path: Path) -> None:
    both = [TorchInterpreter(_LOST, str(tmp_path / "met"), str(rank)) for rank in range(2)]
    said = [one.communicate(timeout=120) for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert said[0][0].splitlines() == ["can't start new thread", "rank 1 of 2"]
