"""What a soak plans and measures, on progress whose figures are known."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.schema_tools.validation import validate

from benchmarks.soak import PACES
from benchmarks.soak_deployments import scheduled, workers
from benchmarks.soak_faults import (
    Fault,
    Happened,
    elsewhere,
    interval_seconds,
    plan_faults,
    recoveries,
)
from benchmarks.soak_training import INTERVAL_BATCHES, Training
from benchmarks.soak_truth import Ledger
from benchmarks.workload import ROOT
from recpoint.format.naming import MANIFEST_KEY, ManifestName
from tests.fault.retention_lives import filled, retain_once


def line(t: float, lag_intervals: float) -> dict[str, Any]:
    return {
        "t": t,
        "step": int(t * INTERVAL_BATCHES / 2),
        "lag_batches": int(lag_intervals * INTERVAL_BATCHES),
    }


@pytest.mark.parametrize("checkpoints", [40, 500])
def test_every_kind_is_killed_in_time_and_the_same_with_the_same_seed(checkpoints: int) -> None:
    faults = plan_faults(checkpoints, 5, seed=3)
    assert faults == plan_faults(checkpoints, 5, seed=3) != plan_faults(checkpoints, 5, seed=4)
    assert {kind for fault in faults for kind in fault.kinds} == {
        "trainer",
        "agent",
        "store",
        "prefect",
    }
    at = [fault.at_checkpoint for fault in faults]
    assert at == sorted(at) and at[-1] < checkpoints - 5
    assert min(b - a for a, b in zip(at, at[1:], strict=False)) >= 4


def test_in_the_end_of_a_long_soak_trainer_and_agent_live() -> None:
    late = {f.kinds for f in plan_faults(500, 8, seed=1) if f.at_checkpoint >= 300}
    assert late == {("store",), ("prefect",)}


def test_lag_is_measured_from_the_return_up_to_the_next_fault() -> None:
    first = Happened(fault=Fault(6, ("store",), 3.0), killed=10.0, back=13.0)
    second = Happened(fault=Fault(12, ("agent",), 1.0), killed=50.0, back=51.0)
    progress = [
        line(9.0, 2.5),  # before any fault: none of its doing
        line(12.0, 1.9),
        line(14.0, 2.1),
        line(16.0, 3.0),
        line(17.0, 0.4),
        line(30.0, 2.0),  # no more of the first
        line(31.0, 2.5),
        line(52.0, 1.9),
    ]
    assert recoveries([first, second], progress, 2.0) == [
        ("store", 3.0, 3.0),
        ("agent", 1.0, 0.0),
    ]
    assert interval_seconds(progress) == 2.0
    assert elsewhere([first, second], progress, 2.0) == [(9.0, 9.0), (30.0, 31.0)]
    # Of both, where it lasts until the second.
    on = [line(t / 2, 3.0) for t in range(28, 110)] + [line(55.0, 1.0)]
    assert [one.seconds for one in recoveries([first, second], on, 2.0)] == [37.0, 3.5]
    assert elsewhere([first, second], on, 2.0) == []


def test_the_training_is_the_same_in_every_process_and_each_batch_changes_it() -> None:
    one = Training()
    digests = [one.digest()]
    for _ in range(3):
        one.batch()
        digests.append(one.digest())
    other = Training()
    again = [other.digest()]
    for _ in range(3):
        other.batch()
        again.append(other.digest())
    assert digests == again and len(set(digests)) == 4


def test_what_retention_drops_has_a_reason_and_what_somebody_deletes_has_none(
    tmp_path: Path,
) -> None:
    run = filled(str(tmp_path / "run"))
    ledger = Ledger(run)
    ledger.look()
    before = set(ledger.there)
    retain_once(run, 1)
    ledger.look()
    assert ledger.there == before and ledger.reasons.keys() < before
    retain_once(run, 1)
    ledger.look()
    assert ledger.there == before - ledger.reasons.keys() == {MANIFEST_KEY.of(40, 1)}
    assert ledger.gone_without_reason == [] and ledger.restorable == [ManifestName(40, 1)]
    assert [name.step for name in ledger.committed] == [10, 20, 30, 40]
    # It is there and is something else than the truth says: another model altogether.
    assert "not in the checkpoint" in str(ledger.wrong(ManifestName(40, 1), {}))
    run.store.delete(MANIFEST_KEY.of(40, 1))
    ledger.look()
    assert ledger.gone_without_reason == [MANIFEST_KEY.of(40, 1)]
    assert ledger.wrong(ManifestName(40, 1), {}) is None


def test_whatever_has_a_schedule_in_prefect_yaml_is_scheduled_in_a_soak() -> None:
    theirs = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    flows = {one["entrypoint"].rpartition(":")[2] for one in theirs if "schedules" in one}
    assert not PACES["full"].only and set(PACES["smoke"].only) <= flows
    for pace in PACES.values():
        ours = scheduled("s3://bucket/run", pace)["deployments"]
        assert {one["entrypoint"].rpartition(":")[2] for one in ours} == set(pace.only or flows)
        for one in ours:
            module, _, name = one["entrypoint"].partition(":")
            taken = getattr(importlib.import_module(module), name)
            taken.validate_parameters(one["parameters"])
            # A soak's graces are shorter than what is deployed elsewhere may be given.
            assert validate(one["parameters"], taken.parameters.model_dump()) == []
            assert one["schedules"][0]["active"] and one["schedules"][0]["interval"] <= 120


def test_each_queue_of_what_is_deployed_has_a_worker() -> None:
    queues = {name: [one[-1] for one in workers(pace)] for name, pace in PACES.items()}
    assert queues == {"full": ["default", "host-1"], "smoke": ["default"]}
