"""Takes hundreds of checkpoints while trainer, agent, store and Prefect are killed again and again.

A small model trains against a real S3 server and a real Prefect server, whose workers retain,
consolidate, validate, publish, fill a sink, sweep and drain on short schedules, while processes are
killed with SIGKILL at random (the seed is printed). A second trainer, without checkpoints and
kills, records the state after each batch: the truth. Counted are: manifests that are gone although
retention gave no reason, and stored checkpoints that do not restore to the truth (`lost`); restarts
of the trainer that did not restore the newest committed checkpoint, bit for bit (`wrong_restores`).
Memory growth is measured in the longest life of trainer and agent: the end against the beginning
after a warm-up. Lag is the trainer's own count. A fault is over when the killed processes are up
again; a fault of Prefect is over at once. Store, Prefect and agent share the machine's cores with
everything else. An interval is longer than the start of a trainer; otherwise lag could not be low
again within one interval."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import closing

from benchmarks.report import Report
from benchmarks.soak_deployments import Pace
from benchmarks.soak_faults import Fault, Happened, plan_faults
from benchmarks.soak_report import Flows, soak_report
from benchmarks.soak_scene import Scene
from benchmarks.soak_training import INTERVAL_BATCHES
from benchmarks.workload import scratch
from recpoint.testing.seaweed import SeaweedServer

__all__ = ["KEYS", "PACES", "run", "soak"]

KEYS = (
    "checkpoints",
    "kills",
    "lost",
    "wrong_restores",
    "rss_growth_mb",
    "lag_late",
    "lag_high_elsewhere",
    "flows_stopped",
    "store_peak_ratio",
)

#: Seconds between two batches; 20 batches are an interval.
_SMOKE_BATCH_SECONDS = 0.1
_FULL_BATCH_SECONDS = 0.3
#: Additional intervals whose truth is recorded: the trainer goes on while the rest is started.
_LEAST_TRUTH = 60

#: One flow of one worker, which each take a processor for seconds to start.
_SMOKE = Pace(
    only=("retain",),
    retain=5,
    consolidate=30,
    validate=30,
    validate_full=30,
    publish=30,
    publish_to=30,
    sweep=30,
    drain=30,
    forget=30,
    retain_grace=5,
    sweep_grace=30,
    come_round_seconds=60,
)
#: A deployment whose run died with Prefect comes back when its lease has expired: after 300 s.
_FULL = Pace(
    retain=45,
    consolidate=60,
    validate=60,
    validate_full=120,
    publish=75,
    publish_to=75,
    sweep=90,
    drain=90,
    forget=120,
    retain_grace=40,
    sweep_grace=120,
    come_round_seconds=420,
)

PACES = {"smoke": _SMOKE, "full": _FULL}


def run(*, smoke: bool) -> Report:
    """Run a soak with a random seed, which is printed."""
    seed = int(os.environ.get("RECPOINT_SOAK_SEED") or secrets.randbelow(10**6))
    print(f"soak: seed {seed} (RECPOINT_SOAK_SEED)", flush=True)
    if smoke:
        faults = [Fault(2, ("trainer",), 0.0)]
        return soak(4, faults, _SMOKE, seed, batch_seconds=_SMOKE_BATCH_SECONDS)
    return soak(500, plan_faults(500, 8, seed), _FULL, seed, batch_seconds=_FULL_BATCH_SECONDS)


def soak(
    checkpoints: int, faults: Sequence[Fault], pace: Pace, seed: int, *, batch_seconds: float
) -> Report:
    """Run until so many checkpoints are committed, with these faults on the way."""
    with (
        scratch(in_memory=False) as disk,
        scratch() as memory,
        SeaweedServer(disk / "weed") as weed,
    ):
        scene = Scene(
            disk,
            memory / "staging",
            weed,
            truth_steps=max(_LEAST_TRUTH, 3 * checkpoints) * INTERVAL_BATCHES,
            batch_seconds=batch_seconds,
            seed=seed,
        )
        with closing(scene):
            deployed = scene.start(pace)
            _gate(scene)
            happened = []
            for fault in faults:
                _until(scene, fault.at_checkpoint)
                print(f"{scene.committed:4d} {'+'.join(fault.kinds)}", flush=True)
                happened.append(scene.suffer(fault))
            _until(scene, checkpoints)
            return _end(scene, happened, deployed, pace.come_round_seconds)


def _until(scene: Scene, committed: int) -> None:
    """Wait until so many checkpoints are committed."""
    deadline = time.monotonic() + 300
    committed_before = scene.committed
    while scene.committed < committed:
        scene.watch_processes()
        if scene.committed > committed_before:
            committed_before, deadline = scene.committed, time.monotonic() + 300
        if time.monotonic() > deadline:
            raise RuntimeError(f"no commit for 300 s:\n{scene.agent.output[-3000:]}")
        time.sleep(0.5)


def _gate(scene: Scene) -> None:
    """Check that the first checkpoint restores to the truth of its step and of no other step."""
    _until(scene, 2)
    assert scene.ledger is not None
    first = scene.ledger.committed[0]
    scene.wait_for(lambda: scene.truth.get(first.step + 1))
    truth = scene.truth
    shifted = {step: truth.get(step + 1, "") for step in truth}
    if scene.ledger.wrong(first, truth) or not scene.ledger.wrong(first, shifted):
        raise AssertionError(f"{first} is not compared with the truth")


def _end(
    scene: Scene, happened: Sequence[Happened], deployed: Sequence[str], seconds: float
) -> Report:
    """Stop training, wait until each scheduled flow has completed once more, and count."""
    scene.trainer.terminate(90)
    stopped = scene.wait_for_flows(deployed, since_time=scene.prefect_back, seconds=seconds)
    flows = Flows(deployed=deployed, by_state=scene.flow_runs(), stopped=stopped)
    scene.stop_watching()
    for worker in scene.workers:
        worker.kill()
    scene.agent.terminate(60)
    return soak_report(scene, happened, flows)
