"""Restoring what was committed, bit for bit, from the checkpoint that counts (format §6.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recpoint.catalog.restore import chain as chain_rows
from recpoint.catalog.restore.chunks import StoredRows
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.placement import place
from recpoint.catalog.restore.restore import MemoryTarget, TableTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.local import LocalStore
from recpoint.errors import (
    DigestMismatch,
    IncompatibleModel,
    NothingToRestore,
    ObjectNotFound,
    SettingsError,
    StoreUnavailable,
    UnsupportedVersion,
)
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.naming import GENERATION_KEY, MANIFEST_KEY
from recpoint.format.records import pack_record
from recpoint.kernels import dirty_bitmap
from recpoint.kernels.bit_packing import BITS
from tests.catalog_builder import Table, build, new_run, publish, tables
from tests.interposed_store import InterposedStore, unavailable


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = new_run(tmp_path)
    run.claim(None)
    return run


def ids(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def assert_same(target: MemoryTarget, expected: Sequence[Table]) -> None:
    assert list(target.tables) == [table.name for table in expected]
    for table in expected:
        found = target.tables[table.name]
        assert found.values.dtype == table.values.dtype
        assert torch.equal(found.values, table.values)
        for restored, state in zip(found.row_states, table.states, strict=True):
            assert restored is not None and torch.equal(restored, state)


def test_a_full_comes_back_bit_for_bit(run: Run) -> None:
    trained = tables()
    trained[0].values[3] = torch.tensor([float("nan"), -0.0, float("inf")])
    moments = torch.randn(7, 3)
    state = {"lr": 0.1, "moments": moments, "names": ["a", "b"]}
    manifest = publish(run, build(run, trained, step=5, generation=1, state=state))
    target = MemoryTarget()
    report = restore(run, target)
    assert report.restored == manifest.ref
    assert (report.chain_length, report.skipped) == (1, ())
    assert report.chunks_read == len(manifest.chunks)
    assert report.bytes_read == manifest.stored_bytes
    nan = trained[0].values.isnan()
    assert torch.equal(target.tables["items"].values.isnan(), nan)
    assert torch.equal(
        target.tables["items"].values.view(torch.int32), trained[0].values.view(torch.int32)
    )
    restored = target.state[0]
    assert isinstance(restored, dict)
    assert restored["lr"] == 0.1 and restored["names"] == ["a", "b"]
    assert torch.equal(restored["moments"], moments)


@pytest.mark.parametrize("threads", [1, 3])
def test_later_increments_overwrite_earlier_rows(run: Run, threads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    trained = tables(rows=100)
    parent = publish(run, build(run, trained, step=10, generation=1, rows_per_chunk=7))
    for step, dirty in ((11, ids(1, 2, 3, 50)), (12, ids(2, 50, 99)), (13, ids(*range(0, 90, 2)))):
        trained[0].train(dirty, generator)
        trained[1].train(dirty[dirty < 50], generator)
        checkpoint = build(
            run,
            trained,
            step=step,
            generation=1,
            parent=parent,
            dirty=[dirty, dirty[dirty < 50]],
            state={"step": step},
            rows_per_chunk=5,
        )
        parent = publish(run, checkpoint)
    target = MemoryTarget()
    report = restore(run, target, threads=threads)
    assert report.chain_length == 4
    assert_same(target, trained)
    assert target.state == {0: {"step": 13}}


class HeldChunks:
    """Chunks in the memory of a process, as a peer would have them; notes what is read."""

    def __init__(self, held: dict[str, bytes]) -> None:
        self.held = held
        self.read_keys: list[str] = []

    def sizes(self, prefix: str) -> dict[str, int]:
        return {key: len(data) for key, data in self.held.items() if key.startswith(prefix)}

    def read(
        self, key: str, *, max_bytes: int, lend: Callable[[int], memoryview] | None = None
    ) -> bytes:
        assert len(self.held[key]) <= max_bytes
        self.read_keys.append(key)
        return self.held[key]


@pytest.fixture
def elsewhere(run: Run) -> tuple[HeldChunks, list[Table]]:
    """The chunks of a full and an increment, which the store does not have any more."""
    trained = tables(rows=100)
    full = publish(run, build(run, trained, step=10, generation=1, rows_per_chunk=30))
    trained[0].train(ids(3, 70), torch.Generator().manual_seed(1))
    second = build(run, trained, step=11, generation=1, parent=full, dirty=[ids(3, 70), ids()])
    newest = publish(run, second)
    held = {}
    for entry in (*full.chunks, *newest.chunks):
        held[entry.key] = run.store.get(entry.key, max_bytes=entry.bytes)
        run.store.delete(entry.key)
    return HeldChunks(held), trained


def test_chunks_may_come_from_elsewhere_than_the_store(
    run: Run, elsewhere: tuple[HeldChunks, list[Table]]
) -> None:
    source, trained = elsewhere
    target = MemoryTarget()
    report = restore(run, target, source=source)
    assert report.chain_length == 2 and len(source.read_keys) == report.chunks_read
    assert_same(target, trained)
    with pytest.raises(NothingToRestore, match="no object"):
        restore(run, MemoryTarget())


def test_what_comes_from_elsewhere_is_checked_as_well(
    run: Run, elsewhere: tuple[HeldChunks, list[Table]]
) -> None:
    source, _ = elsewhere
    key = max(source.held)
    source.held[key] = source.held[key][:-1] + bytes([source.held[key][-1] ^ 1])
    with pytest.raises(DigestMismatch, match=key):
        restore(run, MemoryTarget(), Selection(step=11), source=source)
    assert source.read_keys.count(key) == 2
    del source.held[key]
    with pytest.raises(ObjectNotFound, match=key):
        restore(run, MemoryTarget(), Selection(step=11), source=source)


def test_each_row_is_decoded_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def counting(stored: StoredRows, positions: Tensor | None, into: TableTarget) -> None:
        decoded.append(len(stored.rows) if positions is None else positions.numel())
        place(stored, positions, into)

    monkeypatch.setattr(chain_rows, "place", counting)
    generator = torch.Generator().manual_seed(2)
    trained = tables(rows=100, bits=4)
    parent = publish(run, build(run, trained, step=10, generation=1))
    for step in range(11, 19):
        dirty = torch.randperm(100, generator=generator)[:40].sort().values
        trained[0].train(dirty, generator)
        parent = publish(
            run,
            build(
                run, trained, step=step, generation=1, parent=parent, dirty=[dirty, ids(step - 9)]
            ),
        )
    chain, full = MemoryTarget(), MemoryTarget()
    assert restore(run, chain).chain_length == 9
    assert sum(decoded) == 100 + 50
    publish(run, build(run, trained, step=30, generation=1))
    restore(run, full)
    for name, table in full.tables.items():
        assert torch.equal(chain.tables[name].values, table.values)


class TestOverwrittenTables:
    """What newer checkpoints have overwritten wholly is neither read nor missed (§6.3)."""

    @pytest.fixture
    def links(self, run: Run) -> list[Manifest]:
        """A full, two increments that hold every row of users between them, two that hold none."""
        halves = torch.arange(0, 20, 2), torch.arange(1, 20, 2)
        dirty = [[ids(1), ids(2)], [ids(1), halves[0]], [ids(2), halves[1]], [ids(3), ids()]]
        full = build(run, tables(), step=10, generation=1, rows_per_chunk=4)
        made: list[Manifest] = [publish(run, full)]
        for step, rows in enumerate(dirty, 11):
            checkpoint = build(
                run, tables(seed=step), step=step, generation=1, parent=made[-1], dirty=rows,
                rows_per_chunk=4,
            )  # fmt: skip
            made.append(publish(run, checkpoint))
        return made

    def of_users(self, manifest: Manifest) -> list[ChunkEntry]:
        return [entry for entry in manifest.chunks if entry.table == 1]

    def test_they_are_not_read(self, run: Run, links: list[Manifest]) -> None:
        store = InterposedStore(run.store)
        seen: list[tuple[int, int]] = []
        report = restore(
            Run.open(store),
            MemoryTarget(["users"]),
            threads=1,
            on_progress=lambda *progress: seen.append(progress),
        )
        read = [key for call, key in store.calls if call == "get" and "/" in key]
        # Chunks are read ahead while it is not yet known that nothing of them is needed.
        assert self.of_users(links[0])[-1].key not in read
        assert all(entry.key in read for link in links[2:4] for entry in self.of_users(link))
        assert seen[-1] == (report.bytes_read, report.bytes_read)

    @pytest.mark.parametrize("threads", [1, 6])
    def test_damage_in_them_is_no_reason_to_go_back(
        self, run: Run, links: list[Manifest], threads: int
    ) -> None:
        for overwritten in self.of_users(links[0]):  # also those that are read ahead
            run.store.put(overwritten.key, bytes(overwritten.bytes))
        target = MemoryTarget(["users"])
        assert restore(run, target, threads=threads).restored == links[-1].ref
        expected = tables(seed=12)[1].values
        expected[1::2] = tables(seed=13)[1].values[1::2]
        assert torch.equal(target.tables["users"].values, expected)

    @pytest.mark.parametrize("threads", [1, 6])
    def test_damage_in_a_row_that_counts_is(
        self, run: Run, links: list[Manifest], threads: int
    ) -> None:
        needed = self.of_users(links[2])[0]
        run.store.put(needed.key, bytes(needed.bytes))
        assert restore(run, MemoryTarget(), threads=threads).restored == links[1].ref

    def test_an_increment_of_all_rows_needs_nothing_older(
        self, run: Run, links: list[Manifest]
    ) -> None:
        trained = tables(seed=40)
        dirty: list[torch.Tensor | None] = [ids(3), None]
        publish(run, build(run, trained, step=40, generation=1, parent=links[-1], dirty=dirty))
        store = InterposedStore(run.store)
        target = MemoryTarget(["users"])
        restore(Run.open(store), target)
        older = {entry.key for link in links for entry in self.of_users(link)}
        assert not older & {key for _, key in store.calls}
        assert torch.equal(target.tables["users"].values, trained[1].values)


def test_an_increment_without_rows_of_a_table_leaves_it(run: Run) -> None:
    trained = tables()
    full = publish(run, build(run, trained, step=10, generation=1))
    trained[0].train(ids(5), torch.Generator())
    publish(run, build(run, trained, step=11, generation=1, parent=full, dirty=[ids(5), ids()]))
    target = MemoryTarget()
    restore(run, target)
    assert_same(target, trained)


@pytest.mark.parametrize("bits", BITS)
def test_quantized_rows_come_back_within_their_bound(run: Run, bits: int) -> None:
    trained = tables(rows=60, dim=9, bits=bits)
    trained[0].values[7, 2] = float("nan")  # not quantizable: kept exactly
    trained[0].values[8] = 1.5  # constant
    publish(run, build(run, trained, step=5, generation=1))
    target = MemoryTarget()
    restore(run, target)
    found, values = target.tables["items"].values, trained[0].values
    assert torch.equal(found[7].view(torch.int32), values[7].view(torch.int32))
    assert torch.equal(found[8], values[8])
    rest = [row for row in range(60) if row != 7]
    scale = (values.amax(1) - values.amin(1)) / (2**bits - 1)
    bound = scale[:, None] / 2 + 4 * 2**-24 * torch.maximum(
        values.abs(), scale[:, None] * (2**bits - 1)
    )
    assert ((found - values).abs() <= bound)[rest].all()
    for restored, state in zip(target.tables["items"].row_states, trained[0].states, strict=True):
        assert restored is not None and torch.equal(restored, state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantized_half_precision_tables_round_to_their_dtype(run: Run, dtype: torch.dtype) -> None:
    values = torch.randn(30, 8).to(dtype)
    table = Table("half", values, (), bits=8)
    publish(run, build(run, [table], step=5, generation=1))
    target = MemoryTarget()
    restore(run, target)
    found = target.tables["half"].values
    assert found.dtype == dtype
    assert (found.float() - values.float()).abs().max() <= 0.05


def test_state_of_every_rank_and_in_pieces(run: Run) -> None:
    state = {"large": torch.arange(1000.0).reshape(10, 100), "small": torch.ones(3)}
    checkpoint = build(
        run, tables(), step=5, generation=1, state=state, ranks=3, tensor_elements=64
    )
    assert sum(entry.content == "state" for entry in checkpoint.manifest.chunks) == 3 * 17
    publish(run, checkpoint)
    target = MemoryTarget()
    restore(run, target)
    assert sorted(target.state) == [0, 1, 2]
    for found in target.state.values():
        assert isinstance(found, dict)
        assert torch.equal(found["large"], state["large"])
        assert torch.equal(found["small"], state["small"])


def test_progress_ends_at_everything(run: Run) -> None:
    publish(run, build(run, tables(), step=5, generation=1))
    seen: list[tuple[int, int]] = []
    report = restore(run, MemoryTarget(), on_progress=lambda done, all_: seen.append((done, all_)))
    assert seen == sorted(seen)
    assert seen[-1] == (report.bytes_read, report.bytes_read)


class TestChoice:
    """Which checkpoint is restored."""

    def test_an_empty_run(self, run: Run) -> None:
        with pytest.raises(NothingToRestore, match="no checkpoint on the live line"):
            restore(run, MemoryTarget())

    def test_the_newest_of_the_live_line(self, run: Run) -> None:
        first = publish(run, build(run, tables(), step=5, generation=1))
        publish(run, build(run, tables(seed=1), step=9, generation=1))
        run.claim(first.ref)
        assert restore(run, MemoryTarget()).restored == first.ref
        publish(run, build(run, tables(seed=2), step=7, generation=2))
        target = MemoryTarget()
        assert restore(run, target).restored.step == 7
        assert_same(target, tables(seed=2))

    def test_a_step_of_the_live_line(self, run: Run) -> None:
        publish(run, build(run, tables(), step=5, generation=1))
        publish(run, build(run, tables(seed=1), step=9, generation=1))
        target = MemoryTarget()
        assert restore(run, target, Selection(step=5)).restored.step == 5
        assert_same(target, tables())

    def test_a_superseded_step_only_by_its_generation(self, run: Run) -> None:
        publish(run, build(run, tables(), step=5, generation=1))
        run.claim(None)
        with pytest.raises(NothingToRestore) as caught:
            restore(run, MemoryTarget(), Selection(step=5))
        assert "step 5 (generation 1)" in caught.value.found
        assert (
            restore(run, MemoryTarget(), Selection(step=5, generation=1)).restored.generation == 1
        )

    def test_a_step_that_never_was(self, run: Run) -> None:
        publish(run, build(run, tables(), step=5, generation=1))
        with pytest.raises(NothingToRestore, match="step 6"):
            restore(run, MemoryTarget(), Selection(step=6))

    def test_a_generation_needs_a_step(self, run: Run) -> None:
        with pytest.raises(SettingsError, match="generation"):
            restore(run, MemoryTarget(), Selection(generation=1))

    def test_no_threads(self, run: Run) -> None:
        with pytest.raises(SettingsError, match="threads"):
            restore(run, MemoryTarget(), threads=0)

    def test_a_named_checkpoint_needs_no_lineage(self, run: Run) -> None:
        manifest = publish(run, build(run, tables(), step=5, generation=1))
        run.store.delete(GENERATION_KEY.of(1))
        run.store.put(GENERATION_KEY.of(2), b"damaged")
        fresh = Run.open(run.store)
        assert (
            restore(fresh, MemoryTarget(), Selection(step=5, generation=1)).restored == manifest.ref
        )

    def test_the_line_before_a_claim(self, run: Run) -> None:
        old = publish(run, build(run, tables(), step=5, generation=1))
        run.claim(None)
        publish(run, build(run, tables(seed=1), step=3, generation=2))
        assert restore(run, MemoryTarget(), before=2).restored == old.ref

    def test_a_later_version_is_not_passed_over(self, run: Run) -> None:
        publish(run, build(run, tables(), step=5, generation=1))
        newer = build(run, tables(), step=6, generation=1).manifest
        data = pack_record(newer).replace(b'"version":1', b'"version":3')
        run.store.put(MANIFEST_KEY.of(6, 1), data)
        with pytest.raises(UnsupportedVersion, match="version 3"):
            restore(run, MemoryTarget())

    def test_a_store_that_is_away_is_no_reason_to_go_back(self, run: Run) -> None:
        publish(run, build(run, tables(), step=5, generation=1))
        publish(run, build(run, tables(), step=6, generation=1))

        def refuse(call: str, key: str) -> None:
            if call == "get" and key.startswith("chunks/000000000006"):
                raise unavailable(key)

        away = Run.open(InterposedStore(LocalStore(run.url), before=refuse))
        with pytest.raises(StoreUnavailable):
            restore(away, MemoryTarget())


class GivenTarget:
    """Restores into the tensors it was given."""

    def __init__(self, *targets: TableTarget | None) -> None:
        self.targets = targets
        self.finished = 0

    def begin(self, manifest: Manifest) -> Sequence[TableTarget | None]:
        return self.targets

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        self.finished += 1


class TestTargets:
    """What a checkpoint fits into, and what not: nothing is written before that is known."""

    @pytest.fixture(autouse=True)
    def _full(self, run: Run) -> None:
        publish(run, build(run, tables(), step=5, generation=1))

    def test_parameters_are_written_in_place(self, run: Run) -> None:
        weight = torch.nn.Embedding(40, 3).weight
        before = weight.data_ptr()
        target = GivenTarget(TableTarget(values=weight, row_states=(None, None)), None)
        restore(run, target)
        assert weight.data_ptr() == before and weight.requires_grad
        assert torch.equal(weight.detach(), tables()[0].values)
        assert target.finished == 1

    def test_rows_that_increments_hold_are_marked(self, run: Run) -> None:
        trained = tables()
        full = publish(run, build(run, trained, step=6, generation=1))
        runs = [*range(32, 36), 39]
        parent = full
        for step, rows in ((7, ids(1, 5, 8)), (8, ids(5, *runs))):
            parent = publish(
                run,
                build(run, trained, step=step, generation=1, parent=parent, dirty=[rows, ids()]),
            )
        changed = dirty_bitmap.new(40)
        target = TableTarget(values=torch.zeros(40, 3), row_states=(None, None), changed=changed)
        report = restore(run, GivenTarget(target, None))
        assert dirty_bitmap.collect(changed, rows=40).tolist() == [1, 5, 8, *runs]
        assert (report.full, report.full_stored_bytes) == (full.ref, full.stored_bytes)
        dirty_bitmap.clear(changed)
        restore(run, GivenTarget(target, None), Selection(step=6))
        assert dirty_bitmap.count(changed) == 0

    def test_only_the_tables_wanted_are_read(self, run: Run) -> None:
        target = MemoryTarget(["users"])
        report = restore(run, target)
        assert list(target.tables) == ["users"]
        assert report.chunks_read == 3  # two of rows, one of state

    def test_a_table_that_is_not_there_is_named(self, run: Run) -> None:
        with pytest.raises(IncompatibleModel, match="'shops'"):
            restore(run, MemoryTarget(["shops"]))

    @pytest.mark.parametrize(
        "values",
        [
            torch.zeros(41, 3),
            torch.zeros(40, 4),
            torch.zeros(40, 3, dtype=torch.float64),
            torch.zeros(3, 40).T,
        ],
        ids=["rows", "dim", "dtype", "strides"],
    )
    def test_another_tensor_than_the_tables_is_refused(
        self, run: Run, values: torch.Tensor
    ) -> None:
        good = torch.zeros(20, 2, dtype=torch.float16)
        target = GivenTarget(
            TableTarget(values=values, row_states=(None, None)),
            TableTarget(values=good, row_states=()),
        )
        with pytest.raises(IncompatibleModel, match="'items'"):
            restore(run, target)
        assert not values.any() and not good.any() and not target.finished

    def test_another_row_state_is_refused(self, run: Run) -> None:
        values = torch.zeros(40, 3)
        for states in ((), (None, torch.zeros(40, 1)), (torch.zeros(40, 3).double(), None)):
            with pytest.raises(IncompatibleModel, match="'items'"):
                restore(run, GivenTarget(TableTarget(values=values, row_states=states), None))
        assert not values.any()

    def test_the_wrong_number_of_targets_is_refused(self, run: Run) -> None:
        with pytest.raises(ValueError, match="1 targets for 2 tables"):
            restore(run, GivenTarget(None))

    def test_a_state_that_does_not_fit_is_refused_before_a_row_is_written(self, run: Run) -> None:
        values = torch.zeros(40, 3)

        class Choosy(GivenTarget):
            def check_state(self, manifest: Manifest, state: dict[int, object]) -> None:
                raise IncompatibleModel("state", found="a", expected="b", next_step="c")

        target = Choosy(TableTarget(values=values, row_states=(None, None)), None)
        with pytest.raises(IncompatibleModel):
            restore(run, target)
        assert not values.any() and not target.finished


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_are_written_on_the_device(run: Run) -> None:
    trained = tables()
    full = publish(run, build(run, trained, step=5, generation=1))
    trained[0].train(ids(1, 5, 8), torch.Generator())
    publish(
        run, build(run, trained, step=6, generation=1, parent=full, dirty=[ids(1, 5, 8), ids()])
    )
    values = torch.zeros(40, 3, device="cuda")
    restore(run, GivenTarget(TableTarget(values=values, row_states=(None, None)), None))
    assert torch.equal(values.cpu(), trained[0].values)
