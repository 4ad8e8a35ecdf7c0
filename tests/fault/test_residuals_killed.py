"""An agent that is killed while it stores residuals, or keeps rows of the full, begins again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recpoint.catalog.check.validate import validate
from recpoint.catalog.staging.area import StagedRun
from recpoint.format.naming import ManifestName
from tests.catalog_builder import Table, new_run
from tests.consolidation import restored
from tests.fault.kill_points import at_every_step
from tests.job_builder import Links, stage
from tests.mixed_table import mixed_table
from tests.persist_process import persist_in_process

pytestmark = pytest.mark.nightly("kills")

ROWS, DIM = 60, 6


def one_width(random: torch.Generator) -> Table:
    return Table("items", torch.randn(ROWS, DIM, generator=random), bits=3, residual=True)


def a_width_for_each_row(random: torch.Generator) -> Table:
    """As `Loss` has rows stored; the agent finds a lower price for the residuals."""
    table = mixed_table(ROWS, DIM, price=2.0**-34)
    table.residual = True
    return table


def values_after(
    folder: Path, table_of: Callable[[torch.Generator], Table], die: int | None
) -> tuple[bool, Tensor]:
    """Store a full and two increments; the agent of the first dies at a step.

    Returns:
        Whether it was killed; and the rows of a restore.
    """
    run = new_run(folder / "run")
    run.claim(None)
    random = torch.Generator().manual_seed(3)
    table = table_of(random)
    table.values[4, 1] = torch.nan
    links, killed = Links(), False
    for number, step in enumerate((10, 20, 30)):
        ids = torch.arange(number, ROWS, 2)
        table.values[ids] += 0.05 * torch.randn(len(ids), DIM, generator=random)
        path = stage(
            run,
            folder / "staging",
            [table],
            step=step,
            generation=1,
            links=links,
            dirty=[ids] if number else None,
            slot=number % 2,
            samples=20,
        )
        if step == 20 and die is not None:
            killed = persist_in_process(path, die_at=die) == -signal.SIGKILL
            StagedRun.of_job(path).clean()  # as the next agent does
        if path.exists():
            assert persist_in_process(path) == 0
        assert run.manifest(step, 1).step == step
    for step in (20, 30):
        validated = validate(run, ManifestName(step, 1), level="full")
        assert (validated.result, validated.findings) == ("passed", ())
    return killed, restored(run, run.manifest(30, 1))[0].tables["items"].values


@pytest.mark.parametrize("table_of", [one_width, a_width_for_each_row])
def test_at_every_step(tmp_path: Path, table_of: Callable[[torch.Generator], Table]) -> None:
    _, expected = values_after(tmp_path / "whole", table_of, None)

    def attempt(die: int) -> bool:
        killed, values = values_after(tmp_path / str(die), table_of, die)
        assert torch.equal(values.view(torch.int32), expected.view(torch.int32))
        return killed

    assert at_every_step(attempt) > 30
