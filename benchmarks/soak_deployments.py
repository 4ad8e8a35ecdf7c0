"""Deploys prefect.yaml's flows with short schedules, for the server and workers of a soak."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.workload import ROOT

__all__ = ["KEEP_LAST", "Pace", "deploy", "scheduled", "workers"]

KEEP_LAST = 10

_WORKER = ("-m", "prefect", "worker", "start", "--pool", "recpoint", "--limit", "1")

#: Flows that work on a host or on a server, not on a run.
_OF_NO_RUN = ("drain", "forget")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds between the runs of each deployment, and the graces of what deletes.

    `come_round_seconds`: how long each flow may take to complete once more at the end.
    `only`: the flows to deploy; empty: all flows that have a schedule in prefect.yaml.
    """

    retain: int
    consolidate: int
    validate: int
    validate_full: int
    publish: int
    publish_to: int
    sweep: int
    drain: int
    forget: int
    retain_grace: float
    sweep_grace: float
    come_round_seconds: float
    only: tuple[str, ...] = ()


def deploy(run_url: str, folder: Path, pace: Pace, variables: Mapping[str, str]) -> list[str]:
    """Deploy everything that has a schedule; return the names of the deployed flows.

    Raises:
        RuntimeError: Prefect failed; the message has its output.
    """
    document = scheduled(run_url, pace, sink_url=f"sqlite:{folder / 'served.db'}")
    (folder / "prefect.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    _prefect(folder, variables, "work-pool", "create", "recpoint", "--type", "process")
    _prefect(folder, variables, "deploy", "--all")
    return sorted({deployment["tags"][-1] for deployment in document["deployments"]})


def workers(pace: Pace) -> list[tuple[str, ...]]:
    """Return Python arguments that start the workers, one for each queue of the deployed flows.

    As in prefect.yaml, one worker is for flows that run anywhere, one for the trainer's host. One
    worker for both queues would do the queue `default` first.
    """
    chosen = scheduled("", pace)["deployments"]
    queues = {deployment["work_pool"].get("work_queue_name", "default") for deployment in chosen}
    return [(*_WORKER, "--work-queue", queue) for queue in sorted(queues)]


def scheduled(run_url: str, pace: Pace, *, sink_url: str = "sqlite:served.db") -> dict[str, Any]:
    """Return prefect.yaml's deployments that have a schedule, each with an active one of seconds.

    Raises:
        AttributeError: a deployment is missing from `Pace`.
    """
    document: dict[str, Any] = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    chosen = [
        deployment
        for deployment in document["deployments"]
        if "schedules" in deployment and (not pace.only or _flow(deployment) in pace.only)
    ]
    for deployment in chosen:
        flow = _flow(deployment)
        pace_of = "validate_full" if deployment["name"] == "recpoint-validate-full" else flow
        deployment["schedules"] = [
            {"slug": "soak", "interval": getattr(pace, pace_of), "active": True}
        ]
        if flow not in _OF_NO_RUN:
            deployment["parameters"]["run_url"] = run_url
        if flow == "retain":
            deployment["entrypoint"] = "benchmarks.soak_flows:retain"
            deployment["parameters"] |= {
                "keep": {"last": KEEP_LAST},
                "grace_seconds": pace.retain_grace,
            }
        elif flow == "sweep":
            deployment["entrypoint"] = "benchmarks.soak_flows:sweep"
            deployment["parameters"]["grace_seconds"] = pace.sweep_grace
        elif flow == "publish_to":
            deployment["parameters"]["sink_url"] = sink_url
        elif flow == "consolidate":
            deployment["parameters"]["after_links"] = 6
    return document | {"deployments": chosen}


def _flow(deployment: Mapping[str, Any]) -> str:
    entrypoint: str = deployment["entrypoint"]
    return entrypoint.rpartition(":")[2]


def _prefect(folder: Path, variables: Mapping[str, str], *arguments: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
        cwd=folder,
        env=dict(variables),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"prefect {' '.join(arguments)}:\n{process.stdout}{process.stderr}")
