"""The agent consolidates what nobody else ends: behind persists, and whoever is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from recpoint.catalog.check.check import check
from recpoint.catalog.check.validate import record, validate
from recpoint.catalog.consolidate import moves
from recpoint.catalog.consolidate.consolidate import consolidate_around_damage
from recpoint.catalog.consolidate.plan import (
    ConsolidationPlan,
    ConsolidationTriggers,
    plan_consolidation,
)
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.chain import PassedOver, resolve_chain
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.cli.application import app
from recpoint.flows.agent.agent import run_agent
from recpoint.flows.agent.consolidations import BackgroundConsolidation, Which
from recpoint.format import records
from recpoint.format.naming import ManifestName
from tests.agent_process import AgentProcess
from tests.catalog_builder import Table, new_run, tables
from tests.consolidation import chain_of, merge
from tests.forked_program import PARENT, run_module
from tests.job_builder import Links, stage
from tests.polling import until
from tests.staged_notes import note_to_consolidate

AFTER = 4
WHEN = ConsolidationTriggers(links=AFTER)


def stage_links(
    run: Run, staging: Path, trained: list[Table], *, count: int, policy: str = "continuous"
) -> list[Path]:
    links = Links()
    generator = torch.Generator().manual_seed(4)
    paths = []
    for step in range(1, count + 1):
        dirty = [torch.tensor([step, step + 9]), torch.tensor([0, step])]
        for table, ids in zip(trained, dirty, strict=True):
            table.train(ids, generator)
        paths.append(
            stage(
                run,
                staging,
                trained,
                step=step,
                generation=1,
                links=links,
                dirty=None if step == 1 else dirty,
                slot=step,
                policy=policy,
                state={"step": step},
            )  # fmt: skip
        )
    return paths


def links_of(run: Run) -> int:
    return len(resolve_chain(run, run.live_line()[0]).manifests)


def require_trained(run: Run, trained: list[Table], step: int) -> None:
    require_restored(run, trained, step)
    assert check(run, level="full").ok


def require_restored(run: Run, trained: list[Table], step: int) -> None:
    target = MemoryTarget()
    assert restore(run, target).restored.step == step
    assert target.state == {0: {"step": step}}
    for table in trained:
        assert torch.equal(target.tables[table.name].values, table.values)


def status_of(run: Run, staging: Path) -> dict[str, object]:
    path = StagedRun.of(staging, run.url).status_path
    status = json.loads(path.read_text())["consolidation"]
    assert isinstance(status, dict)
    return status


def test_a_long_chain_of_a_continuous_run_is_shortened(run: Run, tmp_path: Path) -> None:
    staging, trained = tmp_path / "staging", tables()
    stage_links(run, staging, trained, count=5)
    assert run_agent(staging, once=True, prefect="off", consolidate_when=WHEN) == 0
    assert links_of(run) <= 2
    require_trained(run, trained, 5)
    status = status_of(run, staging)
    assert status["state"] == "idle" and status["done"] == 1 and status["last_error"] is None


@pytest.mark.parametrize(
    ("policy", "consolidate"), [("consecutive", "auto"), ("continuous", "off")]
)
def test_other_chains_are_left_alone(
    run: Run, tmp_path: Path, policy: str, consolidate: Which
) -> None:
    staging, trained = tmp_path / "staging", tables()
    stage_links(run, staging, trained, count=5, policy=policy)
    settings = {"once": True, "prefect": "off", "consolidate_when": WHEN}
    assert run_agent(staging, consolidate=consolidate, **settings) == 0  # type: ignore[arg-type]
    assert links_of(run) == 5


@pytest.mark.parametrize(
    ("ratio", "dead", "merged"),
    [
        ("99", "1", False),
        ("1", "1", True),
        pytest.param("99", "0", True, marks=pytest.mark.nightly("kills")),
    ],
)
def test_each_trigger_has_an_option(
    run: Run, tmp_path: Path, ratio: str, dead: str, merged: bool
) -> None:
    staging = tmp_path / "staging"
    stage_links(run, staging, tables(), count=5)
    options = ["--consolidate-after", "99", "--consolidate-ratio", ratio]
    options += ["--consolidate-dead", dead, "--prefect", "off", "--once"]
    done = CliRunner().invoke(app, ["agent", "--staging", str(staging), *options])
    assert done.exit_code == 0, done.output
    assert (links_of(run) < 5) == merged


def consolidating(parent: psutil.Process) -> psutil.Process | None:
    for child in parent.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # nor is a zombie one
            if "consolidate_process" in " ".join(child.cmdline()):
                return child
    return None


def stands_still(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


#: Of the processes that an agent starts: the one that consolidates stops at its first write.
STOPS_ITSELF = """
import os, signal, sys
if "recpoint.flows.agent.consolidate_process" in sys.orig_argv:
    from recpoint.catalog.store import durable
    durable.set_observer(lambda step: os.kill(os.getpid(), signal.SIGSTOP))
"""


def test_an_agent_killed_meanwhile_is_followed_by_one_that_finishes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging, trained = tmp_path / "staging", tables()
    stage_links(run, staging, trained, count=5)
    (tmp_path / "sitecustomize.py").write_text(STOPS_ITSELF)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        agent = AgentProcess(staging, tmp_path / "log", consolidate_after=AFTER)
    with agent:
        child = until(lambda: consolidating(psutil.Process(agent.process.pid)))
        until(lambda: stands_still(child))  # however fast it is, it is not done
    until(lambda: is_gone(child))
    assert links_of(run) == 5
    # No job is left: that there is a chain to merge, the next agent knows from the last one.
    assert run_agent(staging, once=True, prefect="off", consolidate_when=WHEN) == 0
    assert links_of(run) <= 2
    require_trained(run, trained, 5)


def test_a_consolidation_killed_meanwhile_is_tried_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recpoint.flows.agent.consolidations._FIRST_PAUSE_SECONDS", 0.1)
    staging, trained = tmp_path / "staging", tables()
    stage_links(run, staging, trained, count=5)
    run_agent(staging, once=True, prefect="off", consolidate="off")
    run_dir = StagedRun.of(staging, run.url).path
    note_to_consolidate(run_dir, run.url)
    with background(run_dir) as (consolidation, process):
        process().kill()
        until(lambda: status(consolidation, run_dir)["last_error"])
        until(lambda: status(consolidation, run_dir)["done"] == 1)
    assert links_of(run) <= 2
    require_trained(run, trained, 5)


def test_a_chain_with_a_link_that_failed_is_told_once_and_waits_for_the_next_commit(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recpoint.flows.agent.consolidations._FIRST_PAUSE_SECONDS", 0.0)
    staging, trained = tmp_path / "staging", tables()
    jobs = [job_files.read_job(path) for path in stage_links(run, staging, trained, count=6)]
    run_agent(staging, once=True, prefect="off", consolidate="off")
    chunk = next(entry for entry in run.manifest(2, 1).chunks if entry.content == "rows")
    there = run.store.get(chunk.key, max_bytes=1 << 20)
    run.store.delete(chunk.key)
    record(run, validate(run, ManifestName(2, 1)))
    run.store.put(chunk.key, there)
    run_dir = StagedRun.of(staging, run.url).path
    consolidation = BackgroundConsolidation(
        which="all", triggers=WHEN, prefect_url=lambda: None, tell=lambda run_dir: None
    )
    consolidation.start([])
    try:
        for job in jobs[-2:]:
            consolidation.committed(StagedRun(run_dir), job)
            # Done with until something is committed, though there is no pause.
            until(lambda: consolidation.idle)
            assert "step 2" in str(status(consolidation, run_dir)["last_error"])
        told = [r for r in caplog.records if r.levelname == "WARNING" and "step 2" in r.message]
        assert len(told) == 1 and "after the next commit" in told[0].message
        record(run, validate(run, ManifestName(2, 1)))
        consolidation.committed(StagedRun(run_dir), jobs[-1])
        until(lambda: status(consolidation, run_dir)["done"] == 1)
    finally:
        consolidation.stop()


def test_a_merge_that_may_have_too_large_a_manifest_is_told_once(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging, trained = tmp_path / "staging", tables()
    jobs = [job_files.read_job(path) for path in stage_links(run, staging, trained, count=6)]
    run_agent(staging, once=True, prefect="off", consolidate="off")
    # So small a buffer may have each chunk of a source become chunks of the merge.
    monkeypatch.setattr(moves, "BUFFERED_BYTES", 1)
    whole = plan_consolidation(run, run.live_line()[0], triggers=WHEN)
    least_bytes = min(merge.most_manifest_bytes for merge in whole.merges)
    staged_run = StagedRun.of(staging, run.url)
    looked_at: list[StagedRun] = []
    consolidation = BackgroundConsolidation(
        which="all", triggers=WHEN, prefect_url=lambda: None, tell=looked_at.append
    )

    def has_looked(times: int) -> Callable[[], bool]:
        return lambda: len(looked_at) == times and consolidation.idle

    with monkeypatch.context() as patch:
        patch.setattr(records, "MAX_RECORD_BYTES", least_bytes - 1)
        consolidation.start([])
        try:
            for looks, job in enumerate(jobs[-2:], start=1):
                consolidation.committed(staged_run, job)
                until(has_looked(looks))
                assert "no merge is sure" in str(
                    status(consolidation, staged_run.path)["last_error"]
                )
        finally:
            consolidation.stop()
    (warning,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert "reads 6 manifests" in warning and "fewer bits" in warning
    assert links_of(run) == 6


def test_it_stands_still_while_jobs_are_due(run: Run, tmp_path: Path) -> None:
    staging, trained = tmp_path / "staging", tables()
    stage_links(run, staging, trained, count=5)
    run_agent(staging, once=True, prefect="off", consolidate="off")
    run_dir = StagedRun.of(staging, run.url).path
    note_to_consolidate(run_dir, run.url)
    with background(run_dir) as (consolidation, process):
        child = process()
        consolidation.give_way(True)  # it has hardly begun
        until(lambda: stands_still(child))
        assert child.nice() == 19
        # At work: for a moment in which nobody can do anything.
        consolidation.give_way(False)
        consolidation.give_way(True)
        until(lambda: stands_still(child))
        assert status(consolidation, run_dir)["state"] == "waiting"
        assert links_of(run) == 5
        consolidation.give_way(False)
        until(lambda: status(consolidation, run_dir)["done"] == 1)
    assert links_of(run) <= 2


def test_runs_take_turns(run: Run, tmp_path: Path) -> None:
    """One that commits while it is looked at does not keep the others waiting for ever."""
    staging, other = tmp_path / "staging", new_run(tmp_path / "other")
    (path,) = stage_links(run, staging, tables(), count=1)
    job = job_files.read_job(path)
    looked_at: list[Path] = []
    run_dirs = [StagedRun.of(staging, one.url).path for one in (run, other)]
    for run_dir, one in zip(run_dirs, (run, other), strict=True):
        run_dir.mkdir(parents=True, exist_ok=True)
        note_to_consolidate(run_dir, one.url)

    def tell(staged_run: StagedRun) -> None:
        looked_at.append(staged_run.path)
        if staged_run.path == run_dirs[0]:
            consolidation.committed(staged_run, job)

    consolidation = BackgroundConsolidation(
        which="all", triggers=WHEN, prefect_url=lambda: None, tell=tell
    )
    consolidation.start([StagedRun(run_dir) for run_dir in run_dirs])
    try:
        until(lambda: len(looked_at) >= 3)
    finally:
        consolidation.stop()
    assert looked_at[:3] == [run_dirs[0], run_dirs[1], run_dirs[0]]


@pytest.mark.parametrize("merged_already", [False, True])
def test_what_its_process_finds_is_told_for_what_it_is(
    run: Run, tmp_path: Path, merged_already: bool
) -> None:
    """Around a damaged merge; and nothing, where somebody else was faster."""
    staging, trained = tmp_path / "staging", tables()
    stage_links(run, staging, trained, count=7)
    run_agent(staging, once=True, prefect="off", consolidate="off")
    damaged = merge(run, run.manifest(4, 1), 3)
    merged = chain_of(run, run.manifest(4, 1))[-1]
    entry = next(entry for entry in merged.chunks if entry.content == "rows")
    run.store.put(entry.key, bytes(entry.bytes))
    run_dir = StagedRun.of(staging, run.url).path
    note_to_consolidate(run_dir, run.url)
    told: list[Path] = []

    def tell(staged_run: StagedRun) -> None:
        told.append(staged_run.path)
        if merged_already and len(told) == 1:  # it has planned, and has not begun
            _, done = consolidate_around_damage(run, plan_newest)
            assert done is not None and done.outcome == "created"

    def plan_newest(avoid: Sequence[PassedOver]) -> ConsolidationPlan:
        return plan_consolidation(run, run.live_line()[0], avoid=avoid)

    consolidation = BackgroundConsolidation(
        which="auto", triggers=WHEN, prefect_url=lambda: None, tell=tell
    )
    consolidation.start([StagedRun(run_dir)])
    try:
        until(lambda: len(told) == 2)
        found = status(consolidation, run_dir)
    finally:
        consolidation.stop()
    assert found["last_error"] is None and links_of(run) <= 2
    if merged_already:
        assert found["done"] == 0 and found["last"] is None
    else:
        assert found["done"] == 1
        assert "created" in str(found["last"]) and damaged.key in str(found["last"])
    require_restored(run, trained, 7)


class background:
    """A consolidation without an agent around it, and what finds its process."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._consolidation = BackgroundConsolidation(
            which="auto", triggers=WHEN, prefect_url=lambda: None, tell=lambda run_dir: None
        )

    def __enter__(self) -> tuple[BackgroundConsolidation, Callable[[], psutil.Process]]:
        self._consolidation.start([StagedRun(self._run_dir)])
        return self._consolidation, lambda: until(self._process)

    def __exit__(self, *exception: object) -> None:
        self._consolidation.stop()

    def _process(self) -> psutil.Process | None:
        return consolidating(psutil.Process())


def status(consolidation: BackgroundConsolidation, run_dir: Path) -> dict[str, object]:
    found = consolidation.status(StagedRun(run_dir))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "die_at",
    [
        pytest.param(1, marks=pytest.mark.nightly("kills")),
        4,
        pytest.param(9, marks=pytest.mark.nightly("kills")),
    ],
)
def test_its_process_killed_at_a_step_is_followed_by_one_that_finishes(
    run: Run, tmp_path: Path, die_at: int
) -> None:
    staging, trained = tmp_path / "staging", tables(rows=300)
    stage_links(run, staging, trained, count=5)
    run_agent(staging, once=True, prefect="off", consolidate="off")

    program = "recpoint.flows.agent.consolidate_process", run.url, json.dumps(asdict(WHEN)), PARENT

    def process(*before: str) -> subprocess.CompletedProcess[str]:
        return run_module([*before, *program], environment=os.environ, directory=tmp_path)

    killed = process("recpoint.testing.die_at", str(die_at), "-m")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    require_trained(run, trained, 5)
    finished = process()
    assert finished.returncode == 0 and '"done": "created' in finished.stdout
    assert links_of(run) <= 2
    require_trained(run, trained, 5)
    assert "a trigger" not in process().stdout


def test_a_run_that_is_gone_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "staging" / "run-of-an-earlier-year"
    run_dir.mkdir(parents=True)
    note_to_consolidate(run_dir, str(tmp_path / "nowhere"))
    background = BackgroundConsolidation(
        which="all", triggers=WHEN, prefect_url=lambda: None, tell=lambda _: None
    )
    background.start([StagedRun(run_dir)])
    try:
        status = until(
            lambda: (s := background.status(StagedRun(run_dir))) and s["last_error"] and s
        )
        assert "no run.json" in str(status)
        until(lambda: background.idle)  # with no further try to come
        assert background._candidates[StagedRun(run_dir)].tries.failures == 0
    finally:
        background.stop()
