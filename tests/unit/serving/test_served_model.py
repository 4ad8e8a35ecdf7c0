from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recpoint import Checkpointer, Follower
from recpoint.errors import IncompatibleModel
from recpoint.serving.version import Version
from tests.training_builder import (
    ROWS,
    Place,
    Recommender,
    Training,
    checkpointer,
    simple_training,
    until,
)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "run"), tmp_path / "staging")


def requests() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    users = torch.randint(0, ROWS, (64,), generator=generator)
    return users, torch.randint(0, ROWS // 2, (64, 3), generator=generator)


def trained(training: Training, ckpt: Checkpointer, place: Place) -> None:
    for _ in range(2):
        training.batch()
        ckpt.step()
    until(lambda: place.persist_all() > 0)
    # The trainer hears of the commit a moment later. Until then it would skip a checkpoint.
    until(lambda: ckpt.stats.lag_batches == 0)


def predictions(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        scores = model(*requests())
    model.train()
    assert isinstance(scores, Tensor)
    return scores


def scored(version: Version) -> Tensor:
    scores = version(*requests())
    assert isinstance(scores, Tensor)
    return scores


@pytest.mark.parametrize("quantized", [False, True])
def test_predicts_as_the_trainer_does_at_that_step(place: Place, quantized: bool) -> None:
    training = simple_training()
    follower = Follower(place.run, model=Recommender(), quantized=quantized)
    with checkpointer(training, place, bits="lossless") as ckpt:
        ckpt.restore()
        for step in (2, 4, 6):
            trained(training, ckpt, place)
            assert follower.poll()
            with follower.reading() as version:
                assert version.step == step
                assert torch.equal(scored(version), predictions(training.model))
    assert follower.status.fulls_applied == 1


@pytest.mark.parametrize("quantized", [False, True])
def test_a_compiled_model_is_served_whether_or_not_the_trainer_compiled_its_own(
    place: Place, quantized: bool
) -> None:
    training = simple_training()
    compiled = torch.compile(Recommender(), backend="eager")
    assert isinstance(compiled, nn.Module)
    follower = Follower(place.run, model=compiled, quantized=quantized)
    with checkpointer(training, place, bits="lossless") as ckpt:
        ckpt.restore()
        for step in (2, 4, 6):  # in either copy of the model
            trained(training, ckpt, place)
            assert follower.poll()
            with follower.reading() as version:
                assert version.step == step and version.model is not None
                assert hasattr(version.model, "_orig_mod")
                assert torch.equal(scored(version), predictions(training.model))


def test_quantized_tables_predict_as_decoded_ones_in_less_memory(place: Place) -> None:
    training = simple_training()
    decoded = Follower(place.run, model=Recommender())
    coded = Follower(place.run, model=Recommender(), quantized=True)
    with checkpointer(training, place, bits=4) as ckpt:
        ckpt.restore()
        for _ in range(3):
            trained(training, ckpt, place)
            assert decoded.poll() and coded.poll()
            with decoded.reading() as one, coded.reading() as other:
                assert torch.equal(scored(one), scored(other))
    assert coded.status.memory_bytes < decoded.status.memory_bytes / 2


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: nn.Sequential(nn.Embedding(7, 6)), "table '0' is not in the checkpoint"),
        (lambda: Recommender(dtype=torch.float64), "float64"),
        (lambda: _without_norm(), "'norm.running_mean' is not in the model"),
    ],
)
def test_another_model_is_refused_whole(place: Place, build: Any, text: str) -> None:
    training = simple_training()
    with checkpointer(training, place, bits="lossless") as ckpt:
        ckpt.restore()
        trained(training, ckpt, place)
    follower = Follower(place.run, model=build())
    with pytest.raises(IncompatibleModel, match=text):
        follower.poll()
    assert follower.version is None


def _without_norm() -> nn.Module:
    model = Recommender()
    model.norm = nn.Identity()  # type: ignore[assignment]
    return model


class _Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 100 * super().forward(input)


def _hooked() -> nn.Module:
    module = nn.Embedding(3, 3)
    module.register_forward_hook(lambda _module, _args, rows: 100 * rows)
    return module


@pytest.mark.parametrize(
    ("build", "text"), [(lambda: _Scaled(3, 3), "a _Scaled with"), (_hooked, "forward hooks")]
)
def test_what_lookups_of_codes_would_leave_out_is_refused(
    tmp_path: Path, build: Any, text: str
) -> None:
    model = nn.Sequential(nn.Embedding(4, 4), build())
    with pytest.raises(IncompatibleModel, match=text):
        Follower(str(tmp_path), model=model, quantized=True)
    assert type(model[0]) is nn.Embedding, "nothing is replaced"


class _Shared(Recommender):
    """Looks rows up with torch's argument names, and through two names of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.users

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        rows = self.users(input=users) + self.again(users) / self.again.embedding_dim
        scores: Tensor = self.top(torch.cat([rows, self.items(input=items)], dim=1))
        return scores.squeeze(1)


def test_lookups_by_keyword_and_through_a_second_name(place: Place) -> None:
    training = simple_training()
    training.model = _Shared()
    training.optimizers = [torch.optim.SGD(training.model.parameters(), lr=0.1)]
    with checkpointer(training, place, bits=8) as ckpt:
        ckpt.restore()
        copied = copy.deepcopy(training.model)  # with a hook of the checkpointer's
        trained(training, ckpt, place)
    scores = []
    for quantized, model in ((False, _Shared()), (True, _Shared()), (True, copied)):
        follower = Follower(place.run, model=model, quantized=quantized)
        follower.poll()
        with follower.reading() as version:
            scores.append(scored(version))
    assert torch.equal(scores[0], scores[1]) and torch.equal(scores[0], scores[2])


def test_max_norm_cannot_be_kept_as_codes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(3, 3, max_norm=1.0))
    with pytest.raises(IncompatibleModel, match="max_norm"):
        Follower(str(tmp_path), model=model, quantized=True)
