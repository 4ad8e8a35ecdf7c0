"""Stores on fsspec: the contract on a real S3 server, and what is special about S3."""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import pickle
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from recpoint.catalog.store import s3
from recpoint.catalog.store.s3 import S3Failure, S3Store, S3Timeouts, client_settings
from recpoint.catalog.store.store import Store, open_store
from recpoint.errors import (
    ObjectNotFound,
    SettingsError,
    StoreAccessDenied,
    StoreError,
    StoreUnsupported,
)
from recpoint.installation import install_command
from recpoint.testing.seaweed import SeaweedServer
from recpoint.testing.store_suite import StoreSuite
from tests.polling import until


class TestS3StoreContract(StoreSuite):
    @pytest.fixture
    def store(self, s3_run_url: str) -> Store:
        return open_store(s3_run_url)


class TestMemoryStoreContract(StoreSuite):
    shared_between_processes = False

    @pytest.fixture
    def store(self) -> Store:
        return open_store(f"memory://run-{os.urandom(8).hex()}")


@pytest.fixture
def store(s3_run_url: str) -> S3Store:
    store = open_store(s3_run_url)
    assert isinstance(store, S3Store)
    return store


def _request(store: S3Store, method: str, **arguments: object) -> Any:
    """One request past the store, to prepare what it has to cope with."""

    def request() -> Coroutine[Any, Any, Any]:
        return store._call(method, **arguments)

    return store._run("preparing", "", request)


def _prefix(store: S3Store) -> str:
    return store.url.partition("//")[2].partition("/")[2] + "/"


@pytest.mark.parametrize("within_a_loop", [False, True])
def test_a_client_that_nobody_holds_closes_its_connections_on_their_loop(
    s3_run_url: str, caplog: pytest.LogCaptureFixture, within_a_loop: bool
) -> None:
    store = open_store(s3_run_url)
    assert isinstance(store, S3Store)
    store.put("k", b"1")
    sdk = store._client.get()._file_system._s3  # type: ignore[attr-defined]
    (session,) = sdk._endpoint.http_session._sessions.values()
    assert not session.closed
    gone = weakref.ref(store._client.get())

    def let_go() -> None:
        nonlocal store
        del store
        gc.collect()
        assert gone() is None

    async def let_go_in_a_flow() -> None:
        let_go()
        await asyncio.sleep(0.2)

    if within_a_loop:
        asyncio.run(let_go_in_a_flow())
    else:
        let_go()
    gc.collect()  # a task that failed tells when it goes
    until(lambda: session.closed)
    assert [one.getMessage() for one in caplog.records if one.name == "asyncio"] == []


def test_an_upload_that_was_left_behind_is_listed_and_aborted(store: S3Store) -> None:
    store.put("a/k", b"1")
    name = _prefix(store) + "a/big"
    upload = _request(store, "create_multipart_upload", Key=name)["UploadId"]
    _request(store, "upload_part", Key=name, UploadId=upload, PartNumber=1, Body=bytes(5 << 20))
    unfinished = list(store.list_unfinished())
    assert [info.key.partition("?")[0] for info in unfinished] == ["a/big"]
    assert [info.key for info in store.list()] == ["a/k"]
    with pytest.raises(ObjectNotFound):
        store.size("a/big")
    store.delete_unfinished(unfinished[0].key)
    store.delete_unfinished(unfinished[0].key)
    assert list(store.list_unfinished()) == []


def test_a_failed_upload_in_parts_leaves_nothing(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_SINGLE_PUT_BYTES", 0)
    monkeypatch.setattr(s3, "_PART_BYTES", 5 << 20)
    call = S3Store._call

    async def fail_at_part_two(self: S3Store, method: str, **arguments: object) -> Any:
        if arguments.get("PartNumber") == 2:
            raise S3Failure("on purpose", status=500, code="InternalError")
        return await call(self, method, **arguments)

    monkeypatch.setattr(S3Store, "_call", fail_at_part_two)
    with pytest.raises(StoreError, match="on purpose") as caught:
        store.put("big", bytes(16 << 20))
    assert caught.value.retryable
    assert list(store.list_unfinished()) == []
    assert list(store.list()) == []


def test_an_object_that_changes_during_a_read_is_noticed(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_RANGE_BYTES", 1_000)
    store.put("k", b"1" * 2_500)
    assert store.get("k", max_bytes=2_500) == b"1" * 2_500
    call = S3Store._call

    async def change_it_after_the_first(self: S3Store, method: str, **arguments: object) -> Any:
        if "IfMatch" in arguments:
            await call(self, "put_object", Key=_prefix(store) + "k", Body=b"2" * 2_500)
        return await call(self, method, **arguments)

    monkeypatch.setattr(S3Store, "_call", change_it_after_the_first)
    with pytest.raises(StoreError, match="an object that was replaced") as caught:
        store.get("k", max_bytes=2_500)
    assert caught.value.retryable


def test_folders_that_other_tools_made_are_no_objects(store: S3Store) -> None:
    _request(store, "put_object", Key=_prefix(store) + "folder/", Body=b"")
    store.put("folder/k", b"1")
    assert [info.key for info in store.list()] == ["folder/k"]


def test_runs_whose_names_start_alike_are_apart(s3_run_url: str) -> None:
    one, two = open_store(s3_run_url), open_store(s3_run_url + "2/")
    one.put("k", b"1")
    two.put("k", b"2")
    assert two.url == s3_run_url + "2"
    assert [info.key for info in one.list()] == ["k"]
    assert one.get("k", max_bytes=1) == b"1"


def test_a_bucket_that_is_not_there_is_named(s3_run_url: str) -> None:
    store = open_store("s3://no-such-bucket/run")
    calls: list[Callable[[], object]] = [
        lambda: store.get("k", max_bytes=1),
        lambda: store.put("k", b""),
        lambda: store.create("k", b""),
        lambda: list(store.list()),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="no bucket 'no-such-bucket'") as caught:
            call()
        assert not caught.value.retryable
        assert not isinstance(caught.value, ObjectNotFound)


def test_wrong_secrets_are_access_denied_and_never_shown(
    s3_environment: SeaweedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-hidden")
    store = open_store(s3_environment.run_url())
    calls: list[Callable[[], object]] = [
        lambda: store.get("k", max_bytes=1),
        lambda: store.get_range("k", start=0, end=1),
        lambda: store.put("k", b""),
        lambda: store.create("k", b""),
        lambda: store.size("k"),
        lambda: store.delete("k"),
        lambda: list(store.list()),
        lambda: list(store.list_unfinished()),
        lambda: store.probe(),
    ]
    for call in calls:
        with pytest.raises(StoreAccessDenied, match="AWS_ACCESS_KEY_ID") as caught:
            call()
        assert store.url in str(caught.value)
        assert "wrong-and-hidden" not in str(caught.value)
        assert b"wrong-and-hidden" not in pickle.dumps(caught.value)
    assert b"wrong-and-hidden" not in pickle.dumps(store)
    assert "wrong-and-hidden" not in repr(store) + repr(vars(store)) + caplog.text


def test_no_credentials_at_all_are_access_denied(
    s3_environment: SeaweedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreAccessDenied, match="NoCredentialsError"):
        open_store(s3_environment.run_url()).get("k", max_bytes=1)


def test_the_files_of_the_sdk_are_read_once(
    store: S3Store, s3_environment: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.loaders import JSONFileLoader

    store.put("k", b"1")

    def read_again(self: Any, path: str) -> None:
        raise AssertionError(path)

    monkeypatch.setattr(JSONFileLoader, "load_file", read_again)
    other = open_store(s3_environment.run_url())
    other.put("k", b"2")
    assert other.get("k", max_bytes=1) == b"2"


def test_a_forked_child_gets_its_own_client(store: S3Store) -> None:
    store.put("k", b"1")
    program = (
        "import os, sys\n"
        "from recpoint.catalog.store.store import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "assert store.get('k', max_bytes=1) == b'1'\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    store.put('child', store.get('k', max_bytes=1))\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert store.get('child', max_bytes=1) == b'1'\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, store.url], capture_output=True, text=True, timeout=240
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_process_that_used_s3_ends_silently(store: S3Store) -> None:
    program = (
        "import sys\n"
        "from recpoint.catalog.store.store import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "store.put('k', b'1')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", program, store.url],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONASYNCIODEBUG": "0"},
    )
    assert ran.returncode == 0
    assert "Unclosed" not in ran.stderr and "Traceback" not in ran.stderr


def test_a_file_system_that_creates_in_two_steps_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem
    from fsspec.spec import AbstractFileSystem

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", AbstractFileSystem.pipe_file)
    with pytest.raises(StoreUnsupported, match="two steps"):
        open_store("memory://run").probe()


def test_a_file_system_that_ignores_create_is_found_by_the_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    honest = MemoryFileSystem.pipe_file

    def careless(self: Any, path: str, value: bytes, mode: str = "overwrite") -> None:
        honest(self, path, value)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", careless)
    store = open_store("memory://run")
    with pytest.raises(StoreUnsupported, match="replaced the first"):
        store.probe()
    assert list(store.list()) == []


def test_the_package_for_a_scheme_is_named_when_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    # `fsspec.registry`, the attribute, is a read-only view; the module of that name has the table.
    known = importlib.import_module("fsspec.registry")._registry
    monkeypatch.delitem(known, "s3", raising=False)
    with pytest.raises(SettingsError, match=re.escape(install_command("s3"))):
        open_store("s3://bucket/run")


@pytest.mark.parametrize("name", ["connect_seconds", "attempts", "call_seconds", "refused_seconds"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_time_outs_that_cannot_work_are_refused(name: str, value: float) -> None:
    settings: dict[str, Any] = {name: value}
    if name == "refused_seconds" and value == 0:
        assert S3Timeouts(**settings).refused_seconds == 0  # never again: commands end at once
        return
    with pytest.raises(SettingsError, match=name):
        S3Timeouts(**settings)


def test_settings_come_from_configuration_environment_and_defaults() -> None:
    timeouts = S3Timeouts(attempts=2)
    plain = client_settings(timeouts, configured={}, environment={})
    assert "endpoint_url" not in plain and plain["client_kwargs"] == {}
    assert plain["use_listings_cache"] is False and plain["skip_instance_cache"] is True
    config = plain["config_kwargs"]
    assert isinstance(config, dict) and config["retries"]["total_max_attempts"] == 2

    variables = {"AWS_ENDPOINT_URL": "http://general", "AWS_ENDPOINT_URL_S3": "http://special"}
    other = client_settings(timeouts, configured={}, environment=variables)
    assert other["endpoint_url"] == "http://special"
    assert other["client_kwargs"] == {"region_name": "us-east-1"}
    configured = {
        "endpoint_url": "http://configured",
        "config_kwargs": {"read_timeout": 7},
        "s3_additional_kwargs": {"ServerSideEncryption": "AES256"},
    }
    third = client_settings(timeouts, configured=configured, environment=variables)
    assert third["endpoint_url"] == "http://configured"
    assert third["s3_additional_kwargs"] == {"ServerSideEncryption": "AES256"}
    config = third["config_kwargs"]
    assert isinstance(config, dict)
    assert (config["read_timeout"], config["connect_timeout"]) == (7, 3.0)
    with pytest.raises(SettingsError, match="config_kwargs"):
        client_settings(timeouts, configured={"config_kwargs": "x"}, environment={})


@pytest.mark.parametrize(
    "endpoint",
    [
        "notaurl",
        "localhost:8333",
        "ftp://host",
        "http://",
        "http://user:HIDDEN@host:1",
        "http://host?key=HIDDEN",
        "http://host:HIDDEN",
        "http://[HIDDEN",
    ],
)
def test_endpoints_that_cannot_work_are_refused_and_not_repeated(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="S3 endpoint") as caught:
        client_settings(S3Timeouts(), configured={}, environment={"AWS_ENDPOINT_URL": endpoint})
    assert "HIDDEN" not in str(caught.value) and "AWS_ENDPOINT_URL" in caught.value.next_step
