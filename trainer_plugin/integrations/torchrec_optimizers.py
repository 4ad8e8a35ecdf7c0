"""Takes TorchRec's optimizers apart: the optimizers of torch in them, and the warm-ups around them.

    CombinedOptimizer           several optimizers, each of which may be any of these
    KeyedOptimizerWrapper       an optimizer of torch, with names for its parameters
    FusedOptimizer              its row states and step counts are stored with the tables
    WarmupOptimizer             sets the learning rates of the optimizer in it by a count of steps
    GradientClippingOptimizer   clips gradients before the optimizer in it steps; has no state

A warm-up is stored as a scheduler is, behind the schedulers that the Checkpointer was given. Its
stages are the script's, as the functions of a scheduler are. Subclasses are refused, because they
may have state of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer

from recpoint.errors import SettingsError
from recpoint.trainer_plugin.integrations.torchrec_names import check_attributes

__all__ = ["WarmUp", "take_apart", "torch_optimizers"]

_OF_WARM_UP: Final = ("_lr", "_optimizer", "_stages", "_warmup_param", "state")


class WarmUp:
    """The position of one `WarmupOptimizer`: steps, stage, and the rate that stages multiply.

    Args:
        optimizer: the optimizer of TorchRec.

    Raises:
        SettingsError: this version of TorchRec keeps the position in another way.
    """

    def __init__(self, optimizer: Any) -> None:
        check_attributes(optimizer, _OF_WARM_UP, of="optimizers")
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the position as numbers, under one key that no scheduler of torch has."""
        entry = self._optimizer.state.get(self._optimizer._warmup_param)
        steps, stage = (0, 0) if entry is None else entry["warmup"].tolist()
        return {"warm_up": {"steps": steps, "stage": stage, "lr": float(self._optimizer._lr)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned.

        The rates of parameter groups stay as they are: the optimizers and the sources of tables
        restore them, and the next step computes new ones from this position.
        """
        position = state["warm_up"]
        self._optimizer._lr = position["lr"]
        self._optimizer.state[self._optimizer._warmup_param] = {
            "warmup": torch.tensor(
                [position["steps"], position["stage"]], dtype=torch.long, device="cpu"
            )
        }

    def differences(self, state: object) -> list[str]:
        """Return why `state` cannot be loaded, one sentence for each reason."""
        if not isinstance(state, Mapping) or state.keys() != {"warm_up"}:
            return ["a scheduler in the checkpoint stands where a WarmupOptimizer is here"]
        stage, stages = state["warm_up"]["stage"], len(self._optimizer._stages)
        if stage >= stages:
            # TorchRec adds a last stage without an end to those of the script.
            return [
                f"the checkpoint is in stage {stage} of a WarmupOptimizer, which has only "
                f"{stages - 1} stages here"
            ]
        return []


def take_apart(optimizers: Sequence[Optimizer]) -> tuple[list[Optimizer], list[WarmUp]]:
    """Return the optimizers of torch in `optimizers`, and the warm-ups around optimizers.

    Optimizers that are not of TorchRec are returned as they are. Fused ones are left out.

    Raises:
        SettingsError: an optimizer of TorchRec has state that cannot be stored.
    """
    inner_optimizers, warm_ups = [], []
    for optimizer in optimizers:
        for part in _parts(optimizer):
            if isinstance(part, WarmUp):
                warm_ups.append(part)
            else:
                inner_optimizers.append(part)
    return inner_optimizers, warm_ups


def torch_optimizers(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers of torch in `optimizers`; see `take_apart`."""
    return take_apart(optimizers)[0]


def _parts(optimizer: Any) -> Iterator[Optimizer | WarmUp]:
    kind = type(optimizer)
    if isinstance(optimizer, CombinedOptimizer):
        for _, part in optimizer.optimizers:
            yield from _parts(part)
    elif isinstance(optimizer, KeyedOptimizerWrapper):
        check_attributes(optimizer, ("_optimizer",), of="optimizers")
        yield optimizer._optimizer
    elif isinstance(optimizer, FusedOptimizer):
        pass  # its row states and step counts are stored with the tables
    elif kind is WarmupOptimizer:
        yield WarmUp(optimizer)
        yield from _parts(optimizer._optimizer)
    elif kind is GradientClippingOptimizer:
        check_attributes(optimizer, ("_optimizer",), of="optimizers")
        yield from _parts(optimizer._optimizer)
    elif isinstance(optimizer, KeyedOptimizer):
        raise SettingsError(
            "optimizers",
            found=f"a {kind.__name__}, whose own state cannot be saved",
            expected="optimizers of torch, KeyedOptimizerWrapper, CombinedOptimizer, "
            "WarmupOptimizer, GradientClippingOptimizer, or fused ones",
            next_step="pass the optimizer inside it, and use a learning-rate scheduler of torch",
        )
    else:
        yield optimizer
