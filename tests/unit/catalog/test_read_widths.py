"""Each reader takes rows of one table in any mix of widths (format §3)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recpoint import Follower, restore_parts
from recpoint.catalog.check.check import check
from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.overview.width_mix import width_mix
from recpoint.catalog.persist.persist import persist_job
from recpoint.catalog.restore.chunks import StoreChunks, read_chunk, row_ids
from recpoint.catalog.restore.placement import PartsTarget
from recpoint.catalog.restore.restore import restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import RanksMissing
from recpoint.format.chunk import Section
from recpoint.format.manifest import CODE_BITS, ChunkEntry, Manifest
from recpoint.format.naming import MANIFEST_KEY
from recpoint.kernels.allocation import EXACT
from tests.catalog_builder import new_run
from tests.consolidation import chain_of, merge, require_same, restored
from tests.mixed_table import a_chunk_for_each_width, decoded, mixed_table, widths_of
from tests.rank_jobs import RankJobs
from tests.resharding import empty_part
from tests.retained_run import retain
from tests.validated_run import at, rewrite

STEPS = (10, 20, 30, 40)
FORMS = {*((bits, "asymmetric") for bits in CODE_BITS), (32, "exact")}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of two ranks: a full and three increments, each with rows of all widths."""
    folder = tmp_path_factory.mktemp("widths")
    patch = pytest.MonkeyPatch()
    a_chunk_for_each_width(patch)
    run = new_run(folder / "run")
    run.claim(None)
    table = mixed_table(dim=8)
    expected = table.values.clone()
    jobs = RankJobs(run, [folder / "s"] * 2, [table])
    generator = torch.Generator().manual_seed(1)
    for step in STEPS:
        dirty = None
        if step > STEPS[0]:
            dirty = [(torch.rand(400, generator=generator) < 0.4).nonzero().flatten()]
            table.values[dirty[0]] += 0.1
            table.states[1][dirty[0]] *= 1.5
        widths, ids = widths_of(table), torch.arange(400) if dirty is None else dirty[0]
        expected[ids] = decoded(table.values[ids], widths[ids])
        first, second = jobs.stage(step, dirty=dirty, samples=100)
        with suppress(RanksMissing):
            persist_job(first)
        for job in (second, first):
            assert persist_job(job).error == ""
    patch.undo()
    torch.save((expected, table.states), folder / "expected.pt")
    yield folder


@pytest.fixture
def run(stored: Path, tmp_path: Path) -> Run:
    """A copy of the run, which a test may change."""
    shutil.copytree(stored / "run", tmp_path / "run")
    return Run.open(open_store(str(tmp_path / "run")))


@pytest.fixture(scope="module")
def expected(stored: Path) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The rows of the newest checkpoint as each was stored last, and their row states."""
    whole: tuple[Tensor, tuple[Tensor, ...]] = torch.load(stored / "expected.pt")
    return whole


def forms_of(*manifests: Manifest) -> set[tuple[int | None, str | None]]:
    return {(c.bits, c.scheme) for m in manifests for c in m.chunks if c.table is not None}


def same(values: Tensor | None, expected_values: Tensor) -> bool:
    """Bit for bit, but for the payloads of NaN."""
    assert values is not None and values.dtype == expected_values.dtype
    return torch.equal(values.nan_to_num(9.0), expected_values.nan_to_num(9.0))


def test_a_chain(run: Run, expected: tuple[Tensor, tuple[Tensor, ...]]) -> None:
    manifests = [run.manifest(step, 1) for step in STEPS]
    assert all(forms_of(manifest) == FORMS for manifest in manifests)
    target, _ = restored(run, manifests[-1])
    items = target.tables["items"]
    assert same(items.values, expected[0])
    assert all(map(same, items.row_states, expected[1]))
    assert check(run, level="full").ok


@pytest.mark.parametrize("links", [None, 2, 3])
def test_a_merge_moves_codes(run: Run, links: int | None) -> None:
    """Each row has the codes and parameters that it had, so no merge rounds a row again."""
    newest = run.manifest(STEPS[-1], 1)
    state_before, _ = restored(run, newest)
    parts_before = _codes(run, chain_of(run, newest))
    merge(run, newest, links)
    merged = chain_of(run, newest)
    assert forms_of(merged[-1]) == FORMS
    assert len(merged) == (1 if links is None else len(STEPS) - links + 1)
    assert _codes(run, merged) == parts_before
    after, _ = restored(run, newest)
    require_same(state_before, after)
    if len(merged) > 1:
        merge(run, newest, len(merged))
        require_same(state_before, restored(run, newest)[0])
    assert at(run, STEPS[-1], "full").passed


def _codes(run: Run, chain: tuple[Manifest, ...]) -> dict[int, tuple[int, bytes, bytes]]:
    """The width, the codes (or values) and the scale of each row, as the newest chunk has them."""
    rows: dict[int, tuple[int, bytes, bytes]] = {}
    for manifest in chain:
        for entry in manifest.chunks:
            if entry.table is None or entry.bits is None or entry.row_count is None:
                continue
            ids, values, scale = _rows_of(run, manifest, entry)
            for position, row in enumerate(ids):
                each = len(values) // len(ids)
                codes = bytes(values[position * each : (position + 1) * each])
                each = len(scale) // len(ids)
                rows[row] = entry.bits, codes, bytes(scale[position * each : (position + 1) * each])
    return rows


def _rows_of(run: Run, manifest: Manifest, entry: ChunkEntry) -> tuple[list[int], bytes, bytes]:
    chunk = read_chunk(StoreChunks(run.store), manifest, entry)
    sections = chunk.sections
    ids = row_ids(chunk, entry, manifest.tables[0])
    values = sections["values" if entry.scheme == "exact" else "codes"].data_view
    scale = bytes(sections["scale"].data_view) if "scale" in sections else b""
    return [*ids] if isinstance(ids, range) else ids.tolist(), bytes(values), scale


@pytest.mark.parametrize("consolidated", [False, True])
def test_other_shapes_and_other_numbers_of_ranks(
    run: Run, expected: tuple[Tensor, tuple[Tensor, ...]], consolidated: bool
) -> None:
    if consolidated:
        merge(run, run.manifest(STEPS[-1], 1))
    table = mixed_table(dim=8)
    for edges in ([0, 400], [0, 133, 266, 400], [0, 7, 399, 400]):
        for first, stop in pairwise(edges):
            for columns in (range(0, 8), range(3, 6)):
                part = empty_part(table, range(first, stop), columns)
                restore(run, PartsTarget([part]))
                expected_part = expected[0][first:stop, columns.start : columns.stop]
                assert same(part.values, expected_part)


def test_parts_of_a_run(run: Run, expected: tuple[Tensor, tuple[Tensor, ...]]) -> None:
    part = empty_part(mixed_table(dim=8), range(90, 311), range(1, 8))
    restore_parts(run.url, [part])
    assert same(part.values, expected[0][90:311, 1:8])


@pytest.mark.parametrize("level", ["sample", "full"])
def test_validation_bounds_each_row_by_its_own_width(run: Run, level: str) -> None:
    validation = at(run, STEPS[-1], "sample" if level == "sample" else "full")
    assert validation.passed and validation.rows_compared > 50
    assert 0.5 < validation.worst <= 1.0  # of a row's own bound


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_validation_notices_one_wrong_code_of_each_width(run: Run, bits: int) -> None:
    manifest = run.manifest(STEPS[0], 1)
    assert at(run, STEPS[0], "sample").passed

    def flip(sections: dict[str, Section]) -> None:
        codes = sections["codes"]
        data = codes.data
        assert isinstance(data, bytearray)
        for row in range(codes.shape[0]):  # one code of each row, because a sample has few rows
            data[row * codes.shape[1]] ^= 1 << (bits - 1)

    for entry in [c for c in manifest.chunks if c.bits == bits and c.scheme == "asymmetric"]:
        rewrite(run, entry, flip)
    assert not at(run, STEPS[0], "sample").passed


def test_what_retention_keeps_restores(
    run: Run, expected: tuple[Tensor, tuple[Tensor, ...]]
) -> None:
    newest = run.manifest(STEPS[-1], 1)
    merge(run, newest)
    retain(run)
    retain(run)  # once to mark, once to delete
    target, report = restored(run, newest)
    assert report.chain_length == 1
    assert same(target.tables["items"].values, expected[0])
    assert check(run, level="full").ok


def test_the_mix_of_a_checkpoint(run: Run) -> None:
    manifest = run.manifest(STEPS[0], 1)
    mix = width_mix(manifest.chunks, manifest.tables)
    table = mixed_table(dim=8)
    widths = widths_of(table)
    assert mix is not None and not mix.is_one_width
    names = {EXACT: "exact", **{bits: str(bits) for bits in CODE_BITS}}
    shares = {names[bits]: int((widths == bits).sum()) / 400 for bits in names}
    assert dict(mix.row_shares) == shares
    assert [name for name, _ in mix.row_shares] == [*map(str, CODE_BITS), "exact"]
    bits_of_rows = torch.where(widths == EXACT, 32, widths.long())
    assert mix.mean_bits == pytest.approx(float(bits_of_rows.double().mean()))
    (facts,) = (c for c in RunWatch(run).refresh().checkpoints if c.step == STEPS[0])
    assert facts.widths == mix
    assert width_mix((), manifest.tables) is None


@pytest.mark.parametrize("quantized", [False, True])
def test_a_follower_takes_a_full_and_increments(
    run: Run, expected: tuple[Tensor, tuple[Tensor, ...]], quantized: bool
) -> None:
    keys = [MANIFEST_KEY.of(step, 1) for step in STEPS]
    manifests = [run.store.get(key, max_bytes=1 << 20) for key in keys]
    for key in keys:
        run.store.delete(key)
    follower = Follower(run.url, quantized=quantized)
    for step, key, manifest in zip(STEPS, keys, manifests, strict=True):
        run.store.put(key, manifest)
        assert follower.poll()
        whole, _ = restored(run, run.manifest(step, 1))
        with follower.reading() as version:
            ids = torch.randperm(400, generator=torch.Generator().manual_seed(step))
            assert version.step == step
            assert same(version.lookup("items", ids), whole.tables["items"].values[ids])
    assert same(whole.tables["items"].values, expected[0])
    assert follower.status.increments_applied == len(STEPS) - 1
