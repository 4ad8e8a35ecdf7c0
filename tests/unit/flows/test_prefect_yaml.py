"""prefect.yaml: Prefect itself silently ignores keys that it does not know."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.cli.deploy._models import (
    ConcurrencyLimitSpec,
    DeploymentConfig,
    PrefectYamlModel,
    RawScheduleConfig,
    WorkPoolConfig,
)
from prefect.client.schemas.objects import ConcurrencyLimitStrategy
from prefect.utilities.schema_tools.validation import validate
from pydantic import BaseModel

from recpoint.catalog.retention.grace import GRACE_FLOOR_SECONDS
from recpoint.flows.parameters import NO_RESULTS
from recpoint.format.naming import job_stem
from recpoint.tasks.job_name import job_name

FILE = Path(__file__).resolve().parents[3] / "prefect.yaml"
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["deployments"]


def title(deployment: dict[str, Any]) -> str:
    return f"{deployment['entrypoint'].rpartition(':')[2]}/{deployment['name']}"


def load(deployment: dict[str, Any]) -> Flow[..., Any]:
    module, _, name = deployment["entrypoint"].partition(":")
    assert not module.endswith(".py"), "a path would put flows/ first on sys.path"
    flow = getattr(importlib.import_module(module), name)
    assert isinstance(flow, Flow)
    return flow


def known(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def test_the_file_as_a_whole() -> None:
    document = yaml.safe_load(FILE.read_text())
    assert document.keys() <= known(PrefectYamlModel)
    assert document["pull"] == []
    titles = [title(one) for one in DEPLOYMENTS]
    assert len(set(titles)) == len(titles)
    # A list of deployments shows this name alone: it says what the deployment does.
    for one in DEPLOYMENTS:
        flow, queue = one["entrypoint"].rpartition(":")[2], one["work_pool"].get("work_queue_name")
        assert one["name"].startswith(f"recpoint-{flow.replace('_', '-')}")
        assert queue is None or one["name"].endswith(f"-{queue}")
    flows = {path.stem for path in FILE.parent.glob("flows/*.py") if "@flow(" in path.read_text()}
    assert {one["entrypoint"].rpartition(":")[2] for one in DEPLOYMENTS} == flows


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=title)
def test_every_key_is_one_that_prefect_reads(deployment: dict[str, Any]) -> None:
    assert deployment.keys() <= known(DeploymentConfig)
    assert deployment["work_pool"].keys() <= known(WorkPoolConfig)
    limit = deployment["concurrency_limit"]
    assert limit.keys() <= known(ConcurrencyLimitSpec)
    ConcurrencyLimitStrategy(limit["collision_strategy"])
    schedules = deployment.get("schedules", [])
    for schedule in schedules:
        RawScheduleConfig.model_validate(schedule)
        assert schedule["timezone"] and schedule["slug"]
        assert schedule["active"] is (title(deployment) == "forget/recpoint-forget"), (
            "it has no run yet"
        )
    assert len({schedule["slug"] for schedule in schedules}) == len(schedules)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=title)
def test_nothing_is_stored_of_a_flow_run(deployment: dict[str, Any]) -> None:
    flow = load(deployment)
    assert flow.result_storage is NO_RESULTS and flow.persist_result is False


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=title)
def test_parameters_are_the_flows_own_and_each_is_described(deployment: dict[str, Any]) -> None:
    flow = load(deployment)
    properties = flow.parameters.properties
    given = dict(deployment["parameters"])
    for schedule in deployment.get("schedules", []):
        given |= schedule.get("parameters", {})
    assert given.keys() <= properties.keys()
    nested = [one["properties"] for one in flow.parameters.definitions.values()]
    for name, schema in itertools.chain(*(one.items() for one in (properties, *nested))):
        assert len(schema.get("description", "")) > 5, f"{name} has no description"
    missing = set(flow.parameters.required) - given.keys()
    assert missing <= {"run_url", "job_path", "target"}, "all else has a default to start with"
    named = {**given, **dict.fromkeys(missing, f"/somewhere/{job_stem(1, 2, 0)}.json")}
    flow.validate_parameters(named)
    for name in missing:
        with pytest.raises(Exception, match=name):
            flow.validate_parameters({**named, name: ""})


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=title)
def test_what_can_never_be_done_is_refused_by_the_schema(deployment: dict[str, Any]) -> None:
    """Its server compares parameters with that before it makes a flow run."""
    schema = load(deployment).parameters.model_dump()
    if "grace_seconds" in schema["properties"]:
        assert not refused(schema, grace_seconds=GRACE_FLOOR_SECONDS)
        assert refused(schema, grace_seconds=GRACE_FLOOR_SECONDS - 1)
    if "job_path" in schema["properties"]:
        name = f"{job_stem(7, 1200, 3)}.json"
        for good in (name, f"jobs/{name}", f"/a b/run-0123456789ab/jobs/{name}"):
            assert not refused(schema, job_path=good) and job_name(good).step == 1200
        for bad in ("", "/", "jobs/", "x.json", name.removesuffix(".json"), f"x{name}"):
            assert refused(schema, job_path=bad)


def refused(schema: dict[str, Any], **parameters: object) -> bool:
    """Whether one of these is what Prefect refuses."""
    return bool(validate(parameters, schema, ignore_required=True))
