"""Names of parameters, buffers and modules that do not depend on what wraps the model.

As torch's `get_model_state_dict` spells them: a checkpoint of a model under DDP, FSDP or
`torch.compile` restores into the bare model, and the other way round.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["canonical_name"]

#: Attributes under which wrappers keep what they wrap: torch.compile, FSDP, activation
#: checkpointing, and TorchRec's DistributedModelParallel.
_WRAPPED = frozenset(
    ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_dmp_wrapped_module")
)
_MAY_WRAP = _WRAPPED | {"module"}


def canonical_name(model: nn.Module, name: str) -> str:
    """The name without the parts that wrappers have put into it.

    Args:
        model: `name` is a full name in it.
        name: of a module, parameter or buffer.
    """
    parts = name.split(".")
    if _MAY_WRAP.isdisjoint(parts):
        return name  # the usual case; this is called for each module in a stall
    kept, module = [], model
    for part in parts:
        wrapper = part in _WRAPPED or (
            part == "module" and isinstance(module, DistributedDataParallel)
        )
        if not wrapper:
            kept.append(part)
        found = module._modules.get(part) if isinstance(module, nn.Module) else None
        if found is None:
            # A parameter, a buffer, or a module that answers for another, as wrappers do.
            found = getattr(module, part, None)
        module = found  # type: ignore[assignment]
    return ".".join(kept)
