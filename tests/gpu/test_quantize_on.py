"""Rows quantized on the GPU in the cut are stored as the agent stores them by the same method."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from recpoint import Checkpointer, Options, Precision
from recpoint.catalog.persist import persist
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.format.manifest import ChosenMethod
from recpoint.trainer_plugin.settings import Where
from tests.training_builder import until

pytestmark = pytest.mark.gpu

ROWS = 3000
#: Batches before the batch of the first checkpoint.
BEFORE = 9


class _Stored(NamedTuple):
    codes: list[bool]  # of each job: whether the slot held codes
    methods: list[ChosenMethod]
    values: Tensor


def _trained(folder: Path, table: nn.Embedding, precision: Precision) -> _Stored:
    """A full and two increments, each persisted before the next is cut."""
    model = nn.ModuleDict({"table": table})
    url, area = str(folder / "run"), folder / "staging"
    ckpt = Checkpointer(
        model,
        [SGD(model.parameters(), lr=0.1)],
        run=url,
        staging=area,
        interval_batches=10**9,
        bits=precision,
        options=Options(handle_sigterm=False, on_error="raise"),
    )
    ckpt.restore()
    jobs = StagedRun.of(area, open_store(url).url).path
    codes: list[bool] = []

    def committed() -> bool:
        return ckpt.stats.committed == len(codes)

    def compiled() -> bool:
        return not any(t.name == "recpoint-compile" for t in threading.enumerate())

    for _ in range(BEFORE):  # a method is chosen anew once twice as many batches are trained
        ckpt.step()
    for number in range(1, 4):
        ids = torch.arange(number, ROWS, 7, device=table.weight.device)
        with torch.no_grad():
            table.weight[ids] += 0.01 * number
        ckpt.mark("table", ids)
        ckpt.step()  # hears of the commit before, whose methods are compiled beside training
        until(compiled, seconds=300)
        assert ckpt.checkpoint()
        until(lambda: bool(StagedRun(jobs).staged_jobs()))
        (path,) = StagedRun(jobs).staged_jobs()
        codes.append(job_files.read_job(path).tables[0].codes)
        assert persist.persist_job(path).result == "committed"
        until(committed)
    ckpt.close(final=False)
    run, target = Run.open(open_store(url)), MemoryTarget()
    restore(run, target)
    methods = [run.manifest(BEFORE + number, 1).quantizers[0].chosen for number in (1, 2, 3)]
    return _Stored(codes, methods, target.tables["table"].values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("bits", "quantizer"),
    [(2, "auto"), (3, "greedy"), (4, "auto"), (8, "auto"), (4, "symmetric"), (2, "asymmetric")],
)
def test_both_restore_to_the_same(
    device: torch.device, tmp_path: Path, bits: Any, quantizer: Any, dtype: torch.dtype
) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("in the interpreter tables are on the CPU: what quantizes them is not Triton")
    torch.manual_seed(1)
    first = torch.randn(ROWS, 24).to(dtype)
    first[7] = float("inf")
    first[9] *= 1e4
    found = {}
    places: tuple[Where, ...] = ("host", "device")
    for where in places:
        table = nn.Embedding.from_pretrained(first.clone().to(device), freeze=False, sparse=True)
        precision = Precision(bits=bits, small_table_values=0, quantizer=quantizer, place=where)
        found[where] = _trained(tmp_path / where, table, precision)
    host, gpu = found["host"], found["device"]
    fixed = quantizer in ("symmetric", "asymmetric") or bits == 8
    assert host.codes == [False] * 3 and gpu.codes == [fixed, True, True]
    assert gpu.methods[1:] == [gpu.methods[0]] * 2
    # Where there is something to choose, the agent chooses for each job, and the GPU keeps to what
    # was chosen for the full: other methods, and so other bytes, are right then.
    if fixed:
        assert host.methods == gpu.methods
    if host.methods == gpu.methods:
        assert torch.equal(host.values.view(torch.uint8), gpu.values.view(torch.uint8))
    assert bool(torch.isinf(gpu.values[7]).all())


def test_increments_of_residuals_are_staged_as_values_wherever_fulls_are_quantized(
    device: torch.device, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    first = torch.randn(ROWS, 24)
    first[7] = float("inf")
    stored = {}
    places: tuple[Where, ...] = ("host", "device")
    for where in places:
        table = nn.Embedding.from_pretrained(first.clone().to(device), freeze=False, sparse=True)
        precision = Precision(
            bits=4, small_table_values=0, quantizer="asymmetric", place=where, residual=True
        )
        stored[where] = _trained(tmp_path / where, table, precision)
    host, gpu = stored["host"], stored["device"]
    assert host.codes == [False] * 3 and gpu.codes == [True, False, False]
    assert torch.equal(host.values.view(torch.int32), gpu.values.view(torch.int32))
    run = Run.open(open_store(str(tmp_path / "device" / "run")))
    for number in (2, 3):
        schemes = {chunk.scheme for chunk in run.manifest(BEFORE + number, 1).chunks}
        assert "residual" in schemes and "asymmetric" not in schemes
