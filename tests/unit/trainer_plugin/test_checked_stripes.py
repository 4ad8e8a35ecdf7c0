"""Checkpoints of rows on servers with parity: each is proven by its stripes, or not taken."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from recpoint.catalog.check.validate import validate
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.cli.application import app
from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server.home import ServedHome
from recpoint.format.manifest import CheckedStripes
from tests.protected_servers import flip_bit, protected
from tests.training_builder import Place
from tests.unit.trainer_plugin.test_cached_checkpoints import SMALL, Both, checkpointing


def run_of(place: Place) -> Run:
    return Run.open(open_store(place.run))


def test_a_validation_says_what_the_stripes_proved(place: Place) -> None:
    with protected(5, Parity(data=4)) as (_, home):
        both = Both("adagrad", SMALL, home)
        with checkpointing(both, place) as ckpt:
            both.train(ckpt, 12)
    run = run_of(place)
    stripes = [run.manifest(*name).stripes for name in run.live_line()]
    assert all(one is not None and one.fits and not one.unknown for one in stripes)
    found = validate(run, run.live_line()[0], level="full")
    assert found.passed and found.stripes is not None
    assert found.stripes == CheckedStripes.joined(stripes)
    said = CliRunner().invoke(app, ["validate", place.run])
    assert said.exit_code == 0
    assert f"{found.stripes.fits} on embedding servers fit their parity" in said.stdout


def a_row_at_home(home: ServedHome) -> int:
    ids = torch.arange(203)
    (form,) = [one.form for one in home._tables.all() if one.form.table == "users"]
    records = torch.zeros(203, form.record_bytes, dtype=torch.uint8)
    return int(home.fetch("users", ids, records).nonzero()[-1])


def test_a_flipped_bit_on_a_server_is_in_no_checkpoint(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with protected(5, Parity(data=4)) as (servers, home):
        both = Both("adagrad", SMALL, home)
        with checkpointing(both, place, interval_batches=20, on_error="continue") as ckpt:
            both.train(ckpt, 15)
            row = a_row_at_home(home)
            flip_bit(servers, home, "users", row, byte=3)
            both.train(ckpt, 5)
    assert run_of(place).live_line() == []
    assert f"stripe {row // 4} of table 'users', on embedding servers " in caplog.text
    assert "do not fit their parity" in caplog.text
