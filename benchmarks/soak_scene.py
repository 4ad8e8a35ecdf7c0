"""Runs and watches all processes of a soak: store, Prefect, workers, agent, trainers."""

from __future__ import annotations

import json
import os
import random
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.soak_deployments import Pace, deploy, workers
from benchmarks.soak_faults import Fault, Happened
from benchmarks.soak_processes import Child, LocalPrefect, environment, wait_until_logged
from benchmarks.soak_truth import Ledger, read_truth
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import NothingToRestore, RecpointError
from recpoint.flows import prefect_server
from recpoint.testing.seaweed import SeaweedServer

__all__ = ["Scene"]

_LOOK_SECONDS = 1.5
_VERIFY_EVERY = 4
_START_SECONDS = 180.0


class Scene:
    """A run and all processes that work on it.

    Args:
        scratch: a directory on disk.
        staging: a directory in memory.
        weed: the store's server, started.
        truth_steps: number of batches whose truth is recorded.
        batch_seconds: pause after each batch.
        seed: for the choice of the checkpoints that are verified while the soak runs.

    Attributes:
        ledger: the manifests that were seen in the store.
        wrong: descriptions of checkpoints that did not restore to the truth.
        wrong_restores: descriptions of the trainer's restarts that did not restore the truth.
        memory: `trainer` or `agent` -> (monotonic seconds, process id, megabytes) samples.
    """

    def __init__(
        self,
        scratch: Path,
        staging: Path,
        weed: SeaweedServer,
        *,
        truth_steps: int,
        batch_seconds: float,
        seed: int,
    ) -> None:
        self.scratch = scratch
        self.weed = weed
        self.url = weed.run_url()
        self.variables = environment(scratch, staging, weed.environment())
        os.environ.update(weed.environment(), RECPOINT_HOME=self.variables["RECPOINT_HOME"])
        os.environ.update(PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS="10")
        self.prefect = LocalPrefect()
        trainer = ["-m", "benchmarks.soak_trainer"]
        self._progress_file = scratch / "progress.jsonl"
        self._truth_file = scratch / "truth.jsonl"
        recorded = [str(self._truth_file), str(truth_steps)]
        self._truth = self._child("truth", [*trainer, "truth", *recorded])
        options = [str(self._progress_file), str(batch_seconds)]
        self.trainer = self._child("trainer", [*trainer, "train", self.url, str(staging), *options])
        self.agent = self._child("agent", ["-m", "recpoint", "agent"])
        self.workers: list[Child] = []
        self.ledger: Ledger | None = None
        self.wrong: list[str] = []
        self.wrong_restores: list[str] = []
        self.restarts = self.worker_ends = self.verified = 0
        self.prefect_back = "1970-01-01T00:00:00Z"
        self.memory: dict[str, list[tuple[float, int, float]]] = {"trainer": [], "agent": []}
        self._draw = random.Random(seed)
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ledger", daemon=True)

    def _child(self, name: str, arguments: list[str] | tuple[str, ...]) -> Child:
        return Child(arguments, self.scratch / f"{name}.log", self.variables)

    def start(self, pace: Pace) -> list[str]:
        """Start everything; return the names of the deployed flows."""
        self._progress_file.touch()
        self._truth_file.touch()
        self._truth.start()
        prefect_server.start_server()
        self.prefect.wait(_START_SECONDS)
        deployed = deploy(self.url, self._folder("deploy"), pace, self._client())
        for number, arguments in enumerate(workers(pace)):
            log = self.scratch / f"worker-{number}.log"
            self.workers.append(Child(arguments, log, self._client()))
        self.agent.start()
        wait_until_logged(self.agent, "serving", _START_SECONDS)
        self._start_trainer(expect=0)
        self.ledger = self.wait_for(self._open_ledger)
        self._watcher.start()
        for worker in self.workers:
            worker.start()
        return deployed

    def _folder(self, name: str) -> Path:
        folder = self.scratch / name
        folder.mkdir()
        return folder

    def _client(self) -> dict[str, str]:
        """Return the environment of processes that use Prefect, with the URL of its API."""
        home = str(self.scratch / "client")
        return {
            **self.variables,
            "PREFECT_API_URL": str(self.prefect.url),
            "PREFECT_HOME": home,
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        }

    def _open_ledger(self) -> Ledger | None:
        try:
            return Ledger(Run.open(open_store(self.url)))
        except NothingToRestore:
            return None

    def stop_watching(self) -> None:
        """Stop the thread that watches the store, so that only the caller uses the ledger."""
        self._stop.set()
        if self._watcher.is_alive():
            self._watcher.join(60)

    def close(self) -> None:
        """End every process, in whatever state it is."""
        self._stop.set()
        for child in (self.trainer, self.agent, *self.workers, self._truth):
            child.kill()
        self.prefect.kill()
        self.weed.kill()

    @property
    def truth(self) -> dict[int, str]:
        """Return the truth's digests by step."""
        return read_truth(self._truth_file)

    @property
    def progress(self) -> list[dict[str, Any]]:
        """Return the trainers' progress in order, without unfinished lines of killed trainers."""
        lines = []
        for line in self._progress_file.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue
        return lines

    @property
    def committed(self) -> int:
        """Return the number of checkpoints that were seen in the store so far."""
        return 0 if self.ledger is None else len(self.ledger.committed)

    def watch_processes(self, *, training: bool = True) -> None:
        """Sample the memory of trainer and agent; restart workers that ended by themselves.

        Raises:
            RuntimeError: the trainer or the agent has ended by itself.
        """
        for name, child in (("trainer", self.trainer), ("agent", self.agent)):
            if name == "trainer" and not training:
                continue
            if child.pid is None or child.rss_mb is None:
                raise RuntimeError(f"the {name} ended:\n{child.output[-3000:]}")
            self.memory[name].append((time.monotonic(), child.pid, child.rss_mb))
        for worker in self.workers:
            if worker.pid is None:
                self.worker_ends += 1
                worker.start()

    def _watch(self) -> None:
        looks = 0
        while not self._stop.wait(_LOOK_SECONDS):
            assert self.ledger is not None
            try:
                self.ledger.look()
                looks += 1
                truth = self.truth
                # The other trainer may commit before the truth's trainer reaches that step.
                known_names = [name for name in self.ledger.restorable if name.step in truth]
                if looks % _VERIFY_EVERY == 0 and known_names:
                    name = self._draw.choice(known_names)
                    wrong = self.ledger.wrong(name, truth)
                    self.verified += 1
                    if wrong is not None:
                        self.wrong.append(wrong)
            except RecpointError:
                continue  # the store is down; all checkpoints are checked again at the end

    def flow_runs(self, **filters: Any) -> Counter[str]:
        """Count the flow runs that match `filters`, by flow and state."""
        counts: Counter[str] = Counter()
        names = {flow["id"]: flow["name"] for flow in self._ask("flows/filter", {})}
        offset = 0
        while page := self._ask("flow_runs/filter", {"flow_runs": filters, "offset": offset}):
            counts.update(
                f"{names.get(flow_run['flow_id'])} {flow_run['state_type']}" for flow_run in page
            )
            offset += len(page)
        return counts

    def wait_for_flows(self, flows: Sequence[str], *, since_time: str, seconds: float) -> list[str]:
        """Wait until each of these flows has completed after `since_time`; return the others."""
        deadline = time.monotonic() + seconds
        while True:
            counts: Counter[str] = Counter()
            with suppress(OSError):  # a server that is busy may not answer in a minute
                counts = self.flow_runs(
                    state={"type": {"any_": ["COMPLETED"]}}, start_time={"after_": since_time}
                )
            missing = [flow for flow in flows if f"{flow} COMPLETED" not in counts]
            if not missing or time.monotonic() > deadline:
                return missing
            self.watch_processes(training=False)
            time.sleep(1.0)

    def _ask(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        request = urllib.request.Request(
            f"{self.prefect.url}/{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answers: list[dict[str, Any]] = json.load(answer)
            return answers

    def suffer(self, fault: Fault) -> Happened:
        """Kill the fault's processes, wait, start them again, and wait until all are up."""
        killed = time.monotonic()
        for kind in fault.kinds:
            {
                "trainer": self.trainer.kill,
                "agent": self.agent.kill,
                "store": self.weed.kill,
                "prefect": self.prefect.kill,
            }[kind]()
        time.sleep(fault.away_seconds)
        if "store" in fault.kinds:
            self.weed.start()
        if "agent" in fault.kinds:
            self.agent.start()
            wait_until_logged(self.agent, "serving", _START_SECONDS)
        if "trainer" in fault.kinds:
            self._start_trainer(expect=self._newest_step())
        back_s = killed if fault.kinds == ("prefect",) else time.monotonic()
        if "prefect" in fault.kinds:
            self.prefect.wait(_START_SECONDS)
            self.prefect_back = datetime.now(UTC).isoformat()
        return Happened(fault=fault, killed=killed, back=back_s)

    def _newest_step(self) -> int:
        run = Run.open(open_store(self.url))
        return max((name.step for name in run.live_line()), default=0)

    def _start_trainer(self, *, expect: int) -> None:
        """Start the trainer and compare its restore with the truth and the newest commit."""
        lines_before = len(self.progress)
        self.trainer.start()
        restored = self.wait_for(
            lambda: next((x for x in self.progress[lines_before:] if "restored" in x), None)
        )
        self.restarts += 1
        step = restored["restored"]
        if step == 0 and expect == 0:
            return
        truth = self.wait_for(lambda: self.truth.get(step))
        if restored["digest"] != truth:
            self.wrong_restores.append(f"restart at {step}: other contents than the truth")
        if step < expect:
            self.wrong_restores.append(
                f"restart at {step}: {expect} was committed: {restored['skipped']}"
            )

    def wait_for(self, look: Callable[[], Any]) -> Any:
        """Poll `look` until it returns something other than None, and return that.

        Raises:
            RuntimeError: `look` still returns None after a long time.
        """
        deadline = time.monotonic() + _START_SECONDS
        while (value := look()) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no trainer:\n{self.trainer.output[-3000:]}")
            time.sleep(0.05)
        return value
