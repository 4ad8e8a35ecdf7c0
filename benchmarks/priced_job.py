"""Gives the tables of a staged job a price of a bit, as `bits=Loss` does once it has measured one.

A benchmark cannot wait until enough batches are measured, and wants prices of its own choice. So it
stages a checkpoint of `bits=8`, and puts the price into the job file before an agent reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from recpoint.catalog.staging import owned
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.job_files import read_job
from recpoint.format.job import Allocation, Job, StagedTable
from recpoint.format.records import pack_record

__all__ = ["give_price"]

#: The row state of Adagrad and row-wise Adagrad that importances come from.
_SUM: Final = "sum"


def give_price(job_file: Path, price: float, *, scale: float) -> Job:
    """Have each row of the tables of a staged job get a width by a price; return the job.

    Args:
        job_file: of a checkpoint that no agent has begun to store.
        price: loss for each stored bit.
        scale: makes half of the Fisher information of Adagrad's sums.
    """
    job = read_job(job_file)
    tables = tuple(_with_price(table, price, scale) for table in job.tables)
    priced = job.model_copy(update={"tables": tables})
    owned.write_atomically(StagedRun.of_job(job_file).staging, job_file, pack_record(priced))
    return read_job(job_file)  # and so it is checked


def _with_price(table: StagedTable, price: float, scale: float) -> StagedTable:
    names = [state.name for state in table.spec.row_states]
    if not table.is_quantized or _SUM not in names:
        return table
    allocation = Allocation(price=price.hex(), state=names.index(_SUM), scale=scale.hex())
    # A job with a price names no method: the agent takes that of the price.
    return table.model_copy(update={"allocation": allocation, "method": None})
