"""Rows that nothing has changed take no bits, and come back from the rule of their first values."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from recpoint import Follower, restore_parts
from recpoint.catalog.check.check import check
from recpoint.catalog.check.validate import validate
from recpoint.catalog.overview.width_mix import width_mix
from recpoint.catalog.persist import first_rows
from recpoint.catalog.persist.persist import persist_job
from recpoint.catalog.restore.placement import TablePart
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.embeddings.home.initial import Uniform, stored_rule
from recpoint.format import chunk as chunk_format
from recpoint.format import first_values
from recpoint.format.first_values import FirstValueRule
from recpoint.format.job import StagedTable
from recpoint.format.manifest import Columns, Manifest
from tests.catalog_builder import Table
from tests.consolidation import merge, name_of, require_same
from tests.consolidation import restored as restored_step
from tests.job_builder import Links, stage
from tests.mixed_table import a_chunk_for_each_width, mixed_table
from tests.persisted import restored

ROWS, DIM = 400, 6
INITIAL = Uniform(seed=7, low=-0.05, high=0.1)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_rows, "_CHUNK_COST_BYTES", 0)


def rule_of(name: str = "items") -> FirstValueRule:
    rule = stored_rule(INITIAL, name)
    assert rule is not None
    return rule


def table_of(trained: Tensor, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Table:
    """A table of which some rows were trained; the others and their states are as they began."""
    values = INITIAL("items", torch.arange(ROWS), DIM, dtype)
    sums, steps = torch.full((ROWS, DIM), 0.125), torch.full((ROWS,), 3)
    table = Table("items", values, (sums, steps), bits=4, first_values=rule_of())
    table.train(trained, torch.Generator().manual_seed(3))
    return replace(table, **changes)


def bits_of(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def persisted(run: Run, folder: Path, table: Table, links: Links, **settings: Any) -> Manifest:
    """Store the next checkpoint of a chain, whose step is ten times its number."""
    settings = {"step": 10 * (links.length + 1), "slot": links.length} | settings
    path = stage(run, folder, [table], generation=1, links=links, **settings)
    outcome = persist_job(path)
    assert outcome.error == ""
    return run.manifest(outcome.step, 1)


def rows_of_schemes(manifest: Manifest) -> dict[str, int]:
    rows: Counter[str] = Counter()
    for entry in manifest.chunks:
        if entry.scheme is not None:
            rows[entry.scheme] += entry.row_count or 0
    return dict(rows)


TRAINED = torch.arange(0, ROWS, 3)


def as_began(trained: Tensor = TRAINED) -> Tensor:
    """The rows that were not trained: int64 [n]."""
    is_trained = torch.zeros(ROWS, dtype=torch.bool)
    is_trained[trained] = True
    return (~is_trained).nonzero().flatten()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_nothing_has_changed_take_no_bits_and_come_back_exactly(
    run: Run, tmp_path: Path, dtype: torch.dtype
) -> None:
    table = table_of(TRAINED, dtype=dtype)
    manifest = persisted(run, tmp_path / "s", table, Links(), samples=100)
    untrained = as_began()
    assert rows_of_schemes(manifest) == {"first": len(untrained), "asymmetric": len(TRAINED)}
    (entry,) = (entry for entry in manifest.chunks if entry.scheme == "first")
    assert entry.bits == 0 and entry.bytes < 1_200  # a header, a row set, one entry of states
    target = restored(run).tables["items"]
    assert torch.equal(bits_of(target.values[untrained]), bits_of(table.values[untrained]))
    assert not torch.equal(target.values[TRAINED], table.values[TRAINED])
    for restored_state, state in zip(target.row_states, table.states, strict=True):
        assert restored_state is not None and torch.equal(restored_state, state)
    validated = validate(run, name_of(manifest), level="full")
    assert (validated.result, validated.findings) == ("passed", ())
    assert check(run, level="full").ok
    mix = width_mix(manifest.chunks, manifest.tables)
    assert mix is not None and mix.row_shares[0] == ("with first values", len(untrained) / ROWS)


def test_with_widths_of_their_own_too(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    a_chunk_for_each_width(monkeypatch)
    table = mixed_table(ROWS, DIM)
    untrained = torch.arange(1, ROWS, 2)
    table.values[untrained] = INITIAL("items", untrained, DIM, torch.float32)
    table.states[0][untrained], table.states[1][untrained] = 0, 0.0
    table = replace(table, first_values=rule_of())
    manifest = persisted(run, tmp_path / "s", table, Links())
    assert rows_of_schemes(manifest)["first"] == len(untrained)
    target = restored(run).tables["items"]
    assert torch.equal(bits_of(target.values[untrained]), bits_of(table.values[untrained]))
    assert len({entry.bits for entry in manifest.chunks if entry.scheme == "asymmetric"}) > 3


def test_a_row_counts_by_all_its_bits(run: Run, tmp_path: Path) -> None:
    """A row that differs in one bit of its values or states is stored as any other."""
    table = table_of(torch.arange(0))
    table.values[5, DIM - 1] = table.values[5, DIM - 1].nextafter(torch.tensor(9.0))
    table.states[0][7, 2] = 0.25
    table.states[1][9] = 4
    manifest = persisted(run, tmp_path / "s", table, Links())
    assert rows_of_schemes(manifest) == {"first": ROWS - 3, "asymmetric": 3}
    assert validate(run, name_of(manifest), level="full").passed


def test_rows_that_were_trained_without_a_change_may_come_first(run: Run, tmp_path: Path) -> None:
    """With a learning rate of zero, states change and values do not."""
    table = table_of(TRAINED)
    warmed_up = as_began()[:50]
    table.states[0][warmed_up] += torch.rand(50, 1)
    manifest = persisted(run, tmp_path / "s", table, Links())
    assert rows_of_schemes(manifest)["first"] == len(as_began()) - 50
    target = restored(run).tables["items"]
    assert target.row_states[0] is not None
    assert torch.equal(target.row_states[0], table.states[0])


def test_few_rows_get_no_chunk_of_their_own(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_rows, "_CHUNK_COST_BYTES", 4096)
    manifest = persisted(run, tmp_path / "s", table_of(torch.arange(30, ROWS)), Links())
    assert rows_of_schemes(manifest) == {"asymmetric": ROWS}


def test_another_rule_than_that_of_the_script_leaves_nothing_out(run: Run, tmp_path: Path) -> None:
    other = stored_rule(replace(INITIAL, seed=8), "items")
    table = table_of(TRAINED, first_values=other)
    assert rows_of_schemes(persisted(run, tmp_path / "s", table, Links())) == {"asymmetric": ROWS}


def test_a_chunk_has_no_more_rows_than_a_reader_computes_at_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_values, "_MOST_BYTES", 56 * 50)  # 24 + 24 + 8 bytes a row
    table = table_of(TRAINED)
    manifest = persisted(run, tmp_path / "s", table, Links())
    counts = [entry.row_count for entry in manifest.chunks if entry.scheme == "first"]
    assert max(counts) == 50 and sum(counts) == len(as_began())  # type: ignore[type-var, arg-type]
    target = restored(run).tables["items"]
    assert torch.equal(target.values[as_began()], table.values[as_began()])
    merged = merged_into_a_full(run, tmp_path, table, TRAINED[:10])
    counts = [entry.row_count for entry in merged.chunks if entry.scheme == "first"]
    assert max(counts) == 50  # type: ignore[type-var]
    monkeypatch.setattr(first_values, "_MOST_BYTES", 56 * 49)
    report = check(run, level="full")
    assert any("50 rows with their first values" in str(f) for f in report.findings)


def merged_into_a_full(run: Run, tmp_path: Path, table: Table, changed: Tensor) -> Manifest:
    links = Links()
    full = run.manifest(10, 1)
    links.base = links.parent = full.ref
    links.length = 1
    table.train(changed, torch.Generator().manual_seed(5))
    newest = persisted(run, tmp_path / "s", table, links, dirty=[changed])
    merge(run, newest)
    (form,) = (form for form in run.consolidated()[name_of(newest)] if form.form == "full")
    return run.read_manifest(form)


def test_a_merge_moves_the_rows_that_no_increment_has(run: Run, tmp_path: Path) -> None:
    table = table_of(TRAINED)
    full = persisted(run, tmp_path / "s", table, Links())
    changed = torch.arange(0, ROWS, 2)
    untrained = as_began(torch.cat([TRAINED, changed]))
    merged = merged_into_a_full(run, tmp_path, table, changed)
    assert rows_of_schemes(full)["first"] > len(untrained)
    assert rows_of_schemes(merged) == {"first": len(untrained), "asymmetric": ROWS - len(untrained)}
    target = restored(run).tables["items"]
    assert torch.equal(bits_of(target.values[untrained]), bits_of(table.values[untrained]))
    before = restored_step(run, run.manifest(20, 1))[0]
    run.store.delete("manifests/000000000020-00000001.json")
    require_same(restored(run), before)


def test_residuals_stand_on_first_values(run: Run, tmp_path: Path) -> None:
    table = table_of(TRAINED, residual=True)
    links = Links()
    persisted(run, tmp_path / "s", table, links)
    changed = torch.arange(1, ROWS, 5)
    table.values[changed] += 0.01 * torch.randn(len(changed), DIM).clamp(-3, 3)
    newest = persisted(run, tmp_path / "s", table, links, dirty=[changed], samples=200)
    assert rows_of_schemes(newest) == {"residual": len(changed)}
    assert validate(run, name_of(newest), level="full").passed
    target = restored(run).tables["items"]
    on_first_values = changed[changed % 3 != 0]
    errors = (target.values - table.values)[on_first_values].abs()
    assert errors.max() < 0.5 * 0.06 / 15 + 1e-6  # half a step of what the row has moved


@pytest.mark.parametrize("quantized", [False, True], ids=["decoded", "codes"])
def test_a_follower_serves_them(run: Run, tmp_path: Path, quantized: bool) -> None:
    table, links = table_of(TRAINED), Links()
    persisted(run, tmp_path / "s", table, links)
    follower = Follower(run.url, quantized=quantized)
    generator = torch.Generator().manual_seed(2)
    for step in range(20, 60, 10):
        assert follower.poll()
        with follower.reading() as version:
            served = version.lookup("items", torch.arange(ROWS))
            if quantized:
                held = version.tables["items"].nbytes
                assert held < ROWS * (3 + 8) + 500, "rows with first values take no memory"
        assert torch.equal(bits_of(served), bits_of(restored(run).tables["items"].values))
        changed = torch.randint(ROWS, (40,), generator=generator).unique()
        table.train(changed, generator)
        links = Links() if links.length == 3 else links
        dirty = [changed] if links.parent else None
        persisted(run, tmp_path / "s", table, links, dirty=dirty, step=step)


def test_parts_and_pieces(run: Run, tmp_path: Path) -> None:
    """A rule is of the whole row, of which a piece has some columns."""
    whole = table_of(TRAINED)
    pieces = whole.cut([2])
    path = stage(run, tmp_path / "s", pieces, step=10, generation=1)
    assert persist_job(path).error == ""
    manifest = run.manifest(10, 1)
    assert rows_of_schemes(manifest)["first"] == 2 * len(as_began())
    assert {piece.columns for piece in manifest.tables} == {
        Columns(first=0, of=DIM),
        Columns(first=2, of=DIM),
    }
    values = torch.zeros(70, 4)
    restore_parts(run.url, [TablePart(table="items", values=values, first_row=30, first_column=1)])
    wanted = as_began()
    wanted = wanted[(wanted >= 30) & (wanted < 100)]
    assert torch.equal(values[wanted - 30], whole.values[wanted, 1:5])


def test_servers_hold_rows_anywhere(run: Run, tmp_path: Path) -> None:
    table = table_of(TRAINED)
    held = [torch.arange(first, ROWS, 2) for first in range(2)]
    attempt = "ab" * 16
    settings: dict[str, Any] = {"step": 10, "generation": 1, "attempt": attempt, "servers": 2}
    shard = [(0, 0)]
    paths = [stage(run, tmp_path / "s", [table], rank=0, shards=shard, **settings)]
    for server, ids in enumerate(held):
        paths.append(stage(run, tmp_path / "s", [table], rank=1 + server, held=[ids], **settings))
    for path in paths[:-1]:
        assert job_files.read_job(path).servers == 2
        with pytest.raises(Exception, match="parts"):
            persist_job(path)
    assert persist_job(paths[-1]).error == ""
    assert rows_of_schemes(run.manifest(10, 1))["first"] == len(as_began())
    target = restored(run).tables["items"]
    assert torch.equal(target.values[as_began()], table.values[as_began()])


def test_a_retried_job_stores_the_same_bytes(run: Run, tmp_path: Path) -> None:
    table, attempt = table_of(TRAINED), "cd" * 16
    stored = []
    for area in ("first", "second"):
        path = stage(run, tmp_path / area, [table], step=10, generation=1, attempt=attempt)
        assert persist_job(path).error == ""
        stored.append({entry.key: entry.crc32c for entry in run.manifest(10, 1).chunks})
    assert stored[0] == stored[1]


class TestRefused:
    """What no reader accepts."""

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"kind": "increment"}, "first values"),
            ({"bits": 4}, "bits must be 0"),
            ({"scheme": "exact"}, "bits must be 0"),
        ],
    )
    def test_a_manifest(self, run: Run, tmp_path: Path, fields: dict[str, Any], words: str) -> None:
        manifest = persisted(run, tmp_path / "s", table_of(TRAINED), Links())
        body = manifest.model_dump()
        if "kind" in fields:
            ref = {"step": 1, "generation": 1, "attempt": "0" * 32}
            body |= {"kind": "increment", "base": ref, "parent": ref, "chain_length": 2}
        else:
            (entry,) = (entry for entry in body["chunks"] if entry["scheme"] == "first")
            entry |= fields
        with pytest.raises(ValidationError, match=words):
            Manifest.model_validate(body)

    @pytest.mark.parametrize(
        "changes",
        [
            {"low": (0.5).hex(), "high": (0.5).hex()},
            {"low": (-1.7e308).hex(), "high": (1.7e308).hex()},
            {"low": "inf"},
            {"key": "0" * 15},
            {"rule": "normal"},
            {"more": 1},
        ],
    )
    def test_a_rule(self, changes: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            FirstValueRule.model_validate(rule_of().model_dump() | changes)

    def test_a_header_without_a_rule(self) -> None:
        meta = {
            "run": "0" * 32,
            "step": 1,
            "generation": 1,
            "attempt": "0" * 32,
            "content": "rows",
            "rank": 0,
            "table": 0,
            "row_count": 4,
            "dim": 2,
            "bits": 0,
            "scheme": "first",
            "row_set": {"coding": "range", "first": 0},
        }
        chunk_format.ChunkMeta.model_validate(meta | {"first": rule_of().model_dump()})
        with pytest.raises(ValidationError, match="rule"):
            chunk_format.ChunkMeta.model_validate(meta)
        with pytest.raises(ValidationError, match="rule"):
            chunk_format.ChunkMeta.model_validate(
                meta | {"first": rule_of().model_dump(), "scheme": "exact", "bits": 32}
            )

    def test_a_job(self, run: Run, tmp_path: Path) -> None:
        path = stage(run, tmp_path / "s", [table_of(TRAINED)], step=10, generation=1)
        (table,) = job_files.read_job(path).tables
        for changes in ({"bits": 32}, {"residual": True}):
            with pytest.raises(ValidationError, match="first values"):
                StagedTable(**dict(table) | changes)


def test_only_the_rule_itself_is_named() -> None:
    class Shifted(Uniform):
        """Computes other values."""

    assert stored_rule(Shifted(), "items") is None
    assert stored_rule(None, "items") is None
    assert stored_rule(lambda table, ids, dim, dtype: torch.zeros(1), "items") is None
    assert stored_rule(Uniform(low=-1.7e308, high=1.7e308), "items") is None
    ids = torch.tensor([0, 1, 2**40, 2**48 - 1])
    for dtype in DTYPES:
        spec = Table("items", torch.zeros(3, DIM, dtype=dtype)).spec
        rows = rule_of().rows(spec, ids)
        assert torch.equal(bits_of(rows), bits_of(INITIAL("items", ids, DIM, dtype)))
