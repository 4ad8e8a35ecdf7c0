"""Widths by a loss for optimizers without squared gradients: their importance counts lookups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recpoint import Precision, errors, grow
from recpoint.catalog.persist import row_widths
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.embeddings.tables.counted_lookups import LOOKUPS
from recpoint.kernels.lookup_counts import values
from recpoint.trainer_plugin.loss.rounded_rows import rounded_rows
from tests.mixed_table import FITTED
from tests.training_builder import Place
from tests.unit.trainer_plugin.test_loss_bound import (
    BATCH,
    ROWS,
    Clicks,
    Ranker,
    built,
    by_loss,
    count_seconds,
    meter,
    train,
)

Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def sgd(**settings: Any) -> Optimizers:
    return lambda model: [torch.optim.SGD(model.parameters(), lr=0.5, **settings)]


def codes(ckpt: Any, key: str = "users") -> Tensor:
    counts = ckpt._parts.trackers[key].counts
    assert counts is not None
    codes_of_table: Tensor = counts.codes
    return codes_of_table


def lookups(batches: int) -> Tensor:
    """Return how often the first batches look each user up: f32 [rows]."""
    clicks = Clicks()
    users = torch.cat([next(clicks)[0] for _ in range(batches)])
    return torch.bincount(users, minlength=ROWS).float()


def _zeros(table: str, ids: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(len(ids), dim, dtype=dtype)


def sparse(model: Ranker) -> Ranker:
    model.users.sparse = model.items.sparse = True
    return model


def test_rows_get_widths_by_their_lookups_and_a_restart_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_widths, "_CHUNK_COST_BYTES", 0)
    model, ckpt = built(place, by_loss(), optimizers=sgd(), interval_batches=90)
    with place.agent(), ckpt:
        count_seconds(ckpt)
        ckpt.restore()
        train(model, ckpt, 90)
        figures = ckpt.stats.loss
        assert figures is not None and figures.error is None and figures.price is not None
        counts, state = codes(ckpt).clone(), meter(ckpt).state_dict()
        assert state["counted"] == {"users": 90 * BATCH, "items": 90 * 3 * BATCH}
        live = meter(ckpt)._live()[0]
        expected = rounded_rows(
            live, torch.arange(ROWS), meter(ckpt)._moment(live), figures.price, FITTED
        ).values
    run = Run.open(open_store(place.run))
    (name,) = run.manifest_names()
    manifest = run.manifest(*name)
    (row_state,) = manifest.tables[0].row_states
    assert (row_state.name, row_state.dtype, row_state.shape) == (LOOKUPS, "U8", ())
    bits = Counter(getattr(chunk, "bits", None) for chunk in manifest.chunks)
    assert len(bits.keys() & {2, 3, 4, 5, 6, 8}) >= 3

    restored, again = built(place, by_loss(), optimizers=sgd())
    with again:
        again.restore()
        assert torch.equal(codes(again), counts)
        assert meter(again).state_dict() == state
        assert torch.equal(restored.users.weight, expected)  # what was measured is what is stored
        again.close(final=False)


@pytest.mark.filterwarnings("ignore::recpoint.embeddings.tables.optimizers.FullyDirtyTables")
@pytest.mark.parametrize("form", [lambda model: model, sparse], ids=("dense", "sparse"))
@pytest.mark.parametrize("optimizers", [sgd(), sgd(momentum=0.9)], ids=("plain", "momentum"))
def test_each_lookup_that_trains_counts_once(
    place: Place, form: Callable[[Ranker], Ranker], optimizers: Optimizers
) -> None:
    model, ckpt = built(place, by_loss(), wrapped=form, optimizers=optimizers)
    with ckpt:
        ckpt.restore()
        train(model, ckpt, 4)
        with torch.no_grad():
            model.users(torch.tensor([1, 2]))
        expected = lookups(4)
        counted = values(codes(ckpt))
        is_exact = expected <= 16
        assert bool(is_exact.any()) and torch.equal(counted[is_exact], expected[is_exact])
        assert meter(ckpt)._counts["users"].counted == 4 * BATCH
        ckpt.close(final=False)


def test_lookups_in_a_compiled_graph_count_by_their_gradient(place: Place) -> None:
    model, ckpt = built(place, by_loss(), optimizers=sgd())
    with ckpt:
        ckpt.restore()
        gradient = torch.zeros(ROWS, 16)
        gradient[[3, 7]] = 1.0
        model.users.weight.grad = gradient  # as a graph leaves it, whose lookups nobody saw
        (optimizer,) = ckpt._training.optimizers
        optimizer.step()
        assert codes(ckpt).nonzero().flatten().tolist() == [3, 7]
        ckpt.close(final=False)


def test_training_is_the_same_whether_lookups_are_counted_or_not(place: Place) -> None:
    states = []
    for number, bits in enumerate(("lossless", by_loss())):
        model, ckpt = built(
            Place(f"{place.run}-{number}", place.staging), bits, wrapped=sparse, optimizers=sgd()
        )
        with ckpt:
            if number:
                count_seconds(ckpt)
            ckpt.restore()
            train(model, ckpt, 40)
            (optimizer,) = ckpt._training.optimizers
            assert not any(optimizer.state.values())
            marks = [tracker.marked() for tracker in ckpt._parts.trackers.values()]
            assert not any(dirty.all_rows for dirty in marks)
            bitmaps = [dirty.bitmap for dirty in marks]
            states.append([*model.state_dict().values(), torch.get_rng_state(), *bitmaps])
            ckpt.close(final=False)
    assert all(torch.equal(plain, measured) for plain, measured in zip(*states, strict=True))


def test_an_increment_stores_the_counts_of_its_rows(place: Place) -> None:
    model, ckpt = built(place, by_loss(), wrapped=sparse, optimizers=sgd(), interval_batches=3)
    with place.agent(), ckpt:
        ckpt.restore()
        train(model, ckpt, 6)
        counts = codes(ckpt).clone()
    kinds = [name.step for name in Run.open(open_store(place.run)).manifest_names()]
    assert kinds == [3, 6]
    _, again = built(place, by_loss(), wrapped=sparse, optimizers=sgd())
    with again:
        again.restore()
        assert torch.equal(codes(again), counts)
        again.close(final=False)


def test_a_run_may_begin_and_end_to_count(place: Place) -> None:
    for bits, total in (("lossless", 3), (by_loss(), 6), ("lossless", 9)):
        model, ckpt = built(place, bits, optimizers=sgd(), interval_batches=3)
        with place.agent(), ckpt:
            report = ckpt.restore()
            assert (total == 3) == (report is None or report.restored is None)
            train(model, ckpt, total)
            if bits != "lossless":
                assert meter(ckpt)._counts["users"].counted == 3 * BATCH
    manifests = Run.open(open_store(place.run))
    stored = [manifests.manifest(*name).tables[0].row_states for name in manifests.manifest_names()]
    assert [[state.name for state in states] for states in stored] == [[], [LOOKUPS], []]


def test_a_table_that_grows_goes_on_counting(place: Place) -> None:
    model, ckpt = built(place, by_loss(), wrapped=sparse, optimizers=sgd())
    with place.agent(), ckpt:
        ckpt.restore()
        train(model, ckpt, 3)
        before = codes(ckpt).clone()
        (optimizer,) = ckpt._training.optimizers
        grow(model, optimizer, "users", ROWS + 10, initial=_zeros)
        assert torch.equal(codes(ckpt)[:ROWS], before)
        assert codes(ckpt)[ROWS:].tolist() == [0] * 10
        assert ckpt.checkpoint()


def test_tables_of_both_kinds_need_a_width_for_one(place: Place) -> None:
    def two(model: nn.Module) -> list[torch.optim.Optimizer]:
        rest = [p for name, p in model.named_parameters() if not name.startswith("items")]
        items = [p for name, p in model.named_parameters() if name.startswith("items")]
        return [torch.optim.Adagrad(rest), torch.optim.SGD(items, lr=0.1)]

    with pytest.raises(errors.SettingsError, match="'items'.*one unit"):
        built(place, by_loss(), optimizers=two)
    _, ckpt = built(place, Precision(bits=by_loss(), tables={"items": 8}), optimizers=two)
    assert meter(ckpt)._counts == {}
    ckpt.close(final=False)
