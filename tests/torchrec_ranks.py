"""Runs real ranks of a TorchRec job on this CPU, for tests.

    python -m tests.torchrec_ranks FOLDER PLAYS

It imports TorchRec once, which takes seconds, and forks the ranks of one play after the other. A
play is `{"play": name, "ranks": N, ...}`: a function of torchrec_plays or torchrec_losses.
FOLDER/<number>.<r> holds the value that rank r returned.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recpoint.catalog.persist import persist
from recpoint.catalog.staging.agent_lock import AgentLock
from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.errors import RanksMissing
from tests import torchrec_losses, torchrec_plays

__all__ = ["play"]


def play(plays: Sequence[Mapping[str, Any]], folder: Path, **environment: str) -> list[list[Any]]:
    """Run these plays one after the other; return the values of each play's ranks."""
    command = [sys.executable, "-m", "tests.torchrec_ranks", str(folder), json.dumps(list(plays))]
    variables = {"OMP_NUM_THREADS": "1", **environment}
    # In its own session, so that all its processes can be ended if it takes too long.
    launcher = subprocess.Popen(
        command,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = launcher.communicate(timeout=900)
    except BaseException:
        os.killpg(launcher.pid, signal.SIGKILL)
        raise
    assert launcher.returncode == 0, output
    return [
        [
            torch.load(folder / f"{number}.{rank}", weights_only=False)
            if (folder / f"{number}.{rank}").exists()
            else None
            for rank in range(play_arguments["ranks"])
        ]
        for number, play_arguments in enumerate(plays)
    ]


def _agent(staging: str) -> None:
    """Act as the agent of a host for all ranks that stage there, until it is killed."""
    with AgentLock(Path(staging)):
        while True:
            for run in [run.path for run in staged_runs(Path(staging))]:
                for job in StagedRun(run).staged_jobs():
                    with contextlib.suppress(RanksMissing, FileNotFoundError):
                        persist.persist_job(job)
            time.sleep(0.01)


def _perform(number: int, rank: int, play: dict[str, Any], folder: Path) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    meeting = f"file://{folder / f'meeting.{number}'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=play.pop("ranks"))
    name = play.pop("play")
    plays: Any = torchrec_losses if name in torchrec_losses.__all__ else torchrec_plays
    result = getattr(plays, name)(**play)
    torch.save(result, folder / f"{number}.{rank}")
    dist.destroy_process_group()


def _main(folder: Path, plays: list[dict[str, Any]]) -> int:
    warnings.simplefilter("ignore")
    # Imported before the forks, because these imports would take each rank longer than its play.
    # They start no thread.
    import torch.distributed.optim  # noqa: F401
    import torchrec.distributed.model_parallel
    import torchrec.distributed.sharding_plan  # noqa: F401

    import recpoint.trainer_plugin.checkpointer
    import recpoint.trainer_plugin.integrations.torchrec_source  # noqa: F401

    context = multiprocessing.get_context("fork")
    failed = 0
    for number, play_arguments in enumerate(plays):
        processes = [
            context.Process(target=_perform, args=(number, rank, dict(play_arguments), folder))
            for rank in range(play_arguments["ranks"])
        ]
        agent = context.Process(target=_agent, args=(play_arguments.get("staging"),), daemon=True)
        if "staging" in play_arguments:
            agent.start()
        for process in processes:
            process.start()
        expected_code = -signal.SIGKILL if play_arguments.get("die_at") else 0
        while alive := [process.sentinel for process in processes if process.exitcode is None]:
            wait(alive)
            if any(process.exitcode not in (None, expected_code) for process in processes):
                for process in processes:
                    process.kill()  # the other ranks would wait for the failed one
        for process in processes:
            process.join()
        if "staging" in play_arguments:
            agent.kill()
            agent.join()
        failed += sum(process.exitcode != expected_code for process in processes)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), json.loads(sys.argv[2])))
