"""Azure Blob Storage: the contract of stores, lost answers, and a training's checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from recpoint.catalog.check.validate import validate
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import Store, open_store
from recpoint.errors import ObjectExists, StoreUnavailable, StoreUnsupported
from recpoint.testing.store_suite import StoreSuite
from tests.azurite_server import AzuriteServer
from tests.fault.proxy import Break, FaultProxy
from tests.training_builder import Place, checkpointer, simple_training, train

pytestmark = [
    pytest.mark.nightly("azure"),
    # Of aiohttp, to which Azure's SDK hands bytes.
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
]

_CONTAINER = "box"


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzuriteServer]:
    """One emulator with one container for the tests of this file."""
    from azure.storage.blob import BlobServiceClient

    with AzuriteServer(tmp_path_factory.mktemp("azurite")) as server:
        (connection_string,) = server.environment().values()
        with BlobServiceClient.from_connection_string(connection_string) as client:
            client.create_container(_CONTAINER)
        yield server


def _run_url() -> str:
    return f"az://{_CONTAINER}/run-{os.urandom(6).hex()}"


@pytest.fixture
def azure_url(azurite: AzuriteServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """An unused run URL; the environment points to the emulator."""
    for name, value in azurite.environment().items():
        monkeypatch.setenv(name, value)
    return _run_url()


class TestAzureStoreContract(StoreSuite):
    @pytest.fixture
    def store(self, azure_url: str) -> Store:
        return open_store(azure_url)


def test_lost_answers_never_let_a_create_replace(
    azurite: AzuriteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(azurite.port) as proxy:
        for name, value in azurite.environment(port=proxy.port).items():
            monkeypatch.setenv(name, value)
        store = open_store(_run_url())
        proxy.plan = [Break(match="PUT", lose_reply=True, times=1)]
        try:
            store.create("record", b"mine")
        except (ObjectExists, StoreUnavailable):
            pass  # the SDK has tried again, or has given up: the caller reads the object back
        proxy.plan = []
        assert store.get("record", max_bytes=9) == b"mine"
        with pytest.raises(ObjectExists):
            store.create("record", b"other")
        assert store.get("record", max_bytes=9) == b"mine"


def test_a_large_create_whose_answers_are_lost_never_replaces(
    azurite: AzuriteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = b"m" * (9 << 20), b"o" * (9 << 20)
    with FaultProxy(azurite.port) as proxy:
        for name, value in azurite.environment(port=proxy.port).items():
            monkeypatch.setenv(name, value)
        store = open_store(_run_url())
        for after in range(4):
            key = f"chunk-{after}"
            proxy.plan = [Break(match="PUT", after=after, lose_reply=True, times=1)]
            try:
                store.create(key, mine)
            except (ObjectExists, StoreUnavailable):
                pass
            proxy.plan = []
            with pytest.raises(ObjectExists):
                store.create(key, other)
            assert store.get(key, max_bytes=len(mine)) == mine


def test_a_dead_server_is_a_failure_that_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = AzuriteServer(tmp_path / "own")
    with server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
    with pytest.raises(StoreUnavailable) as failure:
        open_store(_run_url()).create("record", b"mine")
    assert failure.value.retryable


def test_a_training_is_stored_validated_and_restored(azure_url: str, tmp_path: Path) -> None:
    place = Place(azure_url, tmp_path / "staging")
    training = simple_training(3)
    with place.agent(), checkpointer(training, place, bits=4) as checkpoints:
        checkpoints.restore()
        train(training, checkpoints, 4)
    run = Run.open(open_store(place.run))
    newest = run.live_line()[0]
    verdict = validate(run, newest, level="full")
    assert verdict.passed and verdict.rows_compared > 100
    assert restore(run, MemoryTarget()).restored.step == newest.step


def test_google_cloud_storage_is_refused_by_name() -> None:
    with pytest.raises(StoreUnsupported, match=r"gs://bucket/run.*Google.*proven"):
        open_store("gs://bucket/run").probe()
