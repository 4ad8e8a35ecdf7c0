"""What `make matrix` runs is there, and the table that it writes is of these environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import matrix
from tests.matrix import ENVIRONMENTS, SUBSET, MatrixEnvironment, read_record
from tests.matrix_checkpoint import _require_equal

ROOT = Path(__file__).resolve().parents[2]


def test_what_it_runs_exists() -> None:
    assert all((ROOT / path).exists() for path in SUBSET)


def test_the_pinned_environment_has_the_pinned_versions() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = ENVIRONMENTS["pinned"]
    assert {
        f"torch=={pinned.torch}",
        f"torchrec=={pinned.torchrec}",
        f"fbgemm-gpu-cpu=={pinned.fbgemm}",
        f"prefect=={pinned.prefect}",
    } <= {line.split("+")[0] for line in constraints}


def test_the_table_has_the_versions_that_the_environments_name() -> None:
    lines = read_record()
    assert lines, "limits.md has no table between its two markers"
    for name, line in lines.items():
        _, _, python, *versions, _, _, _, _, _ = (cell.strip() for cell in line.split("|"))
        environment = ENVIRONMENTS[name]
        assert python.rpartition(".")[0] == environment.python
        assert [version.split("+")[0] for version in versions] == [
            environment.torch,
            environment.torchrec or "none",
            environment.fbgemm or "none",
            environment.prefect,
        ]


def test_lines_are_written_in_the_order_of_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "limits.md"
    page.write_text(f"before\n{matrix._BEGIN}old\n{matrix._END}after\n")
    monkeypatch.setattr(matrix, "RECORD", page)
    lines = {"newest": "| newest | 2 |", "oldest": "| oldest | 1 |"}
    matrix._write_record(lines)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old\n" not in text
    assert list(read_record().items()) == list(reversed(lines.items()))


def test_an_unknown_environment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["newest", "older"]) == 2
    assert capsys.readouterr().out == f"older: expected one of {', '.join(ENVIRONMENTS)}\n"


def test_an_environment_without_its_python_is_not_run_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RECPOINT_MATRIX_CACHE", str(tmp_path))
    monkeypatch.setitem(ENVIRONMENTS, "future", MatrixEnvironment(torch="9.0", python="3.99"))
    record = read_record()
    assert matrix.main(["future"]) == 1
    assert capsys.readouterr().out == "future: not run: no Python 3.99\n"
    assert read_record() == record


def test_the_comparison_of_checkpoints_sees_differences() -> None:
    import torch

    facts = {"model": {"w": torch.ones(2)}, "groups": [{"lr": 0.1, "params": [0]}]}
    newer = {"model": {"w": torch.ones(2)}, "groups": [{"lr": 0.1, "params": [0], "new": True}]}
    _require_equal(facts, newer)
    for restored in (
        {**facts, "model": {"w": torch.tensor([1.0, 1.5])}},
        {**facts, "model": {}},
        {**facts, "groups": [{"lr": 0.2, "params": [0]}]},
        {**facts, "groups": []},
    ):
        with pytest.raises(RuntimeError, match="expected"):
            _require_equal(facts, restored)
