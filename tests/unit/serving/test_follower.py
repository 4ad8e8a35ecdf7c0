"""A follower serves each checkpoint whole, bit for bit, and answers requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recpoint import Follower
from recpoint.catalog.run.leases import read_leases
from recpoint.catalog.store.contract import Clocks
from recpoint.errors import (
    IncompatibleModel,
    NotServing,
    SettingsError,
    UnknownRow,
    UnknownTable,
)
from tests.catalog_builder import build, publish
from tests.consolidation import chain_of, merge
from tests.followed_run import Trainer, require
from tests.no_threads import no_threads


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("quantized", [False, True])
def test_serves_each_checkpoint_bit_for_bit(
    trainer: Trainer, bits: int | None, quantized: bool
) -> None:
    trainer.tables[0].bits = bits
    follower = Follower(trainer.run.url, quantized=quantized)
    for step in range(1, 8):
        if step > 4 and bits:
            trainer.tables[0].bits = 8
        trainer.commit(step)
        if step == 3:
            continue  # the next poll applies two at once
        assert follower.poll()
        require(follower, trainer, step)
        assert not follower.poll()
    status = follower.status
    assert (status.fulls_applied, status.increments_applied) == (1, 6)
    assert (status.lag_seconds, status.lag_checkpoints, status.lag_batches) == (0.0, 0, 0)
    assert status.error is None and status.skipped == () and status.versions_applied == 6


def test_rows_that_cannot_be_quantized_come_and_go(trainer: Trainer) -> None:
    items = trainer.tables[0]
    items.bits = 8
    follower = Follower(trainer.run.url, quantized=True)
    items.values[4, 0] = torch.inf
    items.values[9, 1] = torch.nan
    for step in range(1, 7):
        trainer.commit(step)
        follower.poll()
        require(follower, trainer, step)
        items.values[step + 10, 0] = torch.nan


def test_a_table_that_changes_between_exact_and_quantized(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url, quantized=True)
    for step, bits in enumerate([None, 4, 4, None, 8, 2], start=1):
        trainer.tables[0].bits = bits
        trainer.commit(step, full=step in (1, 5))
        follower.poll()
        require(follower, trainer, step)


def test_an_increment_is_read_once_and_alone(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    trainer.commit(1)
    follower.poll()
    before = follower.status.bytes_read
    made = trainer.commit(2)
    follower.poll()
    assert follower.status.bytes_read - before == made.stored_bytes
    # The copy that was replaced has not read step 2: it takes the rows from the other copy.
    made = trainer.commit(3)
    before = follower.status.bytes_read
    follower.poll()
    assert follower.status.bytes_read - before == made.stored_bytes
    require(follower, trainer, 3)


def test_cumulative_increments_go_on_what_is_served(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    base = trainer.commit(1)
    follower.poll()
    changed: list[set[int]] = [set(), set()]
    for step in (2, 3, 4):
        for table, rows in zip(trainer.tables, changed, strict=True):
            ids = (torch.rand(table.rows, generator=trainer.random) < 0.2).nonzero().flatten()
            table.train(ids, trainer.random)
            rows.update(ids.tolist())
        checkpoint = build(
            trainer.run,
            trainer.tables,
            step=step,
            generation=1,
            parent=base,
            dirty=[torch.tensor(sorted(rows)) for rows in changed],
            state={"model": {"tensors": {"top.weight": torch.full((2, 2), float(step))}}},
        )
        made = publish(trainer.run, checkpoint)
        trainer.at[step] = [table.values.clone() for table in trainer.tables]
        before = follower.status.bytes_read
        assert follower.poll()
        assert follower.status.bytes_read - before == made.stored_bytes
        require(follower, trainer, step)
    assert follower.status.fulls_applied == 1


def test_an_increment_on_the_base_that_lacks_rows_brings_the_base_again(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    base = trainer.commit(1)
    first = [table.clone() for table in trainer.tables]
    follower.poll()
    trainer.commit(2)
    follower.poll()
    # Step 3 follows step 1: it does not hold the rows that step 2 changed.
    trainer.tables = first
    trainer.commit(3, parent=base)
    assert follower.poll()
    require(follower, trainer, 3)
    assert follower.status.fulls_applied == 2


def test_catches_up_from_a_newer_full_when_that_is_less(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    trainer.commit(1)
    follower.poll()
    for step in range(2, 9):
        trainer.commit(step)
    before = follower.status.bytes_read
    merge(trainer.run, trainer.made[-1])
    (merged,) = chain_of(trainer.run, trainer.made[-1])
    assert follower.poll()
    require(follower, trainer, 8)
    assert follower.status.bytes_read - before <= merged.stored_bytes
    assert follower.status.fulls_applied == 2
    trainer.commit(9)
    assert follower.poll()
    require(follower, trainer, 9)
    assert follower.status.fulls_applied == 2


def test_goes_on_although_its_base_is_gone(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    for step in (1, 2, 3):
        trainer.commit(step)
    follower.poll()
    trainer.commit(4)
    merge(trainer.run, trainer.made[-1])
    for manifest in trainer.made:
        trainer.run.store.delete(f"manifests/{manifest.step:012d}-00000001.json")
    assert follower.poll()
    require(follower, trainer, 4)


def test_a_trainer_that_went_back_takes_the_follower_along(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url)
    for step in (1, 2, 3):
        trainer.commit(step)
    follower.poll()
    trainer.run.claim(trainer.made[0].ref)
    assert follower.poll()
    require(follower, trainer, 1)
    trainer.generation = 2
    trainer.commit(2, parent=trainer.made[0])
    assert follower.poll()
    require(follower, trainer, 2)


def test_only_the_tables_that_are_named(trainer: Trainer) -> None:
    trainer.commit(1)
    follower = Follower(trainer.run.url, tables=["users"])
    follower.poll()
    trainer.commit(2)
    follower.poll()
    with follower.reading() as version:
        assert list(version.tables) == ["users"]
        assert torch.equal(version.lookup("users", torch.arange(20)), trainer.at[2][1])
    other = Follower(trainer.run.url, tables=["nobody"])
    with pytest.raises(IncompatibleModel, match="nobody"):
        other.poll()


def test_a_reader_keeps_its_version_and_updates_wait(trainer: Trainer) -> None:
    follower = Follower(trainer.run.url, reader_wait_seconds=0.0)
    trainer.commit(1)
    follower.poll()
    with follower.reading() as old:
        before = old.lookup("items", torch.arange(40)).clone()
        trainer.commit(2)
        assert follower.poll()
        require(follower, trainer, 2)
        trainer.commit(3)
        with pytest.raises(NotServing, match=r"1 request\(s\)"):
            follower.poll()
        assert torch.equal(old.lookup("items", torch.arange(40)), before)
        assert old.step == 1
    assert follower.poll()
    require(follower, trainer, 3)


def test_the_lease_is_there_while_reading_and_gone_after(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.commit(1)
    follower = Follower(trainer.run.url)
    seen: list[str] = []
    get = follower._store.get

    def watched(key: str, *, max_bytes: int) -> bytes:
        seen.extend(held.who for held in read_leases(trainer.run, Clocks.read()))
        return get(key, max_bytes=max_bytes)

    monkeypatch.setattr(follower._store, "get", watched)
    follower.poll()
    assert any(who.startswith("follow by process") for who in seen)
    assert read_leases(trainer.run, Clocks.read()) == []


@pytest.mark.parametrize("quantized", [False, True])
def test_ids_that_are_no_integers_are_refused(trainer: Trainer, quantized: bool) -> None:
    trainer.tables[0].bits = 4
    trainer.commit(1)
    follower = Follower(trainer.run.url, quantized=quantized)
    follower.poll()
    with follower.reading() as version, pytest.raises((TypeError, RuntimeError), match="(?i)int"):
        version.lookup(trainer.tables[0].name, torch.tensor([0.5]))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("row", [-1, 20])
def test_a_row_that_is_not_there_is_named(trainer: Trainer, quantized: bool, row: int) -> None:
    trainer.commit(7)
    follower = Follower(trainer.run.url, quantized=quantized)
    follower.poll()
    assert trainer.tables[1].rows == 20
    with follower.reading() as version, pytest.raises(IndexError) as refused:
        version.lookup("users", torch.tensor([[3, row], [0, 19]]))
    assert isinstance(refused.value, UnknownRow)
    assert str(refused.value).startswith(
        f"table 'users': found row {row} among 4 ids; expected rows 0 … 19, of 20 at step 7. Next: "
    )


def test_a_table_that_is_not_served_is_named(trainer: Trainer) -> None:
    trainer.commit(7)
    follower = Follower(trainer.run.url, tables=["users"])
    follower.poll()
    with follower.reading() as version, pytest.raises(KeyError) as refused:
        version.lookup("items", torch.tensor([0]))
    assert isinstance(refused.value, UnknownTable)
    assert str(refused.value).startswith(
        "table 'items': found no such table at step 7; expected one of 'users'. Next: "
    )


def test_settings_are_checked(tmp_path: Path) -> None:
    url = str(tmp_path)
    settings: list[dict[str, Any]] = [{"channel": "best"}, {"poll_seconds": 0.0}, {"threads": 0}]
    for wrong in settings:
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            Follower(url, **wrong)
    with pytest.raises(SettingsError, match="tables"):
        Follower(url, model=torch.nn.Embedding(3, 3), tables=["weight"])


def test_a_follower_whose_thread_could_not_be_started_follows_when_it_is_started_again(
    trainer: Trainer,
) -> None:
    trainer.commit(1)
    follower = Follower(trainer.run.url)
    with no_threads(), pytest.raises(RuntimeError, match="start new thread"):
        follower.start()
    follower.stop()
    with follower:
        assert follower.wait(seconds=60)
    require(follower, trainer, 1)
