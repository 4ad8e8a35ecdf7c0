"""Parts of all ranks to one manifest; each way in which they can disagree is named."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from recpoint.catalog.persist import persist
from recpoint.catalog.persist.ranks import join_parts, parts_text
from recpoint.catalog.run.run import Run
from recpoint.errors import ForeignObject, FormatError, MalformedObject, RanksMissing
from recpoint.format.keyed_use import KEY, LAST_USE, KeyedUse
from recpoint.format.manifest import Columns, Quantizer, RowStateSpec, TableSpec
from recpoint.format.naming import PART_KEY, PartName
from recpoint.format.part import RankPart, Shard
from recpoint.format.record_kinds import PART
from recpoint.format.records import MAX_RECORD_BYTES, CheckpointRef, pack_record
from tests.catalog_builder import new_run, tables
from tests.rank_jobs import RankJobs


def parts_of(directory: Path) -> tuple[Run, RankJobs, list[RankPart]]:
    """Those of ranks 0 and 1 of 3; rank 1 has nothing of the second table."""
    run = new_run(directory / "run")
    run.claim(None)
    stagings = [directory / f"host-{rank}" for rank in range(3)]
    jobs = RankJobs(run, stagings, tables(), [[20, 10, 10], [15, 0, 5]])
    paths = jobs.stage(10)
    for path in paths[:2]:
        with pytest.raises(RanksMissing):
            persist.persist_job(path)
    names = [PartName(10, 1, jobs.attempt(10), rank) for rank in range(2)]
    found = [run.records(PART).read(*name) for name in names]
    # The third as a copy of the second, for the rows that are left.
    fields = found[1].model_dump()
    fields["rank"] = 2
    fields["tables"][0]["first_row"] = 30
    fields["tables"][1].update(first_row=15, rows=5)
    fields["chunks"] = [
        chunk | {"rank": 2, "key": chunk["key"].replace("/r00001-", "/r00002-")}
        for chunk in fields["chunks"]
    ]
    for chunk in fields["chunks"]:
        if chunk["table"] == 0:
            chunk.update(first_row=30, last_row=39)
    users = next(c.model_dump() for c in found[0].chunks if c.table == 1)
    users |= {"rank": 2, "key": users["key"].replace("/r00000-", "/r00002-")}
    fields["chunks"].append(users | {"row_count": 5, "first_row": 15, "last_row": 19})
    found.append(RankPart.model_validate(fields))
    return run, jobs, found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, RankJobs, list[RankPart]]:
    return parts_of(tmp_path_factory.mktemp("join"))


@pytest.fixture
def parts(made: tuple[Run, RankJobs, list[RankPart]]) -> list[RankPart]:
    return list(made[2])


def changed(part: RankPart, **fields: Any) -> RankPart:
    """Unchecked: what is wrong with a part alone is found before it is joined."""
    return part.model_copy(update=fields)


def with_table(part: RankPart, index: int, *, spec: dict[str, Any], **shard: Any) -> RankPart:
    tables = list(part.tables)
    new = tables[index].spec.model_copy(update=spec)
    tables[index] = tables[index].model_copy(update={"spec": new, **shard})
    return changed(part, tables=tuple(tables))


def join(parts: list[RankPart]) -> Any:
    return join_parts(parts, committed_ms=77, writer="tests")


def test_what_a_manifest_has_of_its_parts(parts: list[RankPart]) -> None:
    parts[1] = changed(parts[1], snapshot_ms=1, staged_ms=2**50, stall_us=10**6, state_bits=16)
    # A rank without rows of a table need not know its row states.
    others = parts[0].tables[0].spec.row_states
    parts[1] = with_table(parts[1], 1, spec={"row_states": others})
    manifest = join([parts[2], parts[0], parts[1]])
    assert (manifest.ranks, manifest.kind, manifest.committed_ms) == (3, "full", 77)
    assert manifest.tables == tuple(shard.spec for shard in parts[0].tables)
    assert len(manifest.chunks) == sum(len(part.chunks) for part in parts)
    assert [chunk.key for chunk in manifest.chunks] == sorted(c.key for c in manifest.chunks)
    assert (manifest.snapshot_ms, manifest.staged_ms, manifest.stall_us) == (1, 2**50, 10**6)
    assert manifest.dirty_rows == sum(part.dirty_rows for part in parts)
    assert manifest.full_bytes == sum(part.full_bytes for part in parts)
    assert (manifest.state_bits, manifest.history) == (16, parts[0].history)


def test_keys_are_counted_by_the_first_part_that_does(parts: list[RankPart]) -> None:
    states = tuple(
        RowStateSpec(name=name, dtype="I64", shape=(), optimizer=0) for name in (KEY, LAST_USE)
    )
    keyed = [with_table(part, 0, spec={"row_states": states}) for part in parts]
    first, second = (
        KeyedUse(table=0, used=used, inserted=9, evicted=1, refused=0) for used in (3, 4)
    )
    assert join(keyed).keyed is None
    keyed[2] = changed(keyed[2], keyed=(second,))
    assert join(keyed).keyed == (second,)
    keyed[1] = changed(keyed[1], keyed=(first,))
    assert join(keyed).keyed == (first,)


REF = CheckpointRef(step=3, generation=1, attempt="ab" * 16)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "00" * 16),
        ("step", 11),
        ("generation", 2),
        ("attempt", "00" * 16),
        ("ranks", 4),
        ("servers", 2),
        ("kind", "increment"),
        ("base", REF),
        ("parent", REF),
        ("chain_length", 2),
        ("policy", "continuous"),
    ],
)
def test_a_rank_that_says_something_else(parts: list[RankPart], field: str, value: object) -> None:
    expected = getattr(parts[0], field)
    parts[1] = changed(parts[1], **{field: value})
    with pytest.raises(MalformedObject) as caught:
        join(parts)
    assert caught.value.found == f"rank 1: {field} {value}"
    assert caught.value.expected == f"{field} {expected}, as rank 0 has"
    assert "/r00001.json" in caught.value.subject


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "other"),
        ("columns", Columns(first=0, of=9)),
        ("rows", 41),
        ("dim", 4),
        ("dtype", "F16"),
        ("row_states", ()),
    ],
)
def test_a_rank_with_another_table(parts: list[RankPart], field: str, value: object) -> None:
    parts[2] = with_table(parts[2], 0, spec={field: value})
    with pytest.raises(MalformedObject) as caught:
        join(parts)
    assert caught.value.found.startswith("rank 2: table 'items'")
    assert f": {field} {value}" in caught.value.found and "rank 0" in caught.value.expected


@pytest.mark.parametrize(
    ("first", "rows", "found"),
    [
        (19, 10, "rank 1: rows from 19 of table 'items'"),
        (21, 10, "rank 1: rows from 21 of table 'items'"),
        (20, 9, "rank 2: rows from 30 of table 'items'"),
        (0, 20, "rank 1: rows from 0 of table 'items'"),
        (0, 0, "rank 2: rows from 30 of table 'items'"),
    ],
)
def test_rows_twice_or_left_out(parts: list[RankPart], first: int, rows: int, found: str) -> None:
    parts[1] = with_table(parts[1], 0, spec={}, first_row=first, rows=rows)
    with pytest.raises(MalformedObject) as caught:
        join(parts)
    assert caught.value.found == found


def scattered(part: RankPart, rows: int) -> RankPart:
    return with_table(part, 0, spec={}, first_row=0, rows=rows, scattered=True)


def test_scattered_shards_have_as_many_rows_as_the_table(parts: list[RankPart]) -> None:
    assert join([scattered(part, rows) for part, rows in zip(parts, (20, 10, 10), strict=True)])
    with pytest.raises(MalformedObject) as caught:
        join([scattered(part, rows) for part, rows in zip(parts, (20, 10, 11), strict=True)])
    assert caught.value.found == "rank 2: 41 rows of table 'items' in all parts"
    with pytest.raises(MalformedObject) as caught:
        join([parts[0], *(scattered(part, 10) for part in parts[1:])])
    assert caught.value.found == "rank 0: a range of rows of table 'items'"
    assert caught.value.expected == "scattered rows, as rank 1 has"
    # A part that holds nothing of the table says neither.
    join(
        [with_table(parts[0], 0, spec={}, rows=0), scattered(parts[1], 30), scattered(parts[2], 10)]
    )


def test_whose_parts_are_named() -> None:
    assert parts_text([1], 2) == "rank 1"
    assert parts_text([2, 0, 1], 3) == "ranks 0, 1, 2"
    assert parts_text([3], 1) == "embedding server 3"
    assert parts_text([1, 0, 3], 1) == "rank 0 and embedding servers 1, 3"
    many = parts_text(range(50), 25)
    assert many.startswith("ranks 0, 1, ") and "19 and 5 more and embedding servers 1, 2" in many


def test_quantizers_of_many_tables_of_all_ranks(parts: list[RankPart]) -> None:
    before = CheckpointRef(step=1, generation=1, attempt="0" * 32)
    specs = [
        TableSpec(name=f"table {n}", rows=3, dim=2, dtype="F32", row_states=())
        for n in range(34_000)
    ]
    nothing_chosen = dict.fromkeys(("bins", "ratio_permille", "refits", "sample_rows", "seed"), 0)
    many = [
        part.model_copy(
            update={
                "kind": "increment",
                "base": before,
                "parent": before,
                "chain_length": 2,
                "tables": tuple(Shard(spec=spec, first_row=part.rank, rows=1) for spec in specs),
                "chunks": tuple(chunk for chunk in part.chunks if chunk.content == "state"),
                "quantizers": tuple(
                    Quantizer(table=n, rank=part.rank, method="asymmetric", **nothing_chosen)
                    for n in range(len(specs))
                ),
            }
        )
        for part in parts
    ]
    manifest = join_parts(many, committed_ms=1, writer="test")
    assert len(manifest.quantizers) == 3 * len(specs)


def test_ranks_that_are_missing_or_there_twice(parts: list[RankPart]) -> None:
    for some in (parts[:2], [parts[0], parts[1], parts[1]], parts[1:]):
        with pytest.raises(MalformedObject, match="one of each of 3 ranks"):
            join(some)
    parts[1] = changed(parts[1], tables=parts[1].tables[:1])
    with pytest.raises(MalformedObject, match="rank 1: 1 tables; expected 2"):
        join(parts)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 3},
        {"rank": 0},
        {"ranks": 1},
        {"ranks": 100_001},
        {"servers": 0},
        {"servers": 100_000},
        {"kind": "increment"},
        {"chunks": []},
        {"chunks": [{}] * 100_000},
        {"tables": [None] * 100_001},
        {"tables.0.first_row": 2},
        {"tables.0.first_row": 2**48},
        {"tables.0.rows": 11},
        {"tables.0.rows": 0},
        {"tables.0.spec.rows": 25},
        {"tables.1.first_row": 5},
        {"tables.1.spec.name": "items"},
        {"chunks.0.rank": 0},
        {"chunks.0.row_count": 11},
        {"chunks.0.last_row": 40},
        {"chunks.0.first_row": 0},
        {"quantizers": [{"table": 0, "rank": 1}]},
        {"written_ms": -1},
        {"extra": 1},
    ],
    ids=lambda change: str(change)[1:48],
)
def test_a_hostile_part_is_refused_before_it_costs_much(
    parts: list[RankPart], change: dict[str, Any]
) -> None:
    fields = parts[1].model_dump(mode="json")
    for path, value in change.items():
        *above, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        target: Any = fields
        for part in above:
            target = target[part]
        target[last] = value
    tracemalloc.start()
    try:
        with pytest.raises(ValidationError):
            RankPart.model_validate(fields)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("what", ["missing", "damaged", "foreign", "another attempt's", "huge"])
def test_a_part_that_is_not_the_one_it_should_be(tmp_path: Path, what: str) -> None:
    run, jobs, (first, second, third) = parts_of(tmp_path)
    attempt = jobs.attempt(10)
    key = PART_KEY.of(10, 1, attempt, rank=1)
    data = pack_record(second)
    if what == "missing":
        run.store.delete(key)
    elif what == "damaged":
        run.store.put(key, data.replace(b"full", b"fulk"))
    elif what == "foreign":
        run.store.put(key, pack_record(third))
    elif what == "another attempt's":
        run.store.put(key, data.replace(attempt.encode(), b"00" * 16))
    else:
        run.store.put(key, data + b" " * MAX_RECORD_BYTES)
    run.store.put(PART_KEY.of(10, 1, attempt, rank=2), pack_record(third))
    job_file = tmp_path / "host-0"
    (job_file,) = job_file.rglob("jobs/*.json")
    if what == "missing":
        with pytest.raises(RanksMissing) as caught:
            persist.persist_job(job_file)
        assert caught.value.ranks == (1,)
        return
    outcome = persist.persist_job(job_file)
    kinds = {kind.__name__ for kind in FormatError.__subclasses__()}
    assert outcome.result == "rejected" and outcome.error_type in kinds
    if what == "foreign":
        assert outcome.error_type == ForeignObject.__name__
    assert "parts/" in outcome.error and not run.manifest_names()
    assert first.rank == 0
