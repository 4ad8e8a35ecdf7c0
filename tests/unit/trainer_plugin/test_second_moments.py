"""The importance of a row, from each optimizer's state, is half of its mean squared gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from recpoint.embeddings.tables.optimizers import row_states
from recpoint.embeddings.tables.tables import ModuleTable, Table, plain_tables
from recpoint.errors import SettingsError
from recpoint.format.dtypes import dtype_name
from recpoint.format.manifest import RowStateSpec, TableSpec
from recpoint.trainer_plugin.state.second_moments import SecondMoment, SecondMoments
from tests.torchrec_model import MISSING
from tests.torchrec_ranks import play
from tests.unit.kernels.every import every

ROWS, DIM, STEPS = 12, 4, 60


class _Trained:
    """An embedding that is trained on random ids, and the squares of all its gradients.

    Row 0 is looked up in each step, the last row never.
    """

    def __init__(
        self, optimizer: Callable[..., torch.optim.Optimizer], *, sparse: bool, steps: int = STEPS
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.EmbeddingBag(ROWS, DIM, sparse=sparse, mode="sum"))
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.squares: list[Tensor] = []
        self.lookups = torch.zeros(ROWS)
        for _ in range(steps):
            ids = torch.cat((torch.zeros(8, 1), torch.randint(1, ROWS - 1, (8, 1))), 1).long()
            loss = (self.model(ids) @ torch.randn(DIM, 1) + torch.randn(8, 1)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            gradient = self.table.weight.grad
            assert gradient is not None
            self.squares.append(gradient.to_dense().square().mean(dim=1))
            self.lookups[ids.unique()] += 1
            self.optimizer.step()

    @property
    def table(self) -> Table:
        return plain_tables(self.model).tables[0]

    def importance(self, *, batches: int = 0) -> Tensor:
        weight = self.table.weight
        states = row_states(self.optimizer.state[weight], ROWS)
        moment = SecondMoments([self.optimizer], []).of(self.table, _spec(states), batches)
        assert moment is not None
        state = list(states.values())[moment.state].double()
        return moment.scale * (state - moment.initial).clamp(min=0).flatten(1).mean(dim=1)


def _spec(states: dict[str, Tensor]) -> TableSpec:
    return TableSpec(
        name="0",
        rows=ROWS,
        dim=DIM,
        dtype="F32",
        row_states=tuple(
            RowStateSpec(
                name=name, dtype=dtype_name(state.dtype), shape=tuple(state.shape[1:]), optimizer=0
            )
            for name, state in states.items()
        ),
    )


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("initial", [0.0, 0.5])
def test_adagrad_adds_up_the_squares_of_all_steps(sparse: bool, initial: float) -> None:
    trained = _Trained(
        lambda parameters, lr: torch.optim.Adagrad(
            parameters, lr, initial_accumulator_value=initial
        ),
        sparse=sparse,
    )
    half_of_mean = 0.5 * torch.stack(trained.squares).double().mean(dim=0)
    torch.testing.assert_close(trained.importance(), half_of_mean, rtol=1e-4, atol=1e-6)
    assert trained.importance()[-1] == 0.0


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_row_wise_adagrad_adds_up_the_means_of_rows() -> None:
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    trained = _Trained(RowWiseAdagrad, sparse=False)
    half_of_mean = 0.5 * torch.stack(trained.squares).double().mean(dim=0)
    torch.testing.assert_close(trained.importance(), half_of_mean, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_has_the_mean_of_the_last_steps(kind: Any) -> None:
    trained = _Trained(lambda given, lr: kind(given, lr=lr, betas=(0.9, 0.95)), sparse=False)
    weights = 0.95 ** torch.arange(STEPS - 1, -1, -1, dtype=torch.float64)
    mean = (weights[:, None] * torch.stack(trained.squares)).sum(dim=0) / weights.sum()
    torch.testing.assert_close(trained.importance(), 0.5 * mean, rtol=1e-4, atol=1e-9)


def test_sparse_adam_is_right_for_hot_rows_and_orders_the_rare_ones_as_adagrad_does() -> None:
    trained = _Trained(
        lambda given, lr: torch.optim.SparseAdam(given, lr=lr, betas=(0.9, 0.999)), sparse=True
    )
    squares = torch.stack(trained.squares).double()
    half_of_mean = 0.5 * squares.mean(dim=0)
    importance = trained.importance()
    assert importance[0] == pytest.approx(float(half_of_mean[0]), rel=0.05)
    # Of rows with few lookups, as many steps ago or not, the state is the sum times 1 - beta2.
    torch.testing.assert_close(importance, half_of_mean, rtol=0.05, atol=1e-9)
    # A row that has had more lookups than the moment remembers counts for more than its share.
    forgetful = _Trained(
        lambda given, lr: torch.optim.SparseAdam(given, lr=lr, betas=(0.5, 0.5)), sparse=True
    )
    frequent = forgetful.lookups > 20
    mean_at_lookups = squares.sum(dim=0) / trained.lookups.clamp(min=1)
    assert bool(frequent[1:].any())
    assert bool((forgetful.importance()[frequent] > 0.05 * mean_at_lookups[frequent]).all())


def test_no_step_gives_no_moment() -> None:
    for optimizer, sparse in ((torch.optim.Adagrad, True), (torch.optim.Adam, False)):
        trained = _Trained(optimizer, sparse=sparse, steps=0)
        states = row_states(trained.optimizer.state.get(trained.table.weight, {}), ROWS)
        moments = SecondMoments([trained.optimizer], [])
        moments.require(trained.table)
        assert moments.of(trained.table, _spec(states), 0) is None


class _OwnAdagrad(torch.optim.Adagrad):
    """Might keep anything as its sum."""


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adadelta, _OwnAdagrad]
)
def test_optimizers_without_a_second_moment_are_refused_by_name(kind: Any) -> None:
    trained = _Trained(kind, sparse=False, steps=1)
    moments = SecondMoments([trained.optimizer], [])
    with pytest.raises(SettingsError, match=kind.__name__):
        moments.require(trained.table)
    with pytest.raises(SettingsError, match=kind.__name__):
        moments.of(trained.table, _spec({}), 1)


def test_a_table_that_nothing_trains_is_refused() -> None:
    trained = _Trained(torch.optim.Adagrad, sparse=True, steps=0)
    with pytest.raises(SettingsError, match="table '0': found no optimizer"):
        SecondMoments([], []).require(trained.table)


class _LibraryTable(ModuleTable):
    """A table that a library trains in backward; FBGEMM's Adam runs on GPUs only."""

    @property
    def row_states(self) -> dict[str, Tensor]:
        return {"exp_avg": torch.zeros(ROWS, DIM), "exp_avg_sq": torch.ones(ROWS)}


class _Library:
    """Supplies such a table, and says of its optimizer what TorchRec's source says."""

    name, settings_step, modules = "library", "", ()

    def __init__(self, optimizer: str, steps: int | None) -> None:
        table = plain_tables(nn.Sequential(nn.EmbeddingBag(ROWS, DIM))).tables[0]
        assert isinstance(table, ModuleTable)
        self.table = _LibraryTable(
            name="library", parameter_name="library.weight", module=table.module
        )
        self.tables = (self.table,)
        self._state = {"optimizer": optimizer, "iter": steps, "beta2": 0.9}

    def state_dict(self) -> Any:
        return {"library": self._state}

    def moment(self) -> SecondMoment | None:
        moments = SecondMoments([], cast(Any, [self]))
        return moments.of(self.table, _spec(self.table.row_states), 5)


@every("optimizer", ["adam", "partial_row_wise_adam"])
def test_a_fused_adam_is_corrected_by_its_own_count_of_steps(optimizer: str) -> None:
    assert _Library(optimizer, 2).moment() == (1, 0.5 / (1 - 0.9**2), 0.0)
    assert _Library(optimizer, 0).moment() is None


@every("optimizer", ["exact_sgd", "lamb", "lars_sgd"])
def test_other_fused_optimizers_are_refused_by_name(optimizer: str) -> None:
    with pytest.raises(SettingsError, match=f"the fused optimizer {optimizer}"):
        _Library(optimizer, 2).moment()


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.xdist_group("torchrec")
def test_fused_and_torch_optimizers_under_torchrec(tmp_path_factory: Any) -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    assert {EmbOptimType.ADAM.value, EmbOptimType.PARTIAL_ROWWISE_ADAM.value} == {
        "adam",
        "partial_row_wise_adam",
    }
    folder = tmp_path_factory.mktemp("moments")
    kinds = {"t0": "table_wise", "t1": "column_wise", "t2": "dense", "s0": "row_wise"}
    kinds["s1"] = "table_wise"
    names = ("RowWiseAdagrad", "Adagrad", "SGD")
    plays = [
        {"play": "second_moments", "ranks": 2, "kinds": kinds, "optimizer": name} for name in names
    ]
    played = dict(zip(names, play(plays, folder), strict=True))
    for rank in range(2):
        assert len(played["SGD"][rank]) > 2
        for name in ("RowWiseAdagrad", "Adagrad"):
            for table, moment in played[name][rank].items():
                assert moment == ("sum", 0.5 / 3, 0.0), table
        for table, moment in played["SGD"][rank].items():
            if "t2" in table:
                assert moment == ("sum", 0.5 / 3, 0.0)
            else:
                assert "found the fused optimizer exact_sgd" in moment, table
