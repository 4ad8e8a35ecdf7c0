"""Names of tasks, and which of their failures are tried again."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace

import pytest
from prefect import Task

from recpoint import errors
from recpoint.format.manifest import CopiedAhead
from recpoint.tasks import persist, reports
from recpoint.tasks.job_name import job_log, job_name
from recpoint.tasks.persist import may_heal
from recpoint.tasks.reports import artifact_key

_PATH = "/s/My_run.x-0123456789ab/jobs/00000003-000000000120-r00002.json"

_KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.RecpointError)
]


def test_a_job_is_called_by_its_path() -> None:
    name = job_name(_PATH)
    assert (name.run, name.generation, name.step, name.rank) == ("My_run.x", 3, 120, 2)
    assert str(name) == "My_run.x step 120 rank 2"


@pytest.mark.parametrize("path", ["", "/s/run/jobs/x.json", "/s/run/jobs/.tmp-1"])
def test_other_files_are_no_jobs(path: str) -> None:
    with pytest.raises(ValueError, match="not the name of a job"):
        job_name(path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Ü..Ä", "run"), ("--a--B__c", "a-b-c"), ("x" * 99, 80 * "x")],
)
def test_names_are_what_artifact_keys_may_be(name: str, expected: str) -> None:
    key = artifact_key(f"s3://b/{name}/", "0123456789abcdef", "r0-lag")
    assert key == f"recpoint-{expected}-0123456789ab-r0-lag"


def test_log_lines_carry_run_step_and_rank(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        job_log(_PATH).info("done %d", 5)
    assert caplog.messages == ["[My_run.x step 120 rank 2] done 5"]


@pytest.mark.parametrize("kind", _KINDS)
def test_only_what_may_heal_is_tried_again(kind: type[errors.RecpointError]) -> None:
    error = kind("x", found="a", expected="b", next_step="c")
    heals = kind in (errors.StoreThrottled, errors.StoreUnavailable)
    assert may_heal(None, None, SimpleNamespace(data=error)) is heals


@pytest.mark.parametrize("error", [ValueError("x"), OSError(5, "x"), TimeoutError(), None])
def test_other_errors_are_not_tried_again(error: Exception | None) -> None:
    assert may_heal(None, None, SimpleNamespace(data=error)) is False


@pytest.mark.parametrize(
    "task",
    [persist.quantize, persist.encode, persist.upload, persist.commit, reports.report],
    ids=lambda task: str(task.name),
)
def test_no_task_stores_results_or_runs_for_ever(task: Task[..., object]) -> None:
    assert task.persist_result is False and task.timeout_seconds
    assert task.retries == (0 if task.name == "report" else 3)
    assert task.name == "report" or task.retry_condition_fn is may_heal


def test_a_report_says_what_a_person_asks() -> None:
    checkpoint = reports.Checkpoint(
        run_url="s3://b/x",
        run_id="0" * 32,
        kind="increment",
        chain_length=3,
        rows=1000,
        stored_bytes=250,
        full_bytes=1000,
        chunks=4,
        stall_us=12_345,
        snapshot_ms=10_000,
        staged_ms=10_500,
        committed_ms=12_250,
        interval_batches=77,
        copied_ahead=None,
    )
    rows = dict(reports.table_rows(9, checkpoint))
    assert rows["step"] == "9" and rows["rows"] == "1,000"
    assert rows["kind"] == "increment (chain of 3)"
    assert rows["of a full exact checkpoint"] == "25.0%"
    assert rows["stall"] == "12.3 ms" and rows["staged after"] == "500 ms"
    assert rows["lag (committed after)"] == "2.2 s" and rows["stored"] == "250 B, 4 chunks"
    assert "rows copied ahead" not in rows
    ahead = CopiedAhead(rows_before=999, bytes_before=9_990, rows_in_stall=1, bytes_in_stall=10)
    rows = dict(reports.table_rows(9, checkpoint._replace(copied_ahead=ahead)))
    assert rows["rows copied ahead"] == "99.9% of 1,000 rows copied before the stall"
