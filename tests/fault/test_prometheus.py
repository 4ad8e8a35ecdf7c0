"""A real Prometheus that scrapes a real trainer and a real agent: panels, rules, and what fires."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from recpoint.catalog.staging.area import StagedRun
from recpoint.dashboards.alert_rules import alert_rules, grafana_dashboard
from recpoint.dashboards.metrics.table import METRICS
from tests.forked_program import run_module
from tests.polling import PATIENCE_SECONDS, until
from tests.prometheus_server import PrometheusServer, free_port, needs_prometheus
from tests.scraping import MetricsAgent, scrape, value

ROOT = Path(__file__).resolve().parents[2]

#: Of the rules: so that what takes minutes in earnest takes seconds here.
QUICK = {
    "patience": "1s",
    "no_commit_intervals": "4",
    "no_commit_seconds": "3",
    "failures_window": "20s",
    "stall_window": "20s",
}

#: Prefixes of the metrics that only a job with a cache, or with embedding servers, has. The trainer
#: of this test has plain tables; `unit/dashboards/test_trainer_metrics.py` has a job with both.
_CACHE_METRIC_PREFIXES = (
    "recpoint_trainer_cache_",
    "recpoint_trainer_lost_",
    "recpoint_trainer_server_",
)

_TRAINER = """
import os, sys, threading, time
import recpoint
from tests.training_builder import Place, checkpointer, simple_training
from pathlib import Path
run, staging, port = sys.argv[1:]
training = simple_training()
ckpt = checkpointer(training, Place(run, Path(staging)), interval_batches=30)
recpoint.export_metrics(ckpt, port=int(port))
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
with ckpt:
    ckpt.restore()
    while not ended.is_set():
        training.batch()
        ckpt.step()
        time.sleep(0.02)  # as long as a batch may take
"""


class Trainer:
    """A trainer in a process of its own; it ends cleanly when it is told to."""

    def __init__(self, run: Path, staging: Path, port: int, log: Path) -> None:
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _TRAINER, str(run), str(staging), str(port)],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> int:
        """Have it close its Checkpointer and end; its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE_SECONDS)


def expressions() -> list[tuple[str, str]]:
    """Every query about a job with plain tables, as Grafana sends it with all runs chosen."""
    return [
        (
            panel["title"],
            target["expr"].replace("$run", ".*").replace("$__rate_interval", "10s"),
        )
        for panel in json.loads(grafana_dashboard())["panels"]
        if panel["type"] != "row"
        for target in panel["targets"]
        if not any(prefix in target["expr"] for prefix in _CACHE_METRIC_PREFIXES)
    ]


def unanswered(server: PrometheusServer) -> list[tuple[str, str]]:
    """Queries without a sample; one that Prometheus refuses is an error."""
    return [(title, query) for title, query in expressions() if not server.query(query)]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_module(["recpoint", *arguments], environment=os.environ, directory=ROOT)


def fires(server: PrometheusServer, *names: str) -> Callable[[], bool]:
    def look() -> bool:
        return set(names) <= server.firing()

    return look


def names_in(server: PrometheusServer) -> set[str]:
    """The metrics of ours that it has now."""
    samples = server.query('{__name__=~"recpoint_.+"}')
    found = {sample["metric"]["__name__"] for sample in samples}
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found} | found


def looked_at(server: PrometheusServer) -> float | None:
    """When it last read that no trainer is lost; None while it has no such sample."""
    samples = server.query("timestamp(recpoint_agent_trainer_lost == 0)")
    return float(samples[0]["value"][1]) if samples else None


def is_quiet(server: PrometheusServer) -> bool:
    return all(rule["state"] == "inactive" for rule in server.rules())


@needs_prometheus
@pytest.mark.nightly("prometheus")
def test_panels_answer_rules_work_and_alerts_fire_for_what_they_are_for(tmp_path: Path) -> None:
    run, staging = tmp_path / "run", tmp_path / "staging"
    trainer_port, agent_port = free_port(), free_port()
    rules = tmp_path / "alerts.yml"
    rules.write_text(alert_rules(QUICK))
    jobs = {"trainer": trainer_port, "agent": agent_port}

    def start_trainer() -> Trainer:
        return Trainer(run, staging, trainer_port, tmp_path / "trainer.log")

    def start_agent() -> MetricsAgent:
        return MetricsAgent(staging, tmp_path / "agent.log", port=agent_port)

    with PrometheusServer(tmp_path, rules=rules, jobs=jobs) as server:
        with start_agent() as agent:
            with start_trainer() as killed:
                committed = 'sum(recpoint_agent_jobs_total{result="committed"}) > 1'
                until(lambda: bool(server.query(committed)))
                os.kill(killed.process.pid, signal.SIGKILL)
            until(fires(server, "RecpointTrainerLost"))
            trainer = start_trainer()
            with trainer:
                restores = "recpoint_trainer_restores_total == 1"
                until(lambda: bool(server.query(restores)))
                assert command("validate", str(run), "--level", "sample").returncode == 0
                until(lambda: not unanswered(server))
                names = {m.name for m in METRICS if not m.name.startswith(_CACHE_METRIC_PREFIXES)}
                until(lambda: names <= names_in(server))
                until(lambda: is_quiet(server))
                assert {rule["health"] for rule in server.rules()} == {"ok"}

                os.kill(agent.process.pid, signal.SIGKILL)
                until(fires(server, "RecpointAgentDown", "RecpointNoCommit"))
                with start_agent() as again:
                    until(lambda: is_quiet(server))
                    assert trainer.end() == 0
                    gone = 'recpoint_agent_trainer_running == 0 unless up{job="trainer"} == 1'
                    until(lambda: bool(server.query(gone)))
                    shown = scrape(again.url)
                    assert value(shown, "recpoint_agent_trainer_lost") == 0
                    assert value(shown, "recpoint_agent_staged_jobs") == 0
                    ended = until(lambda: looked_at(server))
                    until(lambda: (looked_at(server) or 0) > ended + 5)
                    assert not server.firing(), "a run that ended cleanly must not alert"
                    fail_validation(run)
                    until(fires(server, "RecpointValidationFailed"))
        assert {rule["health"] for rule in server.rules()} == {"ok"}
    assert not StagedRun.of(staging, str(run)).staged_jobs()


def fail_validation(run: Path) -> None:
    """Flip a byte of a chunk of rows, and have somebody validate the checkpoint."""
    chunk = sorted(run.glob("chunks/*/r00000-t00000-*.safetensors"))[-1]
    data = bytearray(chunk.read_bytes())
    data[-1] ^= 1
    chunk.write_bytes(data)
    step = chunk.parent.name.split("-")[0].lstrip("0")
    done = command("validate", str(run), "--level", "full", "--step", step)
    assert done.returncode == 1, done.stdout + done.stderr
