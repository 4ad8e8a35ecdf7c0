"""Processes that start embedding servers, or use those of another rank."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from recpoint.embeddings import servers
from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server.home import ServedHome
from recpoint.errors import ServerLost, SettingsError
from recpoint.testing.homes import fetched, ids_of, records_of

__all__ = ["parent", "rank", "stopped"]


def rank(number: int, place: str) -> None:
    """Join the servers, see the other's rows, and go on after a kill."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(place) / 'group'}", rank=number, world_size=2
    )
    _refuse_what_differs(number)
    _learn_why_rank_0_fails(number, Path(place))
    home = servers(2)
    assert isinstance(home, ServedHome)
    home.add_table("t", rows=10, record_bytes=8)
    read = partial(fetched, partial(home.fetch, "t"), range(10), 8)
    own_rows = range(number, 10, 2)

    def both_write_and_read() -> None:
        home.write_back("t", ids_of(own_rows), records_of(own_rows, 8), batch=1)
        dist.barrier()
        assert len(read()) == 10

    both_write_and_read()
    dist.barrier()
    if number == 0:
        os.kill(home._servers[1].transport.hello().pid, signal.SIGKILL)
    dist.barrier()
    try:
        read()
    except ServerLost as error:
        assert "embedding server 2 of 2 (" in str(error)  # noqa: PT017  # not in a test file
    else:
        raise AssertionError("rows of a dead server")
    dist.barrier()
    home.clear("t")  # rank 0 starts the server again, and rank 1 waits for that
    dist.barrier()
    both_write_and_read()
    dist.barrier()
    if number == 0:
        home.close()
    dist.barrier()
    if number == 1:
        home.close()
    dist.destroy_process_group()


def _refuse_what_differs(number: int) -> None:
    """Rank 1 passes another parity. It would look for rows where rank 0 has put others."""
    try:
        home = servers(3, parity=Parity(data=2 - number))
    except SettingsError as error:
        message = "Parity(data=1, parity=1) on rank 1, Parity(data=2, parity=1) on rank 0"
        assert number == 1 and message in str(error)  # noqa: PT017  # not in a test file
    else:
        assert number == 0
        home.close()
    dist.barrier()


def _learn_why_rank_0_fails(number: int, place: Path) -> None:
    (place / f"file {number}").touch()
    try:
        servers(1, directory=place / f"file {number}")
    except FileExistsError:
        assert number == 0
    except ServerLost as error:
        message = str(error)
        assert number == 1 and "rank 0" in message and "file 0" in message  # noqa: PT017  # as above
    else:
        raise AssertionError("rows in a file that was there")
    dist.barrier()


def parent(place: str) -> None:
    """Start two servers, and have a child that keeps all pipes open; then do nothing."""
    home = servers(2)
    assert isinstance(home, ServedHome)
    child = os.fork()
    if child:
        pids = f"{' '.join(str(greeting.pid) for greeting in home.greetings)} {child}"
        path = Path(place) / "pids"
        path.with_suffix(".new").write_text(pids)
        path.with_suffix(".new").rename(path)
    time.sleep(600)


def stopped(place: str, parity: bool, seconds: float) -> None:
    """Write and read rows for a while; the servers are those of the beginning at the end."""
    torch.set_num_threads(1)
    form = Parity(data=2) if parity else None
    with servers(3, parity=form, timeout_seconds=1.0) as home:
        assert isinstance(home, ServedHome)
        home.add_table("t", rows=2_000, record_bytes=400)
        greetings_before = home.greetings
        (Path(place) / "begun").touch()
        deadline, batch = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            batch += 1
            records = records_of(range(2_000), 400, version=batch % 200)
            home.write_back("t", ids_of(range(2_000)), records, batch=batch)
            records_found = torch.zeros_like(records)
            assert home.fetch("t", ids_of(range(2_000)), records_found).all()
            assert torch.equal(records_found, records)
        assert [greeting.pid for greeting in home.greetings] == [
            greeting.pid for greeting in greetings_before
        ]
