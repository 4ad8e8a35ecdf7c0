"""Computes the area under the ROC curve: exactly, or from counts small enough to checkpoint."""

from __future__ import annotations

import torch

__all__ = ["PrequentialAUC", "auc", "auc_from_counts"]

_BINS = 1 << 14
_BINS_PER_LOGIT = 1 << 10  # 14 bits: logits from -8 to +8 in steps of 1/1024; beyond, the end bins


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Compute P(score of a positive > score of a negative) + P(equal) / 2 over all pairs.

    Args:
        scores: [n], finite.
        labels: [n], 0 or 1.

    Returns:
        The AUC; nan if one of the classes is empty.
    """
    _, place = torch.unique(scores, return_inverse=True)
    counts = torch.zeros(2, int(place.max()) + 1 if len(place) else 0, dtype=torch.int64)
    for label in (0, 1):
        counts[label] = torch.bincount(place[labels == label], minlength=counts.shape[1])
    return auc_from_counts(counts)


def auc_from_counts(counts: torch.Tensor) -> float:
    """Compute `auc` from `counts` I64 [2, m]: samples of each label with each score, ascending."""
    negatives, positives = counts[0], counts[1]
    pairs = int(negatives.sum()) * int(positives.sum())
    below = negatives.cumsum(0) - negatives
    # Twice the number of won pairs is an integer, so only the one division rounds.
    return int((positives * (2 * below + negatives)).sum()) / (2 * pairs) if pairs else float("nan")


class PrequentialAUC:
    """AUC of predictions made for each batch before the model is trained on it.

    Logits are counted in bins of 1/1024, so the state has the same size for a run of any length.
    Counts are integers, so they do not depend on the order of samples or on interruptions.
    """

    def __init__(self, *, tail_from_batch: int | None) -> None:
        self._tail_from_batch = tail_from_batch
        self._counts = torch.zeros(2, 2, _BINS, dtype=torch.int64)  # whole run, tail; label; bin

    def add(self, batch: int, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count batch number `batch`: logits F32 [n], labels F32 [n]."""
        bins = (logits.detach() * _BINS_PER_LOGIT).floor().long() + _BINS // 2
        bins = bins.clamp_(0, _BINS - 1) + labels.long() * _BINS
        counts = torch.bincount(bins, minlength=2 * _BINS).view(2, _BINS)
        self._counts[0] += counts
        if self._tail_from_batch is not None and batch >= self._tail_from_batch:
            self._counts[1] += counts

    @property
    def whole(self) -> float:
        """The AUC over the run so far."""
        return auc_from_counts(self._counts[0])

    @property
    def tail(self) -> float:
        """The AUC over the batches from `tail_from_batch` on; nan before that batch."""
        return auc_from_counts(self._counts[1])

    def state_dict(self) -> dict[str, object]:
        """Return the counts, for a checkpoint."""
        return {"counts": self._counts.to(torch.int32)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore the counts of `state`."""
        counts = state["counts"]
        if not isinstance(counts, torch.Tensor) or counts.shape != self._counts.shape:
            raise ValueError("not the counts of a PrequentialAUC")
        self._counts.copy_(counts)
