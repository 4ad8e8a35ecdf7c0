"""Tests that an implementation of `recpoint.serving.sinks.contract.Sink` keeps the contract.

    class TestMySink(SinkSuite):
        @pytest.fixture
        def open_sink(self, tmp_path: Path) -> Callable[[], Sink]:
            return lambda: MySink(tmp_path / "sink")

The fixture must return a function that opens the same sink anew, as another process would. At first
the sink is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from recpoint.errors import NotServing, SinkError, UnknownTable
from recpoint.format.records import CheckpointRef
from recpoint.serving.sinks.backlog import Backlog, without_backlog
from recpoint.serving.sinks.contract import Sink
from recpoint.serving.sinks.records import SinkTable, SinkVersion, TableChange

__all__ = ["SinkSuite", "bring", "sink_version", "served_rows"]

_DIM = 3
_NAMES = ("users", "items")


def sink_version(step: int, *, run: str = "a" * 32, rows: int = 100) -> SinkVersion:
    """Return a version of two tables, `users` and `items`, of 3 float32 values a row."""
    return SinkVersion(
        run=run,
        checkpoint=CheckpointRef(step=step, generation=1, attempt=f"{step:032x}"),
        tables=tuple(
            SinkTable(name=name, rows=rows, dim=_DIM, dtype="F32", ids="rows") for name in _NAMES
        ),
    )


def values_of(step: int, ids: Tensor) -> Tensor:
    """Return rows that differ by step and by id: f32 [n, 3]."""
    columns = torch.arange(_DIM, dtype=torch.float32, device="cpu")
    return 1000.0 * step + ids.to(torch.float32).view(-1, 1) + columns / 8


def ids_of(*rows: int) -> Tensor:
    """Return ids: int64 [n]."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def bring(
    sink: Sink,
    step: int,
    rows: Mapping[str, Tensor],
    *,
    parent: int | None,
    deleted: Mapping[str, Tensor] | None = None,
) -> None:
    """Bring a version: rows with the values of its step, and deletions.

    Args:
        sink: the sink.
        step: of the version.
        rows: name of a table -> ids to put.
        parent: step of the committed version; None: all rows come anew.
        deleted: name of a table -> ids to delete.
    """
    sink.begin(sink_version(step), None if parent is None else sink_version(parent).checkpoint)
    put_rows(sink, step, rows)
    for name, ids in (deleted or {}).items():
        sink.delete(name, ids)
    sink.commit({"top": torch.full((2,), float(step))}, changes_of(rows))


def put_rows(sink: Sink, step: int, rows: Mapping[str, Tensor]) -> None:
    """Put rows with the values of a step."""
    for name, ids in rows.items():
        sink.put(name, ids, values_of(step, ids))


def changes_of(rows: Mapping[str, Tensor]) -> list[TableChange]:
    """Return what a version says that it brought."""
    return [
        TableChange(table=name, rows_put=len(ids), rows_deleted=0, digest="0" * 16)
        for name, ids in rows.items()
    ]


def served_rows(sink: Sink, table: str) -> dict[int, int]:
    """Return what readers see: id -> the step that its row is of. Checks each value."""
    ids = torch.arange(100, dtype=torch.int64, device="cpu")
    with sink.reading() as reading:
        rows, present = reading.lookup(table, ids)
        count = reading.row_count(table)
    assert rows.shape == (100, _DIM) and rows.dtype == torch.float32
    assert not bool(rows[~present].any())
    steps: dict[int, int] = {}
    for row in present.nonzero().flatten().tolist():
        steps[row] = int(rows[row, 0].item()) // 1000
        assert torch.equal(rows[row], values_of(steps[row], ids_of(row))[0])
    assert count == len(steps)
    return steps


def of_step(step: int, *rows: int) -> dict[int, int]:
    """Return what `served_rows` returns if all these rows are of one step."""
    return dict.fromkeys(rows, step)


class SinkSuite:
    """Tests of the contract; subclass it and provide the fixture `open_sink`."""

    @pytest.fixture
    def open_sink(self) -> Callable[[], Sink]:
        """Return a function that opens the sink; the subclass overrides this."""
        raise NotImplementedError("provide a fixture `open_sink`")

    def test_an_empty_sink_serves_nothing(self, open_sink: Callable[[], Sink]) -> None:
        """An empty sink has no position, and a reader is told so."""
        with open_sink() as sink:
            assert sink.position() == (None, None)
            with pytest.raises(NotServing), sink.reading():
                pass

    def test_readers_see_the_committed_version(self, open_sink: Callable[[], Sink]) -> None:
        """A full, then changes: rows, dense layers and the position are those of the newest."""
        everything = {"users": ids_of(*range(20)), "items": ids_of(3, 99)}
        with open_sink() as sink:
            bring(sink, 1, everything, parent=None)
            bring(sink, 2, {"users": ids_of(5, 6), "items": ids_of()}, parent=1)
            bring(sink, 3, {"users": ids_of(6, 30), "items": ids_of(3)}, parent=2)
        with open_sink() as sink:
            expected = of_step(1, *range(20)) | of_step(2, 5) | of_step(3, 6, 30)
            assert served_rows(sink, "users") == expected
            assert served_rows(sink, "items") == of_step(1, 99) | of_step(3, 3)
            with sink.reading() as reading:
                assert reading.version.version == sink_version(3)
                assert reading.version.number == 3
                assert torch.equal(reading.dense()["top"], torch.full((2,), 3.0))
                with pytest.raises(UnknownTable):
                    reading.lookup("prices", ids_of(1))
            committed, begun = sink.position()
            assert begun is None and committed is not None
            assert committed.version == sink_version(3)
            assert committed.parent == sink_version(2).checkpoint
            assert [change.rows_put for change in committed.changes] == [2, 1]

    def test_deferred_rows_are_recorded_with_their_version(
        self, open_sink: Callable[[], Sink]
    ) -> None:
        """What a version defers comes with its commit, beside the dense layers, and goes so."""
        backlog = Backlog()
        backlog.checkpoints[1] = sink_version(1).checkpoint
        backlog.add("users", ids_of(3, 4, 5), 1)  # a range, whose tensor is empty
        backlog.add("items", ids_of(2, 50), 1)
        version = sink_version(2)
        changes = [
            TableChange(
                table=table.name,
                rows_put=0,
                rows_deleted=0,
                digest="0" * 16,
                deferred=backlog.summary(table),
            )
            for table in version.tables
        ]
        with open_sink() as sink:
            bring(sink, 1, {"users": ids_of(*range(9)), "items": ids_of(2, 50)}, parent=None)
            sink.begin(version, sink_version(1).checkpoint)
            sink.commit(backlog.beside({"top": torch.ones(2)}, version), changes)
        with open_sink() as sink, sink.reading() as reading:
            dense = reading.dense()
            recorded = Backlog.of_dense(dense, version, url=sink.url)
            assert [recorded.summary(table) for table in version.tables] == [
                change.deferred for change in reading.version.changes
            ]
            assert reading.version.deferred is not None and reading.version.deferred.rows == 5
            assert set(without_backlog(dense)) == {"top"}
        with open_sink() as sink:
            bring(sink, 3, {"users": ids_of(3)}, parent=2)
            committed = sink.position().committed
            assert committed is not None and committed.deferred is None
            with sink.reading() as reading:
                assert set(reading.dense()) == {"top"}

    def test_ids_come_in_any_order_and_twice(self, open_sink: Callable[[], Sink]) -> None:
        """Rows come back in the order of the ids; ids are any numbers of 64 bits."""
        ids = ids_of(7, -5, 2**63 - 1, -(2**63), 0)
        with open_sink() as sink:
            bring(sink, 1, {"users": ids, "items": ids_of()}, parent=None)
            with sink.reading() as reading:
                order = ids_of(0, 7, 7, 1, -(2**63))
                rows, present = reading.lookup("users", order)
                assert present.tolist() == [True, True, True, False, True]
                assert torch.equal(rows[present], values_of(1, order[present]))
                no_rows, no_presence = reading.lookup("users", ids_of())
                assert no_rows.shape == (0, _DIM) and no_presence.shape == (0,)

    def test_deleted_rows_are_gone(self, open_sink: Callable[[], Sink]) -> None:
        """A row goes with the version that deletes it, and may come back; others do no harm."""
        with open_sink() as sink:
            bring(sink, 1, {"users": ids_of(1, 2, 3, 4), "items": ids_of(1)}, parent=None)
            bring(sink, 2, {"users": ids_of(4)}, parent=1, deleted={"users": ids_of(1, 2, 77)})
            assert served_rows(sink, "users") == of_step(1, 3) | of_step(2, 4)
            bring(sink, 3, {"users": ids_of(2)}, parent=2, deleted={"users": ids_of(4)})
            assert served_rows(sink, "users") == of_step(1, 3) | of_step(3, 2)
            bring(sink, 4, {"users": ids_of(4)}, parent=3, deleted={"users": ids_of(2)})
            assert served_rows(sink, "users") == of_step(1, 3) | of_step(4, 4)

    def test_nothing_is_seen_before_the_commit(self, open_sink: Callable[[], Sink]) -> None:
        """Rows, deletions and dense layers of a version that is being brought are not seen."""
        with open_sink() as sink, open_sink() as reader:
            bring(sink, 1, {"users": ids_of(1, 2, 3), "items": ids_of(1)}, parent=None)
            for parent in (sink_version(1).checkpoint, None):
                sink.begin(sink_version(2), parent)
                put_rows(sink, 2, {"users": ids_of(1, 50)})
                sink.delete("users", ids_of(3))
                assert served_rows(reader, "users") == of_step(1, 1, 2, 3)
                sink.discard()
                assert served_rows(reader, "users") == of_step(1, 1, 2, 3)

    def test_a_version_that_comes_anew_has_its_own_rows_only(
        self, open_sink: Callable[[], Sink]
    ) -> None:
        """Rows of before that do not come are gone."""
        with open_sink() as sink:
            bring(sink, 1, {"users": ids_of(1, 2, 3), "items": ids_of(8)}, parent=None)
            bring(sink, 5, {"users": ids_of(2, 9), "items": ids_of()}, parent=None)
            assert served_rows(sink, "users") == of_step(5, 2, 9)
            assert served_rows(sink, "items") == {}

    def test_the_same_version_is_brought_again(self, open_sink: Callable[[], Sink]) -> None:
        """An attempt that ended in the middle leaves nothing wrong, wherever it ended."""
        with open_sink() as sink:
            bring(sink, 1, {"users": ids_of(1, 2, 3, 4), "items": ids_of(1)}, parent=None)
        for puts in range(3):
            with open_sink() as sink:
                sink.begin(sink_version(2), sink_version(1).checkpoint)
                put_rows(sink, 2, {"users": ids_of(2, 30)[:puts]})
            with open_sink() as sink:
                assert sink.position().begun in (None, sink_version(2))
                assert served_rows(sink, "users") == of_step(1, 1, 2, 3, 4)
        with open_sink() as sink:
            bring(sink, 2, {"users": ids_of(2, 30)}, parent=1)
            assert served_rows(sink, "users") == of_step(1, 1, 3, 4) | of_step(2, 2, 30)
            assert sink.position().begun is None

    def test_another_version_never_mixes_with_an_attempt(
        self, open_sink: Callable[[], Sink]
    ) -> None:
        """After an attempt that left rows, another version is made from changes never again."""
        with open_sink() as sink:
            bring(sink, 1, {"users": ids_of(1, 2, 3), "items": ids_of(1)}, parent=None)
        with open_sink() as sink:
            sink.begin(sink_version(2), sink_version(1).checkpoint)
            put_rows(sink, 2, {"users": ids_of(2, 40)})
        with open_sink() as sink:  # an attempt of a third version ends, too
            sink.begin(sink_version(4), None)
            put_rows(sink, 4, {"users": ids_of(2, 41)})
        with open_sink() as sink:
            if sink.position().begun is not None:
                with pytest.raises(SinkError):
                    bring(sink, 4, {"users": ids_of(3)}, parent=1)
                bring(sink, 4, {"users": ids_of(1, 2, 3), "items": ids_of(1)}, parent=None)
                assert served_rows(sink, "users") == of_step(4, 1, 2, 3)
            else:
                bring(sink, 4, {"users": ids_of(3)}, parent=1)
                assert served_rows(sink, "users") == of_step(1, 1, 2) | of_step(4, 3)
            assert sink.position().begun is None

    def test_another_parent_is_refused(self, open_sink: Callable[[], Sink]) -> None:
        """A version that the sink does not hold cannot be the parent; nothing changes."""
        with open_sink() as sink:
            with pytest.raises(SinkError):
                bring(sink, 3, {"users": ids_of(1)}, parent=2)
            bring(sink, 1, {"users": ids_of(1), "items": ids_of()}, parent=None)
            with pytest.raises(SinkError):
                bring(sink, 3, {"users": ids_of(1)}, parent=2)
            assert served_rows(sink, "users") == of_step(1, 1)

    def test_a_publisher_that_was_replaced_writes_nothing(
        self, open_sink: Callable[[], Sink]
    ) -> None:
        """One that was stopped and goes on after another cannot write: one of both is refused."""
        with open_sink() as first, open_sink() as second:
            bring(first, 1, {"users": ids_of(1, 2), "items": ids_of()}, parent=None)
            first.begin(sink_version(2), sink_version(1).checkpoint)
            put_rows(first, 2, {"users": ids_of(1)})
            try:
                second.begin(sink_version(2), sink_version(1).checkpoint)
            except SinkError:  # the sink lets one publisher in at a time
                first.commit({"top": torch.full((2,), 2.0)}, [])
                assert served_rows(second, "users") == of_step(1, 2) | of_step(2, 1)
                return
            put_rows(second, 2, {"users": ids_of(1)})
            second.commit({"top": torch.full((2,), 2.0)}, [])
            with pytest.raises(SinkError):
                first.put("users", ids_of(2), values_of(9, ids_of(2)))
            with pytest.raises(SinkError):
                first.delete("users", ids_of(2))
            with pytest.raises(SinkError):
                first.commit({}, [])
            assert served_rows(second, "users") == of_step(1, 2) | of_step(2, 1)
