"""Lightning's Trainer with checkpoints: interrupted anywhere, it ends as if it never was."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from tests.flat_settings import arguments

pytest.importorskip("lightning.pytorch", reason="needs the extra [lightning]")

from lightning.pytorch import Trainer, callbacks  # noqa: E402
from lightning.pytorch.callbacks import Callback  # noqa: E402
from lightning.pytorch.utilities.exceptions import SIGTERMException  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from recpoint import (  # noqa: E402
    Checkpointer,
    KeyedEmbedding,
    LightningCallback,
    Lookahead,
    ResumableLoader,
)
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store  # noqa: E402
from recpoint.embeddings import Uniform  # noqa: E402
from recpoint.errors import SettingsError  # noqa: E402
from recpoint.installation import install_command
from recpoint.trainer_plugin import lightning as of_lightning  # noqa: E402
from tests.forked import ForkedProcess  # noqa: E402
from tests.lightning_builder import (  # noqa: E402
    Breaks,
    Manual,
    Module,
    Samples,
    ended,
    fit,
    life,
    loader,
    rank_life,
)
from tests.training_builder import (  # noqa: E402
    BATCH,
    DIM,
    ROWS,
    Place,
    Recommender,
    seed_everything,
    until,
)

pytestmark = pytest.mark.filterwarnings(
    # What Lightning says to every script; and what it deprecates in itself.
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*have no `val_dataloader`:UserWarning",
    "ignore:.*treespec.*:FutureWarning",
    "ignore:.*isinstance.*:FutureWarning",
    "ignore::DeprecationWarning",
)


def _callback(place: Place, **settings: Any) -> LightningCallback:
    return LightningCallback(
        **arguments(
            {
                "run": place.run,
                "directory": place.staging,
                "interval_batches": 2,
                "when_busy": "wait",
                "close_seconds": 20.0,
                "drain_seconds": 20.0,
                "on_error": "raise",
                **settings,
            }
        )
    )


def _steps(place: Place) -> list[int]:
    return sorted(name.step for name in Run.open(open_store(place.run)).live_line())


def test_a_table_gets_more_rows_between_two_fits(place: Place) -> None:
    rule = Uniform(seed=3)
    with place.agent():
        seed_everything(1)
        with pytest.raises(RuntimeError, match="at batch"):
            fit(Module(), loader(), _callback(place), Breaks(11))
        module = Module()
        module.net.users = torch.nn.Embedding(ROWS + 10, DIM, sparse=True)
        trainer = fit(module, loader(), _callback(place, grow={"net.users": rule}))
    assert trainer.global_step == 18
    # No batch looks them up.
    expected = rule("net.users", torch.arange(ROWS, ROWS + 10), DIM, torch.float32)
    assert torch.equal(module.net.users.weight[ROWS:], expected)


@pytest.mark.parametrize(
    ("kind", "module", "settings", "at"),
    [
        ("shuffled", Module, {}, 11),
        ("shuffled", Module, {"accumulate_grad_batches": 2}, 11),
        ("shuffled", Module, {"max_steps": 16, "max_epochs": -1}, 8),
        ("shuffled", Manual, {}, 8),
        ("stream", Module, {}, 6),  # the last checkpoint is between two epochs
        ("stream", Module, {"accumulate_grad_batches": 4}, 11),
    ],
)
def test_a_fit_goes_on_bit_for_bit(
    place: Place, kind: str, module: type[Module], settings: dict[str, Any], at: int
) -> None:
    seed_everything(1)
    whole = fit(module(), loader(kind), **settings)
    expected, batches = ended(whole), _seen(whole)
    with place.agent():
        seed_everything(1)
        with pytest.raises(RuntimeError, match="at batch"):
            fit(module(), loader(kind), _callback(place), Breaks(at), **settings)
        seed_everything(2)
        callback = _callback(place)
        trainer = fit(module(), loader(kind), callback, **settings)
    assert ended(trainer) == expected
    trained = _seen(trainer)
    assert batches[-len(trained) :] == trained
    # With two batches to a checkpoint no more than these, and an accumulation, are trained again.
    accumulated = settings.get("accumulate_grad_batches", 3 if module is Manual else 1)
    assert at - 2 * accumulated <= len(batches) - len(trained) <= at
    assert callback.checkpointer is not None
    assert _steps(place)[-1] == callback.checkpointer.batches_done


def test_pytorch_lightning_runs_the_same_callback(place: Place) -> None:
    package = pytest.importorskip("pytorch_lightning")

    class Plain(package.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Recommender(sparse=True)

        def training_step(self, batch: Any, _: int) -> Any:
            users, items, target = batch
            return (self.net(users, items) - target).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module: Any = Plain()
    with place.agent():
        fit(
            module,
            loader(),
            _callback(place),
            validate=False,
            trainer_class=package.Trainer,
            max_epochs=1,
        )
    assert _steps(place) == [2, 4, 6]


def test_sigterm_takes_a_final_checkpoint_where_gradients_have_been_applied(place: Place) -> None:
    class Terminates(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.fit_loop.total_batch_idx == 6:  # half of an accumulation
                os.kill(os.getpid(), signal.SIGTERM)

    settings: dict[str, Any] = {"accumulate_grad_batches": 2}
    seed_everything(1)
    expected = ended(fit(Module(), loader(), **settings))
    before = signal.getsignal(signal.SIGTERM)
    with place.agent():
        seed_everything(1)
        far = _callback(place, interval_batches=100)
        with pytest.raises(SIGTERMException):
            fit(Module(), loader(), far, Terminates(), **settings)
        assert _steps(place) == [4]
        assert signal.getsignal(signal.SIGTERM) == before
        trainer = fit(Module(), loader(), _callback(place), **settings)
    assert ended(trainer) == expected


def test_what_fails_while_a_batch_is_read_leaves_a_final_checkpoint(place: Place) -> None:
    class Fails(Samples):
        left = 5 * BATCH

        def __getitem__(self, number: int) -> Any:
            self.left -= 1
            if self.left < 0:
                raise OSError("the file server is gone")
            return super().__getitem__(number)

    seed_everything(1)
    expected = ended(fit(Module(), loader(), validate=False, max_epochs=1))
    with place.agent():
        seed_everything(1)
        batches = ResumableLoader(DataLoader(Fails(), batch_size=BATCH, shuffle=True))
        far = _callback(place, interval_batches=100)
        with pytest.raises(OSError, match="file server"):
            fit(Module(), batches, far, validate=False, max_epochs=1)
        assert _steps(place) == [5]
        trainer = fit(Module(), loader(), _callback(place), validate=False, max_epochs=1)
    assert len(_seen(trainer)) == 1
    assert ended(trainer) == expected


def test_training_that_had_ended_trains_nothing(place: Place) -> None:
    with place.agent():
        fit(Module(), loader(), _callback(place), max_epochs=1)
        trainer = fit(Module(), loader(), _callback(place), max_epochs=1)
        assert _seen(trainer) == []
        longer = fit(Module(), loader(), _callback(place), max_epochs=2)
    assert len(_seen(longer)) == 6
    assert longer.current_epoch == 2


def test_epochs_that_are_added_are_drawn_by_the_generator_that_drew_the_others(
    place: Place,
) -> None:
    def batches() -> ResumableLoader:
        own = torch.Generator().manual_seed(4)
        return ResumableLoader(DataLoader(Samples(), batch_size=BATCH, shuffle=True, generator=own))

    seed_everything(1)
    whole = _seen(fit(Module(), batches(), max_epochs=2))
    with place.agent():
        seed_everything(1)
        fit(Module(), batches(), _callback(place), max_epochs=1)
        seed_everything(2)
        trainer = fit(Module(), batches(), _callback(place), max_epochs=2)
    assert _seen(trainer) == whole[6:]


@pytest.mark.slow
def test_a_killed_process_goes_on_bit_for_bit(place: Place, tmp_path: Path) -> None:
    def begin(name: str, run: str, wait_at: int | None = None) -> tuple[ForkedProcess, Path, Path]:
        evidence, seen = tmp_path / f"{name}.json", tmp_path / f"{name}.txt"
        process = ForkedProcess(
            target=life,
            kwargs={
                "run": run,
                "staging": str(place.staging),
                "evidence": str(evidence),
                "seen": str(seen),
                "wait_at": wait_at,
            },
        )
        process.start()
        return process, evidence, seen

    with place.agent():
        whole, expected, _ = begin("whole", f"{place.run}-whole")
        killed, nothing, seen = begin("killed", place.run, wait_at=20)  # of 72
        until(lambda: any(Path(place.run, "manifests").glob("*.json")))
        os.kill(killed.pid or 0, signal.SIGKILL)
        killed.join(240)
        assert killed.exitcode == -signal.SIGKILL
        assert not nothing.exists()
        resumed, found, seen = begin("resumed", place.run)
        for process in (whole, resumed):
            process.join(240)
            assert process.exitcode == 0
    first = int(seen.read_text().splitlines()[0])
    assert first > 0
    assert json.loads(found.read_text()) == json.loads(expected.read_text())


@pytest.mark.slow
@pytest.mark.nightly("loops")
def test_ranks_under_ddp_go_on_bit_for_bit_when_one_was_killed(
    place: Place, tmp_path: Path
) -> None:
    def fit_ranks(name: str, run: str, *, dies_at: int = -1) -> tuple[list[int | None], list[Path]]:
        told = [tmp_path / f"{name}-{rank}.json" for rank in range(2)]
        processes = [
            ForkedProcess(
                target=rank_life,
                args=(rank, 2),
                kwargs={
                    "meeting": str(tmp_path / f"{name}-met"),
                    "run": run,
                    "staging": str(place.staging),
                    "evidence": str(told[rank]),
                    "dies_at": dies_at if rank == 1 else -1,
                },
            )
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
        return [process.exitcode for process in processes], told

    with place.agent():
        assert fit_ranks("whole", f"{place.run}-whole")[0] == [0, 0]
        codes, told = fit_ranks("killed", place.run, dies_at=10)
        assert codes[1] == -signal.SIGKILL and codes[0] not in (0, None)
        assert not any(path.exists() for path in told)
        assert fit_ranks("resumed", place.run)[0] == [0, 0]
    for rank in range(2):
        batches, expected = json.loads((tmp_path / f"whole-{rank}.json").read_text())
        more, found = json.loads((tmp_path / f"resumed-{rank}.json").read_text())
        # Whether the checkpoint at 8 was staged before the kill, nobody says.
        assert batches == 18 and more in (18 - 4, 18 - 8)
        assert found == expected


def test_a_loader_without_a_position_is_refused(place: Place) -> None:
    bare = DataLoader(Samples(), batch_size=BATCH)
    with pytest.raises(SettingsError, match=r"found a DataLoader.*ResumableLoader"):
        fit(Module(), bare, _callback(place), validate=False)


def test_a_lookahead_is_refused(place: Place) -> None:
    ahead = Lookahead(loader(), ids=lambda batch: {"net.users": batch[0]})
    with pytest.raises(SettingsError, match=r"found a Lookahead.*fit\(module, lookahead\.reader"):
        fit(Module(), ahead, _callback(place), validate=False)


@pytest.mark.parametrize("is_keyed", [False, True])
@pytest.mark.parametrize("kind", ["WeightAveraging", "EMAWeightAveraging"])
def test_an_average_that_no_checkpoint_would_have_is_refused(
    place: Place, kind: str, is_keyed: bool
) -> None:
    average = getattr(callbacks, kind, None)
    if average is None:
        pytest.skip("this version of lightning has no such callback")
    module = Module()
    if is_keyed:
        module.net.users = KeyedEmbedding(6, 40, sparse=True)  # type: ignore[assignment]
    expected = "keyed table 'net.users'" if is_keyed else "no checkpoint would have it"
    with pytest.raises(SettingsError, match=expected):
        fit(module, loader(), average(), _callback(place))


def test_averages_of_keyed_tables_are_refused(place: Place) -> None:
    average = callbacks.StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
    module = Module()
    module.net.users = KeyedEmbedding(6, 40, sparse=True)  # type: ignore[assignment]
    with pytest.raises(SettingsError, match=r"StochasticWeightAveraging.*keyed table 'net\.users'"):
        fit(module, loader(), _callback(place), average)


def test_what_lightning_has_is_not_asked_for() -> None:
    with pytest.raises(SettingsError, match="optimizers"):
        LightningCallback(
            run="/nowhere",
            interval_batches=1,
            optimizers=[],  # type: ignore[call-arg]  # mypy says so too
        )


def test_what_a_checkpointer_has_not_is_refused_before_a_fit() -> None:
    with pytest.raises(TypeError, match="interval"):
        LightningCallback(run="/nowhere", interval=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="run"):
        LightningCallback(interval_batches=1)  # type: ignore[call-arg]
    with pytest.raises(SettingsError, match=r"options: found 'raise'.*recpoint\.Options"):
        LightningCallback(
            run="/nowhere",
            interval_batches=1,
            options="raise",  # type: ignore[arg-type]
        )


def test_the_callback_takes_what_the_checkpointer_does() -> None:
    own = inspect.signature(Checkpointer).parameters
    taken = dict(inspect.signature(LightningCallback).parameters)
    assert taken.pop("restore").default is None
    assert own.keys() - taken.keys() == {"model", "optimizers", "reader", "schedulers"}
    assert all(own[name] == parameter for name, parameter in taken.items())
    # What mypy is told of them is stated once more.
    types = get_type_hints(of_lightning.CheckpointerArguments)
    own_types = get_type_hints(Checkpointer.__init__)
    assert types == {name: own_types[name] for name in taken}


def test_a_fast_run_for_development_takes_no_checkpoint(place: Place) -> None:
    callback = _callback(place)
    fit(Module(), loader(), callback, fast_dev_run=True)
    assert callback.checkpointer is None
    assert not Path(place.run).exists()


def test_without_lightning_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "recpoint.trainer_plugin.lightning"
    monkeypatch.delitem(sys.modules, name)
    for missing in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SettingsError, match=re.escape(install_command("lightning"))):
        importlib.import_module(name)


def _seen(trainer: Trainer) -> list[float]:
    module: Any = trainer.lightning_module
    seen: list[float] = module.seen
    return seen
