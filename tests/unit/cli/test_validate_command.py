"""validate: results in the catalog, on the terminal, as JSON, and what list, show, restore say."""

from __future__ import annotations

from pathlib import Path

import pytest

from recpoint.catalog.run.validations import verdicts
from recpoint.format.naming import METRIC_KEY, ManifestName
from recpoint.format.records import unpack_record
from recpoint.format.retention_records import Metric
from tests.unit.cli.conftest import Invoke, SavedRun

NEWEST = ManifestName(30, 2)


def lose_rows(saved: SavedRun, step: int) -> str:
    entry = next(e for e in saved.manifests[step].chunks if e.content == "rows")
    data = bytearray(saved.run.store.get(entry.key, max_bytes=1 << 20))
    data[-1] ^= 1
    saved.run.store.put(entry.key, bytes(data))
    return entry.key


def test_the_newest_checkpoint_passes_and_is_recorded(
    recpoint: Invoke, saved_run: SavedRun
) -> None:
    ended = recpoint("validate", saved_run.directory)
    assert ended.code == 0 and "passed" in ended.stdout and "as validation 1" in ended.stdout
    assert str(verdicts(saved_run.run)[NEWEST]) == "sample"
    ended = recpoint("validate", saved_run.directory, "--level", "full", "--json")
    assert ended.code == 0
    document = ended.json
    assert (document["step"], document["generation"], document["record"]) == (30, 2, 2)
    assert (document["result"], document["links_read"]) == ("passed", 3)
    assert document["findings"] == [] and document["bytes_read"] > 0
    listed = recpoint("list", saved_run.directory, "--json").json["checkpoints"]
    assert [entry["validation"] for entry in listed] == [
        {"result": "passed", "level": "full", "number": 2},
        None,
        None,
    ]
    assert "validated (full)" in recpoint("list", saved_run.directory).stdout
    assert "validated (full)" in recpoint("show", saved_run.directory, 30).stdout
    assert "not validated" in recpoint("show", saved_run.directory, 20).stdout
    assert recpoint("show", saved_run.directory, 20, "--json").json["validation"] is None
    assert recpoint("check", saved_run.directory, "--json").json["findings"] == [
        {"severity": "info", "key": "manifests/000000000025-00000001.json", "text": "superseded"}
    ]


def test_damage_ends_with_code_1_and_is_told_in_the_listing(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path
) -> None:
    key = lose_rows(saved_run, 30)
    ended = recpoint("validate", saved_run.directory, "--step", 30)
    assert ended.code == 1 and "failed: rows are damaged or wrong" in ended.stdout
    ended = recpoint("validate", saved_run.directory, "--step", 30, "--no-record", "--json")
    assert ended.code == 1 and ended.json["record"] is None
    (finding,) = ended.json["findings"]
    assert finding["subject"].endswith(key) and "crc32c" in finding["found"]
    assert "validation failed (sample)" in recpoint("list", saved_run.directory).stdout
    ended = recpoint("restore", saved_run.directory, "--to", tmp_path / "model.pt")
    assert ended.code == 0 and "skipped step 30" in ended.stdout
    assert "validation 1 found wrong or damaged rows" in ended.stdout
    assert "step 20 (generation 1" in ended.stdout and ", not validated, " in ended.stdout


def test_a_superseded_checkpoint_is_validated_by_name(
    recpoint: Invoke, saved_run: SavedRun
) -> None:
    assert recpoint("validate", saved_run.directory, "--step", 25).code == 1
    ended = recpoint("validate", saved_run.directory, "--step", 25, "--generation", 1, "--json")
    assert ended.code == 0 and ended.json["step"] == 25


def test_only_validated_ones_are_restored_when_asked(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path
) -> None:
    command = ("restore", saved_run.directory, "--to", tmp_path / "model.pt", "--validated")
    assert recpoint(*command).code == 1
    refused = recpoint(*command, "--json").json
    assert refused["next_step"] == f"recpoint validate {saved_run.directory}"
    recpoint("validate", saved_run.directory, "--step", 20)
    ended = recpoint(*command, "--json")
    assert ended.code == 0 and ended.json["step"] == 20
    assert [entry["error"] for entry in ended.json["skipped"]] == [
        "not validated; it is restored if its step is named"
    ]


def test_a_validated_one_that_is_near_goes_first_when_asked(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path
) -> None:
    command = ("restore", saved_run.directory, "--to", tmp_path / "model.pt", "--force", "--json")
    recpoint("validate", saved_run.directory, "--step", 20)
    assert recpoint(*command).json["step"] == 30
    assert recpoint(*command, "--validated-within", 9).json["step"] == 30
    ended = recpoint(*command, "--validated-within", 10).json
    assert ended["step"] == 20
    assert ended["skipped"][0]["error"].startswith("not validated; step 20 (generation 1) is")
    assert recpoint(*command, "--validated-within", -1).code == 2


@pytest.mark.parametrize(
    "options",
    [
        ("--level", "all"),
        ("--generation", 2),
    ],
)
def test_wrong_usage(recpoint: Invoke, saved_run: SavedRun, options: tuple[object, ...]) -> None:
    assert recpoint("validate", saved_run.directory, *options).code == 2
    assert verdicts(saved_run.run) == {}


@pytest.mark.parametrize(
    ("function", "found"),
    [
        ("foo", "no module and function with a `:` between them"),
        ("json", "no module and function with a `:` between them"),
        ("foo:", "no module and function with a `:` between them"),
        (":f", "no module and function with a `:` between them"),
        ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("json:no_such_function", "AttributeError: module 'json' has no attribute"),
        ("json:__name__", "a str, which cannot be called"),
        ("module_that_fails:f", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_function_that_is_none(
    recpoint: Invoke,
    saved_run: SavedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    found: str,
) -> None:
    (tmp_path / "module_that_fails.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    ended = recpoint("validate", saved_run.directory, "--eval", function, "--json")
    assert ended.code == 2 and ended.json["error"] == "SettingsError"
    assert ended.json["subject"] == f"evaluation function {function!r}"
    assert ended.json["found"].startswith(found)
    assert "MODULE:FUNCTION" in ended.json["expected"]
    assert f"recpoint validate {saved_run.directory} --eval" in ended.json["next_step"]
    assert verdicts(saved_run.run) == {}


def test_a_run_without_checkpoints_and_no_run(recpoint: Invoke, tmp_path: Path) -> None:
    assert recpoint("validate", tmp_path / "nothing").code == 1


# --- the user's function -------------------------------------------------------------------------

FUNCTIONS = """
import torch

def rows(state):
    return {"rows": float(state["items.weight"].shape[0]), "bias": state["top.bias"].sum()}

def mean(state):
    return torch.stack([t.double().mean() for t in state.values()]).mean()

def wrong(state):
    raise KeyError("missing.weight")

def nothing(state):
    return float("nan")

def odd(state):
    return {"Größe": 1.0}
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"evaluation_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_metrics_of_the_restored_model_are_recorded(
    recpoint: Invoke, saved_run: SavedRun, functions: str
) -> None:
    ended = recpoint("validate", saved_run.directory, "--eval", f"{functions}:rows", "--json")
    assert ended.code == 0 and ended.json["metrics"] == {"rows": 40.0, "bias": 3.0}
    key = METRIC_KEY.of(30, 2, "rows")
    data = saved_run.run.store.get(key, max_bytes=1 << 20)
    metric = unpack_record(Metric, data, name=key, next_step="")
    assert float.fromhex(metric.value) == 40.0
    assert metric.checkpoint == saved_run.manifests[30].ref
    ended = recpoint("validate", saved_run.directory, "--eval", f"{functions}:mean")
    assert ended.code == 0 and "mean" in ended.stdout


@pytest.mark.parametrize("function", ["wrong", "nothing", "odd"])
def test_a_function_that_gives_no_metrics_says_nothing_about_the_checkpoint(
    recpoint: Invoke, saved_run: SavedRun, functions: str, function: str
) -> None:
    ended = recpoint("validate", saved_run.directory, "--eval", f"{functions}:{function}")
    assert ended.code == 2 and "EvaluationFailed" in ended.stderr
    assert verdicts(saved_run.run) == {}


def test_what_failed_is_not_evaluated(
    recpoint: Invoke, saved_run: SavedRun, functions: str
) -> None:
    lose_rows(saved_run, 30)
    ended = recpoint("validate", saved_run.directory, "--eval", f"{functions}:wrong", "--json")
    assert ended.code == 1 and ended.json["metrics"] == {}
