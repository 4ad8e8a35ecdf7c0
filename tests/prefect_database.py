"""Copies the database of a Prefect server that was started once, for the servers of other tests.

Creating the tables takes seconds of a processor, as long as the rest of a server's start, and tests
start a dozen servers. The first test makes the database, and the others get a copy. `test_demo`
does without.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from recpoint.flows import prefect_server
from tests.polling import until

__all__ = ["place_database"]

_SECONDS = 400.0


def place_database(place: Path, factory: pytest.TempPathFactory) -> None:
    """Copy the database to the file `place`, for a server that is started later.

    Args:
        place: path of the new file.
        factory: of this session, whose workers share the database's directory.
    """
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    database = shared / "prefect.db"
    with (shared / "prefect.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not database.exists():
            _make(shared / "prefect_home").replace(database)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(database, place)


def _make(home: Path) -> Path:
    """Start a server in `home` and end it; return one file with everything that it wrote."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PREFECT_")]:
            patch.delenv(name)
        patch.setenv("RECPOINT_HOME", str(home))
        try:
            url = prefect_server.start_server().url
            until(lambda: prefect_server.is_healthy(url), seconds=_SECONDS)
        finally:
            prefect_server.stop_server()
        database = prefect_server.server_directory() / "prefect.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return database
