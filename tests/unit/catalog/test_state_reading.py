"""State trees of the ranks that a reader needs, and of the others only what it needs of them."""

from __future__ import annotations

from typing import Any

import torch

from recpoint.catalog.restore.chunks import StoreChunks
from recpoint.catalog.restore.state import StateReading
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.format.manifest import ChunkEntry, Manifest
from tests.catalog_builder import build, publish, tables

#: Elements of the largest tensor that the builder leaves in the first chunk.
SMALL = 4


def stored(run: Run, *states: object) -> Manifest:
    checkpoint = build(run, tables(), step=5, generation=1, states=states, tensor_elements=SMALL)
    return publish(run, checkpoint)


def read_briefly(
    run: Run, manifest: Manifest, ranks: list[int]
) -> tuple[dict[int, Any], list[str]]:
    """What is under "reader", and which chunks that took."""
    read: list[ChunkEntry] = []
    expected: list[int] = []
    with ReadScheduler(2) as reads:
        reading = StateReading(
            StoreChunks(run.store), manifest, reads, read.append, expected.append
        )
        found: dict[int, Any] = reading.briefly(ranks, ("reader",))
    assert sum(expected) == sum(entry.bytes for entry in read)
    return found, [f"{entry.rank}-{int(entry.key[-18:-12])}" for entry in read]


def test_of_other_ranks_only_the_chunk_with_the_tree_is_read(run: Run) -> None:
    states: list[Any] = [
        {"reader": {"at": rank, "order": torch.full((SMALL,), rank)}, "rng": torch.zeros(3 * SMALL)}
        for rank in range(3)
    ]
    found, chunks = read_briefly(run, stored(run, *states), [0, 2])
    assert found.keys() == {0, 2} and chunks == ["0-0", "2-0"]
    for rank, tree in found.items():
        assert tree.keys() == {"reader"} and tree["reader"]["at"] == rank
        assert torch.equal(tree["reader"]["order"], states[rank]["reader"]["order"])


def test_a_state_that_is_not_in_it_is_read_whole(run: Run) -> None:
    large = torch.arange(3 * SMALL)
    manifest = stored(run, {"reader": {"order": large}, "rng": 1}, {"reader": 7}, 9)
    found, chunks = read_briefly(run, manifest, [0, 1, 2])
    assert torch.equal(found[0]["reader"]["order"], large)
    assert found[1] == {"reader": 7} and found[2] == {}
    assert chunks == ["0-0", "1-0", "2-0", "0-1", "0-2", "0-3"]
