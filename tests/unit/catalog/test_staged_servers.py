"""What a trainer says of its embedding servers is read whole, and refused if it is not that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.servers import read_servers, servers_path, write_servers
from recpoint.errors import (
    DigestMismatch,
    ForeignObject,
    FormatError,
    MalformedObject,
    StagingRefused,
    UnsupportedVersion,
)
from recpoint.format.records import MAX_RECORD_BYTES, pack_record
from recpoint.format.servers import AllServers, ServerFacts, ServersRecord

URL = "s3://bucket/ads"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = StagedRun.of(tmp_path, URL).path
    directory.mkdir()
    return directory


def server(at: int, **changed: object) -> ServerFacts:
    fields: dict[str, object] = {
        "number": at,
        "host": "node",
        "pid": 40 + at,
        "address": "127.0.0.1:4000",
        "state": "up",
        "rows": 100,
        "known_rows": 100,
        "memory_bytes": None,
        "disk_bytes": None,
        "lost_ms": None,
        "whole_ms": None,
    }
    return ServerFacts.model_validate(fields | changed)


def record(url: str = URL, count: int = 2) -> ServersRecord:
    each = tuple(server(number) for number in range(1, count + 1))
    servers = AllServers(parity=1, has_given_up=False, each=each)
    return ServersRecord(run_url=url, generation=3, at_ms=1_700_000_000_000, servers=servers)


def test_it_is_read_as_it_was_written_and_replaced_whole(run_dir: Path) -> None:
    assert read_servers(StagedRun(run_dir)) is None
    write_servers(StagedRun(run_dir), record())
    write_servers(StagedRun(run_dir), record(count=3))
    assert read_servers(StagedRun(run_dir)) == record(count=3)
    assert [path.name for path in run_dir.iterdir()] == ["servers.json"]


def test_what_a_killed_trainer_left_half_written_is_replaced(run_dir: Path) -> None:
    (run_dir / ".tmp-servers").write_bytes(b"half of it" * 1_000)
    write_servers(StagedRun(run_dir), record())
    assert read_servers(StagedRun(run_dir)) == record()
    assert [path.name for path in run_dir.iterdir()] == ["servers.json"]


def test_each_torn_file_is_refused_by_name(run_dir: Path) -> None:
    data = pack_record(record())
    for end in range(len(data) - 1):  # the last byte ends a line
        servers_path(StagedRun(run_dir)).write_bytes(data[:end])
        with pytest.raises(MalformedObject, match=r"servers\.json.*wait some seconds"):
            read_servers(StagedRun(run_dir))


def test_others_than_this_release_writes_are_refused(run_dir: Path) -> None:
    data = pack_record(record())

    def refused(bad: bytes, error: type[FormatError], words: str) -> None:
        servers_path(StagedRun(run_dir)).write_bytes(bad)
        with pytest.raises(error, match=words):
            read_servers(StagedRun(run_dir))

    refused(data.replace(b'"version":1', b'"version":2'), UnsupportedVersion, "version 2")
    refused(data.replace(b'"pid":41', b'"pid":42'), DigestMismatch, "crc32c")
    refused(data.replace(b"recpoint/servers", b"recpoint/cancel"), MalformedObject, "format")
    refused(pack_record(record("s3://bucket/other")), ForeignObject, "another run")
    refused(data + b" " * MAX_RECORD_BYTES, MalformedObject, "bytes")


@pytest.mark.parametrize(
    "changed",
    [
        {"number": 3},
        {"known_rows": 101},
        {"whole_ms": 7},
        {"state": "asleep"},
        {"memory_bytes": -1},
        {"pid": True},
    ],
)
def test_figures_that_no_server_has_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        AllServers(parity=1, has_given_up=False, each=(server(1), server(2, **changed)))


def test_the_file_of_somebody_else_is_refused(run_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_bytes(pack_record(record()))
    servers_path(StagedRun(run_dir)).symlink_to(elsewhere)
    with pytest.raises(StagingRefused, match="no symbolic links"):
        read_servers(StagedRun(run_dir))
    servers_path(StagedRun(run_dir)).unlink()
    os.mkfifo(servers_path(StagedRun(run_dir)))
    with pytest.raises(StagingRefused, match="plain file"):
        read_servers(StagedRun(run_dir))
