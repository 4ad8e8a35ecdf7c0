"""Random calls to homes, compared with a dictionary."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from recpoint.embeddings.home import homes
from recpoint.embeddings.home.contract import FrozenRows, Home
from recpoint.embeddings.home.homes import FileLimits
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.errors import HomeError
from recpoint.testing.homes import fetched, ids_of, records_of
from tests.example_counts import examples
from tests.simulated_network import Repeating, Unreliable, repeated

ROWS = 400
#: Few rows anywhere, or many in a stretch: hypothesis itself draws small sets.
CHOSEN = st.sets(st.integers(0, ROWS - 1), max_size=20).map(sorted) | st.builds(
    lambda first, count, step: list(range(ROWS))[first : first + count * step : step],
    st.integers(0, ROWS - 1),
    st.integers(20, 200),
    st.integers(1, 5),
)
SIZES = {"a": 64, "b": 3_000, "c": 1}


class HomePlay(RuleBasedStateMachine):
    """Two tables and a dictionary for each; frozen rows have a copy of it."""

    home: Home

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, dict[int, bytes]] = {table: {} for table in SIZES}
        self.batches = dict.fromkeys(SIZES, 0)
        self.frozen: list[tuple[FrozenRows, str, range, dict[int, bytes]]] = []
        self.version = 0

    def new_home(self) -> Home:
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.home = self.new_home()
        for table, size in SIZES.items():
            self.home.add_table(table, rows=ROWS, record_bytes=size)

    @rule(
        table=st.sampled_from(sorted(SIZES)),
        chosen=CHOSEN,
        later=st.integers(0, 2),
        twice=st.booleans(),
    )
    def write_back(self, table: str, chosen: list[int], later: int, twice: bool) -> None:
        self.version += 1
        records = records_of(chosen, SIZES[table], version=self.version)
        self.batches[table] += later
        for _ in range(1 + twice):
            self.home.write_back(table, ids_of(chosen), records, batch=self.batches[table])
        self.rows[table] |= {
            row: bytes(record.tolist()) for row, record in zip(chosen, records, strict=True)
        }

    @precondition(lambda self: any(self.batches.values()))
    @rule(table=st.sampled_from(sorted(SIZES)))
    def go_back(self, table: str) -> None:
        if self.batches[table]:
            records = torch.zeros(1, SIZES[table], dtype=torch.uint8)
            try:
                self.home.write_back(table, ids_of([0]), records, batch=-1)
            except HomeError:
                return
            raise AssertionError("a batch went back")

    @rule(
        table=st.sampled_from(sorted(SIZES)),
        chosen=CHOSEN,
    )
    def fetch(self, table: str, chosen: list[int]) -> None:
        found = fetched(partial(self.home.fetch, table), chosen, SIZES[table])
        assert found == {row: self.rows[table][row] for row in chosen if row in self.rows[table]}

    @precondition(lambda self: len(self.frozen) < 4)
    @rule(
        table=st.sampled_from(sorted(SIZES)), one=st.integers(0, ROWS), other=st.integers(0, ROWS)
    )
    def freeze(self, table: str, one: int, other: int) -> None:
        rows = range(min(one, other), max(one, other))
        frozen = self.home.freeze(table, rows)
        self.frozen.append((frozen, table, rows, dict(self.rows[table])))

    @precondition(lambda self: self.frozen)
    @rule(which=st.integers(0, 3))
    def release(self, which: int) -> None:
        frozen, *_ = self.frozen.pop(which % len(self.frozen))
        frozen.release()

    @rule(table=st.sampled_from(sorted(SIZES)))
    def clear(self, table: str) -> None:
        if any(name == table for _, name, _, _ in self.frozen):
            try:
                self.home.clear(table)
            except HomeError:
                return
            raise AssertionError("a frozen table was cleared")
        self.home.clear(table)
        self.rows[table] = {}
        self.batches[table] = 0

    @rule()
    def read_all(self) -> None:
        for table, size in SIZES.items():
            found = fetched(partial(self.home.fetch, table), range(ROWS), size)
            assert found == self.rows[table]

    @invariant()
    def frozen_rows_stay(self) -> None:
        for frozen, table, rows, then in self.frozen:
            found = fetched(frozen.fetch, rows, SIZES[table])
            assert found == {row: record for row, record in then.items() if row in rows}

    def teardown(self) -> None:
        if hasattr(self, "home"):
            self.read_all()
            self.home.close()


class MemoryPlay(HomePlay):
    def new_home(self) -> Home:
        return homes.local()


class FilePlay(HomePlay):
    def new_home(self) -> Home:
        self.directory = Path(tempfile.mkdtemp(prefix="home-"))
        limits = FileLimits(index_rows=100, segment_bytes=8_192, buffer_bytes=4_096)
        return homes.local(self.directory, limits=limits)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "directory"):
            left = [path.name for path in self.directory.iterdir()]
            shutil.rmtree(self.directory)
            assert left == ["home.lock"]


class ServedPlay(HomePlay):
    """On a network that loses, repeats and delays calls to the servers."""

    @initialize(servers=st.integers(1, 3), seed=st.integers(0, 2**32))
    def begin_served(self, servers: int, seed: int) -> None:
        self.servers = [EmbeddingServer() for _ in range(servers)]
        network = [Unreliable(server, seed + at) for at, server in enumerate(self.servers)]
        self.home = Repeating(repeated(lambda: ServedHome(network)))
        for table, size in SIZES.items():
            self.home.add_table(table, rows=ROWS, record_bytes=size)

    def begin(self) -> None:
        """Begun by `begin_served`."""


TestMemoryHome = MemoryPlay.TestCase
TestMemoryHome.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestServedHome = ServedPlay.TestCase
TestServedHome.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestFileHome = FilePlay.TestCase
TestFileHome.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
