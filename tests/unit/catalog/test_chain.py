"""Chains: the links join up, or the error names the one that does not (format §4, invariant 4)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recpoint.catalog.check.check import check
from recpoint.catalog.run.chain import resolve_chain
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.errors import (
    ChainError,
    DigestMismatch,
    ForeignObject,
    MalformedObject,
    MissingLink,
    ObjectNotFound,
)
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MANIFEST_KEY, ManifestName, attempt_prefix
from recpoint.format.records import pack_record
from tests.catalog_builder import build, new_run, publish, tables
from tests.consolidation import merge

DIRTY = [torch.tensor([1, 4, 7]), torch.tensor([0])]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = new_run(tmp_path)
    run.claim(None)
    return run


@pytest.fixture
def links(run: Run) -> list[Manifest]:
    """A full at step 10, increments at 11, 12, 13."""
    made = [publish(run, build(run, tables(), step=10, generation=1))]
    for step in (11, 12, 13):
        checkpoint = build(run, tables(), step=step, generation=1, parent=made[-1], dirty=DIRTY)
        made.append(publish(run, checkpoint))
    return made


def put(run: Run, manifest: Manifest, **changes: object) -> Manifest:
    """Store a manifest without the checks of a commit; its chunks are said to be its own."""
    fields = manifest.model_dump() | changes
    prefix = attempt_prefix(fields["step"], fields["generation"], fields["attempt"])
    for chunk in fields["chunks"]:
        chunk["key"] = prefix + chunk["key"].rpartition("/")[2]
    changed = Manifest.model_validate(fields)
    run.store.put(MANIFEST_KEY.of(changed.step, changed.generation), pack_record(changed))
    return changed


def chain(run: Run, step: int = 13) -> tuple[Manifest, ...]:
    return resolve_chain(run, ManifestName(step, 1)).manifests


def test_a_chain_runs_from_its_full_to_the_newest(run: Run, links: list[Manifest]) -> None:
    assert chain(run) == tuple(links)
    assert chain(run, 10) == tuple(links[:1])
    found = resolve_chain(run, ManifestName(12, 1))
    assert (found.full, found.newest) == (links[0], links[2])


def test_no_such_checkpoint(run: Run) -> None:
    with pytest.raises(ObjectNotFound):
        chain(run)


@pytest.mark.parametrize("step", [10, 11, 12])
def test_a_missing_link_is_named(run: Run, links: list[Manifest], step: int) -> None:
    run.store.delete(MANIFEST_KEY.of(step, 1))
    with pytest.raises(MissingLink) as caught:
        chain(run)
    assert caught.value.subject == MANIFEST_KEY.of(step, 1)
    assert f"step {step + 1}" in caught.value.expected


def test_another_attempt_of_a_linked_step_is_a_missing_link(
    run: Run, links: list[Manifest]
) -> None:
    other = put(run, links[1], attempt="f" * 32)
    with pytest.raises(MissingLink) as caught:
        chain(run)
    assert caught.value.subject == MANIFEST_KEY.of(11, 1)
    assert other.attempt in caught.value.found


def test_an_increment_inserted_twice_does_not_count_twice(run: Run, links: list[Manifest]) -> None:
    # A copy of increment 12 as step 13: its parent is 11, so it can not come after 12.
    copied = put(run, links[2], step=13)
    assert [link.step for link in chain(run)] == [10, 11, 13]
    put(run, copied, chain_length=4)
    with pytest.raises(ChainError, match="chain_length 4"):
        chain(run)


def test_an_increment_that_skips_a_link_is_refused(run: Run, links: list[Manifest]) -> None:
    put(run, links[3], parent=links[1].ref.model_dump())
    with pytest.raises(ChainError, match="one more than its parent's"):
        chain(run)


def test_a_foreign_link_is_named(run: Run, links: list[Manifest], tmp_path: Path) -> None:
    other = new_run(tmp_path / "other")
    other.claim(None)
    publish(other, build(other, tables(), step=11, generation=1))
    key = MANIFEST_KEY.of(11, 1)
    run.store.put(key, other.store.get(key, max_bytes=1 << 20))
    with pytest.raises(ForeignObject) as caught:
        chain(run)
    assert caught.value.subject == key and other.id in caught.value.found


def test_a_damaged_link_is_named(run: Run, links: list[Manifest]) -> None:
    data = pack_record(links[1]).replace(b'"stall_us":100', b'"stall_us":101')
    run.store.put(MANIFEST_KEY.of(11, 1), data)
    with pytest.raises(DigestMismatch) as caught:
        chain(run)
    assert caught.value.subject == MANIFEST_KEY.of(11, 1)


def test_another_base_is_refused(run: Run, links: list[Manifest]) -> None:
    base = links[0].ref.model_copy(update={"attempt": "f" * 32})
    put(run, links[3], base=base.model_dump())
    with pytest.raises(ChainError, match="base"):
        chain(run)


def test_other_tables_are_refused(run: Run, links: list[Manifest]) -> None:
    specs = [table.spec.model_dump() for table in tables()]
    put(run, links[3], tables=[specs[0], specs[1] | {"name": "visitors"}])
    with pytest.raises(ChainError, match="other tables"):
        chain(run)


def test_a_parent_of_a_later_generation_is_refused(run: Run, links: list[Manifest]) -> None:
    later = put(run, links[2], generation=2)
    put(run, links[3], parent=later.ref.model_dump())
    with pytest.raises(ChainError, match="later generation 2"):
        chain(run)


def test_chunks_of_another_checkpoint_are_refused(run: Run, links: list[Manifest]) -> None:
    taken = next(entry for entry in links[1].chunks if entry.content == "rows")
    others = [entry for entry in links[2].chunks if entry.content != "rows"]
    mixed = links[2].model_copy(update={"chunks": (taken, *others)})
    run.store.put(MANIFEST_KEY.of(12, 1), pack_record(mixed))
    with pytest.raises(MalformedObject, match=taken.key):
        chain(run)


def _another_attempt(merged: Manifest) -> dict[str, object]:
    return {"attempt": "f" * 32}


def _other_links(merged: Manifest) -> dict[str, object]:
    assert merged.stands_for is not None
    return {"stands_for": merged.stands_for.model_copy(update={"chain_length": 7})}


@pytest.mark.parametrize("links_merged", [2, None])
@pytest.mark.parametrize("change", [_another_attempt, _other_links])
def test_a_consolidated_manifest_says_of_its_checkpoint_what_its_own_does(
    run: Run,
    links: list[Manifest],
    change: Callable[[Manifest], dict[str, object]],
    links_merged: int | None,
) -> None:
    merge(run, links[-1], links=links_merged)
    merged = chain(run)[-1]
    key = Representation.of(merged).key
    run.store.put(key, pack_record(merged.model_copy(update=change(merged))))
    found = resolve_chain(run, ManifestName(13, 1))
    assert found.manifests == tuple(links)
    (passed,) = found.passed_over
    assert passed.key == key and "the checkpoint's own manifest" in passed.error
    assert [finding.key for finding in check(run).findings if key in finding.key] == [key]
    run.store.put(MANIFEST_KEY.of(13, 1), b"damaged")  # nothing is left that contradicts it
    assert chain(run)[-1].stands_for is not None
