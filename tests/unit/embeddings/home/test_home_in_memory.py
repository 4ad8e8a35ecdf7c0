"""The home in memory keeps the contract of homes, and takes memory for written rows only."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from recpoint.embeddings.home import homes
from recpoint.embeddings.home.contract import Home
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


class Short(TorchDispatchMode):
    """Memory runs out at the nth operation that allocates, from 0 on."""

    def __init__(self, allocations: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = allocations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable and not func.is_view:
            if not self.left:
                raise MemoryError("none is left")
            self.left -= 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("change", ["write_back", "exclusive_or"])
@pytest.mark.parametrize("record_bytes", [16, 5_000])
def test_a_change_without_memory_changes_nothing(change: str, record_bytes: int) -> None:
    """Neither a row, nor a frozen row, nor a size, wherever memory runs out."""
    before, rows, frozen = [0, 2, 5, 900], [2, 5, 7, 901], range(1, 902)
    records = records_of(rows, record_bytes, version=1)
    refused = 0
    with homes.local() as home:
        home.add_table("t", rows=1_000, record_bytes=record_bytes)
        home.write_back("t", ids_of(before), records_of(before, record_bytes), batch=0)
        with home.freeze("t", frozen) as reader:
            kept = fetched(reader.fetch, frozen, record_bytes)
            live = fetched(partial(home.fetch, "t"), range(1_000), record_bytes)
            pages = home.size_bytes()["rows"]
            while True:
                try:
                    with Short(refused):
                        getattr(home, change)("t", ids_of(rows), records, batch=1)
                    break
                except MemoryError:
                    refused += 1
                assert fetched(partial(home.fetch, "t"), range(1_000), record_bytes) == live
                assert fetched(reader.fetch, frozen, record_bytes) == kept
                assert home.size_bytes()["rows"] == pages
            assert refused > 5
            assert fetched(reader.fetch, frozen, record_bytes) == kept
            written = fetched(partial(home.fetch, "t"), rows, record_bytes)
            for row, record in zip(rows, records, strict=True):
                old = live.get(row, bytes(record_bytes)) if change == "exclusive_or" else None
                assert written[row] == (
                    bytes(record.tolist())
                    if old is None
                    else bytes(a ^ b for a, b in zip(old, record.tolist(), strict=True))
                )
