"""consolidate: what it says beforehand, what it does, and what list, show and check say then."""

from __future__ import annotations

from pathlib import Path

import pytest

from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.format.manifest import Manifest
from recpoint.format.naming import CONSOLIDATED_KEY
from tests.catalog_builder import new_run, tables
from tests.consolidation import chain_of, merge, require_same, restored, trained
from tests.unit.cli.conftest import Invoke


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = new_run(tmp_path / "run")
    run.claim(None)
    return run


@pytest.fixture
def links(run: Run) -> list[Manifest]:
    """A full at step 10 and increments up to step 13."""
    return trained(run, tables(rows=100), [10, 11, 12, 13])


def test_a_dry_run_changes_nothing(recpoint: Invoke, run: Run, links: list[Manifest]) -> None:
    before = [info.key for info in run.store.list()]
    ended = recpoint("consolidate", run.url, "--dry-run")
    assert ended.code == 0 and "13-00000001-full.json" in ended.stdout
    assert "4 manifests" in ended.stdout and "pays" in ended.stdout
    document = recpoint("consolidate", run.url, "--dry-run", "--json").json
    assert document["dry_run"] and document["needed"] and document["outcome"] is None
    assert (document["links_before"], document["links_after"]) == (4, 1)
    assert document["sources"] == [Representation.of(link).key for link in links]
    assert [info.key for info in run.store.list()] == before


def test_a_dry_run_shows_every_merge_that_is_weighed(
    recpoint: Invoke, run: Run, links: list[Manifest]
) -> None:
    # 30 % of the rows in each increment: a restore reads 1.9 times what it has to.
    document = recpoint("consolidate", run.url, "--dry-run", "--json").json
    weighed = document["weighed"]
    assert [(one["links"], one["into"]) for one in weighed] == [
        (2, "increment"),
        (3, "increment"),
        (4, "full"),
    ]
    whole = weighed[-1]
    assert whole["chosen"] and whole["why_not"] is None
    assert whole["cost_bytes"] == whole["read_bytes"] + whole["write_bytes"]
    assert [one["links_after"] for one in weighed] == [3, 2, 1]
    assert {one["why_not"] for one in weighed[:2]} == {"may leave many dead rows"}
    assert {key: whole[key] for key in ("read_bytes", "write_bytes", "restore_bytes_after")} == {
        key: document[key] for key in ("read_bytes", "write_bytes", "restore_bytes_after")
    }
    two = recpoint("consolidate", run.url, "--links", 2, "--dry-run", "--json").json
    assert two["weighed"] == weighed and weighed[0]["write_bytes"] == two["write_bytes"]
    shown = recpoint("consolidate", run.url, "--dry-run").stdout
    assert "What an agent weighs" in shown and "the newest 2" in shown and "chosen" in shown


def test_a_dry_run_of_a_full_weighs_nothing(
    recpoint: Invoke, run: Run, links: list[Manifest]
) -> None:
    arguments = ("consolidate", run.url, "--step", 10, "--generation", 1, "--dry-run")
    assert recpoint(*arguments, "--json").json["weighed"] == []
    assert "weighs" not in recpoint(*arguments).stdout


def test_of_a_long_chain_the_cheapest_merges_are_shown(recpoint: Invoke, run: Run) -> None:
    trained(run, tables(rows=100), list(range(10, 35)), share=0.05)
    document = recpoint("consolidate", run.url, "--dry-run", "--json").json
    assert len(document["weighed"]) == 24
    shown = recpoint("consolidate", run.url, "--dry-run").stdout
    assert "4 more with --json" in shown and shown.count("the newest") == 19
    best = min(
        (one for one in document["weighed"] if one["cost_bytes"]), key=lambda one: one["cost_bytes"]
    )
    assert best["chosen"] and sum(one["chosen"] for one in document["weighed"]) == 1


def test_the_newest_into_a_full(recpoint: Invoke, run: Run, links: list[Manifest]) -> None:
    before, _ = restored(run, links[-1])
    document = recpoint("consolidate", run.url, "--json").json
    assert document["outcome"] == "created" and document["dry_run"] is False
    assert document["key"] == CONSOLIDATED_KEY.of(13, 1, None)
    require_same(before, restored(run, links[-1])[0])
    again = recpoint("consolidate", run.url)
    assert again.code == 0 and "nothing to do" in again.stdout
    listed = recpoint("list", run.url, "--json").json["checkpoints"]
    assert [entry["merged"] for entry in listed] == [["full"], [], [], []]
    assert [entry["chain_length"] for entry in listed] == [4, 3, 2, 1]
    assert [entry["manifests_to_read"] for entry in listed] == [1, 3, 2, 1]
    assert (listed[0]["kind"], listed[0]["consolidated"]) == ("increment", False)
    (line,) = (x for x in recpoint("list", run.url).stdout.splitlines() if "merged: full" in x)
    assert line.split()[:4] == ["13", "1", "increment", "1"]  # of the chain one is left to read
    shown = recpoint("show", run.url, 13)
    assert "a restore reads 1" in shown.stdout and "full, consolidated" in shown.stdout
    assert recpoint("check", run.url, "--level", "full").code == 0


def test_the_newest_links_of_a_named_checkpoint(
    recpoint: Invoke, run: Run, links: list[Manifest]
) -> None:
    arguments = ("consolidate", run.url, "--step", 12, "--generation", 1, "--links", 2)
    ended = recpoint(*arguments)
    assert ended.code == 0 and CONSOLIDATED_KEY.of(12, 1, 10) in ended.stdout
    listed = recpoint("list", run.url, "--json").json["checkpoints"]
    assert listed[1]["merged"] == ["after 10"]
    assert [entry["manifests_to_read"] for entry in listed] == [3, 2, 2, 1]


def test_what_was_passed_over_is_said(
    recpoint: Invoke, run: Run, links: list[Manifest], tmp_path: Path
) -> None:
    done = merge(run, links[-1])
    run.store.put(done.key, b"damaged")
    file = tmp_path / "model.pt"
    document = recpoint("restore", run.url, "--to", file, "--json").json
    assert [passed["key"] for passed in document["passed_over"]] == [done.key]
    assert document["chain_length"] == 4 and document["skipped"] == []
    ended = recpoint("restore", run.url, "--to", file, "--force")
    assert f"passed over {done.key}" in ended.stdout
    assert f"passed over {done.key}" in recpoint("show", run.url, 13).stdout
    assert recpoint("check", run.url).code == 0
    assert recpoint("consolidate", run.url).code == 4


def test_a_damaged_merge_is_passed_over_and_said(
    recpoint: Invoke, run: Run, links: list[Manifest]
) -> None:
    done = merge(run, links[2])
    entry = next(entry for entry in chain_of(run, links[2])[0].chunks if entry.content == "rows")
    run.store.put(entry.key, bytes(entry.bytes))
    document = recpoint("consolidate", run.url, "--json").json
    assert document["outcome"] == "created" and len(document["sources"]) == 4
    assert [passed["key"] for passed in document["passed_over"]] == [done.key]
    assert run.url in document["passed_over"][0]["error"]


def test_its_help_says_that_all_is_merged_unless_told_otherwise(recpoint: Invoke) -> None:
    shown = " ".join(recpoint("consolidate", "--help").stdout.split())
    assert "Default: all into a full. An agent and the flow" in shown


def test_wrong_usage(recpoint: Invoke, run: Run) -> None:
    assert recpoint("consolidate", run.url).code == 1
    assert recpoint("consolidate", run.url, "--generation", 1).code == 2
    assert recpoint("consolidate", run.url, "--links", 1).code == 2


def test_all_links_of_a_chain_that_has_no_more_go_into_a_full(
    recpoint: Invoke, run: Run, links: list[Manifest]
) -> None:
    for most in (len(links), len(links) + 5):
        plan = recpoint("consolidate", run.url, "--links", most, "--dry-run", "--json").json
        assert plan["links_after"] == 1
    said = " ".join(recpoint("consolidate", "--help").stdout.replace("│", "").split())
    assert "into one increment; if the chain has no more, all of them into a full" in said
