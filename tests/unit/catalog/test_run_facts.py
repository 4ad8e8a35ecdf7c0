"""What retention reads of a run whose chunks are not all there."""

from __future__ import annotations

from pathlib import Path

import pytest

from recpoint.catalog.check.validate import record, validate
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.retention.rules import RetentionPolicy
from recpoint.catalog.run.facts import gather
from recpoint.catalog.run.representations import Representations
from recpoint.catalog.run.run import Run
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from tests.catalog_builder import new_run, tables
from tests.consolidation import trained
from tests.retained_run import retain, steps


class Chains:
    """Two chains, 10 and 20, then 30, 40 and 50, of which the newest is validated."""

    def __init__(self, place: Path) -> None:
        self.run: Run = new_run(place)
        self.run.claim(None)
        trained(self.run, tables(), [10, 20])
        made = trained(self.run, tables(seed=4), [30, 40, 50], seed=4)
        self.manifests = {manifest.step: manifest for manifest in made}
        record(self.run, validate(self.run, ManifestName(50, 1)))

    def lose(self, step: int, content: str) -> None:
        manifest: Manifest = self.manifests[step]
        lost = next(chunk for chunk in manifest.chunks if chunk.content == content)
        data = self.run.store.get(lost.key, max_bytes=1 << 26)
        self.run.store.put(lost.key, data[:-1])

    def restoring(self) -> list[int]:
        facts = gather(self.run)
        there = Representations(facts.manifests, facts.verdicts)
        return [name.step for name in sorted(facts.live) if there.is_trusted(name)]


@pytest.fixture
def chains(tmp_path: Path) -> Chains:
    return Chains(tmp_path / "run")


@pytest.mark.parametrize(
    ("step", "content", "left"),
    [
        (30, "state", [10, 20, 40, 50]),
        (40, "state", [10, 20, 30, 50]),
        (50, "state", [10, 20, 30, 40]),
        (40, "rows", [10, 20, 30]),
    ],
)
def test_what_restores_where_a_chunk_is_cut(
    chains: Chains, step: int, content: str, left: list[int]
) -> None:
    chains.lose(step, content)
    assert chains.restoring() == left
    assert restore(chains.run, MemoryTarget()).restored.step == left[-1]


def test_a_link_without_its_state_keeps_nothing_from_going(chains: Chains) -> None:
    chains.lose(40, "state")
    for _ in range(2):
        retain(chains.run, RetentionPolicy(keep_last=1))
    assert steps(chains.run) == [30, 40, 50]
    assert restore(chains.run, MemoryTarget()).restored.step == 50
