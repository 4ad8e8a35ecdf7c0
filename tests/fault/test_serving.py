"""A trainer, an agent and a server of predictions, all real processes."""

from __future__ import annotations

import json
import os
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from retail import RetailReader
from tests.agent_process import AgentProcess
from tests.forked_program import ForkedProgram, be_script, run_script
from tests.polling import until
from train_dlrm import build_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROWS, BATCH = 2000, 64


@contextmanager
def server(run: str, said: Path, *options: str) -> Iterator[str]:
    command = [str(EXAMPLES / "serve.py"), "--run", run, "--port", "0"]
    process = ForkedProgram(
        be_script,
        [*command, "--rows", str(ROWS), "--poll", "0.05", *options],
        environment=os.environ,
        output=(said, said.with_suffix(".err")),
    )
    try:
        until(lambda: said.read_text().endswith("\n"))
        yield f"http://127.0.0.1:{json.loads(said.read_text().splitlines()[0])['port']}"
    finally:
        process.kill()
        process.wait()


def trained(run: str, staging: Path, steps: int, *options: str) -> None:
    arguments = ["--run", run, "--staging", str(staging), "--rows", str(ROWS)]
    arguments += ["--batch", str(BATCH)]
    arguments += ["--interval", "10", "--steps", str(steps), "--max-staged", "4"]
    run_script(str(EXAMPLES / "train_dlrm.py"), *arguments, *options).check_returncode()


def asked(url: str, sparse: torch.Tensor) -> dict[str, Any] | None:
    """The answer; None while there is nothing to serve."""
    data = json.dumps({"sparse": sparse.tolist()}).encode()
    try:
        with urllib.request.urlopen(f"{url}/predict", data=data, timeout=30) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return None
    assert isinstance(found, dict)
    return found


def expected(steps: int, sparse: torch.Tensor, *, keyed: bool) -> dict[int, list[float]]:
    """What the trainer's model predicts after each batch: the same training, in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()
    reader = RetailReader(lines=BATCH // 2, rows=ROWS, keyed=keyed)
    model = build_model(reader)
    dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
    optimizers = [
        torch.optim.Adagrad(model.tables.parameters(), lr=0.1),
        torch.optim.Adagrad(dense, lr=0.02),
    ]
    found: dict[int, list[float]] = {}
    for step, batch in enumerate(reader, start=1):
        loss = F.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.label)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found[step] = model(torch.empty(len(sparse), 0), sparse).tolist()
        model.train()
        if step == steps:
            break
    torch.set_num_threads(threads)
    return found


def caught_up(url: str) -> dict[str, Any] | None:
    """The status, once nothing newer waits to be served."""
    with urllib.request.urlopen(f"{url}/status", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found if found["lag_seconds"] == 0.0 else None


@pytest.mark.slow
@pytest.mark.parametrize(
    "keyed", [False, pytest.param(True, marks=pytest.mark.nightly("loops"))], ids=["rows", "keys"]
)
def test_predictions_are_the_trainers_at_the_step_they_name(tmp_path: Path, keyed: bool) -> None:
    options = ["--keyed"] if keyed else []
    run, staging = str(tmp_path / "run"), tmp_path / "staging"
    sparse = next(iter(RetailReader(lines=8, rows=ROWS, seed=5, keyed=keyed))).sparse
    right = expected(60, sparse, keyed=keyed)
    seen: dict[int, list[float]] = {}

    def serves(url: str, step: int) -> bool:
        answer = asked(url, sparse)
        if answer is not None:
            seen[answer["step"]] = answer["logits"]
        return answer is not None and answer["step"] == step

    with (
        AgentProcess(staging, tmp_path / "agent.log"),
        server(run, tmp_path / "one", *options) as url,
    ):
        assert asked(url, sparse) is None
        for steps in (20, 60):
            trained(run, staging, steps, *options)
            until(partial(serves, url, steps))
        # The version is there before the figures about it, at the end of the same look.
        status = until(lambda: caught_up(url))
        with server(run, tmp_path / "other", "--quantized", *options) as other:
            until(lambda: serves(other, 60))
    assert seen.keys() >= {20, 60} and all(logits == right[s] for s, logits in seen.items())
    assert seen[20] != seen[60]
    assert status["serving"]["step"] == 60 and status["fulls_applied"] == 1
    assert status["error"] is None
