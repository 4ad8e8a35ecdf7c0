"""Captures of CUDA graphs over marked tables are refused by name: a replay would mark nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from recpoint.embeddings.tables import lookups
from recpoint.embeddings.tables.marks import Tracker
from recpoint.errors import SettingsError
from recpoint.kernels import dirty_bitmap
from recpoint.trainer_plugin.tables import find_tables
from tests.training_builder import Place, checkpointer, simple_training


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether the stream is being captured: stands in for the state of a CUDA stream."""
    state = [False]
    monkeypatch.setattr(lookups, "_is_capturing", lambda: state[0])
    yield state


def test_no_device_is_asked_before_torch_has_initialized_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A build with CUDA raises an error on a host without a driver."""
    questions = []

    def no_driver() -> bool:
        questions.append("capturing?")
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", no_driver)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    lookups.refuse_capture("a step")
    assert questions == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="driver"):
        lookups.refuse_capture("a step")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(SettingsError, match="a step: found capture of a CUDA graph"):
        lookups.refuse_capture("a step")


def test_a_captured_step_of_a_tables_optimizer_is_refused_before_it_changes_anything(
    place: Place, capturing: list[bool]
) -> None:
    training = simple_training()
    with place.agent(), checkpointer(training, place) as ckpt:
        ckpt.restore()
        training.batch()
        ckpt.step()
        before = training.model.users.weight.detach().clone()
        capturing[0] = True
        # The backward pass may be captured: the step names the rows that have a gradient.
        with pytest.raises(SettingsError, match="a step of the tables' SGD: found capture of a CU"):
            training.batch()
        capturing[0] = False
        assert torch.equal(training.model.users.weight, before)
        training.batch()
        ckpt.step()
        assert ckpt.stats.failed == 0


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_captured_lookups_are_refused_if_only_they_can_mark(
    capturing: list[bool], max_norm: float | None
) -> None:
    model = nn.Embedding(9, 2, max_norm=max_norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (table,), _, _ = find_tables(model, [optimizer])
    tracker = Tracker(table)
    tracker.choose(by_gradient=True)
    tracker.install()
    capturing[0] = True
    if max_norm is None:
        model(torch.tensor([3]))
    else:
        with pytest.raises(SettingsError, match="a lookup of table 'weight': found capture of"):
            model(torch.tensor([3]))
    capturing[0] = False
    model(torch.tensor([4]))
    tracker.remove()


def test_a_captured_backward_pass_of_fused_tables_is_refused(capturing: list[bool]) -> None:
    pytest.importorskip("torchrec")
    from recpoint.trainer_plugin.integrations.fbgemm import _ForwardHook, feature_bags

    trackers = []
    for rows in (9, 70):
        module = nn.Embedding(rows, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        trackers.append(Tracker(find_tables(module, [optimizer])[0][0]))
    # Three features, the first and the last of one table; -1 stands for a pruned row.
    hook = _ForwardHook(trackers, (0, 1, 0))
    ids, offsets = torch.tensor([1, 69, -1, 2, 8]), torch.tensor([0, 1, 1, 4, 4, 4, 5])

    def backward() -> None:
        output = torch.ones(1, requires_grad=True) * 2
        hook(None, (ids, offsets), {}, output)
        output.sum().backward()

    capturing[0] = True
    with pytest.raises(SettingsError, match="backward pass of TorchRec's fused tables: found capt"):
        backward()
    capturing[0] = False
    backward()
    found = [dirty_bitmap.collect(one.bitmap, rows=one.rows).tolist() for one in trackers]
    assert found == [[1, 8], [2, 69]]
    assert not any(one.all_rows or one.unapplied for one in trackers)
    # After a cut each tracker has another bitmap, and a lookup may have other numbers of bags.
    taken = [tracker.take() for tracker in trackers]
    ids, offsets = torch.tensor([3, 4, 5]), torch.tensor([0, 1, 2, 3])
    backward()
    marked = [dirty_bitmap.collect(t.bitmap, rows=t.rows).tolist() for t in trackers]
    assert marked == [[3, 5], [4]]
    assert [dirty_bitmap.count(dirty.bitmap) for dirty in taken] == [2, 2]
    assert feature_bags(6, 3, [[1], [0, 2], [3]]) == [(0, 1), (1, 3), (3, 6)]
