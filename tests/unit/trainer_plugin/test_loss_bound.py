"""Checkpoints whose widths follow from a measured loss: taken, restored, and their loss again."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from recpoint import (
    Checkpointer,
    Lookahead,
    Loss,
    Options,
    Precision,
    ResumableLoader,
    Staging,
    errors,
)
from recpoint.catalog.check.validate import validate
from recpoint.catalog.persist import row_widths
from recpoint.catalog.persist.residuals import residuals_to
from recpoint.catalog.persist.row_widths import importance
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.cli import inspect
from recpoint.format.naming import ManifestName
from recpoint.kernels.allocation import WIDTHS, allocate
from recpoint.kernels.quantize import dequantize, quantize
from recpoint.trainer_plugin.loss.meter import LossMeter
from recpoint.trainer_plugin.loss.rounded_rows import rounded_rows
from recpoint.trainer_plugin.settings import as_precision
from recpoint.trainer_plugin.snapshot.codes import TableQuantizer
from tests.mixed_table import FITTED, LEVELED
from tests.training_builder import Place, seed_everything

ROWS, DIM, BATCH = 1_500, 16, 64
INCREASE = 1e-3

Batch = tuple[Tensor, Tensor, Tensor]


class Ranker(nn.Module):
    """Two tables, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, DIM)
        self.items = nn.EmbeddingBag(ROWS, DIM, mode="mean")
        self.norm = nn.BatchNorm1d(2 * DIM)
        self.layers = nn.Sequential(nn.Linear(2 * DIM, 8), nn.ReLU(), nn.Dropout(0.1))
        self.top = nn.Linear(8, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        features = self.norm(torch.cat([self.users(users), self.items(items)], dim=1))
        scores: Tensor = self.top(self.layers(features)).squeeze(1)
        return scores


class Clicks:
    """An endless reader of clicks: few users and items come often, most come seldom."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        chance = torch.Generator().manual_seed(self.position)
        self.position += 1
        users = (ROWS * torch.rand(BATCH, generator=chance) ** 4).long()
        items = (ROWS * torch.rand(BATCH, 3, generator=chance) ** 4).long()
        odds = ((users % 7 < 3).float() + (items % 5 < 2).float().sum(1) - 1.5) * 1.5
        clicks = (torch.rand(BATCH, generator=chance) < odds.sigmoid()).float()
        return users, items, clicks

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    users, items, clicks = batch
    return functional.binary_cross_entropy_with_logits(model(users, items), clicks)


def built(place: Place, bits: Any, **settings: Any) -> tuple[Ranker, Checkpointer]:
    seed_everything(1)
    model = Ranker()
    optimizers = settings.pop("optimizers", None) or [
        torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.01)
    ]
    if callable(optimizers):
        optimizers = optimizers(model)
    options = {"handle_sigterm": False, "announce": False, **settings.pop("options", {})}
    ckpt = Checkpointer(
        settings.pop("wrapped", lambda model: model)(model),
        optimizers,
        run=place.run,
        reader=Clicks(),
        bits=bits,
        staging=Staging(directory=place.staging, jobs=3),
        options=Options(**options),
        **{"interval_batches": 100, **settings},
    )
    return model, ckpt


def by_loss(**settings: Any) -> Loss:
    return Loss(**{"increase": INCREASE, "of": loss_of, "share": 0.5, **settings})


def train(model: Ranker, ckpt: Checkpointer, total: int) -> None:
    (optimizer,) = ckpt._training.optimizers
    for batch in ckpt.batches(total=total):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def meter(ckpt: Checkpointer) -> LossMeter:
    assert ckpt._parts.loss is not None
    return ckpt._parts.loss


def count_seconds(ckpt: Checkpointer) -> None:
    """Have each look at the clock take a second, so that no real clock decides in a test."""
    seconds = itertools.count()
    meter(ckpt)._pace.clock = lambda: float(next(seconds))


def held_out(model: Ranker) -> float:
    """Return the mean loss of batches that no training sees, in evaluation."""
    clicks = Clicks()
    clicks.position = 1 << 20
    model.eval()
    with torch.no_grad():
        losses = [float(loss_of(model, next(clicks))) for _ in range(60)]
    model.train()
    return sum(losses) / len(losses)


@pytest.mark.parametrize("quantizes_here", (False, True), ids=("host", "as on a GPU"))
def test_rows_get_the_widths_that_keep_the_loss_and_a_restart_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch, quantizes_here: bool
) -> None:
    """On a GPU, `place="auto"` stages codes of other tables; of one with an allocation, values."""
    monkeypatch.setattr(row_widths, "_CHUNK_COST_BYTES", 0)
    if quantizes_here:
        monkeypatch.setattr(TableQuantizer, "may", lambda self, table, bits: True)
    model, ckpt = built(place, by_loss(), interval_batches=90)
    with place.agent(), ckpt:
        count_seconds(ckpt)
        ckpt.restore()
        train(model, ckpt, 90)
        figures = ckpt.stats.loss
        assert figures is not None and figures.error is None
        price = figures.price
        assert price is not None and figures.shown is not None
        assert figures.shown[1] <= INCREASE
        assert figures.batches > 30 and 0 < figures.measured_share <= 0.5
        assert sum(figures.widths.values()) == pytest.approx(1)
        state = meter(ckpt).state_dict()
        lives = meter(ckpt)._live()
        exact = {live.key: live.weight.detach().clone() for live in lives}
        ids = torch.arange(ROWS)
        expected = {
            live.key: rounded_rows(live, ids, meter(ckpt)._moment(live), price, FITTED).values
            for live in lives
        }
        loss = held_out(model)
    run = Run.open(open_store(place.run))
    (name,) = run.manifest_names()
    bits = Counter(getattr(chunk, "bits", None) for chunk in run.manifest(*name).chunks)
    assert len(bits.keys() & {2, 3, 4, 5, 6, 8}) >= 3  # a mix of widths
    stored = inspect.checkpoint(run.manifest(*name))["loss"]
    assert (stored["increase"], stored["price"]) == (INCREASE, price)
    assert (stored["low"], stored["high"]) == figures.shown
    assert stored["batches"] == figures.batches

    restored, again = built(place, by_loss())
    with again:
        report = again.restore()
        assert report is not None and report.restored.step == 90
        assert meter(again).state_dict() == state
        for key, table in (("users", restored.users), ("items", restored.items)):
            assert not torch.equal(table.weight, exact[key])
            assert torch.equal(table.weight, expected[key])  # what was measured is what is stored
        assert abs(held_out(restored) / loss - 1) < 3 * INCREASE
        again.close(final=False)


def test_increments_hold_residuals_that_cost_less_than_was_measured(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The widths are those of the residuals at the price that was measured on whole rows."""
    monkeypatch.setattr(row_widths, "_CHUNK_COST_BYTES", 0)
    model, ckpt = built(place, by_loss(), interval_batches=90)
    weights = {"users": model.users.weight, "items": model.items.weight}
    with place.agent(), ckpt:
        count_seconds(ckpt)
        ckpt.restore()
        train(model, ckpt, 90)
        rows_of_full = {name: weight.detach().clone() for name, weight in weights.items()}
        train(model, ckpt, 180)
        price = meter(ckpt)._search.price
        assert price is not None
        lives = {live.spec.name: live for live in meter(ckpt)._live()}
        moments = {name: meter(ckpt)._moment(live) for name, live in lives.items()}
    run = Run.open(open_store(place.run))
    full, increment = (run.manifest(*name) for name in sorted(run.manifest_names()))
    assert (full.step, increment.step) == (90, 180)
    assert {chunk.scheme for chunk in increment.chunks if chunk.table is not None} == {"residual"}
    assert (full.state_bits, increment.state_bits) == (8, 8)
    for step in (90, 180):
        validated = validate(run, ManifestName(step, full.generation), level="full")
        assert (validated.result, validated.findings) == ("passed", ())
    of_full, of_increment = MemoryTarget(), MemoryTarget()
    restore(run, of_full, Selection(step=90))
    restore(run, of_increment, Selection(step=180))
    for name, live in lives.items():
        rows = live.weight.detach()
        changed_ids = (rows != rows_of_full[name]).any(dim=1).nonzero().flatten()
        base, restored = (
            target.tables[name].values[changed_ids] for target in (of_full, of_increment)
        )
        moment = moments[name]
        assert moment is not None
        states = live.row_states[moment.state][changed_ids]
        residuals = residuals_to(base, rows[changed_ids])
        weight = importance(states, moment.scale, moment.initial)
        widths = allocate(residuals, weight, price)
        expected = rows[changed_ids].clone()
        for bits in WIDTHS:
            chosen = widths == bits
            coded = quantize(residuals[chosen], bits, LEVELED, half_parameters=True)
            decoded = dequantize(coded.codes, coded.scale, coded.offset)
            expected[chosen] = base[chosen] + decoded
        assert torch.equal(restored, expected)
        whole = rounded_rows(live, changed_ids, moment, price, FITTED)
        assert whole.damage is not None
        damage = weight * (restored - rows[changed_ids]).square().sum(dim=1)
        assert float(damage.sum()) < float(whole.damage.sum())
        assert float(widths.float().mean()) < float(whole.widths.float().mean()) - 0.5


def test_a_loss_has_residuals_and_small_states_unless_told_otherwise() -> None:
    by_default = Precision(bits=by_loss())
    assert (by_default.residual, by_default.state) == (True, 8)
    assert as_precision(by_loss()).residual
    told = Precision(bits=by_loss(), residual=False, state="lossless")
    assert (told.residual, told.state) == (False, "lossless")
    assert (Precision().residual, Precision(bits=4).state) == (False, "lossless")


def test_training_is_the_same_whether_it_is_measured_or_not(place: Place) -> None:
    states = []
    for number, bits in enumerate(("lossless", by_loss())):
        model, ckpt = built(Place(f"{place.run}-{number}", place.staging), bits)
        with ckpt:
            if number:
                count_seconds(ckpt)
            ckpt.restore()
            train(model, ckpt, 40)
            marks = [tracker.marked().bitmap for tracker in ckpt._parts.trackers.values()]
            states.append([*model.state_dict().values(), torch.get_rng_state(), *marks])
            ckpt.close(final=False)
    assert all(torch.equal(plain, measured) for plain, measured in zip(*states, strict=True))


def test_measurements_take_their_share_of_the_time(place: Place) -> None:
    _, ckpt = built(place, by_loss(share=0.01))
    own, seconds = meter(ckpt), [0.0]
    own._pace.clock = lambda: seconds[0]
    measured = []

    def of(model: nn.Module, batch: Batch) -> Tensor:
        seconds[0] += 1.0
        measured.append(seconds[0])
        return loss_of(model, batch)

    own._setting = by_loss(share=0.01, of=of)
    batch = next(Clicks())
    for _ in range(2_000):
        own.look(batch)
        seconds[0] += 1.0
        assert own._pace._spent_seconds <= max(3.0, 0.01 * seconds[0])
    # The first batch at once; then three seconds of each three hundred.
    assert measured[:3] == [1.0, 2.0, 3.0] and len(measured) == 3 * 6
    assert own.figures.measured_share == pytest.approx(0.01, rel=0.15)


def test_an_error_at_the_first_batch_ends_training(place: Place) -> None:
    model, ckpt = built(place, by_loss(of=lambda model, batch: model(batch.users)))
    with ckpt:
        ckpt.restore()
        with pytest.raises(AttributeError, match="users"):
            train(model, ckpt, 3)
        ckpt.close(final=False)


def test_rows_get_eight_bits_after_a_later_error(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[None] = []

    def of(model: nn.Module, batch: Batch) -> Tensor:
        calls.append(None)
        if len(calls) > 3 * 60:
            raise MemoryError("no memory")
        return loss_of(model, batch)

    model, ckpt = built(place, by_loss(of=of), interval_batches=1_000)
    with ckpt:
        count_seconds(ckpt)
        ckpt.restore()
        train(model, ckpt, 100)
        assert meter(ckpt)._search.price is not None
        with caplog.at_level(logging.WARNING, "recpoint"):
            train(model, ckpt, 160)
        assert "MemoryError: no memory" in caplog.text
        figures = ckpt.stats.loss
        assert figures is not None and figures.error == "MemoryError: no memory"
        assert figures.price is None
        lives = meter(ckpt)._live()
        assert [ckpt._parts.cutter.parts.whole(live).allocation for live in lives] == [None, None]
        ckpt.close(final=False)


def test_rows_are_stored_exactly_if_eight_bits_cost_too_much(place: Place) -> None:
    live_rows: list[Tensor] = []

    def of(model: nn.Module, batch: Batch) -> Tensor:
        """Return a loss that an error in a row raises a lot; the first of three passes has none."""
        assert isinstance(model, Ranker)
        rows = model.users(batch[0])
        if len(live_rows) % 3 == 0:
            live_rows.append(rows)
        else:
            live_rows.append(live_rows[-1])
        penalty: Tensor = (rows - live_rows[-1]).square().mean()
        return loss_of(model, batch) + 1e3 * penalty

    model, ckpt = built(place, by_loss(of=of), interval_batches=80)
    with place.agent(), ckpt:
        count_seconds(ckpt)
        ckpt.restore()
        train(model, ckpt, 30)
        assert ckpt.stats.loss is not None and ckpt.stats.loss.is_lossless
        assert ckpt.checkpoint()
        exact = model.users.weight.detach().clone()
    restored, again = built(place, by_loss())
    with again:
        again.restore()
        assert torch.equal(restored.users.weight, exact)
        again.close(final=False)


def test_loops_with_accumulation_autocast_evaluation_and_breaks_are_measured(place: Place) -> None:
    def of(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, batch)

    model, ckpt = built(place, by_loss(of=of), interval_batches=1_000)
    (optimizer,) = ckpt._training.optimizers
    with ckpt:
        count_seconds(ckpt)
        ckpt.restore()
        for _ in range(2):
            for number, batch in enumerate(ckpt.batches(total=100)):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(model, batch)
                loss.backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                if number == 5:
                    held_out(model)
                if number == 11:
                    break
        figures = ckpt.stats.loss
        assert figures is not None and figures.batches >= 8 and figures.error is None
        ckpt.close(final=False)


def test_batches_that_a_lookahead_has_read_are_measured(place: Place) -> None:
    seed_everything(1)
    model = Ranker()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    users, items, clicks = zip(*itertools.islice(Clicks(), 24), strict=True)
    samples = TensorDataset(torch.cat(users), torch.cat(items), torch.cat(clicks))
    ckpt = Checkpointer(
        model,
        optimizer,
        run=place.run,
        reader=Lookahead(
            ResumableLoader(DataLoader(samples, batch_size=BATCH)),
            ids=lambda batch: {"users": batch[0], "items": batch[1]},
            window=5,
        ),
        interval_batches=10,
        bits=Precision(bits=by_loss(), tables={"items": 8}),
        staging=Staging(directory=place.staging, jobs=3),
        options=Options(handle_sigterm=False, announce=False),
    )
    with place.agent(), ckpt:
        count_seconds(ckpt)
        ckpt.restore()
        for batch in ckpt.batches(epochs=1):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        assert ckpt.stats.failed == 0
        figures = ckpt.stats.loss
        assert figures is not None and figures.batches >= 8
    run = Run.open(open_store(place.run))
    assert [name.step for name in run.manifest_names()] == [10, 20, 24]


def refused(place: Place, bits: Any, **settings: Any) -> str:
    with pytest.raises(errors.SettingsError) as caught:
        built(place, bits, **settings)
    return str(caught.value)


def test_what_cannot_be_measured_is_refused_by_name(place: Place) -> None:
    def max_norm(model: Ranker) -> Ranker:
        model.items.max_norm = 1.0
        return model

    def on_meta(model: Ranker) -> Ranker:
        model.top.register_buffer("bias_of_users", torch.zeros(2, device="meta"))
        return model

    text = refused(place, by_loss(), wrapped=max_norm)
    assert "'items'" in text and "max_norm" in text and "'lossless'" in text
    assert "'top.bias_of_users' on meta" in refused(place, by_loss(), wrapped=on_meta)
    text = refused(
        place, by_loss(), optimizers=lambda model: [torch.optim.Adagrad(model.items.parameters())]
    )
    assert "'users'" in text and "is in no optimizer" in text


def test_tables_of_other_optimizers_may_be_named(place: Place) -> None:
    def two(model: Ranker) -> list[torch.optim.Optimizer]:
        dense = [p for name, p in model.named_parameters() if not name.startswith("items")]
        return [
            torch.optim.Adagrad(dense),
            torch.optim.SGD(model.items.parameters(), lr=0.1),
        ]

    for bits in ("lossless", 8):
        precision = Precision(bits=by_loss(), tables={"items": bits})
        _, ckpt = built(place, precision, optimizers=two)
        own = meter(ckpt)
        assert own._priced == {"users"} and own._rounded == {"users", "items"} - (
            {"items"} if bits == "lossless" else set()
        )
        ckpt.close(final=False)


@pytest.mark.parametrize(
    ("settings", "name"),
    (
        ({"tables": {"users": 4}}, "Precision.tables\\['users'\\]"),
        ({"tables": {"users": "auto"}}, "Precision.tables"),
        ({"tables": {"users": Loss(increase=1e-4, of=loss_of)}}, "Precision.tables"),
        ({"quantizer": "refit"}, "Precision.quantizer"),
        ({"place": "device"}, "Precision.place"),
    ),
)
def test_settings_that_a_loss_excludes_are_refused(settings: Any, name: str) -> None:
    with pytest.raises(errors.SettingsError, match=name):
        Precision(bits=by_loss(), **settings)


@pytest.mark.parametrize(
    "settings", ({"increase": 0}, {"increase": 0.5}, {"of": 3}, {"share": 0}, {"share": 0.6})
)
def test_values_that_a_loss_cannot_have_are_refused(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(errors.SettingsError, match=f"Loss.{name}"):
        by_loss(**settings)


def test_tables_that_the_loss_never_looks_up_have_no_price(place: Place) -> None:
    def of(model: nn.Module, batch: Batch) -> Tensor:
        users, _, clicks = batch
        assert isinstance(model, Ranker)
        return functional.binary_cross_entropy_with_logits(model.users(users).sum(dim=1), clicks)

    model, ckpt = built(place, by_loss(of=of))
    with ckpt:
        count_seconds(ckpt)
        ckpt.restore()
        train(model, ckpt, 4)
        assert ckpt.stats.loss is not None and ckpt.stats.loss.error is None
        assert ckpt.stats.loss.batches > 1
        meter(ckpt)._search.price = 1.0
        has_price = {live.key: meter(ckpt).allocation(live) for live in meter(ckpt)._live()}
        assert has_price["users"] is not None and has_price["items"] is None
        ckpt.close(final=False)


@pytest.mark.parametrize("price", [None, 2.0**-20])
def test_rows_and_states_that_are_not_finite_predict_no_cost(
    place: Place, price: float | None
) -> None:
    model, ckpt = built(place, by_loss())
    (optimizer,) = ckpt._training.optimizers
    with ckpt:
        count_seconds(ckpt)
        ckpt.restore()
        train(model, ckpt, 2)
        sums = optimizer.state[model.users.weight]["sum"]
        sums[0], sums[1] = torch.inf, torch.nan
        with torch.no_grad():
            model.users.weight[2] = torch.nan
        predicted = meter(ckpt)._predicted(price)
        assert 0.0 < predicted.damage < float("inf")
        ckpt.close(final=False)
