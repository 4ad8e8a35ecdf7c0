"""Train a DLRM in a train pipeline of TorchRec. Kill it and start it again: it goes on.

torchrun --nproc-per-node 2 torchrec_pipelines.py --pipeline sparse-dist
"""

import argparse
import hashlib
import os
import sys
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if not find_spec("torchrec") or not find_spec("fbgemm_gpu"):
    sys.exit("skipped: torchrec and fbgemm-gpu-cpu are not installed")

from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline.train_pipelines import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from recpoint import Checkpointer, ResumableLoader

ROWS = {"user": 50_000, "item": 20_000}
BATCHES = int(os.environ.get("BATCHES", "900"))  # of the whole run, over all its starts
PIPELINES = {
    "sparse-dist": TrainPipelineSparseDist,
    "semi-sync": TrainPipelineSemiSync,
    "prefetch": PrefetchTrainPipelineSparseDist,
}


def impressions(count: int) -> TensorDataset:
    """Return `count` samples: 4 numbers, a user and an item, and a label that can be learnt."""
    drawn = torch.Generator().manual_seed(0)
    ids = [(torch.rand(count, generator=drawn) ** 3 * rows).long() for rows in ROWS.values()]
    labels = (ids[1] % 2).float()
    return TensorDataset(torch.rand(count, 4, generator=drawn), torch.stack(ids, 1), labels)


def collate(samples: list[tuple[Tensor, Tensor, Tensor]]) -> Batch:
    """Return a batch in the form that TorchRec's pipelines move to a device."""
    numbers, ids, labels = map(torch.stack, zip(*samples, strict=True))
    features = KeyedJaggedTensor(
        keys=list(ROWS),
        values=ids.T.reshape(-1),  # feature after feature
        lengths=torch.ones(ids.numel(), dtype=torch.int32),
    )
    return Batch(numbers, features, labels)


def sharded_model(device: torch.device) -> DistributedModelParallel:
    """Return TorchRec's DLRM with its loss; its tables step in backward."""
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=16, num_embeddings=rows, feature_names=[name])
        for name, rows in ROWS.items()
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.1})
    dlrm = DLRM(
        bags,
        dense_in_features=4,
        dense_arch_layer_sizes=[32, 16],
        over_arch_layer_sizes=[32, 1],
        dense_device=device,
    )
    return DistributedModelParallel(DLRMTrain(dlrm), device=device)


def warm_optimizer(model: DistributedModelParallel) -> CombinedOptimizer:
    """Return one optimizer for tables and dense layers, with warm-ups and clipped gradients."""
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=300, value=0.1)]
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    )
    clipped = GradientClippingOptimizer(dense, clipping=GradientClipping.NORM, max_gradient=1.0)
    return CombinedOptimizer(
        [
            ("fused", WarmupOptimizer(model.fused_optimizer, stages, lr=0.1)),
            ("dense", WarmupOptimizer(clipped, stages, lr=0.05)),
        ]
    )


def digest(model: DistributedModelParallel) -> str:
    """Return a digest of all weights, of all ranks."""
    own = hashlib.sha256()
    for value in model.state_dict().values():
        is_sharded = hasattr(value, "local_shards")
        for tensor in [s.tensor for s in value.local_shards()] if is_sharded else [value]:
            own.update(tensor.detach().cpu().numpy().tobytes())
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, own.hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


parser = argparse.ArgumentParser()
parser.add_argument("--pipeline", choices=list(PIPELINES), default="sparse-dist")
chosen = parser.parse_args().pipeline
has_gpu = torch.cuda.is_available()
if chosen != "sparse-dist" and not has_gpu:
    sys.exit(
        f"--pipeline {chosen}: found no GPU, expected one: TorchRec's "
        f"{PIPELINES[chosen].__name__} ends with an error on a CPU. "
        "Next: run this on a host with GPUs, or take --pipeline sparse-dist"
    )
dist.init_process_group("nccl" if has_gpu else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
if has_gpu:
    torch.cuda.set_device(device)
torch.manual_seed(0)
torch.set_num_threads(1)  # two trainings on one machine then have the same bits

samples = impressions(64_000)
sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(samples, seed=0)
loader = DataLoader(samples, batch_size=64, sampler=sampler, collate_fn=collate)
reader = ResumableLoader(loader)  # it knows its position to the batch
model = sharded_model(device)
optimizer = warm_optimizer(model)
run = os.environ.get("RUN", "runs/pipelines")

with Checkpointer(model, optimizer, reader=reader, run=run, interval_batches=100) as checkpoints:
    checkpoints.restore()
    pipeline = checkpoints.pipelined(PIPELINES[chosen](model, optimizer, device))
    batches = checkpoints.batches(total=BATCHES)
    while True:
        try:
            loss, _, _ = pipeline.progress(batches)  # what DLRMTrain returns beside its loss
        except StopIteration:  # the pipeline has trained all batches that it took
            break
        if rank == 0 and (done := checkpoints.batches_done + 1) % 100 == 0:
            print(f"batch {done}: loss {loss.item():.3f}", flush=True)

result = digest(model)
if rank == 0:
    print(f"{checkpoints.batches_done} batches, SHA-256 {result}")
dist.destroy_process_group()
