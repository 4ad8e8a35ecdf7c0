"""What a demo asks of Prefect: that it is up, and which flows it has seen. By HTTP alone."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any, NamedTuple

from recpoint.dashboards.demo_processes import Child, ChildFailed
from recpoint.dashboards.demo_progress import DemoProgress
from recpoint.flows import prefect_server

__all__ = ["PrefectUI", "persisted_by_prefect", "wait_for_prefect"]

_START_SECONDS = 300.0
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 60.0
_PAGE = 200
#: The agent's own words for "from now on persists are flows".
_AGENT_IS_READY = "Prefect is at "


class PrefectUI(NamedTuple):
    """Where Prefect is."""

    api_url: str
    own_server: bool

    @property
    def url(self) -> str:
        """The page for people."""
        return prefect_server.ui_url(self.api_url)


def wait_for_prefect(agent: Child, progress: DemoProgress) -> PrefectUI:
    """Wait until the API answers and the agent uses it.

    Raises:
        ChildFailed: the agent ended, or Prefect did not come up.
    """
    progress.waiting_for_prefect()
    configured = prefect_server.configured_url()
    deadline = time.monotonic() + _START_SECONDS
    while True:
        agent.check()
        local = prefect_server.running_server()
        api_url = configured or (local.url if local else None)
        if api_url and _AGENT_IS_READY in agent.output():
            ui = PrefectUI(api_url, own_server=configured is None)
            progress.prefect_is_up(ui.url)
            return ui
        if time.monotonic() > deadline:
            raise ChildFailed(
                "the Prefect server",
                found=f"no answer within {_START_SECONDS:.0f} s",
                expected="a server that starts within half a minute",
                next_step=f"see {prefect_server.server_directory() / 'server.log'} and {agent.log}",
            )
        time.sleep(_POLL_SECONDS)


def persisted_by_prefect(ui: PrefectUI, run_name: str) -> int:
    """Steps of the run for which Prefect has a completed `persist` flow run; as the API says."""
    steps: set[str] = set()
    offset = 0
    while page := _persist_runs(ui, run_name, offset):
        for flow_run in page:
            steps.update(tag for tag in flow_run["tags"] if tag.startswith("step:"))
        offset += len(page)
    return len(steps)


def _persist_runs(ui: PrefectUI, run_name: str, offset: int) -> list[dict[str, Any]]:
    question = {
        "flows": {"name": {"any_": ["persist"]}},
        "flow_runs": {
            "tags": {"all_": [f"run:{run_name}"]},
            "state": {"type": {"any_": ["COMPLETED"]}},
        },
        "limit": _PAGE,
        "offset": offset,
    }
    request = urllib.request.Request(
        f"{ui.api_url.rstrip('/')}/flow_runs/filter",
        data=json.dumps(question).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
        page: list[dict[str, Any]] = json.load(answer)
    return page
