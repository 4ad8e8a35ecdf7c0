"""Writes and reads what a trainer says of its embedding servers, in the staging area (format §7).

Nothing but what people are told depends on it. Rank 0 replaces the file whole and does not make it
durable. Nobody removes it: in the next training, its generation says that it is an earlier one's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from recpoint.catalog.staging import owned
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store import durable
from recpoint.errors import ForeignObject
from recpoint.format.records import MAX_RECORD_BYTES, pack_record, unpack_record
from recpoint.format.servers import ServersRecord

__all__ = ["read_servers", "servers_path", "write_servers"]

#: One name, so that what a killed trainer has left half-written is overwritten by the next.
_TEMPORARY: Final = f"{durable.TEMPORARY_PREFIX}servers"
_NEXT_STEP: Final = "wait some seconds: a trainer that lives replaces it; if none does, remove it"


def servers_path(staged_run: StagedRun) -> Path:
    """Return the path of the file."""
    return staged_run.path / "servers.json"


def write_servers(staged_run: StagedRun, record: ServersRecord) -> None:
    """Replace the file so that it is whole at every moment, but not durably.

    Raises:
        StagingRefused: the directory is not this user's own.
        OSError: it cannot be written.
    """
    data = pack_record(record)
    owned.replace(staged_run.staging, servers_path(staged_run), data, temporary=_TEMPORARY)


def read_servers(staged_run: StagedRun) -> ServersRecord | None:
    """Return what a trainer has written last, whichever trainer that was; None: none has.

    Raises:
        FormatError: it is damaged, of another version, or of another run.
        StagingRefused: it, or a directory above it, is not this user's own.
        OSError: it cannot be read.
    """
    path = servers_path(staged_run)
    try:
        # With one byte more than the bound the parser refuses a larger file, whatever its size.
        data = owned.read(staged_run.staging, path, MAX_RECORD_BYTES + 1)
    except FileNotFoundError:
        return None
    record = unpack_record(ServersRecord, data, name=str(path), next_step=_NEXT_STEP)
    if StagedRun.of(staged_run.staging, record.run_url) != staged_run:
        raise ForeignObject(
            str(path),
            found="embedding servers of another run",  # whose URL may hold a credential
            expected=f"those of the run of {staged_run.name}",
            next_step=_NEXT_STEP,
        )
    return record
