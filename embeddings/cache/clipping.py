"""Clips gradients by the norm of all of them, also if several ranks share the rows of tables.

A rank has the gradients of its own batch for tables that ranks share: they are averaged in the
optimizer's step. The norm of what a rank has differs from the others', and so would the factor by
which each clips the dense layers. Replicas of these would drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from recpoint.embeddings.cache.cache import caches_of
from recpoint.embeddings.cache.reduction import Reduction
from recpoint.errors import SettingsError

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip gradients by their norm, as `torch.nn.utils.clip_grad_norm_` does in one process.

        loss.backward()
        norm = recpoint.embeddings.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()

    The norm is that of the gradients which are averaged over all ranks, and all ranks clip by one
    factor. Call it on all ranks, after the gradients of dense layers were averaged
    (DistributedDataParallel does that in the backward pass), after `GradScaler.unscale_`, and
    before the step. No backward pass may follow before the step. The gradients of shared tables are
    averaged here, and the step waits for no others. Sparse gradients of shared tables are clipped,
    too.

    Without tables that ranks share it is torch's function.

    Args:
        parameters: parameters with gradients, as for torch's function.
        max_norm: the norm that the gradients are clipped to.
        norm_type: the p of the p-norm, above 0; may be infinite.
        error_if_nonfinite: raise an error if the norm is not finite.

    Returns:
        The norm before clipping, a scalar, the same on all ranks. Its last bits may differ from
        torch's, which adds in another order.

    Raises:
        RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.
        RanksDiffer: ranks do different things, or have different gradients of dense layers.
        RankLost: a rank does not answer.
        SettingsError: `norm_type` is not above 0.
    """
    all_parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    tables: set[int] = set()
    reductions: list[Reduction] = []
    for cache in caches_of(all_parameters):
        if cache.reduction is not None:
            cache.end_failed_step()
            reductions.append(cache.reduction)
            tables |= {id(weight) for weight in cache.weights}
    if not reductions:
        return torch.nn.utils.clip_grad_norm_(
            all_parameters, max_norm, norm_type, error_if_nonfinite
        )
    power = float(norm_type)
    if not power > 0:
        raise SettingsError(
            "clip_grad_norm_(norm_type=...)",
            found=f"{norm_type!r:.200}",
            expected="a number above 0",
            next_step="pass norm_type=2.0",
        )
    dense = [
        parameter
        for parameter in all_parameters
        if id(parameter) not in tables and parameter.grad is not None
    ]
    dense_norm = _norm_of_dense(
        [parameter.grad for parameter in dense if parameter.grad is not None], power
    )
    norms = []
    for reduction in reductions:
        norms_of_tables = [
            _norm(gradient, power) for gradient in reduction.average_gradients(all_parameters)
        ]
        by_rank, dense_norm = reduction.agree_on_norms(
            _together(norms_of_tables, power), dense_norm
        )
        norms += by_rank
    total = _together([*norms, dense_norm], power)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is not finite: {total}. To clip "
            "them anyway, call clip_grad_norm_ with error_if_nonfinite=False"
        )
    norm = torch.tensor(total, dtype=torch.float32, device=all_parameters[0].device)
    torch.nn.utils.clip_grads_with_norm_(dense, max_norm, norm)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for reduction in reductions:
        reduction.scale_averaged(all_parameters, factor)
    return norm


def _norm_of_dense(gradients: Sequence[Tensor], power: float) -> float:
    if not gradients:
        return 0.0
    norm = torch.nn.utils.get_total_norm(gradients, power)
    whole = getattr(norm, "full_tensor", None)  # of gradients in pieces on several ranks
    return float(norm if whole is None else whole())


def _norm(gradient: Tensor, power: float) -> float:
    values = gradient._values() if gradient.is_sparse else gradient
    if not values.numel():
        return 0.0
    return float(torch.linalg.vector_norm(values, power, dtype=torch.float32))


def _together(norms: Sequence[float], power: float) -> float:
    """Return the norm of all values from the norms of their parts."""
    if not all(math.isfinite(norm) for norm in norms):
        return math.nan if any(math.isnan(norm) for norm in norms) else math.inf
    if math.isinf(power):
        return max(norms, default=0.0)
    largest = max(norms, default=0.0)
    if largest == 0.0:
        return 0.0
    # Divided, because powers of large norms are no floats.
    return float(largest * sum((norm / largest) ** power for norm in norms) ** (1 / power))
