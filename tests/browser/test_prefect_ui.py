"""What a person sees of a checkpoint in Prefect's own pages, in a real browser."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from recpoint.catalog.run.run import Run
from recpoint.flows import prefect_server
from tests.agent_process import AgentProcess
from tests.browser.conftest import PATIENCE_SECONDS
from tests.catalog_builder import new_run, tables
from tests.job_builder import stage
from tests.polling import SERVER_SECONDS, until
from tests.prefect_api import ask
from tests.prefect_database import place_database

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.nightly("browser"), pytest.mark.xdist_group("browser")]


@pytest.fixture
def server(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The API of a local Prefect server, as an agent starts one."""
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RECPOINT_HOME", str(tmp_path / "home"))
    place_database(tmp_path / "home" / "prefect" / "prefect.db", tmp_path_factory)
    # The usual port is for tests that need it to stay.
    port = int(os.environ["RECPOINT_SERVER_PORT"]) + 1000
    monkeypatch.setenv("RECPOINT_SERVER_PORT", str(port))
    try:
        local = prefect_server.start_server()
        until(lambda: prefect_server.is_healthy(local.url), seconds=PATIENCE_SECONDS)
        yield local.url
    finally:
        prefect_server.stop_server()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose newest generation is 1."""
    run = new_run(tmp_path / "ads-ranker")
    run.claim(None)
    return run


def is_completed(api: str, step: int) -> bool:
    """Whether the flow run of this step is: an agent that ends before says something else."""
    runs = ask(f"{api}/flow_runs/filter", {})
    states = {one["name"]: one["state_type"] for one in runs}
    return states.get(f"persist ads-ranker step {step} rank 0") == "COMPLETED"


def test_a_checkpoint_and_the_lag_are_seen(
    server: str, run: Run, tmp_path: Path, page: Page
) -> None:
    staging = tmp_path / "staging"
    with AgentProcess(staging, tmp_path / "agent.log", prefect="auto") as agent:
        until(lambda: agent.logged("Prefect is at") > 0, seconds=PATIENCE_SECONDS)
        step = 119

        def is_shown() -> bool:
            """Whether Prefect knows of one more job: not of the first for sure.

            On a busy machine its API is slow enough now and then to be given up for a while.
            """
            nonlocal step
            step += 1
            job = stage(run, staging, tables(bits=4), step=step, generation=1)
            until(lambda: not job.exists(), seconds=PATIENCE_SECONDS)
            try:
                until(
                    lambda: is_completed(server, step),
                    longest_pause=SERVER_SECONDS,
                    seconds=20,
                )
            except TimeoutError:
                return False
            return True

        until(is_shown, seconds=3 * PATIENCE_SECONDS)
    artifacts = {one["key"]: one for one in ask(f"{server}/artifacts/filter", {})}
    ours = f"recpoint-ads-ranker-{run.id[:12]}"
    name = f"{ours}-g1-step-{step}-r0"
    assert {name, f"{ours}-r0-lag"} <= artifacts.keys() and len(artifacts) <= 1 + step - 119
    table = artifacts[name]
    stored = {row["what"]: row["value"] for row in json.loads(table["data"])}

    ui = prefect_server.ui_url(server)
    page.goto(f"{ui}/runs/flow-run/{table['flow_run_id']}")
    page.get_by_text(f"persist ads-ranker step {step} rank 0").first.wait_for()
    page.get_by_text("Completed").first.wait_for()
    page.screenshot(path=tmp_path / "prefect-flow-run.png")

    page.goto(f"{ui}/artifacts/artifact/{table['id']}")
    page.get_by_text(f"Checkpoint {step} of").first.wait_for()
    for what, value in stored.items():
        page.get_by_text(what, exact=True).first.wait_for()
        page.get_by_text(value, exact=True).first.wait_for()
    assert stored["kind"] == "full (chain of 1)"
    page.screenshot(path=tmp_path / "prefect-checkpoint.png")

    lag = artifacts[f"{ours}-r0-lag"]
    page.goto(f"{ui}/artifacts/artifact/{lag['id']}")
    page.get_by_text("a trainer that dies now loses").first.wait_for()
    page.screenshot(path=tmp_path / "prefect-lag.png")
    for name in ("flow-run", "checkpoint", "lag"):
        assert (tmp_path / f"prefect-{name}.png").stat().st_size > 10_000, "an empty page"
