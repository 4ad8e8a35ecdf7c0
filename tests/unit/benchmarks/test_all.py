"""Running all benchmarks into one directory: what fails, what is there already, and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.all import run_all
from benchmarks.machine import commit


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_all_goes_on_after_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECPOINT_SOAK_SEED", "no number")
    out = tmp_path / "figures"
    chosen = ["all", "--smoke", "--out", str(out), "--only", "soak", "gpu", "policy"]
    assert main(chosen) == 1
    failed = read(out / "soak.json")
    assert failed["exit_code"] == 1 and "no number" in failed["last_lines"][-1]
    done = read(out / "policy.json")
    assert done["exit_code"] == 0 and done["report"]["name"] == "policy"
    everything = read(out / "all.json")
    assert everything["benchmarks"] == {
        name: read(out / f"{name}.json") for name in ("soak", "gpu", "policy")
    }
    assert everything["commit"] == commit() and everything["machine"]["memory_bytes"] > 0
    table = (out / "all.md").read_text().splitlines()
    assert "| soak |  | failed with exit code 1 |  |" in table
    figure = done["report"]["figures"]["intermittent_full_at"]
    assert f"| policy | `intermittent_full_at` | {figure:g} |  |" in table
    assert failed["last_lines"][-1] in table
    assert f"- commit: {commit()}" in "\n".join(table)
    if not torch.cuda.is_available():
        assert "| gpu | `mark_2m_us` | not run: no CUDA device |  |" in table
    assert sorted(path.name for path in out.iterdir()) == [
        "all.json",
        "all.md",
        "gpu.json",
        "policy.json",
        "soak.json",
    ]


@pytest.mark.nightly("benchmarks")
@pytest.mark.skipif(commit() == "unknown", reason="without git nobody knows what ran before")
def test_all_runs_again_only_what_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"

    def run_where_it_has(**changes: object) -> str:
        """When the benchmark began whose file is there in the end; "before": it did not run."""
        file.write_text(json.dumps(read(file) | {"began": "before"} | changes))
        assert run_all(["policy"], tmp_path, smoke=True) == 0
        assert read(tmp_path / "all.json")["benchmarks"] == {"policy": read(file)}
        return str(read(file)["began"])

    assert run_all(["policy"], tmp_path, smoke=True) == 0
    assert run_where_it_has() == "before"
    assert run_where_it_has(commit="another") != "before"
    assert run_where_it_has(arguments=[]) != "before"
    assert run_where_it_has(exit_code=1) != "before"
    file.write_text(file.read_text()[:100])  # what is no result at all
    assert run_all(["policy"], tmp_path, smoke=True) == 0
    assert read(file)["exit_code"] == 0
