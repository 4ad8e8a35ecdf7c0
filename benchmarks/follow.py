"""Measures the time from a commit to serving its version, with a trainer, agent and follower.

One process trains a DLRM on generated data of Criteo's shape and checkpoints it every few batches,
an agent persists, and `recpoint follow` reads each version. Measured is the time from the writing
of a manifest to the moment when requests get its version, by one clock. The follower polls every
0.25 s, so it waits half of that on average. The store is a local directory, and then a real S3
server on this host.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.report import Report, spread_of
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.testing.seaweed import SeaweedServer
from tests.agent_process import AgentProcess
from tests.polling import until

__all__ = ["KEYS", "run"]

KEYS = ("commit_to_served_s", "commit_to_served_s3_s")

_EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_dlrm.py"
_POLL_SECONDS = 0.25
#: Versions after the first that are measured at least: fewer give no useful median.
_LEAST = 3


def run(*, smoke: bool) -> Report:
    """Measure on both stores."""
    report = Report(
        name="follow",
        columns=("store", "versions", "increment MB", "commit to served s", "worst s"),
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recpoint-follow-")))
        local = _served(str(folder / "run"), folder / "local", smoke=smoke)
        s3 = stack.enter_context(SeaweedServer(folder / "seaweed"))
        old_environment = dict(os.environ)
        os.environ.update(s3.environment())
        try:
            remote = _served(s3.run_url(), folder / "remote", smoke=smoke)
        finally:
            os.environ.clear()
            os.environ.update(old_environment)
    for key, name, versions in zip(KEYS, ("local directory", "S3"), (local, remote), strict=True):
        seconds = [version["seconds"] for version in versions]
        sizes = [version["bytes"] / 1e6 for version in versions]
        report.rows.append(
            (
                name,
                len(versions),
                statistics.median(sizes),
                report.timed(f"commit to served, {name}", seconds),
                max(seconds),
            )
        )
        report.put(key, spread_of(seconds))
    report.notes = [f"a look every {_POLL_SECONDS} s; the first version, a full, is left out"]
    return report


def _served(url: str, folder: Path, *, smoke: bool) -> list[Mapping[str, Any]]:
    """Return, for each version after the first, seconds from commit to served and its bytes."""
    folder.mkdir()
    # A smoke run trains until enough versions were served, which takes longer on a slow machine.
    steps, interval = (10**6, 20) if smoke else (2000, 50)
    follow = [sys.executable, "-m", "recpoint", "follow", url, "--json"]
    train = [sys.executable, str(_EXAMPLE), "--run", url, "--data", "criteo-shape"]
    train += [
        "--rows",
        str(1000 if smoke else 200_000),
        "--batch",
        "64" if smoke else "256",
        "--max-staged",
        "2",
    ]
    train += ["--steps", str(steps), "--interval", str(interval)]
    train += ["--staging", str(folder / "staging")]
    lines: list[dict[str, Any]] = []
    with AgentProcess(folder / "staging", folder / "agent.log"):
        follower = subprocess.Popen(
            [*follow, "--poll-seconds", str(_POLL_SECONDS)], stdout=subprocess.PIPE, text=True
        )
        reader = threading.Thread(target=_collect, args=(follower, lines), daemon=True)
        reader.start()
        try:
            if smoke:
                _train_until(train, lambda: sum(bool(line["step"]) for line in lines) > _LEAST)
            else:
                subprocess.run(train, check=True, stdout=subprocess.DEVNULL, timeout=1800)
                until(lambda: any(line["step"] == steps for line in lines), seconds=120)
        finally:
            follower.send_signal(signal.SIGINT)
            follower.wait(60)
            reader.join(60)
    run = Run.open(open_store(url))
    versions: list[Mapping[str, Any]] = []
    for line in [line for line in lines if line["step"]][1:]:
        manifest = run.manifest(line["step"], line["generation"])
        if line["skipped"] or line["error"] or line["attempt"] != manifest.attempt:
            raise AssertionError(f"not served as it was committed: {line}")
        seconds = (line["served_ms"] - line["committed_ms"]) / 1000
        versions.append({"seconds": seconds, "bytes": manifest.stored_bytes})
    if len(versions) < _LEAST:
        raise AssertionError(f"{len(versions)} versions: too few for a median")
    return versions


def _train_until(command: list[str], enough: Callable[[], bool]) -> None:
    """Train until `enough` returns True, then kill the trainer."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as trainer:
        try:
            until(lambda: enough() or trainer.poll() is not None, seconds=200)
        finally:
            trainer.kill()


def _collect(follower: subprocess.Popen[str], lines: list[dict[str, Any]]) -> None:
    assert follower.stdout is not None
    for text in follower.stdout:
        document = json.loads(text)
        if "step" in document:
            lines.append(document)
