"""An agent that waits for other ranks goes on with other jobs, and says for whom it waits."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recpoint.catalog.persist import persist
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.errors import StoreUnavailable
from recpoint.flows.agent import waiting_jobs
from recpoint.flows.agent.agent import Agent
from recpoint.flows.agent.gate import PrefectGate
from recpoint.format.naming import MANIFEST_KEY
from tests.catalog_builder import new_run, tables
from tests.interposed_store import InterposedStore, unavailable
from tests.polling import until
from tests.rank_jobs import RankJobs, ServerJobs


def test_missing_ranks_are_named_and_later_jobs_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    host = tmp_path / "host-a"
    jobs = RankJobs(run, [host, tmp_path / "host-b"], tables())
    first, other = jobs.stage(10)
    second, after = jobs.stage(20, slot=1)
    with caplog.at_level(logging.WARNING):
        agent = Agent(host, gate=PrefectGate(enabled=False), name_ranks_after=0)
        assert agent.serve(once=True) == 2  # both have their part in the store, and wait
    assert len(list(run.store.list("parts/"))) == 2 and not run.manifest_names()
    (seen,) = agent.observe().runs
    assert seen.missing_ranks == 1 and seen.facts.failures["other"] == 0
    status = json.loads(StagedRun(first.parent.parent).status_path.read_text())
    assert [(late["job"], late["ranks"]) for late in status["missing_ranks"]] == [
        (first.stem, [1]),
        (second.stem, [1]),
    ]
    assert "for the part of rank 1" in caplog.text
    for job in (other, after):
        assert persist.persist_job(job).result == "committed"
    again = Agent(host, gate=PrefectGate(enabled=False))
    assert again.serve(once=True) == 0 and run.live_line() == [(20, 1), (10, 1)]


def test_a_missing_embedding_server_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    hosts = [tmp_path / "host-a", tmp_path / "host-a", tmp_path / "host-b"]
    *here, there = ServerJobs(run, hosts, tables()).stage(10)
    with caplog.at_level(logging.WARNING):
        agent = Agent(hosts[0], gate=PrefectGate(enabled=False), name_ranks_after=0)
        assert agent.serve(once=True) == 2  # of the rank, and of the server that is on its host
    assert "for the part of embedding server 2" in caplog.text
    status = json.loads(StagedRun(here[0].parent.parent).status_path.read_text())
    late_parts = [(late["ranks"], late["servers"]) for late in status["missing_ranks"]]
    # The agent tries both jobs at once: the first server's part may be there before the rank's.
    assert late_parts in ([([], [1, 2]), ([], [2])], [([], [2]), ([], [2])])
    assert [seen.missing_ranks for seen in agent.observe().runs] == [len(late_parts[0][1])]
    assert persist.persist_job(there).result == "committed"
    again = Agent(hosts[0], gate=PrefectGate(enabled=False))
    assert again.serve(once=True) == 0 and run.manifest(10, 1).servers == 2


def _replaced(run: Run) -> None:
    shutil.rmtree(run.url)
    new_run(Path(run.url))


def _damaged(run: Run) -> None:
    run.store.put(MANIFEST_KEY.of(10, 1), b"not a manifest")


@pytest.mark.parametrize(
    ("happens", "error_type"), [(_replaced, "ForeignObject"), (_damaged, "MalformedObject")]
)
def test_a_job_that_waits_in_vain_is_rejected(
    tmp_path: Path, happens: Callable[[Run], None], error_type: str
) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    host = tmp_path / "host-a"
    (job,) = RankJobs(run, [host, tmp_path / "host-b"], tables()).stage(10, only=[0])
    agent = Agent(host, gate=PrefectGate(enabled=False), name_ranks_after=0)
    serving = threading.Thread(target=agent.serve)
    serving.start()
    try:
        until(lambda: [seen.missing_ranks for seen in agent.observe().runs] == [1])
        happens(run)
        until(lambda: not job.exists())
    finally:
        agent.stop()
        serving.join()
    outcome = job_files.read_outcome(StagedRun(job.parent.parent).outcome_path(1, 10, 0))
    assert (outcome.result, outcome.error_type) == ("rejected", error_type)


def test_the_join_is_left_to_the_rank_that_was_last_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all agents joined at once, each would read all parts; if the last one dies, one must."""
    monkeypatch.setattr(waiting_jobs, "_JOIN_SECONDS", 0.5)
    run = new_run(tmp_path / "run")
    run.claim(None)
    host = tmp_path / "host-a"
    waiting, last = RankJobs(run, [host, tmp_path / "host-b"], tables()).stage(10)
    agent = Agent(host, gate=PrefectGate(enabled=False), name_ranks_after=0)
    serving = threading.Thread(target=agent.serve)
    serving.start()
    try:
        until(lambda: [seen.missing_ranks for seen in agent.observe().runs] == [1])

        def die(call: str, key: str) -> None:
            if call == "list" and key.startswith("parts/"):
                raise unavailable(key)

        with pytest.raises(StoreUnavailable):
            persist.persist_job(last, store=InterposedStore(run.store, before=die))
        part_ended = time.monotonic()
        assert not run.manifest_names()
        until(lambda: not waiting.exists())
        waited_seconds = time.monotonic() - part_ended
    finally:
        agent.stop()
        serving.join()
    assert waited_seconds >= 0.9, "two parts of half a second each, less the way to here"
    assert run.manifest(10, 1).ranks == 2
