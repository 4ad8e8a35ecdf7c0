"""Measures what evicted rows of keyed tables cost: log loss, against all rows and against hashing.

A click's logit is the sum of weights that four ids have. Ids are drawn by Zipf's law from ids in
use, of which 1 % are replaced by new ones in 100 batches. Each model is asked for a batch of 2,048
clicks before it learns from it; its log loss is the mean over the second half of the stream. Keyed
tables with rows for 10 % of all ids are compared with tables that have rows for all of them, and
with tables in which ids are hashed into as many rows. They admit keys at their fourth lookup and
evict the least recently used row; a note has the loss of other rules.

The benchmark `keyed` calls `measure`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.report import Report, spread_of
from recpoint import KeyedEmbedding, LeastRecent, LeastUsed, Seen
from recpoint.embeddings.keyed.admission import Admission, EachKey
from recpoint.embeddings.keyed.eviction import Eviction

__all__ = ["KEYS", "measure"]

KEYS = ("vs_unbounded", "vs_hashing")

_FIELDS = 4
_ZIPF = 1.05
#: Share of the ids in use that each batch replaces.
_CHURN = 1e-4

#: Rules by the names that the note gives them; the first is that of the figures.
_RULES: Mapping[str, tuple[Admission, Eviction]] = {
    "Seen(4), LeastRecent": (Seen(times=4), LeastRecent()),
    "Seen(4), LeastUsed": (Seen(times=4), LeastUsed()),
    "LeastRecent": (EachKey(), LeastRecent()),
    "LeastUsed": (EachKey(), LeastUsed()),
}


class _Batch(NamedTuple):
    """Keys int64 [fields, samples], and clicks float32 [samples]."""

    keys: Tensor
    clicks: Tensor


def measure(report: Report, *, smoke: bool) -> None:
    """Add the figures KEYS, and a note."""
    in_use, batches, samples = (500, 8, 24) if smoke else (40_000, 1_500, 2_048)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            _measure(report, in_use, batches, samples)
    finally:
        torch.set_num_threads(threads)


def _measure(report: Report, in_use: int, batches: int, samples: int) -> None:
    all_ids = in_use + round(in_use * _CHURN * batches)
    rows = all_ids // 10
    learners = {name: _Learner(_keyed(rows, *rules)) for name, rules in _RULES.items()}
    learners["all rows"] = _Learner(_keyed(all_ids, EachKey(), LeastRecent()))
    learners["hashing"] = _Learner(_hashed(rows))
    losses: dict[str, list[float]] = {name: [] for name in learners}
    for batch in _stream(in_use, batches, samples):
        for name, learner in learners.items():
            ids = batch.keys.remainder(rows) + 1 if name == "hashing" else batch.keys
            losses[name].append(learner.learn(ids, batch.clicks))
    means = {
        name: sum(own[batches // 2 :]) / (batches - batches // 2) for name, own in losses.items()
    }
    ours = means[next(iter(_RULES))]
    report.put("vs_unbounded", spread_of([ours / means["all rows"]]))
    report.put("vs_hashing", spread_of([ours / means["hashing"]]))
    each = "; ".join(f"{name} {mean:.4f}" for name, mean in means.items())
    report.notes.append(f"log loss with rows for {rows:,} of {all_ids:,} ids: {each}")


def _keyed(rows: int, admit: Admission, evict: Eviction) -> list[KeyedEmbedding]:
    return [KeyedEmbedding(1, rows, admit=admit, evict=evict, sparse=True) for _ in range(_FIELDS)]


def _hashed(rows: int) -> list[nn.Embedding]:
    tables = [nn.Embedding(rows + 1, 1, sparse=True) for _ in range(_FIELDS)]
    for table in tables:
        nn.init.uniform_(table.weight, -0.01, 0.01)
    return tables


class _Learner:
    """A logistic regression on the ids of four fields."""

    def __init__(self, tables: list[KeyedEmbedding] | list[nn.Embedding]) -> None:
        self._tables = tables
        self._bias = nn.Parameter(torch.zeros(1))
        weights = [table.weight for table in tables]
        self._optimizer = torch.optim.Adagrad([self._bias, *weights], lr=0.1)

    def learn(self, keys: Tensor, clicks: Tensor) -> float:
        """Return the log loss of the batch, then learn from it."""
        logits = self._bias.expand(len(clicks))
        for table, column in zip(self._tables, keys, strict=True):
            logits = logits + table(column)[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, clicks)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        return loss.item()


def _stream(in_use: int, batches: int, samples: int) -> Iterator[_Batch]:
    """Draw batches of ids; id k of a field is the k-th that came into use."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.arange(1, in_use + 1, dtype=torch.float64) ** -_ZIPF
    shares = weights.cumsum(0) / weights.sum()
    ids_in_use = torch.stack([torch.randperm(in_use, generator=generator) for _ in range(_FIELDS)])
    new_ids, due = in_use, 0.0
    for _ in range(batches):
        draws = torch.rand(_FIELDS, samples, dtype=torch.float64, generator=generator)
        ids = ids_in_use.gather(1, torch.searchsorted(shares, draws).clamp_(max=in_use - 1))
        keys = _keys_of(ids)
        logits = _normal(keys).sum(0) - 1
        clicks = (torch.rand(samples, generator=generator) < logits.sigmoid()).float()
        yield _Batch(keys, clicks)
        due += in_use * _CHURN
        while due >= 1:
            due -= 1
            places = torch.randint(in_use, (_FIELDS, 1), generator=generator)
            ids_in_use.scatter_(1, places, new_ids)
            new_ids += 1


def _keys_of(ids: Tensor) -> Tensor:
    """Return keys all over int64; different ids have different keys."""
    return (ids * 0x2545F4914F6CDD1D).bitwise_xor(0x5DEECE66D)


def _normal(keys: Tensor) -> Tensor:
    """Return a weight for each key, about normal with variance 1, from its bits."""
    mixed = keys * 0x369DEA0F31A53F85
    parts = [(mixed >> shift & 0xFFFF).float() / 0xFFFF for shift in (16, 32, 48)]
    return 2 * (parts[0] + parts[1] + parts[2] - 1.5)
