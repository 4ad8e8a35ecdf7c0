"""How commands end: codes, and one message without a traceback."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import metadata

import pytest

from recpoint import errors
from recpoint.catalog.store.run_url import naming_run
from recpoint.cli.reporting import exit_code
from tests.unit.cli.conftest import Invoke, SavedRun


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("NothingToRestore", 1),
        ("ObjectNotFound", 1),
        ("SettingsError", 2),
        ("StagingError", 2),
        ("StagingFull", 2),
        ("EvaluationFailed", 2),
        ("StoreAccessDenied", 3),
        ("StoreUnavailable", 3),
        ("StoreThrottled", 3),
        ("IncompatibleModel", 4),
        ("ForeignObject", 4),
        ("MalformedObject", 4),
        ("DigestMismatch", 4),
        ("UnsupportedVersion", 4),
        ("MissingLink", 4),
    ],
)
def test_exit_codes_of_errors(name: str, code: int) -> None:
    kind = getattr(errors, name)
    assert exit_code(kind("x", found="", expected="", next_step="")) == code


def test_every_error_has_a_documented_exit_code() -> None:
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.RecpointError):
            assert exit_code(kind("x", found="", expected="", next_step="")) in (1, 2, 3, 4)
    assert exit_code(KeyboardInterrupt()) == 130
    assert exit_code(PermissionError()) == 2


def test_wrong_usage_is_code_2(recpoint: Invoke) -> None:
    for arguments in (["nonsense"], ["list"], ["show", "x", "NaN"], ["list", "x", "--nonsense"]):
        assert recpoint(*arguments).code == 2


def test_help_lists_every_command_and_the_codes(recpoint: Invoke) -> None:
    text = recpoint("--help").stdout
    for name in ("demo", "agent", "server", "list", "show", "check", "restore", "sweep", "info"):
        assert name in text
        assert recpoint(name, "--help").code == 0
    assert "130 interrupted" in " ".join(text.split())


def test_its_version(recpoint: Invoke) -> None:
    ended = recpoint("--version")
    assert ended.code == 0 and ended.stdout == f"recpoint {metadata.version('recpoint')}\n"


def test_the_module_and_the_script_are_the_same_program() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "recpoint", "list", "/nowhere/at/all", "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 1
    assert "NothingToRestore" in ended.stdout
    assert ended.stderr == ""


def test_a_listing_imports_neither_prefect_nor_torch() -> None:
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from recpoint.cli import app\n"
        "CliRunner().invoke(app, ['list', '/nowhere/at/all'])\n"
        "sys.exit(len({'prefect', 'torch'} & sys.modules.keys()))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=240, check=False).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["list", "--json"],
        ["nonsense", "--json"],
        ["show", "x", "NaN", "--json"],
        ["check", "x", "--level", "bogus", "--json"],
        ["sweep", "x", "--json", "--grace", "5 years"],
        ["agent", "--json", "--nonsense"],
    ],
)
def test_wrong_usage_is_json_too_when_json_is_asked_for(
    recpoint: Invoke, arguments: list[str], saved_run: SavedRun
) -> None:
    ended = recpoint(*[str(saved_run.directory) if word == "x" else word for word in arguments])
    assert ended.code == 2 and ended.stderr == ""
    assert ended.json["error"] == "UsageError"
    assert ended.json["found"] and ended.json["next_step"].endswith("--help")


def test_help_and_results_are_the_same_with_json_asked_for(
    recpoint: Invoke, saved_run: SavedRun
) -> None:
    assert recpoint("list", "--json", "--help").code == 0
    assert recpoint("list", saved_run.directory / "nowhere", "--json").code == 1
    assert recpoint("list", saved_run.directory, "--json").code == 0


def test_proposed_commands_can_be_copied() -> None:
    text = "recpoint check URL --level full, and recpoint list URL"
    named = naming_run(text, "s3://bucket/a b")
    assert (
        named
        == "recpoint check 's3://bucket/a b' --level full, and recpoint list 's3://bucket/a b'"
    )
    others = naming_run("recpoint validate URL, or recpoint dashboard URL...", "s3://bucket/a")
    assert others == "recpoint validate s3://bucket/a, or recpoint dashboard URL..."
    assert naming_run(text, "s3://KEY:HIDDEN@bucket/a") == text
    assert naming_run(text, None) == text
