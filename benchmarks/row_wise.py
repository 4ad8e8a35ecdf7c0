"""Implements Adagrad with one accumulator a row, with which fleets train embedding tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["RowWiseAdagrad"]


class RowWiseAdagrad(torch.optim.Optimizer):
    """Moves row r by lr · g_r / (√s_r + eps), where s_r sums the means of g_r² over all steps.

    Gradients must be sparse. The state `sum` is f32 [rows].
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float = 0.1, eps: float = 1e-10
    ) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["sum"] = torch.zeros(weight.shape[0])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        """Take one step on the rows that have a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                gradient = weight.grad.coalesce()
                ids, values = gradient.indices()[0], gradient.values()
                total = self.state[weight]["sum"]
                total[ids] += values.square().mean(dim=1)
                step = group["lr"] / (total[ids].sqrt() + group["eps"])
                weight[ids] -= step[:, None] * values
