"""Trainings of two small tables that a signal interrupts at one place of one call, and that go on.

What is stored afterwards is compared with what the tables were: all rows, with their row states.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import Tensor

from recpoint import Checkpointer
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import SettingsError
from tests.interrupted import Arrival, Interrupt, TimeOut, Visits, handler_raises
from tests.persisted import restored
from tests.polling import until
from tests.training_builder import (
    Batches,
    Place,
    Recommender,
    Training,
    checkpointer,
    seed_everything,
)

__all__ = ["CALLS", "Life", "compare", "killed_life"]

#: What is interrupted.
CALLS = ("step", "batch", "restore", "close")

Rows = dict[str, list[Tensor]]


class Life:
    """One training process, at `place`; with an agent beside it.

    Args:
        place: of the run and its staging area.
        call: what is interrupted. A step is due for a checkpoint, other calls make their own.

    Attributes:
        truth: batches done -> each table with its row states, as they were then.
    """

    def __init__(self, place: Place, call: str) -> None:
        seed_everything(3)
        model = Recommender()
        # Of both kinds: marked after steps by sparse gradients, and at lookups.
        model.users.sparse = True
        users = model.users.weight
        others = [p for p in model.parameters() if p is not users]
        optimizers = [torch.optim.SGD([users], lr=0.1), torch.optim.Adagrad(others, lr=0.1)]
        self.training = Training(model, optimizers, Batches(3))
        self.place = place
        interval = 1 if call == "step" else 1_000
        self.ckpt: Checkpointer = checkpointer(self.training, place, interval_batches=interval)
        self.truth: dict[int, Rows] = {}

    def batch(self) -> None:
        """Train, and note what is there after that many batches."""
        assert torch.is_grad_enabled()
        self.training.batch()
        self.truth[self.ckpt.batches_done + 1] = self.rows()

    def rows(self) -> Rows:
        """The live tables."""
        model, (_, adagrad) = self.training.model, self.training.optimizers
        items = adagrad.state[model.items.weight]["sum"]
        return {
            "users": [model.users.weight.detach().clone()],
            "items": [model.items.weight.detach().clone(), items.clone()],
        }

    def interrupted(self, call: str, arrival: Arrival | None) -> Visits:
        """Make the call, which the signal may come into; it raises if the signal came."""
        visits = Visits(arrival)
        with handler_raises(Interrupt if arrival is None else arrival.error):
            try:
                visits.call(self.training.batch if call == "batch" else getattr(self.ckpt, call))
            except (Interrupt, TimeOut):
                assert visits.arrived
            else:
                assert not visits.arrived or _python_drops(arrival), f"{arrival}: was swallowed"
        if call == "batch":
            torch.set_grad_enabled(True)  # torch's optimizers may have been within a no_grad
        return visits

    def begin(self, call: str) -> None:
        """All that comes before the call."""
        if call == "restore":
            return
        self.ckpt.restore()
        self.until_stored()
        if call != "batch":
            self.batch()
        if call == "close":
            self.ckpt.step()

    def until_stored(self) -> None:
        """Train one more batch, and wait until a checkpoint of it is committed."""
        self.batch()
        self.ckpt.step()

        def cut() -> bool:
            return self.ckpt.stats.lag_batches == 0 or self.ckpt.checkpoint()

        until(cut)
        until(lambda: self.ckpt.stats.lag_batches == 0)

    def go_on(self, call: str) -> None:
        """All that comes after it, up to a committed checkpoint, as a script would go on."""
        if call == "restore":
            try:
                self.ckpt.restore()
            except SettingsError as error:
                assert "a second call" in str(error)
        if call == "close":
            self.ckpt.close()  # an interrupt ends its waiting, and nothing else
            run = Run.open(open_store(self.place.run))
            until(lambda: run.manifest_names()[-1].step == max(self.truth))
        else:
            self.until_stored()


def _python_drops(arrival: Arrival | None) -> bool:
    """Whether Python drops what is raised there.

    It does in a generator that it throws away, as torch's does, and where it tells a weak
    collection that one of its objects is gone.
    """
    if arrival is None:
        return False
    directory, file = os.path.split(arrival.spot.file)
    return "torch" in directory.split(os.sep) or (
        file in ("weakref.py", "_weakrefset.py") and arrival.spot.function.endswith("remove")
    )


def compare(place: Place, truth: dict[int, Rows]) -> None:
    """The newest checkpoint is of the newest batch there was, and has its rows."""
    found = restored(Run.open(open_store(place.run)))
    assert found.manifest is not None
    step = found.manifest.ref.step
    assert step == max(truth)
    for name, (values, *states) in truth[step].items():
        table = found.tables[name]
        assert torch.equal(table.values, values), f"{name} at {step}"
        for state, there in zip(states, table.row_states, strict=True):
            assert there is not None and torch.equal(there, state), (
                f"row states of {name} at {step}"
            )


def killed_life(place: Place, call: str, arrival: Arrival, truth: Path) -> None:
    """One whole life, which ends by SIGKILL after the checkpoint that follows the interrupt."""
    torch.set_num_threads(1)
    with place.agent():
        life = Life(place, call)
        life.begin(call)
        life.interrupted(call, arrival)
        life.go_on(call)
        torch.save(life.truth, truth)
        os.kill(os.getpid(), signal.SIGKILL)
