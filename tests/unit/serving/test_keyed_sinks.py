"""A sink serves keyed tables by key: keys that move, leave and come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recpoint.catalog.restore.keyed_rows import KEY, LAST_USE
from recpoint.errors import MalformedObject, UnknownRow
from recpoint.format.manifest import Manifest
from recpoint.serving.sinks.opening import open_sink
from recpoint.serving.sinks.publisher import SinkPublisher
from recpoint.serving.sinks.reader import SinkReader
from recpoint.serving.sinks.verification import verify
from tests.catalog_builder import Table, build, new_run, publish
from tests.keyed_run import KEYS, KeyedTrainer


@pytest.mark.parametrize("kind", ["sqlite", "parquet"])
def test_keys_come_move_and_go(tmp_path: Path, kind: str) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    trainer = KeyedTrainer(run)
    url = f"{kind}:{tmp_path}/served"
    publisher = SinkPublisher(run.url, open_sink(url))
    deleted_rows = 0
    for _ in range(25):
        trainer.commit()
        if trainer.step % 5 == 3:
            continue  # two increments come at once
        committed = publisher.poll()
        assert committed is not None
        deleted_rows += committed.changes[0].rows_deleted
        with SinkReader(url).reading() as version:
            rows, present = version.lookup_present("users", KEYS)
            with pytest.raises(UnknownRow):
                version.lookup("users", KEYS)
        assert set(KEYS[present].tolist()) == set(trainer.rows)
        for key, row in zip(KEYS[present].tolist(), rows[present], strict=True):
            assert torch.equal(row, trainer.rows[key])
        with open_sink(url) as sink:
            comparison = verify(run, sink)
        assert comparison.differences == []
    assert deleted_rows > 10


def test_two_slots_of_a_key_are_not_published(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)

    def commit(step: int, keys: list[int], parent: Manifest | None = None) -> Manifest:
        table = Table(
            "users",
            torch.full((4, 3), float(step)),
            states=(torch.tensor(keys), torch.tensor([-1, 1, 1, 1])),
            state_names=(KEY, LAST_USE),
        )
        dirty = None if parent is None else [torch.arange(1, 4)]
        return publish(
            run, build(run, [table], step=step, generation=1, parent=parent, dirty=dirty)
        )

    with open_sink(f"sqlite:{tmp_path}/served.db") as sink:
        publisher = SinkPublisher(run.url, sink)
        full = commit(1, [0, 5, 6, 7])
        assert publisher.poll() is not None
        for parent in (full, None):
            commit(2 if parent else 3, [0, 5, 6, 5], parent)
            with pytest.raises(MalformedObject, match="key 5 in two rows"):
                publisher.poll()
        committed = sink.position().committed
        assert committed is not None and committed.version.checkpoint.step == 1
        commit(4, [0, 8, 6, 5])
        committed = publisher.poll()
        assert committed is not None and committed.version.checkpoint.step == 4
