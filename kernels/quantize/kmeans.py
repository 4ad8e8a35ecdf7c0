"""Quantization with a codebook a row, the paper's k-means: for comparison, never stored.

Check-N-Run (NSDI 2022) found its error the least of all schemes and its time out of the question.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.kernels.quantize.shapes import require_rows

__all__ = ["Clustered", "decode", "kmeans"]

#: Rows that are worked on at once.
_BLOCK: Final = 1024
#: How often values are assigned to centroids and these moved to the means.
_ROUNDS: Final = 25


class Clustered(NamedTuple):
    """Codes u8 [n, dim] into codebook f32 [n, 2^bits], whose rows ascend."""

    codes: Tensor
    codebook: Tensor


def kmeans(rows: Tensor, bits: int) -> Clustered:
    """Lloyd's algorithm on each row, from its quantiles and from even places; the better of both.

    Args:
        rows: f32 [n, dim], finite, in CPU memory.
        bits: one of `BITS`; 2^bits centroids a row.

    Raises:
        ValueError: bits or rows do not fit.
    """
    require_rows(rows, bits)
    parts = [_clustered(part, 2**bits) for part in rows.split(_BLOCK)]
    codes, codebooks = zip(*parts, strict=True)
    return Clustered(torch.cat(codes), torch.cat(codebooks))


def decode(clustered: Clustered) -> Tensor:
    """f32 [n, dim]: the centroids that the codes name."""
    return clustered.codebook.gather(1, clustered.codes.long())


def _clustered(rows: Tensor, count: int) -> Clustered:
    if not rows.shape[0]:
        return Clustered(
            rows.to(torch.uint8), torch.empty(0, count, dtype=torch.float32, device="cpu")
        )
    values = rows.double()
    places = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
    low, high = values.amin(dim=1, keepdim=True), values.amax(dim=1, keepdim=True)
    starts = (torch.quantile(values, places, dim=1).t(), low + (high - low) * places)
    clusterings, errors = [], []
    for start in starts:
        codebook = _lloyd(values, start.contiguous()).float()
        clustered = Clustered(_nearest(values, codebook.double()).to(torch.uint8), codebook)
        clusterings.append(clustered)
        errors.append((decode(clustered).double() - values).square().sum(dim=1))
    first = (errors[0] <= errors[1])[:, None]
    return Clustered(*(torch.where(first, a, b) for a, b in zip(*clusterings, strict=True)))


def _lloyd(values: Tensor, centroids: Tensor) -> Tensor:
    for _ in range(_ROUNDS):
        codes = _nearest(values, centroids)
        members = torch.zeros_like(centroids).scatter_add_(1, codes, torch.ones_like(values))
        sums = torch.zeros_like(centroids).scatter_add_(1, codes, values)
        # A centroid without members stays where it is; all stay in order.
        centroids = torch.where(members > 0, sums / members.clamp(min=1.0), centroids)
        centroids = centroids.sort(dim=1).values
    return centroids


def _nearest(values: Tensor, centroids: Tensor) -> Tensor:
    middles = (centroids[:, 1:] + centroids[:, :-1]) / 2
    return torch.searchsorted(middles.contiguous(), values)
