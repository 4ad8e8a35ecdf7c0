"""A run whose manifests were stored as roots and pages is restored for ever (format §4.1, §8)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recpoint.catalog.check.check import check
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MANIFEST_KEY, ManifestName
from recpoint.format.paging import pack_manifest
from tests.small_pages import small_pages

PAGES = Path(__file__).parent / "pages"


@pytest.fixture
def run() -> Run:
    return Run.open(open_store(str(PAGES / "run")))


def test_a_run_in_pages_is_restored(run: Run) -> None:
    target = MemoryTarget()
    report = restore(run, target, Selection(step=200))
    assert report.chain_length == 1  # the consolidated manifest is in pages too
    expected_bits = json.loads((PAGES / "expected.json").read_text())
    assert target.tables.keys() == expected_bits.keys()
    for name, table in target.tables.items():
        tensors = [table.values, *(state for state in table.row_states if state is not None)]
        assert [tensor.view(torch.int32).tolist() for tensor in tensors] == expected_bits[name]
    assert check(run, level="full").findings == ()


def test_its_manifests_have_two_levels_of_pages(run: Run) -> None:
    own, consolidated = (
        run.read_manifest(Representation(ManifestName(200, 1), form)) for form in ("own", "full")
    )
    for manifest in (own, consolidated):
        assert isinstance(manifest, Manifest) and len(manifest.pages) > len(manifest.chunks) / 2
    prefixes = {page.key.rpartition("/")[0] for page in consolidated.pages}
    assert prefixes == {chunk.key.rpartition("/")[0] for chunk in consolidated.chunks}


def test_the_same_chunks_give_the_same_pages(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pages(monkeypatch, root=2)
    packed = pack_manifest(run.manifest(200, 1))
    for page, data in packed.pages:
        assert run.store.get(page.key, max_bytes=page.bytes) == data
    assert packed.record == run.store.get(MANIFEST_KEY.of(200, 1), max_bytes=1 << 20)
