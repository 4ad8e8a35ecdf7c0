"""A sink serves keyed tables by key: keys that move, leave and come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recpoint.errors import UnknownRow
from recpoint.serving.sinks.opening import open_sink
from recpoint.serving.sinks.publisher import SinkPublisher
from recpoint.serving.sinks.reader import SinkReader
from recpoint.serving.sinks.verification import verify
from tests.catalog_builder import new_run
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
