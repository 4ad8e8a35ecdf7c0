"""A checkpoint whose manifest no reader would accept is refused before anything is staged."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recpoint import Checkpointer
from recpoint.catalog.persist import plan
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.errors import RecordTooLarge, SettingsError
from recpoint.format import records
from recpoint.trainer_plugin.policy import FULL
from recpoint.trainer_plugin.ranks.agreement import RecordNeeds
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.snapshot.record_bound import RecordBound
from tests.several_trainers import run_ranks
from tests.training_builder import Batches, Place, checkpointer, seed_everything, until


class Tables(nn.Module):
    """A model of nothing but tables."""

    def __init__(self, tables: int, rows: int, dim: int, *, sparse: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, dim, sparse=sparse) for _ in range(tables))


class OfTables:
    """A training of `Tables`; each batch changes the same rows of each table."""

    def __init__(
        self, tables: int, rows: int, dim: int, make: type[torch.optim.Optimizer] = torch.optim.SGD
    ) -> None:
        seed_everything(3)
        self.model = Tables(tables, rows, dim, sparse=make is torch.optim.SparseAdam)
        self.optimizers = [make(self.model.parameters(), lr=0.1)]  # type: ignore[call-arg]
        self.reader = Batches(3)
        self.schedulers: list[object] = []

    def batch(self, rows: int = 2) -> None:
        next(self.reader)
        self.optimizers[0].zero_grad()
        ids = torch.arange(rows)
        sum(table(ids).sum() for table in self.model.tables).backward()
        self.optimizers[0].step()


def checkpointing(training: Any, place: Place, **settings: Any) -> Checkpointer:
    return checkpointer(training, place, **{"interval_batches": 10**6, **settings})


def committed(place: Place) -> list[str]:
    """Kinds of the stored checkpoints, oldest first."""
    run = Run.open(open_store(place.run))
    return [run.manifest(name.step, name.generation).kind for name in run.manifest_names()]


def has_failed(ckpt: Checkpointer, times: int) -> bool:
    return ckpt.stats.failed == times


def staged(place: Place) -> int:
    return len(StagedRun(place.run_directory).staged_jobs())


class TestBuild:
    def test_fewer_bits_are_named_if_they_help_and_they_do(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plan, "CHUNK_BYTES", 1_000)
        monkeypatch.setattr(records, "MAX_RECORD_BYTES", 11_000)
        training = OfTables(1, 600, 16)  # 15 rows a chunk; of 8 bits 41
        with pytest.raises(SettingsError, match=r"a full of 5\d chunks.*Next: set bits=8, with"):
            checkpointing(training, place)
        assert not Path(place.run).exists()
        ckpt = checkpointing(training, place, bits=8)
        with place.agent(), ckpt:
            ckpt.restore()
            training.batch()
            ckpt.step()
        assert committed(place) == ["full"]

    def test_second_moments_of_8_bits_are_named_if_16_do_not_help(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plan, "CHUNK_BYTES", 1_000)
        training = OfTables(1, 600, 16, torch.optim.Adagrad)  # 7 rows a chunk; 10 or 12 with fewer
        for limit, state in ((20_500, 16), (18_000, 8)):
            monkeypatch.setattr(records, "MAX_RECORD_BYTES", limit)
            message = rf"a full of.*Next: set bits=Precision\(state={state}\), with"
            with pytest.raises(SettingsError, match=message):
                checkpointing(training, place)
        ckpt = checkpointing(training, place, state=8)
        with place.agent(), ckpt:
            ckpt.restore()
            training.batch()
            ckpt.step()
        assert committed(place) == ["full"]

    def test_many_tables_are_refused_and_bits_are_no_advice(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(records, "MAX_RECORD_BYTES", 14_000)
        with pytest.raises(SettingsError, match=r"a job file of about .*Next: train fewer tables"):
            checkpointing(OfTables(40, 3, 4), place)
        ckpt = checkpointing(OfTables(20, 3, 4), place)
        ckpt.close()


def test_row_states_of_the_first_step_count_and_nothing_is_staged(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 30_000)
    training = OfTables(40, 3, 4, torch.optim.SparseAdam)
    ckpt = checkpointing(training, place)
    with place.agent(), ckpt:
        ckpt.restore()
        training.batch()
        ckpt.step()
        assert any("a job file of about" in text for text in caplog.messages)  # at once
        for _ in range(3):
            training.batch()
            ckpt.step()
            assert not ckpt.checkpoint()
        assert ckpt.stats.failed == 3 and ckpt.stats.staged == 0 and staged(place) == 0
        assert ckpt.observe().failures["too_large"] == 3
        assert "no checkpoint will be until this changes" in (ckpt.stats.last_error or "")
        # Nothing else keeps a checkpoint from being taken, and no row was lost.
        monkeypatch.setattr(records, "MAX_RECORD_BYTES", 64 << 20)
        assert ckpt.checkpoint()
    assert committed(place) == ["full"]


def test_a_full_takes_the_place_of_an_increment_that_would_be_too_large(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The rows of an increment have ids, so fewer of them fit a chunk: 117 instead of 250.
    monkeypatch.setattr(plan, "CHUNK_BYTES", 2_000)
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 11_000)
    training = OfTables(1, 5_000, 2)
    ckpt = checkpointing(training, place)
    with place.agent(), ckpt:
        ckpt.restore()
        for rows in (2, 2, 5_000, 3):
            training.batch(rows)
            ckpt.step()
            until(lambda: ckpt.checkpoint())
            until(lambda: ckpt.stats.lag_batches == 0)
        assert ckpt.stats.failed == 0
    assert committed(place) == ["full", "increment", "full", "increment"]


def test_what_the_agent_rejects_as_too_large_is_not_staged_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 2_000)
    training = OfTables(1, 4_000, 16)
    weight = training.optimizers[0].param_groups[0]["params"][0].detach()
    weight[1::2] *= 1e6  # parameters of these rows need 32 bits, so each block has two chunks
    ckpt = checkpointing(training, place, bits=8, when_busy="wait")
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 20_000)
    with place.agent(), ckpt:
        ckpt.restore()
        for batch in range(4):
            training.batch()
            ckpt.step()
            assert ckpt.checkpoint() is (batch == 0)
            until(partial(has_failed, ckpt, batch + 1))
        assert ckpt.stats.staged == 1
        assert "the agent rejected as too large" in (ckpt.stats.last_error or "")
    assert committed(place) == []


class TestSeveralRanks:
    def test_the_joined_manifest_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1_000)
        bound = RecordBound(Ranks(), None)  # type: ignore[arg-type]  # it asks no cutter
        half = RecordNeeds(increment_bytes=100, full_bytes=450, tables_bytes=100, parts_bytes=0)
        assert bound.fitting(FULL, [half, half]) == FULL
        with pytest.raises(RecordTooLarge, match=r"a full with a manifest of about 1,450 bytes"):
            bound.fitting(FULL, [half, half, half])
        parts = half._replace(parts_bytes=200 << 20)
        with pytest.raises(RecordTooLarge, match=r"parts of about 419,430,400 bytes together"):
            bound.fitting(FULL, [parts, parts])

    def test_all_ranks_refuse_at_the_build_and_at_a_cut(self, tmp_path: Path) -> None:
        codes, logs = run_ranks("tests.record_ranks", 2, tmp_path / "ranks", "")
        assert codes == [0, 0], "\n".join(logs)
        for rank in range(2):
            told = json.loads((tmp_path / "ranks" / f"told-{rank}").read_text())
            assert "a manifest of about" in told["at the build"]
            assert told["at a cut"][:2] == [False, 1], told
            assert "a full with a manifest of about" in told["at a cut"][2]
        assert not list((tmp_path / "ranks").rglob("jobs/*.json"))
