"""Reads and marks the tables of one FBGEMM module of TorchRec, which share one buffer.

TorchRec groups the shards of a process into table-batched embeddings (TBE). A fused TBE updates the
rows that were looked up in its backward pass, and keeps their optimizer state in separate buffers.
A dense TBE leaves both to an optimizer of torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.batched_embedding_kernel import (
    BatchedDenseEmbedding,
    BatchedDenseEmbeddingBag,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)

from recpoint.embeddings.tables.lookups import refuse_capture
from recpoint.embeddings.tables.marks import LookupMarker
from recpoint.embeddings.tables.tables import Marker
from recpoint.errors import SettingsError
from recpoint.interrupts import came_from_handler
from recpoint.trainer_plugin.integrations.torchrec_names import check_attributes

__all__ = ["Kernel"]

_log = logging.getLogger("recpoint")

_FUSED = (BatchedFusedEmbedding, BatchedFusedEmbeddingBag)
_DENSE = (BatchedDenseEmbedding, BatchedDenseEmbeddingBag)
#: Fused optimizers that change only rows that were looked up.
_OPTIMIZERS = (
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.ADAM,
    EmbOptimType.PARTIAL_ROWWISE_ADAM,
)
#: Attributes that TorchRec and FBGEMM set in `__init__`, and that are read here.
_OF_WRAPPER = ("_emb_module", "_feature_table_map", "config")
_OF_CONFIG = ("embedding_dim", "local_metadata", "name", "num_embeddings")
_OF_FUSED = (
    "_used_rowwise_adagrad_with_counter",
    "_used_rowwise_adagrad_with_global_weight_decay",
    "optimizer",
    "optimizer_args",
    "weights_physical_placements",
)
_OF_ARGS = ("gradient_clipping", "max_gradient", "max_norm", "regularization_mode")
#: Optimizers that need the count of steps.
_COUNTING = (EmbOptimType.ADAM, EmbOptimType.PARTIAL_ROWWISE_ADAM)
_BUFFERS = ("weights", "momentum1", "momentum2")
_PLACES = ("dev", "host", "uvm")
_HYPERPARAMETERS = ("eps", "beta1", "beta2", "weight_decay")
#: State with one number for the module, although FBGEMM lists it for each table.
_SCALARS = ("iter",)


class Kernel:
    """Reads and marks the tables of one TBE.

    Args:
        owner: full name of the sharded module, for messages.
        module: TorchRec's wrapper of the TBE.

    Attributes:
        tables: TorchRec's configuration of each shard in the TBE, in order.
        fused: whether rows are updated in backward.

    Raises:
        SettingsError: the kind of module, the optimizer or the place of the rows is not supported.
    """

    def __init__(self, owner: str, module: Any) -> None:
        # Subclasses are refused: they keep rows in other processes, in files or in host memory.
        if type(module) not in (*_FUSED, *_DENSE):
            raise _refused(
                owner,
                f"rows in a {type(module).__name__}",
                ", ".join(kind.__name__ for kind in (*_FUSED, *_DENSE)),
                "choose the compute kernel 'fused' or 'dense' in the sharding plan",
            )
        check_attributes(module, _OF_WRAPPER, of=f"module {owner!r}")
        check_attributes(module.config, ("embedding_tables",), of=f"module {owner!r}")
        for table in module.config.embedding_tables:
            check_attributes(table, _OF_CONFIG, of=f"module {owner!r}")
        self._owner = owner
        self._module: Any = module
        self._tbe: Any = module._emb_module
        self.tables: Sequence[Any] = tuple(self._module.config.embedding_tables)
        self.fused = isinstance(module, _FUSED)
        supported = (
            SplitTableBatchedEmbeddingBagsCodegen
            if self.fused
            else DenseTableBatchedEmbeddingBagsCodegen
        )
        if not isinstance(self._tbe, supported):
            raise _refused(
                owner,
                f"a {type(self._tbe).__name__}",
                supported.__name__,
                "use FBGEMM's own kernels",
            )
        if self.fused:
            self._check_fused()
        #: For each feature, the position in `tables` of the table that it looks up.
        self.table_of: Sequence[int] = tuple(self._module._feature_table_map)
        self._views: tuple[Any, list[Tensor], list[dict[str, Tensor]]] = (None, [], [])
        if not self._buffers():
            # Their addresses tell when the rows have moved.
            raise _refused(
                owner,
                "none of the buffers that hold its rows",
                f"weights_dev, weights_host, weights_uvm or weights of {type(self._tbe).__name__}",
                "use the versions of TorchRec and FBGEMM that docs/understanding/limits.md lists",
            )

    def _check_fused(self) -> None:
        owner = f"module {self._owner!r}"
        check_attributes(self._tbe, _OF_FUSED, of=owner)
        optimizer, args = self._tbe.optimizer, self._tbe.optimizer_args
        check_attributes(args, (*_OF_ARGS, *_HYPERPARAMETERS), of=owner)
        if optimizer not in _OPTIMIZERS:
            raise _refused(
                self._owner,
                f"the fused optimizer {optimizer.name}",
                ", ".join(optimizer.name for optimizer in _OPTIMIZERS),
                "choose another optimizer in apply_optimizer_in_backward",
            )
        if optimizer in _COUNTING:
            check_attributes(self._tbe, ("iter", "iter_cpu"), of=owner)
        places = {int(place) for place in self._tbe.weights_physical_placements}
        if not places <= {EmbeddingLocation.DEVICE.value, EmbeddingLocation.HOST.value}:
            raise _refused(
                self._owner,
                "rows in unified memory, cached or not",
                "rows in the memory of one device",
                "choose the compute kernel 'fused' in the sharding plan",
            )
        if args.regularization_mode and (
            self._tbe._used_rowwise_adagrad_with_counter
            or self._tbe._used_rowwise_adagrad_with_global_weight_decay
        ):
            raise _refused(
                self._owner,
                "weight decay that counts steps for each row",
                "weight decay without such counts, or no weight decay",
                "do not use counter_based_regularization or global weight decay",
            )

    def weights(self) -> list[Tensor]:
        """Return the rows of each table, [rows, dim]; the same objects until the rows move."""
        return self._split()[1]

    def row_states(self) -> list[dict[str, Tensor]]:
        """Return each table's row states of the fused optimizer: name -> [rows] or [rows, dim]."""
        return self._split()[2]

    def _split(self) -> tuple[Any, list[Tensor], list[dict[str, Tensor]]]:
        # Splitting makes new views, and a tracker would take a new view for another weight.
        places = tuple(tensor.data_ptr() for tensor in self._buffers())
        if self._views[0] != places:
            states: list[dict[str, Tensor]] = [{} for _ in self.tables]
            if self.fused and self._tbe.optimizer is not EmbOptimType.EXACT_SGD:
                for state, tensors in zip(states, self._tbe.get_optimizer_state(), strict=True):
                    state |= {name: t for name, t in tensors.items() if name not in _SCALARS}
            self._views = (places, list(self._tbe.split_embedding_weights()), states)
        return self._views

    def _buffers(self) -> list[Tensor]:
        names = [f"{name}_{place}" for name in _BUFFERS for place in _PLACES] + ["weights"]
        buffers = [getattr(self._tbe, name, None) for name in names]
        return [tensor for tensor in buffers if isinstance(tensor, Tensor)]

    def state(self) -> dict[str, Any]:
        """Return the fused optimizer's state that belongs to no row: steps and hyperparameters."""
        args = self._tbe.optimizer_args
        return {
            "optimizer": self._tbe.optimizer.value,
            # Adam corrects its bias by this count of forward passes, which includes evaluations.
            # Other optimizers do not count.
            "iter": int(self._tbe.iter_cpu) if hasattr(self._tbe, "iter_cpu") else None,
            "lr": float(self._tbe.get_learning_rate()),
            # The learning rate that the fused optimizer's next zero_grad() or step() sets.
            "group_lr": float(self._module.fused_optimizer.param_groups[0]["lr"]),
            **{name: float(getattr(args, name)) for name in _HYPERPARAMETERS},
            **self._limits(),
        }

    def pass_counts(self) -> list[Tensor]:
        """Return the counts of forward passes, which evaluations raise, too: int64 [1] each."""
        counts = [getattr(self._tbe, name, None) for name in ("iter", "iter_cpu")]
        return [count for count in counts if isinstance(count, Tensor)]

    def _limits(self) -> dict[str, float]:
        """Return the limits of gradients and rows that the module was built with; 0: no limit."""
        args = self._tbe.optimizer_args
        return {
            "max_gradient": float(args.max_gradient) if args.gradient_clipping else 0.0,
            "max_norm": float(args.max_norm),
        }

    def differences(self, table: str, state: Mapping[str, Any]) -> list[str]:
        """Return what `load_state` cannot take over from a table's state, one sentence each."""
        settings = {"optimizer": self._tbe.optimizer.value, **self._limits()}
        return [
            f"table {table!r} was trained with {name} {state[name]}, and its module here has "
            f"{value}"
            for name, value in settings.items()
            if name in state and state[name] != value
        ]

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned, of this or another module with the same optimizer."""
        if state["iter"] is not None and hasattr(self._tbe, "iter_cpu"):
            self._tbe.iter_cpu.fill_(state["iter"])
            self._tbe.iter.fill_(state["iter"])
        self._tbe.set_learning_rate(state["lr"])
        self._tbe.update_hyper_parameters({name: state[name] for name in _HYPERPARAMETERS})
        for group in self._module.fused_optimizer.param_groups:
            group["lr"] = state["group_lr"]

    def track(self, markers: Sequence[Marker]) -> RemovableHandle:
        """Mark the rows that backward passes change from now on.

        Args:
            markers: one marker for each of `tables`.

        Returns:
            A handle that ends the marking.
        """
        handle: RemovableHandle = self._tbe.register_forward_hook(
            _ForwardHook(markers, self.table_of), with_kwargs=True
        )
        return handle

    def before_lookup(self, hook: Callable[[], None]) -> RemovableHandle:
        """Call `hook()` before each lookup, also in evaluations.

        Returns:
            A handle that ends this.
        """
        handle: Any = self._tbe.register_forward_pre_hook(_BeforeLookup(hook))
        return handle  # type: ignore[no-any-return]


class _BeforeLookup:
    """Calls a function before each lookup of a TBE; does nothing in copies of the model."""

    __slots__ = ("_hook",)

    def __init__(self, hook: Callable[[], None] | None = None) -> None:
        self._hook = hook

    def __call__(self, _module: Any, _args: tuple[Any, ...]) -> None:
        if self._hook is not None:
            self._hook()

    def __reduce__(self) -> tuple[type[_BeforeLookup], tuple[()]]:
        return _BeforeLookup, ()


class _ForwardHook:
    """Has rows marked after each lookup of a fused TBE; does nothing in copies of the model.

    Rows change in the backward pass of a lookup, so they are marked there, by a hook on the output
    of the lookup, which autograd calls before the pass. An evaluation has no backward pass. If the
    backward pass comes after a cut, the rows are marked after the cut.
    """

    __slots__ = ("_bags", "_features", "_lookup", "_markers")

    def __init__(self, markers: Sequence[Marker] = (), table_of: Sequence[int] = ()) -> None:
        self._markers = markers
        self._features = len(table_of)
        self._lookup = LookupMarker([markers[table] for table in table_of])
        #: Number of bags of the last lookup in which all features had equally many, and its bags.
        self._bags: tuple[int, Sequence[tuple[int, int]]] = (0, ())

    def __call__(
        self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not self._markers or not isinstance(output, Tensor) or not output.requires_grad:
            return
        names = ("indices", "offsets", "", "", "batch_size_per_feature_per_rank")
        call = dict(zip(names, args, strict=False)) | kwargs
        ids, offsets = call["indices"], call["offsets"]
        sizes = call.get("batch_size_per_feature_per_rank")

        def before_backward(_gradient: Tensor) -> None:
            refuse_capture("the backward pass of TorchRec's fused tables")
            try:
                self._mark(ids, offsets, sizes)
            except Exception as error:
                # The error must not stop training, and it is safe to mark all rows instead.
                _log.warning(
                    "the next checkpoint stores all rows of a module's tables, because the rows of "
                    "a lookup could not be marked: %s",
                    error,
                )
                for marker in self._markers:
                    marker.mark_all()
                if came_from_handler(error):
                    raise

        output.register_hook(before_backward)

    def _mark(self, ids: Tensor, offsets: Tensor, sizes: Sequence[Sequence[int]] | None) -> None:
        bag_count = offsets.numel() - 1
        if sizes is not None:
            bags: Sequence[tuple[int, int]] = feature_bags(bag_count, self._features, sizes)
        else:
            if self._bags[0] != bag_count:
                self._bags = bag_count, feature_bags(bag_count, self._features, None)
            bags = self._bags[1]
        self._lookup.mark(ids, offsets, bags)

    def __reduce__(self) -> tuple[type[_ForwardHook], tuple[()]]:
        return _ForwardHook, ()


def feature_bags(
    bags: int, features: int, sizes: Sequence[Sequence[int]] | None
) -> list[tuple[int, int]]:
    """Return the first bag of each feature and the end of its bags.

    Args:
        bags: number of all bags, which come feature by feature.
        features: number of features.
        sizes: for each feature, its bags on each rank; None: all features have equally many bags.
    """
    bag_counts = [bags // features] * features if sizes is None else [sum(ranks) for ranks in sizes]
    return list(pairwise(accumulate(bag_counts, initial=0)))


def _refused(owner: str, found: str, expected: str, next_step: str) -> SettingsError:
    return SettingsError(
        f"tables of {owner!r}", found=found, expected=expected, next_step=next_step
    )
