"""The flow `publish-to`: a sink gets each checkpoint, and no password is shown."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from prefect.blocks.system import Secret
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import Artifact
from pydantic import SecretStr

from recpoint.catalog.run.run import Run
from recpoint.errors import SettingsError
from recpoint.flows.publish_to import publish_to
from recpoint.serving.sinks.reader import SinkReader
from recpoint.tasks.publish_to import sink_mark, sink_slot
from tests.catalog_builder import tables
from tests.consolidation import trained

pytestmark = pytest.mark.usefixtures("prefect_api")


def message(run: Run, **parameters: Any) -> str:
    """Return what the flow says; raise what it raises."""

    async def once() -> str:
        state = await publish_to(run.url, return_state=True, **parameters)
        await state.aresult()
        return str(state.message)

    return asyncio.run(once())


def artifacts_of(run: Run) -> list[Artifact]:
    """Return what is shown of the run's sinks."""
    with get_client(sync_client=True) as client:
        key = ArtifactFilterKey(like_=f"recpoint-run-{run.id[:12]}-sink-%")
        return client.read_artifacts(artifact_filter=ArtifactFilter(key=key))


def test_a_sink_gets_each_checkpoint(run: Run, tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/served.db"
    trained(run, tables(), [1])
    assert message(run, sink_url=url).startswith("readers see step 1 ")
    trained(run, tables(seed=3), [4])
    assert message(run, sink_url=url, channel="validated").startswith("readers see step 1 ")
    Secret(value=SecretStr(url)).save("sink-of-ads", overwrite=True)
    newest = message(run, sink_url_secret="sink-of-ads")
    assert newest.startswith("readers see step 4 ") and newest.endswith("version 2 of the sink")
    table = tables(seed=3)[0]
    with SinkReader(url).reading() as version:
        assert version.checkpoint.step == 4
        assert version.lookup(table.name, torch.arange(3)).shape == (3, table.dim)
    shown = [artifact for artifact in artifacts_of(run) if "step 4 " in str(artifact.description)]
    rows = json.loads(str(shown[0].data))
    assert {row["table"] for row in rows} == {table.name for table in tables()}


def test_a_budget_defers_rows_until_a_version_without_one(run: Run, tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/served.db"
    in_training = tables()
    (full,) = trained(run, in_training, [1])
    message(run, sink_url=url)
    trained(run, in_training, [4], parent=full, seed=5)
    assert message(run, sink_url=url, budget_bytes=60).startswith("readers see step 4 ")
    with SinkReader(url).reading() as version:
        assert version.deferred is not None and version.deferred.rows > 0
    assert message(run, sink_url=url).startswith("readers see step 4 ")
    with SinkReader(url).reading() as version:
        assert version.deferred is None


def test_an_artifact_of_each_sink_is_made_for_each_version(run: Run, tmp_path: Path) -> None:
    trained(run, tables(), [1])
    for name in ("first", "first", "second", "first"):
        assert message(run, sink_url=f"sqlite:{tmp_path}/{name}.db").startswith(
            "readers see step 1"
        )
    keys = Counter(artifact.key for artifact in artifacts_of(run))
    assert list(keys.values()) == [1, 1]
    trained(run, tables(seed=3), [4])
    assert message(run, sink_url=f"sqlite:{tmp_path}/first.db").startswith("readers see step 4")
    assert sorted(Counter(artifact.key for artifact in artifacts_of(run)).values()) == [1, 2]


def test_one_flow_run_at_a_time_publishes_to_a_sink(run: Run, tmp_path: Path) -> None:
    trained(run, tables(), [1])
    busy, free = f"sqlite:{tmp_path}/busy.db", f"sqlite:{tmp_path}/free.db"

    async def while_another_publishes() -> list[str]:
        async with sink_slot(await sink_mark(busy, None)) as has_slot:
            assert has_slot
            states = [await publish_to(run.url, url, return_state=True) for url in (busy, free)]
        states.append(await publish_to(run.url, busy, return_state=True))
        return [str(state.message) for state in states]

    refused, beside, afterwards = asyncio.run(while_another_publishes())
    assert refused == "another flow run publishes to this sink"
    assert beside.startswith("readers see step 1 ") and afterwards.startswith("readers see step 1 ")


def test_a_sink_is_marked_by_what_it_holds_only() -> None:
    def mark(url: str) -> str:
        return asyncio.run(sink_mark(url, None))

    same = {
        mark(f"redis://{user}host/0{options}")
        for user in ("", "u:pw@")
        for options in ("", "?grace=9")
    }
    assert len(same) == 1
    others = ("redis://host/1", "redis://other/0", "redis://host/0?prefix=ads", "sqlite:host/0")
    assert len(same | {mark(url) for url in others}) == 5


def test_a_password_is_no_parameter(run: Run) -> None:
    with pytest.raises(SettingsError, match="sink_url_secret"):
        message(run, sink_url="redis://:hunter2@127.0.0.1/0")
    with pytest.raises(SettingsError, match="neither sink_url nor"):
        message(run)
    with pytest.raises(SettingsError, match="both"):
        message(run, sink_url="sqlite:a", sink_url_secret="b")
