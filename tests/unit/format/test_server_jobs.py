"""Jobs and parts of embedding servers: what their records may say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from recpoint.format.job import Job
from recpoint.format.manifest import CacheUse
from recpoint.format.part import RankPart

PAGE = (Path(__file__).parents[3] / "docs" / "format.md").read_text()


def body_of(title: str) -> dict[str, Any]:
    """The sample of a record on the page, a job of one rank or a part of rank 1 of 2."""
    found = re.search(rf"^\*\*{title}\*\*, [^\n]*\n\n```json\n(.*?)^```$", PAGE, re.M | re.DOTALL)
    assert found is not None
    body: dict[str, Any] = json.loads(found[1])["body"]
    return body


def with_table(body: dict[str, Any], **fields: object) -> dict[str, Any]:
    return body | {"tables": [body["tables"][0] | fields]}


def job(**fields: object) -> Job:
    """Of the last of two servers, which holds 600 of 1,000 rows."""
    body = with_table(body_of("Job"), **{"scattered": True, "shard_rows": 600} | fields)
    return Job.model_validate(body | {"rank": 2, "servers": 2})


def part(*, chunks: list[Any] | None = None, **fields: Any) -> RankPart:
    """Of the last of two servers, which stores 250 of the 600 rows that it holds."""
    body = body_of("Part")
    before = {"step": 400, "generation": 2, "attempt": "ab" * 16}
    text = json.dumps(body).replace("/r00001-", "/r00002-").replace('"rank": 1', '"rank": 2')
    body = json.loads(text) | {"ranks": 1, "servers": 2, "kind": "increment", "chain_length": 2}
    body |= {"base": before, "parent": before}
    kept = [chunk for chunk in body["chunks"] if chunk["content"] != "state"]
    (rows,) = (chunk for chunk in kept if chunk["content"] == "rows")
    rows.update(row_count=250, first_row=7, last_row=999)
    body["chunks"] = kept if chunks is None else chunks
    return RankPart.model_validate(
        with_table(body, **{"first_row": 0, "rows": 600, "scattered": True} | fields)
    )


def test_a_job_of_a_server() -> None:
    served = job()
    assert (served.parts, served.has_state) == (3, False)
    assert served.tables[0].id_bound == 1000
    rank = Job.model_validate(body_of("Job"))
    assert (rank.parts, rank.has_state) == (1, True)
    assert rank.tables[0].id_bound == rank.tables[0].shard_rows
    assert "scattered" not in rank.tables[0].model_dump() and "servers" not in rank.model_dump()


@pytest.mark.parametrize(
    "fields",
    [
        {"first_row": 1},
        {"all_rows": True, "row_count": 600},
        {"row_count": 601},
        {"shard_rows": 1001},
        {"scattered": False},
    ],
    ids=str,
)
def test_scattered_rows_that_cannot_be(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        job(**fields)


def test_numbers_of_jobs_that_cannot_be() -> None:
    body = with_table(body_of("Job"), scattered=True, shard_rows=600)
    for fields in ({"rank": 3, "servers": 2}, {"rank": 1}, {"rank": 1, "servers": 0}):
        with pytest.raises(ValidationError):
            Job.model_validate(body | fields)
    with pytest.raises(ValidationError, match="the only rank"):
        Job.model_validate(with_table(body_of("Job"), scattered=True))


def test_a_part_of_a_server() -> None:
    stored = part()
    assert (stored.rank, stored.parts) == (2, 3)
    assert {chunk.content for chunk in stored.chunks} == {"rows", "sample"}
    assert part(chunks=[]).chunks == ()


@pytest.mark.parametrize("fields", [{"first_row": 1}, {"rows": 249}, {"rows": 1001}], ids=str)
def test_scattered_shards_that_cannot_be(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        part(**fields)


def test_a_part_of_a_rank_has_chunks_and_a_server_no_state() -> None:
    with pytest.raises(ValidationError, match="every rank has state"):
        RankPart.model_validate(body_of("Part") | {"chunks": []})
    state = next(one for one in body_of("Part")["chunks"] if one["content"] == "state")
    state |= {"rank": 2, "key": state["key"].replace("/r00001-", "/r00002-")}
    with pytest.raises(ValidationError, match="is state of part 2 of 3"):
        part(chunks=[state])


def test_a_checkpoint_of_one_rank_alone_has_no_parts() -> None:
    with pytest.raises(ValidationError, match="a part of rank 0 of 1"):
        RankPart.model_validate(body_of("Part") | {"rank": 0, "ranks": 1})


def test_what_several_caches_did() -> None:
    names = list(CacheUse.model_fields)
    one = CacheUse(**{name: number for number, name in enumerate(names, 1)})
    other = CacheUse(**{name: 10 * number for number, name in enumerate(names, 1)})
    assert CacheUse.joined([None, None]) is None
    assert CacheUse.joined([None, one]) == one
    joined = CacheUse.joined([one, None, other])
    assert joined is not None and joined.window == other.window
    assert (joined.hits, joined.wait_us) == (11, 11 * one.wait_us)
