"""Settings that cannot work are refused when they are given, by name."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

import recpoint
from recpoint import (
    Checkpointer,
    Consecutive,
    Continuous,
    ExpectedFailures,
    Intermittent,
    OneShot,
    Options,
    Precision,
    Staging,
    Timeouts,
)
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import SettingsError
from recpoint.format.manifest import MAX_CHAIN_LENGTH
from recpoint.trainer_plugin.policy import as_policy
from recpoint.trainer_plugin.settings import Settings, as_precision, as_staging
from tests.polling import until
from tests.training_builder import (
    Batches,
    Place,
    Recommender,
    checkpointer,
    simple_training,
    train,
)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("interval_batches", 0),
        ("interval_batches", -1),
        ("interval_batches", True),
        ("interval_batches", 2.0),
        ("interval_seconds", 0),
        ("interval_seconds", float("nan")),
        ("interval_seconds", float("inf")),
        ("interval_seconds", "automatic"),
        ("interval_seconds", True),
        ("interval_seconds", np.bool_(True)),
        ("interval_seconds", np.float32("nan")),
        ("interval_seconds", 10**400),
        ("interval_seconds", 1j),
        ("interval_batches", np.bool_(True)),
        ("interval_batches", np.float64(2.0)),
        ("interval_batches", np.int64(0)),
        ("interval_batches", "auto"),
        ("bits", 7),
        ("bits", "Auto"),
        ("bits", "4"),
        ("bits", 1),
        ("bits", True),
        ("bits", 4.0),
        ("bits", {"users": 4}),
        ("policy", "incremental"),
        ("policy", None),
        ("policy", Consecutive),
        ("failures", 0.1),
        ("failures", {"per_node_hour": 0.1}),
        ("staging", 5),
        ("staging", "a\0b"),
        ("timeouts", 60.0),
        ("timeouts", None),
        ("options", {"on_error": "raise"}),
        ("options", None),
    ],
)
def test_a_parameter_is_refused_by_name(setting: str, value: Any, place: Place) -> None:
    model = Recommender()
    interval: dict[str, Any] = {"interval_batches": None} if setting == "interval_seconds" else {}
    with pytest.raises(SettingsError) as caught:
        build(place, model, SGD(model.parameters(), lr=0.1), **interval, **{setting: value})
    assert caught.value.subject == setting
    assert caught.value.found == f"{value!r:.200}" and caught.value.expected
    assert "recpoint.Checkpointer" in caught.value.next_step


def test_the_least_number_of_seconds_is_said(place: Place) -> None:
    model = Recommender()
    interval: dict[str, Any] = {"interval_batches": None, "interval_seconds": "5"}
    with pytest.raises(SettingsError, match="a finite number of seconds, more than 0, or"):
        build(place, model, SGD(model.parameters(), lr=0.1), **interval)


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        (Precision, "bits", 7),
        (Precision, "bits", True),
        (Precision, "small_table_values", -1),
        (Precision, "small_table_values", True),
        (Precision, "tables", {"users": 7}),
        (Precision, "tables", {"users": np.int64(7)}),
        (Precision, "tables", {"users": np.bool_(True)}),
        (Precision, "tables", ["users"]),
        (Precision, "tables", {"users": "automatic"}),
        (Precision, "state", 4),
        (Precision, "state", 16.0),
        (Precision, "state", "16"),
        (Precision, "quantizer", "kmeans"),
        (Precision, "quantizer", None),
        (Precision, "quantizer", {"users": "greedy"}),
        (Precision, "place", "gpu"),
        (Precision, "place", True),
        (Consecutive, "full_every", 0),
        (Consecutive, "full_every", None),
        (Consecutive, "full_every", np.uint64(2**64 - 1)),
        (Continuous, "full_every", MAX_CHAIN_LENGTH + 1),
        (Continuous, "full_every", None),
        (OneShot, "full_every", 2.0),
        (Intermittent, "full_every", True),
        (Staging, "directory", 5),
        (Staging, "directory", "a\0b"),
        (Staging, "jobs", 0),
        (Staging, "jobs", 1001),
        (Staging, "when_busy", "block"),
        (Staging, "busy_wait_seconds", float("inf")),
        (Timeouts, "close_seconds", -1),
        (Timeouts, "drain_seconds", None),
        (Timeouts, "ranks_seconds", 0),
        (Options, "on_error", "ignore"),
        (Options, "on_superseded", "stop"),
        (Options, "handle_sigterm", "no"),
        (Options, "row_local_optimizers", ("SGD",)),
        (Options, "row_local_optimizers", SGD),
        (Options, "verify_unmarked_rows", -1),
        (Options, "verify_unmarked_rows", True),
        (Options, "verify_unmarked_rows", 0.5),
    ],
)
def test_a_field_is_refused_by_name(kind: type, setting: str, value: Any) -> None:
    with pytest.raises(SettingsError) as caught:
        kind(**{setting: value})
    error = caught.value
    assert error.subject.startswith(f"{kind.__name__}.{setting}")
    assert error.found and error.expected and f"recpoint.{kind.__name__}" in error.next_step
    assert getattr(recpoint, kind.__name__) is kind


@pytest.mark.parametrize(
    "kind",
    [Precision, Consecutive, Continuous, OneShot, Intermittent, Staging, Timeouts, Options],
)
def test_settings_are_frozen_and_told_field_by_field(kind: type) -> None:
    made = kind()
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, None)
        assert f"\n        {field.name}: " in (inspect.getdoc(kind) or "").replace("\n", "\n    ")
    with pytest.raises(TypeError):
        kind(1)
    assert pickle.loads(pickle.dumps(made)) == made == kind()


def test_a_checkpointer_takes_fourteen_parameters_each_described() -> None:
    parameters = inspect.signature(Checkpointer).parameters
    assert len(parameters) <= 14
    for name in parameters:
        assert f"\n    {name}: " in (inspect.getdoc(Checkpointer) or ""), name


@pytest.mark.parametrize(
    ("given", "subject"),
    [
        ({}, "ExpectedFailures"),
        ({"nodes": 2}, "ExpectedFailures.nodes"),
        ({"nodes": 2, "job_hours": 5}, "ExpectedFailures.nodes"),
        ({"nodes": 0, "per_node_hour": 0.1}, "ExpectedFailures.nodes"),
        ({"nodes": 1.0, "per_node_hour": 0.1}, "ExpectedFailures.nodes"),
        ({"nodes": True, "per_node_hour": 0.1}, "ExpectedFailures.nodes"),
        ({"per_node_hour": -0.1}, "ExpectedFailures.per_node_hour"),
        ({"per_node_hour": float("nan")}, "ExpectedFailures.per_node_hour"),
        ({"per_node_hour": float("inf")}, "ExpectedFailures.per_node_hour"),
        ({"per_node_hour": 1e7}, "ExpectedFailures.per_node_hour"),
        ({"per_node_hour": "0.1"}, "ExpectedFailures.per_node_hour"),
        ({"per_node_hour": True}, "ExpectedFailures.per_node_hour"),
        ({"per_node_hour": 10**400}, "ExpectedFailures.per_node_hour"),
        ({"nodes": np.bool_(True), "per_node_hour": 0.1}, "ExpectedFailures.nodes"),
        ({"job_hours": 0}, "ExpectedFailures.job_hours"),
        ({"job_hours": -1.0}, "ExpectedFailures.job_hours"),
        ({"job_hours": float("nan")}, "ExpectedFailures.job_hours"),
    ],
)
def test_failures_that_cannot_be(given: dict[str, Any], subject: str) -> None:
    with pytest.raises(SettingsError) as caught:
        ExpectedFailures(**given)
    assert caught.value.subject == subject and "ExpectedFailures" in caught.value.next_step


@pytest.mark.parametrize(
    ("setting", "value", "kept"),
    [
        ("interval_batches", np.int64(5), 5),
        ("interval_batches", np.uint8(5), 5),
        ("interval_seconds", np.float32(0.5), 0.5),
        ("interval_seconds", np.int32(300), 300.0),
        ("interval_seconds", Fraction(1, 2), 0.5),
    ],
)
def test_an_interval_is_kept_as_pythons(setting: str, value: Any, kept: float) -> None:
    interval = {"interval_batches": None, "interval_seconds": None, setting: value}
    common = settings(**interval).common
    assert type(common[setting]) is type(kept) and common[setting] == kept


@pytest.mark.parametrize(
    ("kind", "setting", "value", "kept"),
    [
        (Consecutive, "full_every", np.int64(4), 4),
        (OneShot, "full_every", np.int8(4), 4),
        (Staging, "jobs", np.int16(2), 2),
        (Precision, "small_table_values", np.int64(0), 0),
        (Precision, "bits", np.int64(8), 8),
        (Precision, "bits", np.uint8(2), 2),
        (Precision, "state", np.int32(16), 16),
        (Staging, "busy_wait_seconds", np.float64(2.5), 2.5),
        (Timeouts, "close_seconds", np.float16(2.5), 2.5),
        (Timeouts, "drain_seconds", np.int8(3), 3.0),
        (Timeouts, "ranks_seconds", 7, 7.0),
        (Options, "verify_unmarked_rows", np.int64(7), 7),
    ],
)
def test_numbers_are_kept_as_pythons(kind: type, setting: str, value: Any, kept: float) -> None:
    found = getattr(kind(**{setting: value}), setting)
    assert type(found) is type(kept) and found == kept


def test_widths_of_tables_are_kept_as_pythons() -> None:
    given = {"users": np.int64(4), "items": "auto", "ads": 2}
    precision = Precision(tables=given)  # type: ignore[arg-type]
    assert precision.tables == {"users": 4, "items": "auto", "ads": 2}
    assert {type(bits) for bits in precision.tables.values()} == {int, str}
    given["users"] = 7  # what was checked is what is used
    assert precision.tables["users"] == 4


def test_a_name_a_width_and_a_path_are_short_for_what_they_stand_for() -> None:
    assert as_policy("continuous") == Continuous() and as_policy(OneShot()) == OneShot()
    assert as_precision(np.int64(4)) == Precision(bits=4)  # type: ignore[arg-type]
    assert as_precision(Precision(bits="auto")) == Precision(bits="auto")
    assert as_staging("/here") == Staging(directory="/here") and as_staging(None) == Staging()
    assert as_staging(Staging(jobs=2)) == Staging(jobs=2)


def test_numbers_of_failures_are_kept_as_pythons() -> None:
    given = ExpectedFailures(
        per_node_hour=np.float32(0.5),  # type: ignore[arg-type]
        nodes=np.int64(4),  # type: ignore[arg-type]
        job_hours=np.int64(72),  # type: ignore[arg-type]
    )
    assert repr(given) == "ExpectedFailures(per_node_hour=0.5, nodes=4, job_hours=72.0)"


def test_numpys_numbers_train_and_are_stored(place: Place) -> None:
    training = simple_training()
    two: Any = np.int64(2)
    ckpt = checkpointer(training, place, interval_batches=two, policy=Consecutive(full_every=two))
    with place.agent(), ckpt:
        ckpt.restore()
        for _ in range(3):
            train(training, ckpt, 2)
            until(lambda: ckpt.stats.committed == ckpt.stats.staged == len(ckpt.stats.stalls_ms))
    run = Run.open(open_store(place.run))
    line = [(name.step, run.manifest(*name).kind) for name in reversed(run.live_line())]
    assert line == [(2, "full"), (4, "increment"), (6, "full")]


@pytest.mark.parametrize("interval", [{}, {"interval_batches": 1, "interval_seconds": 1.0}])
def test_exactly_one_interval(interval: dict[str, Any], place: Place) -> None:
    model = Recommender()
    given = {"interval_batches": None, **interval}
    with pytest.raises(SettingsError, match="exactly one"):
        build(place, model, SGD(model.parameters(), lr=0.1), **given)


@pytest.mark.parametrize(
    ("given", "ranks", "subject"),
    [
        ({"staging": Staging(when_busy="cancel")}, 2, "Staging.when_busy"),
        ({"timeouts": Timeouts(ranks_seconds=60)}, 2, "Timeouts.ranks_seconds"),
        ({"timeouts": Timeouts(drain_seconds=600)}, 2, "Timeouts.ranks_seconds"),
        (
            {"staging": Staging(when_busy="wait", busy_wait_seconds=600)},
            2,
            "Timeouts.ranks_seconds",
        ),
        ({"staging": Staging(busy_wait_seconds=600)}, 2, None),  # nothing waits for so long
        ({"staging": Staging(when_busy="cancel")}, 1, None),
        ({"timeouts": Timeouts(ranks_seconds=60)}, 1, None),
    ],
)
def test_what_suits_no_job_of_several_ranks(
    given: dict[str, Any], ranks: int, subject: str | None
) -> None:
    try:
        settings(**given).check_ranks(ranks)
    except SettingsError as error:
        assert error.subject == subject
    else:
        assert subject is None


def settings(**given: Any) -> Settings:
    """Those of a Checkpointer to which nothing but `given` was given."""
    usual = {
        "interval_batches": None if given.get("interval_seconds") else 10,
        "interval_seconds": None,
        "precision": Precision(),
        "policy": Consecutive(),
        "failures": None,
        "staging": Staging(),
        "timeouts": Timeouts(),
        "options": Options(),
    }
    return Settings(**usual | given)


def build(place: Place, model: nn.Module, optimizers: Any, **settings: Any) -> Checkpointer:
    return Checkpointer(
        model,
        optimizers,
        **{
            "run": place.run,
            "staging": place.staging,
            "interval_batches": 2,
            **settings,
        },
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(10, 4)
        self.b = nn.Embedding(10, 4)
        self.b.weight = self.a.weight


class TiedToLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 10, bias=False)
        self.a = nn.Embedding(10, 4)
        self.a.weight = self.out.weight


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.zeros(20, 4)
        self.a = nn.Embedding(12, 4, _weight=whole[:12])
        self.b = nn.Embedding(10, 4, _weight=whole[10:])


@pytest.mark.parametrize("make", [Tied, TiedToLinear, Overlapping])
def test_two_names_for_one_table(make: type[nn.Module], place: Place) -> None:
    model = make()
    with pytest.raises(SettingsError, match="two names for one table"):
        build(place, model, SGD(model.parameters(), lr=0.1))


def test_a_module_under_two_names_is_one_table(place: Place) -> None:
    model = nn.Module()
    model.first = nn.Embedding(10, 4)
    model.all = nn.ModuleList([model.first])
    ckpt = build(place, model, SGD(model.parameters(), lr=0.1))
    ckpt.mark_all("first")
    ckpt.close()


def test_a_table_in_no_optimizer(place: Place) -> None:
    model = Recommender()
    with pytest.raises(SettingsError, match=r"'items'.*in no optimizer"):
        build(place, model, SGD([model.users.weight, *model.top.parameters()], lr=0.1))


def test_a_parameter_in_two_optimizers(place: Place) -> None:
    model = Recommender()
    optimizers = [SGD(model.parameters(), lr=0.1), SGD(model.top.parameters(), lr=0.1)]
    with pytest.raises(SettingsError, match=r"top\.weight.*each parameter in one optimizer"):
        build(place, model, optimizers)


def test_a_parameter_outside_the_model(place: Place) -> None:
    model = Recommender()
    other = nn.Parameter(torch.zeros(3))
    with pytest.raises(SettingsError, match="outside the model"):
        build(place, model, SGD([*model.parameters(), other], lr=0.1))


def test_table_bits_of_no_table_or_of_a_frozen_one(place: Place) -> None:
    model = Recommender()
    model.items.weight.requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(SettingsError, match="no such table"):
        build(place, model, optimizer, bits=Precision(tables={"user": 4}))
    with pytest.raises(SettingsError, match="not trained"):
        build(place, model, optimizer, bits=Precision(tables={"items": 4}))


@pytest.mark.parametrize(
    "table",
    [
        nn.Embedding(0, 4),
        nn.Embedding(4, 0),
        nn.Embedding(4, 4, _weight=torch.zeros(4, 4).t()[:, ::1].t().t()),
    ],
    ids=["no rows", "no values", "transposed"],
)
def test_a_weight_that_cannot_be_stored(table: nn.Embedding, place: Place) -> None:
    model = nn.ModuleDict({"table": table})
    with pytest.raises(SettingsError, match="table"):
        build(place, model, SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("run", ["s3://", "", "s3://key:secret@bucket/x", "carrier-pigeon://x/y"])
def test_a_run_url_that_cannot_work(run: str, place: Place) -> None:
    model = Recommender()
    with pytest.raises(SettingsError) as caught:
        build(place, model, SGD(model.parameters(), lr=0.1), run=run)
    assert "secret" not in str(caught.value)


def test_things_without_a_state_are_refused(place: Place) -> None:
    model = Recommender()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(SettingsError, match=r"reader: .*recpoint\.ResumableLoader\(loader\)"):
        build(place, model, optimizer, reader=iter([1]))
    with pytest.raises(SettingsError, match=r"extras\['scaler'\]"):
        build(place, model, optimizer, extras={"scaler": object()})
    with pytest.raises(SettingsError, match=r"optimizers\[0\]"):
        build(place, model, [object()])


def test_calls_in_the_wrong_order(place: Place) -> None:
    model = Recommender()
    ckpt = build(place, model, SGD(model.parameters(), lr=0.1), reader=Batches(0))
    with pytest.raises(SettingsError, match="restore"):
        ckpt.step()
    with pytest.raises(SettingsError, match="fresh"):
        ckpt.restore(3, fresh=True)
    with pytest.raises(SettingsError, match="partial"):
        ckpt.restore(partial={"tables": "users"})
    with pytest.raises(SettingsError, match="partial"):
        ckpt.restore(partial={"optimizers": ["users"]})
    ckpt.restore()
    with pytest.raises(SettingsError, match="second call"):
        ckpt.restore()
    with pytest.raises(SettingsError, match="no such table"):
        ckpt.mark("nobody", torch.tensor([1]))
    ckpt.close(final=False)
    ckpt.close()
    with pytest.raises(SettingsError, match="closed"):
        ckpt.step()


@pytest.mark.parametrize("name", ["step", "generation"])
@pytest.mark.parametrize("value", ["3", True, -3, 3.0, 10**12, np.True_, np.float64(3), [3]])
def test_a_step_that_is_none(name: str, value: Any, place: Place) -> None:
    model = Recommender()
    given = {"step": 3, "generation": 1, name: value}
    with pytest.raises(SettingsError, match="a whole number") as caught:
        build(place, model, SGD(model.parameters(), lr=0.1)).restore(**given)
    assert caught.value.subject == name


def test_state_that_cannot_be_stored_is_named_before_training(place: Place) -> None:
    model = Recommender()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["callback"] = print
    with pytest.raises(SettingsError, match="callback"):
        build(place, model, optimizer)


@pytest.mark.parametrize(
    ("setting", "value", "subject"),
    [
        ("interval_batches", 0, "interval_batches"),
        ("bits", 7, "bits"),
        ("bits", Precision(tables={"ads": 8}), "Precision.tables['ads']"),
        ("run", "carrier-pigeon://x/y", "run URL 'carrier-pigeon://x/y'"),
        ("run", "s3:///prefix", "run URL 's3:///prefix'"),
        ("run", None, "run URL"),
        ("run", Path("run"), "run URL"),
        ("model", None, "model"),
        ("model", Tied(), "tables 'a.weight' and 'b.weight'"),
        (
            "model",
            Recommender(),
            "optimizers[0], group 0, parameter 0",
        ),  # another one than is trained
        ("optimizers", None, "optimizers"),
        ("optimizers", [], "table 'users'"),
        ("schedulers", None, "schedulers"),
        ("extras", ["scaler"], "extras"),
        ("extras", {5: Batches(1)}, "extras"),
        ("staging", 5, "staging"),
        ("staging", "a\0b", "staging"),
    ],
)
def test_a_checkpointer_that_cannot_work_is_not_built(
    setting: str, value: Any, subject: str, place: Place
) -> None:
    model = Recommender()
    given: dict[str, Any] = {"model": model, "optimizers": SGD(model.parameters(), lr=0.1)}
    given |= {"run": place.run, "staging": place.staging, "interval_batches": 2}
    with pytest.raises(SettingsError) as caught:
        Checkpointer(**given | {setting: value})
    assert caught.value.subject == subject
    assert caught.value.found and caught.value.expected and caught.value.next_step
    assert not Path(place.run).exists() and not place.staging.exists()
