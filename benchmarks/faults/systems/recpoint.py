"""recpoint: a Checkpointer, and the agent's work in a thread or in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import crc32c
import torch

from benchmarks.faults.system import Begin, Hostile, Model, Restored, System, Tags, Trainer, train

__all__ = ["Recpoint"]

_PATIENCE_SECONDS = 60.0


class _Life(Trainer):
    """A trainer that trains what is left of the tags and takes a checkpoint of the last."""

    def __init__(self, model: Model, optimizer: torch.optim.Optimizer, checkpointer: Any) -> None:
        self._model, self._optimizer, self._checkpointer = model, optimizer, checkpointer

    def save(self, tags: Tags) -> None:
        checkpointer = self._checkpointer
        counts_before = checkpointer.stats.committed, checkpointer.stats.failed
        for tag in tags[checkpointer.batches_done :]:
            train(self._model, self._optimizer, tag)
            checkpointer.step()
        if not checkpointer.checkpoint():
            raise RuntimeError(f"no checkpoint was cut: {checkpointer.stats.last_error}")
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if checkpointer.stats.failed > counts_before[1]:
                raise RuntimeError(checkpointer.stats.last_error)
            if checkpointer.stats.committed > counts_before[0]:
                return
            time.sleep(0.005)
        raise TimeoutError(f"step {len(tags)} was not stored in {_PATIENCE_SECONDS:.0f} s")


class Recpoint(System):
    """A run with lossless increments."""

    name = "recpoint"
    title = "recpoint"
    distributions = ("recpoint",)
    modules = (
        "recpoint.catalog.consolidate.consolidate",
        "recpoint.catalog.persist.persist",
        "recpoint.trainer_plugin.checkpointer",
    )
    used = (
        "`Checkpointer`, lossless, consecutive increments; the agent's persist in a thread that "
        "tries again, and `recpoint agent` in a process where the worker or Prefect is struck"
    )
    retention = "call"
    on_s3 = True

    @property
    def url(self) -> str:
        """Return the run URL."""
        return str(self.place.store) if self.place.url is None else f"{self.place.url}/run"

    @contextmanager
    def trainer(
        self, begin: Begin = "newest", *, keep: int | None = None, overwrite: bool = False
    ) -> Iterator[Trainer]:
        """See `System.trainer`."""
        with ExitStack() as stack:
            stack.enter_context(self._process() if self.worker else self._thread())
            # It never writes over a checkpoint: it goes back, and takes the step again.
            start: dict[str, Any] = {"step": 1} if overwrite else {"fresh": begin == "anew"}
            model, optimizer, checkpointer = self._start(**start)
            yield _Life(model, optimizer, checkpointer)
            checkpointer.close(final=False)

    def _start(self, **start: Any) -> tuple[Model, torch.optim.Optimizer, Any]:
        from recpoint import Checkpointer, Consecutive, Options, Precision, Staging, Timeouts

        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpointer = Checkpointer(
            model,
            [optimizer],
            run=self.url,
            interval_batches=10**9,
            bits=Precision(small_table_values=0),
            policy=Consecutive(full_every=100),
            staging=Staging(directory=self.place.staging),
            timeouts=Timeouts(close_seconds=30.0, drain_seconds=30.0),
            options=Options(handle_sigterm=False),
        )
        checkpointer.restore(**start)
        return model, optimizer, checkpointer

    def restore(self) -> Restored:
        """See `System.restore`."""
        with self._process() if self.worker else self._thread():
            model, _, checkpointer = self._start()
            step = checkpointer.batches_done
            tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            checkpointer.close(final=False)
            return step, tensors

    @contextmanager
    def _thread(self) -> Iterator[None]:
        """Do the agent's work in a thread, and try again after an error, as agents do."""
        from recpoint.catalog.persist.persist import persist_job
        from recpoint.catalog.staging.agent_lock import AgentLock
        from recpoint.catalog.staging.area import StagedRun, staged_runs
        from recpoint.errors import RecpointError

        ended = threading.Event()

        def work() -> None:
            with AgentLock(self.place.staging):
                while not ended.wait(0.01):
                    with suppress(RecpointError, OSError):
                        for directory in [run.path for run in staged_runs(self.place.staging)]:
                            for job in StagedRun(directory).staged_jobs():
                                persist_job(job)

        def again() -> None:
            while not ended.wait(0.01):
                with suppress(RecpointError, OSError):
                    work()

        thread = threading.Thread(target=again, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(_PATIENCE_SECONDS)

    @contextmanager
    def _process(self) -> Iterator[None]:
        """Run `recpoint agent`, and start it again when it dies, as a supervisor does."""
        ended = threading.Event()
        log = (self.place.folder / "agent.log").open("ab")

        def start(environment: dict[str, str]) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "recpoint", "agent"]
            command += ["--staging", str(self.place.staging)]
            command += ["--prefect", "auto" if "PREFECT_API_URL" in environment else "off"]
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment)

        process = start(dict(os.environ))

        def supervise() -> None:
            nonlocal process
            while not ended.wait(0.05):
                if process.poll() is not None:
                    # Where it was struck by its environment, it is not struck again.
                    process = start({k: v for k, v in os.environ.items() if "IO_FAULT" not in k})

        thread = threading.Thread(target=supervise, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            process.kill()
            process.wait()

    def _run(self) -> Any:
        from recpoint.catalog.run.run import Run
        from recpoint.catalog.store.store import open_store

        return Run.open(open_store(self.url))

    def _manifest(self, step: int) -> Path:
        return next(iter(sorted(self.place.store.glob(f"manifests/{step:012d}-*.json"))[::-1]))

    def files(self, step: int) -> list[Path]:
        """See `System.files`."""
        chunks = sorted(self.place.store.glob(f"chunks/{step:012d}-*/*"))
        return [self._manifest(step), *chunks]

    def names(self, step: int) -> list[str]:
        """See `System.names`."""
        return [f"step {step}", f"/{step:012d}-"]

    def disturb(self, what: str) -> None:
        """See `System.disturb`."""
        if what == "missing increment":
            self._manifest(3).unlink()
        elif what == "duplicate increment":
            shutil.copy(self._manifest(3), self._manifest(4))
        else:
            third, fourth = (path.read_bytes() for path in map(self._manifest, (3, 4)))
            self._manifest(3).write_bytes(fourth)
            self._manifest(4).write_bytes(third)

    def retain(self, keep: int) -> None:
        """See `System.retain`."""
        from recpoint.catalog.retention.plan import plan_prune
        from recpoint.catalog.retention.prune import execute
        from recpoint.catalog.retention.rules import RetentionPolicy

        policy = RetentionPolicy(keep_last=keep, require_validated=False)
        run = self._run()
        execute(run, plan_prune(run, policy, grace_seconds=0.0, grace_floor_seconds=0.0))

    def consolidate(self) -> None:
        """See `System.consolidate`."""
        from recpoint.catalog.consolidate.consolidate import consolidate
        from recpoint.catalog.consolidate.plan import plan_consolidation

        run = self._run()
        consolidate(run, plan_consolidation(run, run.live_line()[0]))

    def falsify(self, what: Hostile, step: int) -> list[Path]:
        """See `System.falsify`."""
        path = self._manifest(step)
        fields = json.loads(path.read_bytes())["body"]
        rows = [chunk for chunk in fields["chunks"] if chunk["content"] == "rows"]
        if what == "path traversal":
            outside = self.place.store.parent / "outside.safetensors"
            shutil.copy(self.place.store / rows[0]["key"], outside)
            rows[0]["key"] = f"../{outside.name}"
        elif what == "huge sizes":
            fields["tables"][0]["rows"] = rows[0]["row_count"] = 1 << 50
        elif what == "negative offsets":
            rows[0]["first_row"] = -1
        elif what == "overlapping ranges":
            fields["chunks"].append(rows[0])
        elif what == "wrong digest":
            rows[0]["crc32c"] ^= 1
        else:
            fields["version"] = 999
        body = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        digest = crc32c.crc32c(body.encode())
        path.write_text(f'{{"body":{body},"crc32c":{digest}}}\n')
        return [path]
