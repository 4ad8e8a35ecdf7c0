"""Finds out whether TorchRec and FBGEMM have what recpoint reads in them, whatever their versions.

A version is not refused by its number. Classes, methods and parameters are looked for when a
Checkpointer is built, before a module that imports them is imported. Attributes that a class sets
in its `__init__` are looked for in the objects themselves, before the first is read. A name that
is missing is refused, because a checkpoint made without it could lack state without a sign.

This is the only module that may tell versions apart. TorchRec 1.5 to 1.9 have all names below.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

from torch import nn

from recpoint.errors import SettingsError

__all__ = ["check_attributes", "check_packages", "check_recognition"]

_KERNELS: Final = "torchrec.distributed.batched_embedding_kernel"
_TRAINING: Final = "fbgemm_gpu.split_table_batched_embeddings_ops_training"

#: module -> class -> attributes of the class; an attribute may be a method, a property or a member.
_CLASSES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "torchrec.distributed.embedding": {"ShardedEmbeddingCollection": ()},
    "torchrec.distributed.embedding_types": {"ShardedEmbeddingModule": ()},
    "torchrec.distributed.embeddingbag": {"ShardedEmbeddingBagCollection": ()},
    # Replicas that differ are recognized by these two.
    "torchrec.distributed.model_parallel": {"DMPCollection": ()},
    "torchrec.distributed.types": {"ShardingEnv2D": ()},
    _KERNELS: {
        "BatchedDenseEmbedding": (),
        "BatchedDenseEmbeddingBag": (),
        "BatchedFusedEmbedding": ("fused_optimizer",),
        "BatchedFusedEmbeddingBag": ("fused_optimizer",),
    },
    "torchrec.modules.mc_modules": {
        "DistanceLFU_EvictionPolicy": (),
        "LFU_EvictionPolicy": (),
        "LRU_EvictionPolicy": (),
        "MCHManagedCollisionModule": (),
    },
    "torchrec.optim.clipping": {"GradientClippingOptimizer": ()},
    "torchrec.optim.fused": {"FusedOptimizer": ()},
    "torchrec.optim.keyed": {
        "CombinedOptimizer": ("optimizers",),
        "KeyedOptimizer": (),
        "KeyedOptimizerWrapper": (),
    },
    "torchrec.optim.warmup": {"WarmupOptimizer": ()},
    "fbgemm_gpu.split_embedding_configs": {
        "EmbOptimType": (
            "EXACT_SGD",
            "EXACT_ADAGRAD",
            "EXACT_ROWWISE_ADAGRAD",
            "ADAM",
            "PARTIAL_ROWWISE_ADAM",
        )
    },
    "fbgemm_gpu.split_table_batched_embeddings_ops_common": {
        "EmbeddingLocation": ("DEVICE", "HOST")
    },
    _TRAINING: {
        "DenseTableBatchedEmbeddingBagsCodegen": ("split_embedding_weights",),
        "SplitTableBatchedEmbeddingBagsCodegen": (
            "get_learning_rate",
            "get_optimizer_state",
            "set_learning_rate",
            "split_embedding_weights",
            "update_hyper_parameters",
        ),
    },
}
#: Parameters of a TBE's `forward` -> their positions without `self`: its hook gets a plain tuple.
_FORWARD: Final = {"indices": 0, "offsets": 1, "batch_size_per_feature_per_rank": 4}


def check_packages() -> None:
    """Check that TorchRec and FBGEMM have the classes and methods that recpoint uses.

    Raises:
        SettingsError: a module cannot be imported, or a name is missing; the message has them all.
    """
    missing_names: list[str] = []
    for module_name, classes in _CLASSES.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            missing_names.append(f"{module_name} ({error})")
            continue
        missing_names += _missing(module, classes)
    if missing_names:
        raise _refused(f"without {', '.join(missing_names)}")


def check_recognition(model: nn.Module) -> None:
    """Check that sharded modules would be recognized, if TorchRec has a part in the model.

    Raises:
        SettingsError: TorchRec lacks the class by whose name they are recognized.
    """
    module = "torchrec.distributed.embedding_types"
    base = "ShardedEmbeddingModule"
    if not hasattr(importlib.import_module(module), base) and any(
        type(part).__module__.startswith("torchrec.distributed.") for part in model.modules()
    ):
        raise _refused(f"without {module}.{base}")


def _missing(module: ModuleType, classes: dict[str, tuple[str, ...]]) -> Iterator[str]:
    for class_name, attributes in classes.items():
        kind = getattr(module, class_name, None)
        if kind is None:
            yield f"{module.__name__}.{class_name}"
            continue
        for attribute in attributes:
            if not hasattr(kind, attribute):
                yield f"{class_name}.{attribute}"
        if class_name == "SplitTableBatchedEmbeddingBagsCodegen":
            parameters = list(inspect.signature(kind.forward).parameters)[1:]
            for parameter, position in _FORWARD.items():
                if parameters[position : position + 1] != [parameter]:
                    yield f"parameter {position} {parameter!r} of {class_name}.forward"


def check_attributes(value: Any, attributes: tuple[str, ...], *, of: str) -> None:
    """Check that an object of TorchRec or FBGEMM has the attributes that recpoint will read.

    Args:
        value: the object.
        attributes: names of the attributes.
        of: full name of the sharded module, or other words for the message.

    Raises:
        SettingsError: attributes are missing; the message has them all.
    """
    missing_names = [name for name in attributes if not hasattr(value, name)]
    if missing_names:
        names = ", ".join(f"{type(value).__name__}.{name}" for name in missing_names)
        raise _refused(f"without {names} of {of}")


def _packages_text() -> str:
    """Return names and versions of TorchRec and FBGEMM, as far as they say them."""
    versions = []
    for package in ("torchrec", "fbgemm_gpu"):
        try:
            version = getattr(importlib.import_module(package), "__version__", "of no version")
        except ImportError:
            version = "that cannot be imported"
        versions.append(f"{package} {version}")
    return " and ".join(versions)


def _refused(found: str) -> SettingsError:
    return SettingsError(
        "torchrec",
        found=f"{_packages_text()}, {found}",
        expected="the names that TorchRec 1.5 to 1.9 have, because recpoint reads them",
        next_step="install versions of torchrec and FBGEMM that docs/understanding/limits.md lists",
    )
