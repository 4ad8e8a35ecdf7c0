"""Damaged chunks and manifests: an error that names them, or the newest good checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import crc32c
import pytest
import torch

from recpoint.catalog.restore.chunks import StoreChunks, read_chunk
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, TableTarget, restore
from recpoint.catalog.restore.target import RowSink
from recpoint.catalog.run.run import Run
from recpoint.errors import (
    DigestMismatch,
    ForeignObject,
    MalformedObject,
    MissingLink,
    NothingToRestore,
    ObjectNotFound,
    RecpointError,
)
from recpoint.format.chunk import Section, build_chunk, section_tensor, tensor_section
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.naming import MANIFEST_KEY
from recpoint.format.records import pack_record
from recpoint.kernels import row_set
from tests.catalog_builder import build, copy_run, new_run, publish, tables
from tests.interposed_store import InterposedStore

DIRTY = [torch.tensor([1, 4, 7, 9]), torch.tensor([0, 3])]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Manifest]]:
    """Full 10, increments 11 and 12, full 20, increment 21."""
    run = new_run(tmp_path_factory.mktemp("built") / "run")
    run.claim(None)
    made: list[Manifest] = []
    for step in (10, 11, 12, 20, 21):
        parent = None if step in (10, 20) else made[-1]
        checkpoint = build(
            run,
            tables(seed=step),
            step=step,
            generation=1,
            parent=parent,
            dirty=DIRTY if parent else None,
            rows_per_chunk=3,
            state={"step": step},
        )
        made.append(publish(run, checkpoint))
    return run, made


@pytest.fixture
def links(built: tuple[Run, list[Manifest]]) -> list[Manifest]:
    """The manifests of the run, which is built once and copied for each test."""
    return built[1]


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """With the fixture `links` a run with five checkpoints, else an empty one."""
    if "links" in request.fixturenames:
        built: tuple[Run, list[Manifest]] = request.getfixturevalue("built")
        return copy_run(built[0], tmp_path / "run")
    run = new_run(tmp_path / "run")
    run.claim(None)
    return run


def row_chunk(manifest: Manifest) -> ChunkEntry:
    return next(entry for entry in manifest.chunks if entry.content == "rows")


def remove(run: Run, key: str) -> None:
    run.store.delete(key)


def truncate(run: Run, key: str) -> None:
    run.store.put(key, run.store.get(key, max_bytes=1 << 20)[:-1])


def lengthen(run: Run, key: str) -> None:
    run.store.put(key, run.store.get(key, max_bytes=1 << 20) + b"x")


def flip(run: Run, key: str) -> None:
    data = bytearray(run.store.get(key, max_bytes=1 << 20))
    data[-1] ^= 4
    run.store.put(key, bytes(data))


def swap_in_another(run: Run, key: str) -> None:
    """Another valid chunk in its place, as a mistaken copy leaves it."""
    others = [info.key for info in run.store.list("chunks/") if info.key != key]
    size = run.store.size(key)
    same = [other for other in others if run.store.size(other) == size]
    run.store.put(key, run.store.get((same or others)[0], max_bytes=1 << 20))


DAMAGE = [
    pytest.param(remove, ObjectNotFound, id="missing"),
    pytest.param(truncate, DigestMismatch, id="truncated"),
    pytest.param(lengthen, DigestMismatch, id="longer"),
    pytest.param(flip, DigestMismatch, id="flipped"),
    pytest.param(swap_in_another, DigestMismatch, id="swapped"),
]
Damage = Callable[[Run, str], None]


@pytest.mark.parametrize("content", ["rows", "state"])
@pytest.mark.parametrize(("damage", "kind"), DAMAGE)
def test_a_named_checkpoint_with_a_damaged_chunk_is_an_error(
    run: Run, links: list[Manifest], damage: Damage, kind: type[RecpointError], content: str
) -> None:
    entry = next(entry for entry in links[4].chunks if entry.content == content)
    damage(run, entry.key)
    with pytest.raises(kind) as caught:
        restore(run, MemoryTarget(), Selection(step=21))
    assert entry.key in caught.value.subject
    assert type(caught.value) is kind


@pytest.mark.parametrize(("damage", "kind"), DAMAGE)
@pytest.mark.parametrize(("broken", "restored"), [(4, 20), (3, 12)])
def test_the_newest_good_checkpoint_is_restored_instead(
    run: Run,
    links: list[Manifest],
    damage: Damage,
    kind: type[RecpointError],
    broken: int,
    restored: int,
) -> None:
    entry = row_chunk(links[broken])
    damage(run, entry.key)
    target = MemoryTarget()
    report = restore(run, target)
    assert report.restored.step == restored
    assert target.state == {0: {"step": restored}}
    assert [skipped.name.step for skipped in report.skipped] == ([21] if broken == 4 else [21, 20])
    assert all(entry.key in skipped.error for skipped in report.skipped)
    assert all(skipped.error.startswith(kind.__name__) for skipped in report.skipped)
    # Nothing of the damaged chain is left in the tables.
    expected = MemoryTarget()
    restore(run, expected, Selection(step=restored))
    for name, table in expected.tables.items():
        assert torch.equal(target.tables[name].values, table.values)


def test_a_damaged_manifest_is_passed_over(run: Run, links: list[Manifest]) -> None:
    flip(run, MANIFEST_KEY.of(21, 1))
    report = restore(run, MemoryTarget())
    assert report.restored.step == 20
    assert MANIFEST_KEY.of(21, 1) in report.skipped[0].error


def test_a_manifest_that_names_a_chunk_of_generation_zero_is_passed_over(
    run: Run, links: list[Manifest]
) -> None:
    chunk = links[-1].chunks[0]
    strange = chunk.model_copy(update={"key": chunk.key.replace("-00000001-", "-00000000-")})
    chunks = (strange, *links[-1].chunks[1:])
    run.store.put(
        MANIFEST_KEY.of(21, 1), pack_record(links[-1].model_copy(update={"chunks": chunks}))
    )
    report = restore(run, MemoryTarget())
    assert report.restored.step == 20
    assert MANIFEST_KEY.of(21, 1) in report.skipped[0].error


def test_a_missing_link_is_passed_over(run: Run, links: list[Manifest]) -> None:
    remove(run, MANIFEST_KEY.of(20, 1))
    with pytest.raises(MissingLink):
        restore(run, MemoryTarget(), Selection(step=21))
    report = restore(run, MemoryTarget())
    assert report.restored.step == 12
    assert [skipped.name.step for skipped in report.skipped] == [21]


def test_when_nothing_is_good_the_error_says_what_was_wrong_with_each(
    run: Run, links: list[Manifest]
) -> None:
    for base in (links[0], links[3]):
        flip(run, row_chunk(base).key)
    with pytest.raises(NothingToRestore) as caught:
        restore(run, MemoryTarget())
    reasons = caught.value.found.split("; 3 checkpoints, steps 10 … 12: ")
    assert reasons[0].startswith("2 checkpoints, steps 20 … 21: ")
    for base, reason in zip((links[3], links[0]), reasons, strict=True):
        assert row_chunk(base).key in reason
    assert caught.value.next_step == f"recpoint check {run.url} --level full"


def test_a_chunk_known_to_be_damaged_is_not_read_for_each_chain_that_needs_it(
    run: Run, links: list[Manifest]
) -> None:
    key = row_chunk(links[0]).key
    flip(run, key)
    for manifest in links[3:]:
        remove(run, MANIFEST_KEY.of(manifest.step, 1))
    store = InterposedStore(run.store)
    with pytest.raises(NothingToRestore):
        restore(Run.open(store), MemoryTarget())
    # Twice, since what came first may have been damaged on its way only.
    assert store.calls.count(("get", key)) == 2


def test_missing_objects_are_found_before_anything_is_written(
    run: Run, links: list[Manifest]
) -> None:
    remove(run, row_chunk(links[3]).key)
    begun: list[int] = []

    class Watching(MemoryTarget):
        def begin(self, manifest: Manifest) -> Sequence[TableTarget | RowSink | None]:
            begun.append(manifest.step)
            return super().begin(manifest)

    restore(run, Watching())
    assert begun == [12]


class TestMalformed:
    """Objects with the right digest that say something impossible."""

    def replace(
        self, run: Run, manifest: Manifest, entry: ChunkEntry, data: bytes, **changes: object
    ) -> None:
        """Store other bytes for a chunk, and a manifest that vouches for them."""
        run.store.put(entry.key, data)
        stored = {"bytes": len(data), "crc32c": crc32c.crc32c(data)} | changes
        changed = ChunkEntry.model_validate(entry.model_dump() | stored)
        chunks = [changed if known.key == entry.key else known for known in manifest.chunks]
        new = Manifest.model_validate(manifest.model_dump() | {"chunks": tuple(chunks)})
        run.store.put(MANIFEST_KEY.of(manifest.step, manifest.generation), pack_record(new))

    def rebuilt(self, run: Run, manifest: Manifest, entry: ChunkEntry, rows: torch.Tensor) -> bytes:
        """The chunk with other row ids."""
        chunk = read_chunk(StoreChunks(run.store), manifest, entry)
        coded = row_set.encode(rows)
        assert coded.payload is not None
        sections = [section for section in chunk.sections.values() if section.name != "row_set"]
        sections.append(Section("row_set", "U8", (len(coded.payload),), coded.payload))
        meta = type(chunk.meta).model_validate(
            chunk.meta.model_dump() | {"row_set": {"coding": coded.coding, "first": coded.first}}
        )
        return build_chunk(meta, sections)

    def test_a_foreign_chunk_with_a_matching_digest(self, run: Run, tmp_path: Path) -> None:
        other = new_run(tmp_path / "other")
        other.claim(None)
        attempt = "a" * 32
        theirs = build(other, tables(), step=10, generation=1, attempt=attempt)
        ours = publish(run, build(run, tables(), step=10, generation=1, attempt=attempt))
        entry = row_chunk(ours)
        self.replace(run, ours, entry, theirs.chunks[entry.key])
        with pytest.raises(ForeignObject) as caught:
            restore(run, MemoryTarget(), Selection(step=10))
        assert caught.value.subject == entry.key

    @pytest.mark.parametrize(
        ("step", "chunk", "rows"),
        [
            pytest.param(10, 1, [0, 2, 7], id="full, a set beside ranges"),
            pytest.param(11, 0, [1, 7, 9], id="increment, two sets"),
        ],
    )
    def test_a_row_in_two_chunks(
        self, run: Run, links: list[Manifest], step: int, chunk: int, rows: list[int]
    ) -> None:
        # The chunks of the full hold 0-2, 3-5, ..., those of the increment {1, 4, 7} and {9}.
        manifest = links[step - 10]
        entry = [entry for entry in manifest.chunks if entry.table == 0][chunk]
        data = self.rebuilt(run, manifest, entry, torch.tensor(rows))
        self.replace(run, manifest, entry, data, first_row=rows[0], last_row=rows[-1])
        with pytest.raises(MalformedObject, match="a row of table 'items' in two chunks"):
            restore(run, MemoryTarget(), Selection(step=step))

    @pytest.mark.parametrize("end", ["first_row", "last_row"])
    def test_other_rows_than_the_manifest_says(
        self, run: Run, links: list[Manifest], end: str
    ) -> None:
        entry = row_chunk(links[1])  # rows 1, 4, 7
        data = bytes(run.store.get(entry.key, max_bytes=entry.bytes))
        claimed = {"first_row": 0, "last_row": 8}[end]
        self.replace(run, links[1], entry, data, **{end: claimed})
        with pytest.raises(MalformedObject, match="rows from 1 to 7") as caught:
            restore(run, MemoryTarget(), Selection(step=11))
        assert caught.value.subject == entry.key

    def test_two_ranges_that_overlap(self, run: Run) -> None:
        manifest = publish(run, build(run, tables(), step=10, generation=1))
        second = [entry for entry in manifest.chunks if entry.table == 0][1]
        chunk = read_chunk(StoreChunks(run.store), manifest, second)
        meta = type(chunk.meta).model_validate(
            chunk.meta.model_dump() | {"row_set": {"coding": "range", "first": 15}}
        )
        data = build_chunk(meta, list(chunk.sections.values()))
        self.replace(run, manifest, second, data, first_row=15, last_row=30)
        with pytest.raises(MalformedObject, match="in two chunks"):
            restore(run, MemoryTarget(), Selection(step=10))

    def test_a_row_set_that_does_not_decode(self, run: Run, links: list[Manifest]) -> None:
        manifest = links[1]
        entry = row_chunk(manifest)
        chunk = read_chunk(StoreChunks(run.store), manifest, entry)
        sections = [section for section in chunk.sections.values() if section.name != "row_set"]
        sections.append(Section("row_set", "U8", (9,), b"no frame."))
        self.replace(run, manifest, entry, build_chunk(chunk.meta, sections))
        with pytest.raises(MalformedObject, match="row set") as caught:
            restore(run, MemoryTarget(), Selection(step=11))
        assert caught.value.subject == entry.key

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    @pytest.mark.parametrize("name", ["scale", "offset"])
    def test_row_parameters_that_are_not_finite(
        self, run: Run, name: str, dtype: torch.dtype, value: float
    ) -> None:
        manifest = publish(run, build(run, tables(bits=4), step=10, generation=1))
        entry = row_chunk(manifest)
        chunk = read_chunk(StoreChunks(run.store), manifest, entry)
        sections = dict(chunk.sections)
        for parameter in ("scale", "offset"):
            stored = section_tensor(sections[parameter]).to(dtype).clone()
            if parameter == name:
                stored[3] = value
            sections[parameter] = tensor_section(parameter, stored)
        self.replace(run, manifest, entry, build_chunk(chunk.meta, list(sections.values())))
        with pytest.raises(MalformedObject, match=f"a {name} that is not finite") as caught:
            restore(run, MemoryTarget(), Selection(step=10))
        assert caught.value.subject == entry.key

    def test_more_rows_than_the_bytes_can_hold(self, run: Run) -> None:
        manifest = publish(run, build(run, tables(), step=10, generation=1, rows_per_chunk=40))
        entry = row_chunk(manifest)
        huge = 2**31 - 1
        specs = [spec.model_dump() for spec in manifest.tables]
        specs[0]["rows"] = huge
        changed = entry.model_dump() | {"row_count": huge, "last_row": huge - 1}
        chunks = [
            changed if known.key == entry.key else known.model_dump() for known in manifest.chunks
        ]
        new = Manifest.model_validate(manifest.model_dump() | {"tables": specs, "chunks": chunks})
        run.store.put(MANIFEST_KEY.of(10, 1), pack_record(new))
        with pytest.raises(MalformedObject, match=f"for {huge} rows"):
            restore(run, MemoryTarget(), Selection(step=10))

    def test_a_rank_without_a_state(self, run: Run) -> None:
        checkpoint = build(run, tables(), step=10, generation=1, ranks=2)
        chunks = [
            entry
            for entry in checkpoint.manifest.chunks
            if (entry.content, entry.rank) != ("state", 1)
        ]
        manifest = checkpoint.manifest.model_copy(update={"chunks": tuple(chunks)})
        publish(run, type(checkpoint)(manifest=manifest, chunks=checkpoint.chunks))
        with pytest.raises(MalformedObject, match="rank 1"):
            restore(run, MemoryTarget(), Selection(step=10))

    def test_a_state_with_a_piece_missing(self, run: Run) -> None:
        state = {"large": torch.arange(100.0)}
        checkpoint = build(run, tables(), step=10, generation=1, state=state, tensor_elements=30)
        states = [entry for entry in checkpoint.manifest.chunks if entry.content == "state"]
        chunks = [entry for entry in checkpoint.manifest.chunks if entry != states[2]]
        manifest = checkpoint.manifest.model_copy(update={"chunks": tuple(chunks)})
        publish(run, type(checkpoint)(manifest=manifest, chunks=checkpoint.chunks))
        with pytest.raises(MalformedObject, match="pieces missing"):
            restore(run, MemoryTarget(), Selection(step=10))
