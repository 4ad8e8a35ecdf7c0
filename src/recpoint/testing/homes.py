"""Tests that an implementation of `recpoint.embeddings.home.contract.Home` keeps the contract.

    class TestMyHome(HomeSuite):
        @pytest.fixture
        def home(self) -> Iterator[Home]:
            with MyHome(...) as home:  # empty
                yield home

The fixture must return a fresh, empty home for each test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor

from recpoint.embeddings.home.contract import FrozenRows, Home, TableRows
from recpoint.errors import HomeError

__all__ = ["HomeSuite", "fetched", "ids_of", "records_of"]

_UNTOUCHED = 0xA5


def ids_of(rows: Sequence[int]) -> Tensor:
    """Return ids as a home takes them: int64 [n]."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def records_of(rows: Sequence[int], record_bytes: int, *, version: int = 0) -> Tensor:
    """Return records that differ by row and by version: uint8 [n, record_bytes]."""
    row = ids_of(rows).view(-1, 1)
    positions = torch.arange(record_bytes, dtype=torch.int64, device="cpu")
    mixed = (row * 1_000_003 + version * 7_919 + 1) * (positions * 2_654_435_761 + 97)
    return ((mixed >> 7) & 0xFF).to(torch.uint8)


def fetched(
    reader: Callable[[Tensor, Tensor], Tensor], rows: Sequence[int], record_bytes: int
) -> dict[int, bytes]:
    """Fetch rows, and return those that are there. Checks that other rows of `out` are untouched.

    Args:
        reader: of (ids, out), as `FrozenRows.fetch`.
        rows: ascending.
        record_bytes: of the table.
    """
    out = torch.full((len(rows), record_bytes), _UNTOUCHED, dtype=torch.uint8, device="cpu")
    present = reader(ids_of(rows), out)
    assert present.dtype == torch.bool and present.shape == (len(rows),)
    assert (out[~present] == _UNTOUCHED).all()
    return {
        row: bytes(record.tolist())
        for row, record, is_present in zip(rows, out, present.tolist(), strict=True)
        if is_present
    }


def _expected(rows: Sequence[int], record_bytes: int, *, version: int = 0) -> dict[int, bytes]:
    records = records_of(rows, record_bytes, version=version)
    return {row: bytes(record.tolist()) for row, record in zip(rows, records, strict=True)}


class HomeSuite:
    """Tests of the contract; subclass it and provide the fixture `home`."""

    #: Rows of a table whose start must take neither time nor memory.
    many_rows = 1_000_000_000

    @pytest.fixture
    def home(self) -> Home:
        """Return an empty home; the subclass overrides this."""
        raise NotImplementedError("provide a fixture `home`")

    @pytest.mark.parametrize("record_bytes", [1, 7, 64, 520, 4_080, 4_081, 10_000])
    def test_what_is_written_comes_back(self, home: Home, record_bytes: int) -> None:
        """Rows with records of any length come back, others are missing and leave `out` alone."""
        home.add_table("t", rows=1_000, record_bytes=record_bytes)
        rows = [0, 3, 4, 5, 500, 999]
        home.write_back("t", ids_of(rows), records_of(rows, record_bytes), batch=0)
        records = fetched(partial(home.fetch, "t"), range(1_000), record_bytes)
        assert records == _expected(rows, record_bytes)

    def test_a_home_is_empty_at_the_start(self, home: Home) -> None:
        """No row is there before it is written; no ids are no rows."""
        home.add_table("t", rows=100, record_bytes=8)
        assert fetched(partial(home.fetch, "t"), range(100), 8) == {}
        assert fetched(partial(home.fetch, "t"), [], 8) == {}
        home.write_back("t", ids_of([]), records_of([], 8), batch=1)
        assert fetched(partial(home.fetch, "t"), range(100), 8) == {}

    def test_a_record_of_zeros_is_a_record(self, home: Home) -> None:
        """A row whose record is all zeros is there; its neighbours are not."""
        home.add_table("t", rows=10, record_bytes=16)
        home.write_back("t", ids_of([0, 4]), torch.zeros(2, 16, dtype=torch.uint8), batch=0)
        records = fetched(partial(home.fetch, "t"), range(10), 16)
        assert records == {0: bytes(16), 4: bytes(16)}

    def test_the_last_record_counts(self, home: Home) -> None:
        """A row that is written again has the new record, also within one batch."""
        home.add_table("t", rows=50, record_bytes=12)
        for batch, rows in enumerate([range(0, 50), range(10, 30), range(20, 40), range(20, 22)]):
            ids = ids_of(rows)
            home.write_back("t", ids, records_of(rows, 12, version=batch), batch=batch)
        home.write_back("t", ids_of([20]), records_of([20], 12, version=9), batch=3)
        expected = _expected(range(50), 12)
        expected |= _expected(range(10, 20), 12, version=1)
        expected |= _expected(range(20, 40), 12, version=2)
        expected |= _expected([20], 12, version=9) | _expected([21], 12, version=3)
        assert fetched(partial(home.fetch, "t"), range(50), 12) == expected

    def test_a_table_gets_more_rows(self, home: Home) -> None:
        """Old and frozen rows stay, new ones were never written, and both can be."""
        home.add_table("t", rows=100, record_bytes=520)
        rows = range(0, 100, 3)
        home.write_back("t", ids_of(rows), records_of(rows, 520), batch=0)
        if not home.may_add_rows:
            with pytest.raises(HomeError, match="keep their sizes"):
                home.add_rows("t", rows=200)
            return
        with home.freeze("t", range(100)) as frozen:
            home.add_rows("t", rows=5_000)
            home.add_rows("t", rows=5_000)
            assert fetched(frozen.fetch, range(100), 520) == _expected(rows, 520)
            written = [3, 98, 99, 100, 4_999]
            home.write_back("t", ids_of(written), records_of(written, 520, version=1), batch=1)
            assert fetched(frozen.fetch, range(100), 520) == _expected(rows, 520)
        expected = _expected(rows, 520) | _expected(written, 520, version=1)
        assert fetched(partial(home.fetch, "t"), range(5_000), 520) == expected
        with home.freeze("t", range(5_000)) as frozen:
            assert fetched(frozen.fetch, range(5_000), 520) == expected
        home.add_table("t", rows=5_000, record_bytes=520)
        home.add_rows("t", rows=self.many_rows)
        assert fetched(partial(home.fetch, "t"), [3, self.many_rows - 1], 520).keys() == {3}
        with pytest.raises(ValueError, match="expected 1000000000 or more"):
            home.add_rows("t", rows=5_000)
        with pytest.raises(HomeError):
            home.add_rows("another", rows=5_000)
        home.clear("t")
        assert fetched(partial(home.fetch, "t"), [3, self.many_rows - 1], 520) == {}

    def test_records_are_copied(self, home: Home) -> None:
        """What the caller does with its tensors afterwards changes nothing."""
        home.add_table("t", rows=10, record_bytes=4)
        ids, records = ids_of([1, 2]), records_of([1, 2], 4)
        home.write_back("t", ids, records, batch=0)
        ids.fill_(7)
        records.fill_(7)
        stored = fetched(partial(home.fetch, "t"), range(10), 4)
        assert stored == _expected([1, 2], 4)

    def test_the_same_write_back_twice_is_one(self, home: Home) -> None:
        """Repeating a call leaves the same rows, and the same frozen rows."""
        home.add_table("t", rows=20, record_bytes=8)
        home.write_back("t", ids_of(range(8)), records_of(range(8), 8), batch=0)
        with home.freeze("t", range(20)) as frozen:
            for _ in range(2):
                rows = range(4, 12)
                home.write_back("t", ids_of(rows), records_of(rows, 8, version=1), batch=1)
                records = fetched(partial(home.fetch, "t"), range(20), 8)
                assert records == _expected(range(4), 8) | _expected(rows, 8, version=1)
                assert fetched(frozen.fetch, range(20), 8) == _expected(range(8), 8)

    def test_exclusive_or_replaces_records(self, home: Home) -> None:
        """Rows that are there become the XOR, others the given records; frozen ones stay."""
        home.add_table("t", rows=20, record_bytes=9)
        home.write_back("t", ids_of(range(8)), records_of(range(8), 9), batch=0)
        rows, differences = range(4, 12), records_of(range(4, 12), 9, version=1)
        with home.freeze("t", range(20)) as frozen:
            home.exclusive_or("t", ids_of(rows), differences, batch=1)
            assert fetched(frozen.fetch, range(20), 9) == _expected(range(8), 9)
        mixed = records_of(rows, 9)
        mixed[4:] = 0  # these were never written
        mixed ^= differences
        expected = {row: bytes(record.tolist()) for row, record in zip(rows, mixed, strict=True)}
        records = fetched(partial(home.fetch, "t"), range(20), 9)
        assert records == _expected(range(4), 9) | expected
        home.exclusive_or("t", ids_of(rows), differences, batch=1)
        home.exclusive_or("t", ids_of([]), records_of([], 9), batch=1)
        records = fetched(partial(home.fetch, "t"), range(4, 20), 9)
        zeros = dict.fromkeys(range(8, 12), bytes(9))
        assert records == _expected(range(4, 8), 9) | zeros
        with pytest.raises(ValueError, match="not ascending"):
            home.exclusive_or("t", ids_of([2, 1]), records_of([2, 1], 9), batch=1)
        assert fetched(partial(home.fetch, "t"), range(4), 9) == _expected(range(4), 9)

    def test_several_tables_at_once(self, home: Home) -> None:
        """`write_back_all` and `fetch_all` do what the calls for each table do."""
        sizes = {f"t{number}": 8 + 3 * number for number in range(5)}
        for table, record_bytes in sizes.items():
            home.add_table(table, rows=100, record_bytes=record_bytes)
        written = {table: range(number, 100, 2 + number) for number, table in enumerate(sizes)}
        changed = [
            TableRows(table, ids_of(rows), records_of(rows, sizes[table]))
            for table, rows in written.items()
        ]
        home.write_back_all(changed, batch=1)
        home.write_back_all([], batch=1)
        fetches = [
            TableRows(
                table,
                ids_of(range(100)),
                torch.full((100, size), _UNTOUCHED, dtype=torch.uint8, device="cpu"),
            )
            for table, size in sizes.items()
        ]
        for fetch, present in zip(fetches, home.fetch_all(fetches), strict=True):
            rows = written[fetch.table]
            assert present.nonzero().view(-1).tolist() == list(rows)
            assert torch.equal(fetch.records[present], records_of(rows, sizes[fetch.table]))
            assert (fetch.records[~present] == _UNTOUCHED).all()
        assert home.fetch_all([]) == []
        with pytest.raises(HomeError, match="batch 0"):
            home.write_back_all(changed, batch=0)

    def test_tables_are_separate(self, home: Home) -> None:
        """Rows of one table say nothing about another table, and batches are counted for each."""
        sizes = {"a": 8, "b/..": 24, "\u00e9": 1}
        for number, (table, size) in enumerate(sizes.items()):
            home.add_table(table, rows=10 + number, record_bytes=size)
            home.write_back(table, ids_of([number]), records_of([number], size), batch=9 - number)
        for number, (table, size) in enumerate(sizes.items()):
            out = torch.zeros(10, size, dtype=torch.uint8, device="cpu")
            present = home.fetch(table, ids_of(range(10)), out)
            assert present.nonzero().view(-1).tolist() == [number]
            assert torch.equal(out[present], records_of([number], size))

    def test_a_table_is_added_once(self, home: Home) -> None:
        """Adding it again keeps its rows; another size is refused."""
        home.add_table("t", rows=10, record_bytes=8)
        home.write_back("t", ids_of([3]), records_of([3], 8), batch=0)
        home.add_table("t", rows=10, record_bytes=8)
        assert fetched(partial(home.fetch, "t"), range(10), 8) == _expected([3], 8)
        with pytest.raises(HomeError, match="found 11 rows of 8 bytes; expected 10 rows"):
            home.add_table("t", rows=11, record_bytes=8)
        with pytest.raises(HomeError, match="10 rows of 9 bytes"):
            home.add_table("t", rows=10, record_bytes=9)
        for bad in ({"rows": 0, "record_bytes": 8}, {"rows": 8, "record_bytes": 0}):
            with pytest.raises(ValueError, match="expected 1 or more"):
                home.add_table("u", **bad)
        with pytest.raises(ValueError, match="expected a name"):
            home.add_table("", rows=1, record_bytes=1)

    def test_a_table_must_be_added(self, home: Home) -> None:
        """Call with an unknown table name it."""
        ids, records = ids_of([0]), records_of([0], 8)
        for call in (
            lambda: home.fetch("who", ids, records),
            lambda: home.write_back("who", ids, records, batch=0),
            lambda: home.freeze("who", range(1)),
            lambda: home.clear("who"),
        ):
            with pytest.raises(HomeError, match="'who'.*add_table"):
                call()

    def test_batches_never_go_back(self, home: Home) -> None:
        """An earlier batch is refused and changes nothing; the same and later ones are taken."""
        home.add_table("t", rows=10, record_bytes=8)
        home.write_back("t", ids_of([1]), records_of([1], 8), batch=5)
        with pytest.raises(HomeError, match="batch 4 after one of batch 5"):
            home.write_back("t", ids_of([1]), records_of([1], 8, version=1), batch=4)
        assert fetched(partial(home.fetch, "t"), range(10), 8) == _expected([1], 8)
        for batch in (5, 6):
            home.write_back("t", ids_of([batch]), records_of([batch], 8), batch=batch)
        assert fetched(partial(home.fetch, "t"), range(10), 8) == _expected([1, 5, 6], 8)

    @pytest.mark.parametrize(
        ("ids", "shape", "match"),
        [
            (torch.tensor([1, 1]), (2, 8), "ascending"),
            (torch.tensor([2, 1]), (2, 8), "ascending"),
            (torch.tensor([-1, 1]), (2, 8), "-1"),
            (torch.tensor([1, 10]), (2, 8), "10"),
            (torch.tensor([1, 2], dtype=torch.int32), (2, 8), "int32"),
            (torch.tensor([[1, 2]]), (2, 8), "shape"),
            (torch.arange(8)[::4], (2, 8), "not contiguous"),
            (torch.tensor([1, 2]), (2, 7), "shape"),
            (torch.tensor([1, 2]), (3, 8), "shape"),
            (torch.tensor([1, 2]), (16,), "shape"),
        ],
    )
    def test_other_arguments_are_refused(
        self, home: Home, ids: Tensor, shape: tuple[int, ...], match: str
    ) -> None:
        """Ids and records of another form are refused before anything is read or written."""
        home.add_table("t", rows=10, record_bytes=8)
        home.write_back("t", ids_of(range(10)), records_of(range(10), 8), batch=0)
        records = torch.zeros(shape, dtype=torch.uint8, device="cpu")
        with pytest.raises(ValueError, match=match):
            home.write_back("t", ids, records, batch=0)
        with pytest.raises(ValueError, match=match):
            home.fetch("t", ids, records)
        assert not records.any()
        with home.freeze("t", range(10)) as frozen, pytest.raises(ValueError, match=match):
            frozen.fetch(ids, records)
        with pytest.raises(ValueError, match="dtype"):
            home.fetch("t", ids_of([1]), torch.zeros(1, 8, dtype=torch.int8, device="cpu"))
        with pytest.raises(ValueError, match="not contiguous"):
            home.fetch("t", ids_of([1, 2]), records_of([1, 2], 16)[:, ::2])
        stored = fetched(partial(home.fetch, "t"), range(10), 8)
        assert stored == _expected(range(10), 8)

    def test_frozen_rows_stay(self, home: Home) -> None:
        """A frozen row has its record, or is missing, as when it was frozen."""
        home.add_table("t", rows=100, record_bytes=20)
        home.write_back("t", ids_of(range(0, 60)), records_of(range(60), 20), batch=0)
        frozen = home.freeze("t", range(10, 90))
        for batch in range(1, 6):
            rows = range(5 * batch, 100, batch)
            home.write_back("t", ids_of(rows), records_of(rows, 20, version=batch), batch=batch)
        assert fetched(frozen.fetch, range(10, 90), 20) == _expected(range(10, 60), 20)
        assert fetched(frozen.fetch, [11, 70], 20) == _expected([11], 20)
        for outside in (9, 90):
            with pytest.raises(ValueError, match=f"ids: {outside}, expected 10 <= id < 90"):
                frozen.fetch(ids_of([outside]), torch.zeros(1, 20, dtype=torch.uint8))
        frozen.release()
        frozen.release()
        with pytest.raises(HomeError, match="release"):
            frozen.fetch(ids_of([11]), torch.zeros(1, 20, dtype=torch.uint8))
        records = fetched(partial(home.fetch, "t"), range(25, 100), 20)
        expected = _expected(range(25, 60), 20)
        for batch in range(1, 6):
            expected |= _expected(range(5 * batch, 100, batch), 20, version=batch)
        assert records == {row: record for row, record in expected.items() if row >= 25}

    def test_several_freezes_at_once(self, home: Home) -> None:
        """Each reader has the rows of its own time, in whatever order they are released."""
        home.add_table("t", rows=40, record_bytes=8)
        readers: list[tuple[FrozenRows, dict[int, bytes]]] = []
        now: dict[int, bytes] = {}
        for batch in range(6):
            rows = range(batch, 40, batch + 1)
            home.write_back("t", ids_of(rows), records_of(rows, 8, version=batch), batch=batch)
            now |= _expected(rows, 8, version=batch)
            readers.append((home.freeze("t", range(40)), dict(now)))
            for reader, expected in readers:
                assert fetched(reader.fetch, range(40), 8) == expected
        for index in (3, 0, 2, 2, 0, 0):
            reader, expected = readers.pop(index)
            assert fetched(reader.fetch, range(40), 8) == expected
            reader.release()
            for other_reader, still in readers:
                assert fetched(other_reader.fetch, range(40), 8) == still
        assert fetched(partial(home.fetch, "t"), range(40), 8) == now

    @pytest.mark.parametrize("rows", [range(0, 10, 2), range(-1, 3), range(0, 11), range(3, 1)])
    def test_ranges_outside_the_table_are_refused(self, home: Home, rows: range) -> None:
        """A range with another step, or outside the table, is refused; an empty one is taken."""
        home.add_table("t", rows=10, record_bytes=8)
        with pytest.raises(ValueError, match="rows: range"):
            home.freeze("t", rows)
        with home.freeze("t", range(3, 3)) as frozen:
            assert fetched(frozen.fetch, [], 8) == {}

    def test_a_cleared_table_is_empty(self, home: Home) -> None:
        """No row and no batch number is left; a frozen table is not cleared."""
        home.add_table("t", rows=30, record_bytes=8)
        home.write_back("t", ids_of(range(30)), records_of(range(30), 8), batch=7)
        frozen = home.freeze("t", range(3))
        with pytest.raises(HomeError, match="'t'.*frozen"):
            home.clear("t")
        assert len(fetched(partial(home.fetch, "t"), range(30), 8)) == 30
        frozen.release()
        home.clear("t")
        assert fetched(partial(home.fetch, "t"), range(30), 8) == {}
        home.write_back("t", ids_of([2]), records_of([2], 8, version=3), batch=0)
        records = fetched(partial(home.fetch, "t"), range(30), 8)
        assert records == _expected([2], 8, version=3)

    def test_a_closed_home_refuses_calls(self, home: Home) -> None:
        """Closing twice is fine; every other call names the closed home."""
        home.add_table("t", rows=10, record_bytes=8)
        frozen = home.freeze("t", range(10))
        home.close()
        home.close()
        ids, records = ids_of([0]), records_of([0], 8)
        for call in (
            lambda: home.add_table("t", rows=10, record_bytes=8),
            lambda: home.fetch("t", ids, records),
            lambda: home.write_back("t", ids, records, batch=0),
            lambda: home.freeze("t", range(1)),
            lambda: home.clear("t"),
            lambda: home.size_bytes(),
            lambda: frozen.fetch(ids, records),
        ):
            with pytest.raises(HomeError, match="close"):
                call()
        frozen.release()

    def test_sizes_follow_the_rows(self, home: Home) -> None:
        """A large table costs little before rows are written. All roles are there."""
        home.add_table("t", rows=self.many_rows, record_bytes=64)
        sizes_before = home.size_bytes()
        assert {"rows", "index", "frozen", "buffers", "disk"} <= sizes_before.keys()
        rows = range(self.many_rows - 3_000, self.many_rows, 3)
        home.write_back("t", ids_of(rows), records_of(rows, 64), batch=0)
        with home.freeze("t", range(self.many_rows)) as frozen:
            home.write_back("t", ids_of(rows), records_of(rows, 64, version=1), batch=1)
            assert fetched(frozen.fetch, rows, 64) == _expected(rows, 64)
            records = fetched(partial(home.fetch, "t"), rows, 64)
            assert records == _expected(rows, 64, version=1)
            sizes_after = home.size_bytes()
        growth_bytes = sum(sizes_after.values()) - sum(sizes_before.values())
        assert 64_000 <= sum(sizes_after.values())
        assert growth_bytes < 64 << 20

    def test_threads_read_and_write_at_once(self, home: Home) -> None:
        """Each thread has rows of its own in one table, and finds what it wrote."""
        home.add_table("t", rows=8_000, record_bytes=40)

        def work(number: int) -> bool:
            rows = range(number, 8_000, 8)
            for version in range(6):
                ids = ids_of(rows)
                home.write_back("t", ids, records_of(rows, 40, version=version), batch=0)
                records = torch.zeros(len(rows), 40, dtype=torch.uint8, device="cpu")
                if not home.fetch("t", ids, records).all():
                    return False
                if not torch.equal(records, records_of(rows, 40, version=version)):
                    return False
            return True

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(work, range(8)))

    def test_a_fetch_beside_a_write_back_is_never_a_mixture(self, home: Home) -> None:
        """Each record is the one before or the one after; a frozen one never changes."""
        rows = range(0, 3_000, 3)
        ids = ids_of(rows)
        home.add_table("t", rows=3_000, record_bytes=100)
        versions = [records_of(rows, 100, version=version) for version in range(4)]
        home.write_back("t", ids, versions[0], batch=0)
        ended = threading.Event()

        def write() -> None:
            try:
                for batch in range(1, 40):
                    home.write_back("t", ids, versions[batch % 4], batch=batch)
            finally:
                ended.set()

        with home.freeze("t", range(3_000)) as frozen, ThreadPoolExecutor(1) as threads:
            writing = threads.submit(write)
            reads = 0
            while not ended.is_set() or not reads:
                out = torch.zeros_like(versions[0])
                assert home.fetch("t", ids, out).all()
                matches = torch.stack([(out == version).all(1) for version in versions])
                assert matches.any(0).all()
                assert frozen.fetch(ids, out).all()
                assert torch.equal(out, versions[0])
                reads += 1
            writing.result()
