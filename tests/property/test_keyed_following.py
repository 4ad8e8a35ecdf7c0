"""Whatever happens to a run, a follower serves each key's row of one checkpoint, or zeros."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recpoint import Follower
from recpoint.errors import RecpointError
from recpoint.format.naming import ManifestName
from tests.catalog_builder import new_run
from tests.consolidation import merge
from tests.example_counts import examples
from tests.fault.retention_lives import retain_once
from tests.keyed_run import KEYS, KeyedTrainer

OPERATIONS = st.lists(
    st.sampled_from(
        ["increment"] * 4
        + ["cumulative"] * 2
        + ["full", "merge", "retain", "go back", "grow", "pin", "unpin"]
        + ["poll"] * 6
    ),
    min_size=4,
    max_size=22,
)


def require(follower: Follower, trainer: KeyedTrainer) -> None:
    """Require that each key has the row of the checkpoint that is served."""
    if follower.version is None:
        return
    with follower.reading() as version:
        name = ManifestName(version.checkpoint.step, version.checkpoint.generation)
        assert int(version.dense["step"]) == version.step
        rows = trainer.rows_at[name]
        expected = torch.stack([rows.get(key, torch.zeros(3)) for key in KEYS.tolist()])
        assert torch.equal(version.lookup("users", KEYS), expected), name


@settings(max_examples=examples(12), deadline=None)
@given(
    operations=OPERATIONS,
    bits=st.sampled_from([None, 4]),
    quantized=st.booleans(),
    pinned=st.integers(1, 6),
)
def test_serves_the_rows_that_keys_have(
    operations: list[str], bits: int | None, quantized: bool, pinned: int
) -> None:
    with tempfile.TemporaryDirectory(prefix="recpoint-keys-") as folder:
        run = new_run(Path(folder) / "run")
        run.claim(None)
        trainer = KeyedTrainer(run, bits=bits)
        follower = Follower(run.url, quantized=quantized)
        for operation in ["increment", *operations, "unpin", "increment", "poll"]:
            match operation:
                case "increment" | "cumulative" | "full":
                    trainer.commit(operation)
                case "grow":
                    trainer.grow(3)
                case "go back":
                    trainer.go_back()
                case "retain":
                    retain_once(run, last=2)
                case "pin":
                    follower.pin(pinned)
                case "unpin":
                    follower.unpin()
                case "merge":
                    if trainer.newest is not None and trainer.newest.parent is not None:
                        try:
                            merge(run, trainer.newest, None)
                        except RecpointError:
                            pass  # too short a chain, or its links are gone
                case "poll":
                    try:
                        follower.poll()
                    except RecpointError:
                        assert follower.status.pinned is not None, "only a pin may lead nowhere"
                    require(follower, trainer)
        require(follower, trainer)
        assert follower.version == trainer.step
