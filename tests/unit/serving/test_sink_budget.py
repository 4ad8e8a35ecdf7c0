"""Under a budget the rows that changed most go first, and a sink says what stands at what."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recpoint.catalog.run.run import Run
from recpoint.catalog.store import durable
from recpoint.errors import IncompatibleModel, MalformedObject, SettingsError, SinkError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MANIFEST_KEY, ManifestName
from recpoint.format.records import CheckpointRef
from recpoint.serving.sinks.backlog import Backlog
from recpoint.serving.sinks.contract import Sink
from recpoint.serving.sinks.most_changed import ID_BYTES, MostChanged, change_of
from recpoint.serving.sinks.opening import open_sink
from recpoint.serving.sinks.publisher import Budget, SinkPublisher
from recpoint.serving.sinks.reader import SinkReader
from recpoint.serving.sinks.records import CommittedVersion, DeferredRows, SinkVersion
from recpoint.serving.sinks.verification import verify
from recpoint.testing.sinks import sink_version
from tests.catalog_builder import Table, build, new_run, publish
from tests.consolidation import merge
from tests.followed_run import Trainer
from tests.keyed_run import KEYS, KeyedTrainer
from tests.redis_server import redis_server

_ROWS, _DIM = 60, 4
_ROW_BYTES = 4 * _DIM + ID_BYTES


class _Stopped(Exception):
    """Ends a publisher at a step, as a kill does."""


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis server."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The sink's URL; in SQLite, unless a test asks for another one."""
    kind = getattr(request, "param", "sqlite")
    if kind != "redis":
        return f"{kind}:{tmp_path}/served"
    return f"{request.getfixturevalue('redis_url')}?prefix={secrets.token_hex(8)}&grace=0"


in_each = pytest.mark.parametrize("url", ["sqlite", "parquet", "redis"], indirect=True)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """A trainer of one table, and of a smaller one of another dtype."""
    run = new_run(tmp_path / "run")
    run.claim(None)
    numbers = torch.Generator().manual_seed(4)
    items = torch.randn(_ROWS, _DIM, generator=numbers)
    users = torch.randn(20, 3, generator=numbers).bfloat16()
    return Trainer(run, [Table("items", items), Table("users", users)])


class _Line:
    """Commits increments of one table with chosen rows."""

    def __init__(self, run: Run, *, states: tuple[Tensor, ...] = ()) -> None:
        self.run = run
        self.table = Table(
            "items",
            torch.zeros(_ROWS, _DIM),
            states=states,
            state_names=("sum",) * len(states),
        )
        self.step = 0
        self._parent: Manifest | None = None

    def commit(self, changes: dict[int, float] | None = None) -> None:
        """Add a number to all values of some rows; a full without `changes`."""
        self.step += 1
        for row, change in (changes or {}).items():
            self.table.values[row] += change
        checkpoint = build(
            self.run,
            [self.table],
            step=self.step,
            generation=1,
            parent=None if changes is None else self._parent,
            dirty=None if changes is None else [torch.tensor(sorted(changes))],
            state={"model": {"tensors": {"top": torch.tensor([self.step])}, "extra": {}}},
        )
        self._parent = publish(self.run, checkpoint)

    def fresh_rows(self, sink: Sink) -> set[int]:
        """Return the rows of the sink that are those of the newest checkpoint."""
        with sink.reading() as reading:
            rows, _ = reading.lookup("items", torch.arange(_ROWS))
        return set((rows == self.table.values).all(dim=1).nonzero().flatten().tolist())


@pytest.fixture
def line(tmp_path: Path) -> _Line:
    """A line of checkpoints that begins with a full of zeros."""
    run = new_run(tmp_path / "line")
    run.claim(None)
    line = _Line(run)
    line.commit()
    return line


def rows_budget(rows: int, *, most_versions: int = 100) -> Budget:
    """Return a budget for some rows of `items`."""
    return Budget(rows * _ROW_BYTES, most_versions)


def require_proven(run: Run, sink: Sink) -> CommittedVersion:
    """Require that `verify` finds each row as the sink says that it is."""
    comparison = verify(Run.open(run.store), sink)
    assert comparison.differences == []
    deferred = comparison.version.deferred
    assert comparison.older_rows == (0 if deferred is None else deferred.rows)
    return comparison.version


@in_each
def test_rows_that_changed_most_go_first(line: _Line, url: str) -> None:
    with open_sink(url) as sink:
        publisher = SinkPublisher(line.run.url, sink, budget=rows_budget(2))
        first = publisher.poll()
        assert first is not None and first.deferred is None  # without a version all rows come
        line.commit({3: 0.5, 7: -4.0, 11: 1.0, 20: 2.0, 30: 0.25})
        second = publisher.poll()
        assert second is not None and second.changes[0].rows_put == 2
        assert second.deferred == DeferredRows(
            rows=3,
            size_bytes=3 * 4 * _DIM,
            oldest=first.version.checkpoint,
            oldest_number=1,
        )
        assert set(range(_ROWS)) - line.fresh_rows(sink) == {3, 11, 30}
        assert require_proven(line.run, sink) == second
        # What changed adds up: row 30 is now the farthest, and row 50 goes before row 11.
        line.commit({30: 1.5, 50: 1.25})
        third = publisher.poll()
        assert third is not None and third.parent == second.version.checkpoint
        assert set(range(_ROWS)) - line.fresh_rows(sink) == {3, 11}
        assert third.deferred is not None and third.deferred.oldest_number == 1
        assert require_proven(line.run, sink) == third
        assert publisher.poll() == third  # a budget is for each checkpoint
        with SinkReader(url).reading() as version:
            assert version.dense()["top"].tolist() == [3]
            assert set(version.dense()) == {"top"}
            assert version.deferred == third.deferred


def test_a_row_that_is_deferred_stands_at_the_last_version_that_had_it(
    line: _Line, url: str
) -> None:
    with open_sink(url) as sink:
        publisher = SinkPublisher(line.run.url, sink, budget=rows_budget(1))
        publisher.poll()
        line.commit({1: 1.0})
        second = publisher.poll()
        line.commit({1: 0.125, 2: 2.0})
        third = publisher.poll()
        assert second is not None and third is not None and third.deferred is not None
        assert third.deferred.oldest == second.version.checkpoint
        require_proven(line.run, sink)
        line.commit({1: -0.125, 3: 5.0})  # as it was: nothing is deferred of it
        fourth = publisher.poll()
        assert fourth is not None and fourth.deferred is None
        require_proven(line.run, sink)


def test_no_row_waits_longer_than_it_may(line: _Line, url: str) -> None:
    with open_sink(url) as sink:
        publisher = SinkPublisher(line.run.url, sink, budget=rows_budget(1, most_versions=2))
        publisher.poll()
        line.commit({1: 0.5, 2: 0.25, 5: 9.0})
        publisher.poll()
        line.commit({6: 9.0})
        second = publisher.poll()
        assert second is not None and second.deferred is not None
        assert second.number - second.deferred.oldest_number == 2
        line.commit({7: 9.0, 8: 0.125})
        third = publisher.poll()
        assert third is not None and third.changes[0].rows_put == 2  # rows 1 and 2, out of turn
        assert set(range(_ROWS)) - line.fresh_rows(sink) == {7, 8}
        require_proven(line.run, sink)


def test_a_full_closes_what_was_deferred(line: _Line, url: str) -> None:
    with open_sink(url) as sink:
        publisher = SinkPublisher(line.run.url, sink, budget=rows_budget(1))
        publisher.poll()
        line.commit({1: 0.5, 2: 0.25})
        publisher.poll()
        line.commit()
        full = publisher.poll()
        assert full is not None and full.parent is None and full.deferred is None
        assert line.fresh_rows(sink) == set(range(_ROWS))
        require_proven(line.run, sink)


@in_each
def test_a_publisher_without_a_budget_brings_the_rest(line: _Line, url: str) -> None:
    with open_sink(url) as sink:
        budgeted = SinkPublisher(line.run.url, sink, budget=rows_budget(1))
        budgeted.poll()
        line.commit({1: 0.5, 2: 0.25, 3: 1.0})
        held = budgeted.poll()
        line.commit({4: 0.5})
        budgeted.poll()
        complete = SinkPublisher(line.run.url, sink).poll()
        assert complete is not None and held is not None
        assert complete.number == 4 and complete.deferred is None
        assert complete.parent == complete.version.checkpoint  # the same checkpoint, all of it
        assert line.fresh_rows(sink) == set(range(_ROWS))
        require_proven(line.run, sink)
        assert SinkPublisher(line.run.url, sink).poll() == complete
        line.commit({5: 1.0, 6: 2.0})
        budgeted.poll()
        line.commit({7: 1.0})
        later = SinkPublisher(line.run.url, sink).poll()
        assert later is not None and later.deferred is None
        require_proven(line.run, sink)


def test_a_full_that_costs_less_to_read_does_not_bring_all_rows(line: _Line, url: str) -> None:
    with open_sink(url) as sink:
        publisher = SinkPublisher(line.run.url, sink, budget=rows_budget(5))
        publisher.poll()
        for number in range(3):
            line.commit(dict.fromkeys(range(50), 1.0 + number))
        newest = line.run.manifest(line.step, 1)
        merge(line.run, newest, links=4)
        merged = line.run.read_manifest(line.run.consolidated()[ManifestName(4, 1)][0])
        assert merged.kind == "full"
        committed = publisher.poll()
        assert committed is not None and committed.changes[0].rows_put == 5
        assert require_proven(line.run, sink) == committed


def test_importance_of_rows_counts(tmp_path: Path, url: str) -> None:
    run = new_run(tmp_path / "adagrad")
    run.claim(None)
    sums = torch.ones(_ROWS, _DIM)
    line = _Line(run, states=(sums,))
    line.commit()
    with open_sink(url) as sink:
        publisher = SinkPublisher(run.url, sink, budget=rows_budget(1))
        publisher.poll()
        sums[9] = 10_000.0
        line.commit({8: 2.0, 9: 0.5})
        publisher.poll()
        assert set(range(_ROWS)) - line.fresh_rows(sink) == {8}
        require_proven(run, sink)


@in_each
@pytest.mark.parametrize("bits", [None, 4])
def test_versions_under_a_budget_are_proven(trainer: Trainer, url: str, bits: int | None) -> None:
    trainer.tables[0].bits = bits
    budget = Budget(12 * _ROW_BYTES, most_versions=4)
    most_deferred = 0
    with open_sink(url) as sink:
        publisher = SinkPublisher(trainer.run.url, sink, budget=budget)
        for step in range(1, 9):
            trainer.commit(step, full=step == 7)
            if step % 5 == 3:
                continue  # the next look brings two checkpoints at once
            committed = publisher.poll()
            assert committed is not None and committed == require_proven(trainer.run, sink)
            assert (committed.parent is None) == (step in (1, 7))
            if committed.deferred is not None:
                most_deferred = max(most_deferred, committed.deferred.rows)
                assert committed.number - committed.deferred.oldest_number <= 4
        assert most_deferred > 20
        SinkPublisher(trainer.run.url, sink).poll()
        assert require_proven(trainer.run, sink).deferred is None
        with sink.reading() as reading:
            for table, values in zip(trainer.tables, trainer.at[8], strict=True):
                rows, _ = reading.lookup(table.name, torch.arange(table.rows))
                assert torch.equal(rows.view(torch.uint8), values.view(torch.uint8))


def test_a_line_that_left_the_held_version_comes_anew(trainer: Trainer, url: str) -> None:
    """The oldest deferred row stands at step 1, on both lines; the sink's own step is on one."""
    with open_sink(url) as sink:
        publisher = SinkPublisher(trainer.run.url, sink, budget=rows_budget(2))
        trainer.commit(1)
        publisher.poll()
        made = trainer.commit(2)
        trainer.commit(3)
        publisher.poll()
        trainer.run.claim(made.ref)
        trainer.generation = 2
        trainer.commit(4, parent=made)
        committed = publisher.poll()
        assert committed is not None and committed.parent is None
        assert require_proven(trainer.run, sink).deferred is None


def test_a_checkpoint_that_rows_stand_at_may_be_gone(trainer: Trainer, url: str) -> None:
    with open_sink(url) as sink:
        publisher = SinkPublisher(trainer.run.url, sink, budget=rows_budget(2))
        for step in (1, 2, 3):
            trainer.commit(step)
            publisher.poll()
        trainer.run.store.delete(MANIFEST_KEY.of(1, 1))
        trainer.commit(4, full=True)
        committed = publisher.poll()
        assert committed is not None and committed.parent is None
        require_proven(trainer.run, sink)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite",
        pytest.param("parquet", marks=pytest.mark.nightly("sink_budget")),
        pytest.param("redis", marks=pytest.mark.nightly("sink_budget")),
    ],
    indirect=True,
)
def test_a_publisher_with_a_budget_may_end_at_any_step(trainer: Trainer, url: str) -> None:
    trainer.commit(1)
    budget = rows_budget(10, most_versions=3)
    SinkPublisher(trainer.run.url, open_sink(url), budget=budget).poll()
    for step in range(2, 40):
        trainer.commit(step, full=step % 7 == 0)
        steps_left = step - 1

        def stop(name: str) -> None:
            nonlocal steps_left
            if name.startswith("sink-"):
                steps_left -= 1
                if not steps_left:
                    raise _Stopped

        durable.set_observer(stop)
        try:
            SinkPublisher(trainer.run.url, open_sink(url), budget=budget).poll()
            break  # it takes fewer steps than this
        except _Stopped:
            pass
        finally:
            durable.set_observer(None)
        comparison = verify(Run.open(trainer.run.store), open_sink(url))
        assert comparison.differences == []
        assert comparison.version.version.checkpoint.step == step - 1
        # Another budget chooses other rows. Redis has those that the attempt put as well: they are
        # those of the version, although they are recorded as deferred.
        other_budget = rows_budget(3) if step % 2 else budget
        SinkPublisher(trainer.run.url, open_sink(url), budget=other_budget).poll()
        comparison = verify(Run.open(trainer.run.store), open_sink(url))
        assert comparison.differences == []
        assert comparison.version.version.checkpoint.step == step
        deferred = comparison.version.deferred
        assert comparison.older_rows <= (0 if deferred is None else deferred.rows)
    else:
        pytest.fail("the sweep reached no end")


def test_keys_go_at_once_and_their_rows_come_when_there_is_room(tmp_path: Path, url: str) -> None:
    run = new_run(tmp_path / "keyed")
    run.claim(None)
    trainer = KeyedTrainer(run)
    deferred_rows = 0
    with open_sink(url) as sink:
        publisher = SinkPublisher(run.url, sink, budget=Budget(2 * (12 + ID_BYTES)))
        for _ in range(12):
            trainer.commit()
            if trainer.step % 5 == 3:
                continue
            committed = publisher.poll()
            assert committed is not None and committed == require_proven(run, sink)
            deferred_rows += 0 if committed.deferred is None else committed.deferred.rows
            with SinkReader(url).reading() as version:
                _, present = version.lookup_present("users", KEYS)
            assert set(KEYS[present].tolist()) <= set(trainer.rows)
        assert deferred_rows > 10
        SinkPublisher(run.url, sink).poll()
        with SinkReader(url).reading() as version:
            rows, present = version.lookup_present("users", KEYS)
        assert set(KEYS[present].tolist()) == set(trainer.rows)
        for key, row in zip(KEYS[present].tolist(), rows[present], strict=True):
            assert torch.equal(row, trainer.rows[key])


def test_verification_names_deferred_rows_that_are_neither(line: _Line, url: str) -> None:
    with open_sink(url) as sink:
        publisher = SinkPublisher(line.run.url, sink, budget=rows_budget(1))
        publisher.poll()
        line.commit({3: 1.0, 4: 2.0, 5: 3.0})
        committed = publisher.poll()
        assert committed is not None
        with sink.reading() as reading:
            dense = reading.dense()
        sink.begin(committed.version, committed.version.checkpoint)
        sink.put("items", torch.tensor([3]), torch.full((1, _DIM), 7.0))
        sink.commit(dense, committed.changes)
        assert verify(line.run, sink).differences == [
            "row 3 of table 'items' is deferred, and is neither that of its version nor that of "
            "the older one which it stands at"
        ]
        sink.begin(committed.version, committed.version.checkpoint)
        sink.put("items", torch.tensor([3]), torch.zeros(1, _DIM))
        sink.commit({"top": dense["top"]}, committed.changes)
        differences = verify(line.run, sink).differences
        assert any("row 3" in text and "other values" in text for text in differences)
        assert any("by its version, and none by their record" in text for text in differences)


def test_another_publisher_of_the_same_checkpoint_is_noticed(
    line: _Line, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One brings the deferred rows of a version, between another one's look and its `begin`."""
    with open_sink(url) as sink:
        publisher = SinkPublisher(line.run.url, sink, budget=rows_budget(1))
        publisher.poll()
        line.commit({1: 1.0, 2: 2.0})
        publisher.poll()
        begin = sink.begin
        line_url = line.run.url

        def begin_too_late(version: SinkVersion, parent: CheckpointRef | None) -> None:
            monkeypatch.setattr(sink, "begin", begin)
            line.run.store.delete(MANIFEST_KEY.of(3, 1))  # the other one sees step 2 alone
            SinkPublisher(line_url, open_sink(url)).poll()
            begin(version, parent)

        line.commit({3: 1.0, 4: 1.0})
        monkeypatch.setattr(sink, "begin", begin_too_late)
        with pytest.raises(SinkError, match="another publisher brought"):
            publisher.poll()
        require_proven(line.run, sink)


def test_a_budget_that_cannot_be_is_refused(line: _Line, url: str) -> None:
    for budget in (Budget(0), Budget(1, most_versions=0)):
        with pytest.raises(SettingsError, match="budget"):
            SinkPublisher(line.run.url, open_sink(url), budget=budget)


@pytest.mark.parametrize("seed", range(20))
def test_the_chosen_rows_are_those_of_a_sort(seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    left: list[int] = []
    room = int(torch.randint(0, 60, (1,), generator=numbers)) * (8 + ID_BYTES)
    most = MostChanged(room, {"t": 8}, lambda _table, ids, _numbers: left.extend(ids.tolist()))
    changes = torch.randperm(100, generator=numbers).float()
    first, reserved = 0, 0
    while first < 100:
        count = int(torch.randint(0, 30, (1,), generator=numbers))
        ids = torch.arange(first, min(first + count, 100))
        most.add("t", ids, ids.double().view(-1, 1), changes[ids], torch.zeros_like(ids))
        first += count
        most.reserve(8)
        reserved += 8
    chosen = torch.cat([ids[:0], *(ids for _, ids, _ in most.chosen())])
    rows = max(0, room - reserved) // (8 + ID_BYTES)
    assert set(chosen.tolist()) == set(changes.topk(min(rows, 100)).indices.tolist())
    assert sorted([*left, *chosen.tolist()]) == list(range(100))


def test_changes_that_are_no_numbers_come_first() -> None:
    rows = torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [float("inf"), 0.0]])
    changes = change_of(rows, torch.zeros(3, 2), torch.tensor([2.0, 0.0, 1.0]))
    assert changes[0] == 2 * 5**0.5
    assert changes[1:].tolist() == [float("inf")] * 2


def test_the_record_of_deferred_rows_is_read_back_and_checked() -> None:
    version = sink_version(9)
    version = version.model_copy(
        update={"tables": (version.tables[0], version.tables[1].model_copy(update={"ids": "keys"}))}
    )
    backlog = Backlog()
    backlog.checkpoints |= {number: sink_version(number).checkpoint for number in (3, 5)}
    backlog.add("users", torch.tensor([7, 8, 9]), 3)
    backlog.add("users", torch.tensor([99, 1]), 5)
    backlog.add("items", torch.tensor([-5, 2**62]), torch.tensor([5, 3]))
    dense = backlog.beside({"top": torch.ones(2)}, version)
    assert list(dense)[0] == "top" and len(dense) == 5
    again = Backlog.of_dense(dense, version, url="sqlite:x")
    ids = torch.tensor([1, 2, 7, 99])
    assert again.rows_of("users").numbers_of(ids).tolist() == [5, 0, 3, 5]
    assert again.rows_of("items").numbers_of(torch.tensor([2**62, -5, 0])).tolist() == [3, 5, 0]
    assert again.numbers == [3, 5]
    assert again.rows_of("users") is again.rows_of("users")  # is sorted once for many chunks
    again.add("users", torch.tensor([0]), 3)
    assert again.rows_of("users").ids[0] == 0
    again = Backlog.of_dense(dense, version, url="sqlite:x")
    assert again.summary(version.tables[1]) == backlog.summary(version.tables[1])
    names = [name for name in dense if name != "top"]
    damaged = [
        {names[0].replace("/3/", "/x/", 1): dense[names[0]]},
        {names[0].replace("users", "prices"): dense[names[0]]},
        {names[0].replace("/range/", "/delta/"): dense[names[0]]},
        {names[0].rpartition("/")[0]: dense[names[0]]},
        {names[1]: dense[names[1]].float()},
        {names[2]: torch.tensor([3, 2])},
    ]
    for records in damaged:
        with pytest.raises(MalformedObject, match="older version"):
            Backlog.of_dense(records, version, url="sqlite:x")
    with pytest.raises(IncompatibleModel, match="another name"):
        backlog.beside({names[0]: torch.ones(1)}, version)
