"""The home in memory keeps the contract of homes, and takes memory for written rows only."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from recpoint.embeddings import homes
from recpoint.embeddings.home import Home
from recpoint.testing.homes import HomeSuite, fetched, ids_of, records_of


class TestMemoryHome(HomeSuite):
    @pytest.fixture
    def home(self) -> Iterator[Home]:
        with homes.local() as home:
            yield home


def test_sizes_count_each_page_once() -> None:
    with homes.local() as home:
        home.add_table("t", rows=1_000_000, record_bytes=5_000)
        assert sum(home.size_bytes().values()) == 0
        for batch in range(2):
            rows = [0, 1, 999_999]
            home.write_back("t", ids_of(rows), records_of(rows, 5_000), batch=batch)
            sizes = home.size_bytes()
            # Rows 0 and 1 end in the third page; the last row lies in two or three pages.
            assert sizes["rows"] // 4_096 == 3 + len(
                range(999_999 * 5_000 // 4_096, (10**6 * 5_000 - 1) // 4_096 + 1)
            )
            assert sizes["index"] == 2 * 4_096
            assert sizes["frozen"] == sizes["disk"] == 0
        with home.freeze("t", range(10)):
            assert home.size_bytes()["frozen"] == 0
            home.write_back("t", ids_of([1]), records_of([1], 5_000), batch=2)
            assert 0 < home.size_bytes()["frozen"] <= 5 * 4_096
        assert home.size_bytes()["frozen"] == 0
        home.clear("t")
        assert sum(home.size_bytes().values()) == 0


def test_memory_is_that_of_the_pages_written() -> None:
    """As the kernel counts it. Without small pages, each of these rows would take 2 MiB."""

    def resident_bytes() -> int:
        with open("/proc/self/smaps_rollup") as file:
            line = next(line for line in file if line.startswith("Rss"))
        return int(line.split()[1]) << 10

    rows = range(0, 10**9, 10**6)
    ids, records = ids_of(rows), records_of(rows, 64)
    with homes.local() as home:
        home.add_table("t", rows=10**9, record_bytes=64)
        before = resident_bytes()
        home.write_back("t", ids, records, batch=0)
        assert resident_bytes() - before < 200 << 20
        assert len(fetched(partial(home.fetch, "t"), rows, 64)) == 1_000
