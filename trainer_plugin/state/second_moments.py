"""Finds the row state that says how much an error in a row matters to the loss.

An error e in one value of a row raises the mean loss of a batch by about ½ · F · e², where F is a
diagonal entry of the Fisher information: the mean of the value's squared gradients over batches, up
to one factor for all values of a model (docs/understanding/allocation.md). Adagrad and Adam keep
that mean, or a sum from which it follows:

    Adagrad, also fused   sum, of all steps; each step counts, looked up or not: sum / steps
    row-wise Adagrad      the same sum of the mean over a row's values
    Adam, AdamW           exp_avg_sq, over the last 1 / (1 - beta2) steps: / (1 - beta2^steps)
    SparseAdam, and       exp_avg_sq, which moves only in steps that look the row up. It is the mean
    Adam as fused         over the row's last 1 / (1 - beta2) lookups, and not over steps

The last is F for a row that each batch looks up, and more than F for other rows. While a row has
had fewer lookups than 1 / (1 - beta2), its state grows with each lookup as Adagrad's sum does, so
rows still stand in the order of their sums.

Other optimizers of torch, such as SGD, keep no such state. Lookups of their tables are counted
(`embeddings.tables.counted_lookups`), and F is taken as the lookups a batch, as if each had the
same squared gradient. The unit of this F is another one, so it has no price in common with the F
above.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch.optim import Adagrad, Adam, AdamW, Optimizer, SparseAdam

from recpoint.embeddings.tables.counted_lookups import LOOKUPS, LookupCounts
from recpoint.embeddings.tables.optimizers import is_rowwise_adagrad
from recpoint.embeddings.tables.tables import Table, TableSource
from recpoint.errors import SettingsError
from recpoint.format.manifest import TableSpec

__all__ = ["SecondMoment", "SecondMoments", "counts_of"]

#: Names of the row states.
_SUM: Final = "sum"
_MEAN: Final = "exp_avg_sq"
#: The optimizers of torch whose second moment is a decaying mean.
_ADAMS: Final = (Adam, AdamW, SparseAdam)
#: FBGEMM's name of a fused optimizer -> its row state.
_FUSED: Final = {
    "exact_adagrad": _SUM,
    "exact_row_wise_adagrad": _SUM,
    "adam": _MEAN,
    "partial_row_wise_adam": _MEAN,
}


class SecondMoment(NamedTuple):
    """The row state of a table that stands for a second moment of its gradients.

    A row's importance is `scale` times the mean of its values of the state, less `initial`. The
    values of `LOOKUPS` are the counts that its codes stand for.

    Attributes:
        state: index of the row state in the table's spec.
        scale: makes half of the Fisher information of a state.
        initial: the value with which the optimizer begins the state.
    """

    state: int
    scale: float
    initial: float


class SecondMoments:
    """Finds the second moments of the tables of one model.

    Args:
        optimizers: the optimizers that train the model.
        sources: the libraries that supply tables in their own form.
        counted: keys of the tables whose lookups are counted instead.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        sources: Sequence[TableSource],
        *,
        counted: Collection[str] = (),
    ) -> None:
        self._optimizers = tuple(optimizers)
        self._sources = tuple(sources)
        self._counted = frozenset(counted)

    def require(self, table: Table) -> None:
        """Refuse a table of which neither a second moment nor a count of lookups is kept.

        Raises:
            SettingsError: its optimizer keeps no second moment, or no optimizer trains the table.
        """
        if _is_fused(table):
            self._fused(table)
        elif table.key not in self._counted:
            self._trained(table)

    def require_one_unit(self, tables: Sequence[Table]) -> None:
        """Refuse tables whose importances have two units, for which no price holds.

        Raises:
            SettingsError: the lookups of some tables are counted, and others have second moments.
        """
        counted = [table for table in tables if table.key in self._counted]
        if counted and len(counted) < len(tables):
            raise SettingsError(
                f"widths by the loss for table {counted[0].name!r}",
                found="an optimizer without squared gradients, so that its lookups are counted, "
                "beside tables with squared gradients",
                expected="importances of one unit, so that one price of a bit holds for all tables",
                next_step=f"give one kind of tables a width of its own, Precision(tables="
                f"{{{counted[0].name!r}: 8}}), or train all tables with optimizers of one kind",
            )

    def of(self, table: Table, spec: TableSpec, batches: int) -> SecondMoment | None:
        """Return the second moment of a table; None if no step has changed it yet.

        Args:
            table: the table.
            spec: the table as it is stored now, with its row states.
            batches: batches that the run has trained: the steps of optimizers that count none.

        Raises:
            SettingsError: as `require`.
        """
        beta2, initial, steps = None, 0.0, batches
        if table.key in self._counted:
            name = LOOKUPS
        elif _is_fused(table):
            entry = self._fused(table)
            name, initial = _FUSED[entry["optimizer"]], 0.0
            beta2 = entry["beta2"] if name == _MEAN else None
            # FBGEMM counts steps for Adam alone.
            steps = batches if beta2 is None else entry["iter"]
        else:
            optimizer, group = self._trained(table)
            is_mean = type(optimizer) in _ADAMS
            name = _MEAN if is_mean else _SUM
            beta2 = group["betas"][1] if is_mean else None
            steps = optimizer.state.get(table.weight, {}).get("step", batches)
            initial = float(group.get("initial_accumulator_value", 0.0))
        names = [state.name for state in spec.row_states]
        divisor = float(steps) if beta2 is None else 1.0 - float(beta2) ** float(steps)
        if name not in names or not divisor > 0.0:
            return None
        return SecondMoment(names.index(name), 0.5 / divisor, initial)

    def _fused(self, table: Table) -> Mapping[str, Any]:
        """Return what the table's source says of its fused optimizer."""
        for source in self._sources:
            if any(table is own_table for own_table in source.tables):
                entry: Mapping[str, Any] = source.state_dict()[table.name]
                name = entry.get("optimizer")
                if name not in _FUSED:
                    raise _refused(table, f"the fused optimizer {name}")
                return entry
        raise _refused(table, "an optimizer of no source that is known here")

    def _trained(self, table: Table) -> tuple[Optimizer, Mapping[str, Any]]:
        """Return the optimizer of torch that trains the table, and its group."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if any(parameter is table.weight for parameter in group["params"]):
                    kind = type(optimizer)
                    if _keeps_second_moments(kind):
                        return optimizer, group
                    raise _refused(table, f"{kind.__module__}.{kind.__qualname__}")
        raise _refused(table, "no optimizer that trains it")


def counts_of(
    tables: Sequence[Table], optimizers: Sequence[Optimizer], keys: Collection[str]
) -> dict[str, LookupCounts]:
    """Return counts for tables on the CPU whose optimizer of torch keeps no second moment.

    Args:
        tables: the tables of the model.
        optimizers: the optimizers that train it.
        keys: keys of the tables that need a second moment.

    Returns:
        `Table.key` -> its counts, all zero.
    """
    trained = {
        id(parameter)
        for optimizer in optimizers
        if not _keeps_second_moments(type(optimizer))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {
        table.key: LookupCounts(table.rows)
        for table in tables
        if table.key in keys
        and not (_is_fused(table) or table.cached)
        and table.weight.is_cpu
        and id(table.weight) in trained
    }


def _keeps_second_moments(kind: type) -> bool:
    # Subclasses may keep something else under the same name.
    return kind is Adagrad or kind in _ADAMS or is_rowwise_adagrad(kind)


def _is_fused(table: Table) -> bool:
    return table.row_states is not None


def _refused(table: Table, found: str) -> SettingsError:
    return SettingsError(
        f"widths by the loss for table {table.name!r}",
        found=found,
        expected="an optimizer of torch that trains the table, or a fused Adagrad or Adam",
        next_step="choose one of these for the table, or give the table a width of its own,"
        " Precision(tables={NAME: 8})",
    )
