"""prefect.yaml: Prefect itself silently ignores keys that it does not know."""

from __future__ import annotations

import importlib
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
from pydantic import BaseModel

from recpoint.flows.no_results import NO_RESULTS

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
        assert schedule["active"] is (title(deployment) == "forget/recpoint"), "it has no run yet"
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
    for name, schema in properties.items():
        assert schema.get("description"), f"{name} has no description"
    missing = set(flow.parameters.required) - given.keys()
    assert missing <= {"run_url", "job_path", "target"}, "all else has a default to start with"
    places = missing - {"job_path"}
    flow.validate_parameters({**given, **dict.fromkeys(missing, "file:///somewhere")})
    for name in places:
        with pytest.raises(Exception, match=name):
            flow.validate_parameters({**given, **dict.fromkeys(missing, "x"), name: ""})
