"""The flow `publish-to`: a sink gets each checkpoint, and no password is shown."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from prefect.blocks.system import Secret
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from pydantic import SecretStr

from recpoint.catalog.run.run import Run
from recpoint.errors import SettingsError
from recpoint.flows.publish_to import publish_to
from recpoint.serving.sinks.reader import SinkReader
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
    with get_client(sync_client=True) as client:
        key = ArtifactFilterKey(any_=[f"recpoint-run-{run.id[:12]}-sink"])
        shown = client.read_artifacts(artifact_filter=ArtifactFilter(key=key))
    rows = json.loads(str(max(shown, key=lambda artifact: str(artifact.created)).data))
    assert {row["table"] for row in rows} == {table.name for table in tables()}


def test_a_password_is_no_parameter(run: Run) -> None:
    with pytest.raises(SettingsError, match="sink_url_secret"):
        message(run, sink_url="redis://:hunter2@127.0.0.1/0")
    with pytest.raises(SettingsError, match="neither sink_url nor"):
        message(run)
    with pytest.raises(SettingsError, match="both"):
        message(run, sink_url="sqlite:a", sink_url_secret="b")
