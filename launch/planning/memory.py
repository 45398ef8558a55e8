"""Device memory of one rank during a training step, from what DeepSpeed 0.19.8 allocates and when.

A step has four moments: the end of the forward pass, the backward pass, the reduction of the gradients, and the
optimizer's step. No moment has all allocations, so the peak is the sum of the parts at one moment, not the sum of their
maxima. With P parameters, R ranks, g parameters in the largest group and b elements per bucket (`reduce_bucket_size`,
at most P), in bytes:

    stage     weights   masters, moments   gradients   further in reduction             further in step
    0         4P        8P                 4P          4 min(P, 5e8)
    1, fp32   4P        12P/R              4P          a bucket 4b, a copy 4b           4g/R, gradients 4P/R
    1, bf16   2P        12P/R              4P          4 per parameter of small groups
    2, fp32   4P        12P/R              4P/R        a bucket 4b, a copy 4b           4g/R
    2, bf16   2P        12P/R              4P/R        a bucket 2b, copies 2b and 4b
    3, fp32   4P/R      12P/R              4P/R        a bucket 4b (always), a copy 4b  4g/R
    3, bf16   2P/R      12P/R              4P/R        a bucket 4b (always), a copy 4b  4g/R

The sources in DeepSpeed (`runtime/`): `zero/stage_1_and_2.py` allocates a bucket in the first hook of a backward pass
(`setup_buckets`) and copies it to reduce it (`allreduce_bucket`; in bf16 once more, to fp32). In fp32 it then keeps its
shard in a new buffer (`copy_grads_in_partition`) and flattens that once more for the step, group by group; in bf16 it
adds to a flat fp32 buffer (`_build_compact_grad_partition_buffer`) that the step uses directly. `bf16_optimizer.py`
(stage 1, bf16) holds fp32 gradients of the whole model; `engine.py` (`buffered_allreduce_fallback`) reduces them, and
those of stage 0, in chunks of 5e8 elements, and copies a chunk only if it has several tensors. `zero/stage3.py` holds
one bucket for the whole run, interleaves it in a copy to scatter it (`reduce_scatter_coalesced`), gathers up to
`stage3_max_live_parameters` weights, and flattens gradients by sub-group. NCCL's collectives work in place.

A CPU differs in three ways: allocated memory counts only once it is written, so that a bucket counts as it fills, when
activations are already freed; gloo copies what it scatters; and there are no buffers of CUDA and NCCL.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from configs.schema import Config
from launch.engine.deepspeed_config import accumulation_steps, deepspeed_config
from launch.optim.muon import MAX_BATCH_NUMEL, MUON, Block
from launch.optim.optimizer import group_algorithm, muon_blocks, optimizer_groups
from launch.planning.activations import activation_bytes, head_bytes, loss_bytes, working_bytes
from model.gpt import GPT
from model.parameters import collect_specs

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "libraries")
ENGINE_BUCKET = 500_000_000  # elements; `MEMORY_OPT_ALLREDUCE_SIZE` in DeepSpeed's engine.py
# Defaults of DeepSpeed's zero/config.py.
DEFAULT_SUB_GROUP = DEFAULT_LIVE_PARAMETERS = 1_000_000_000

# Outside PyTorch's allocator: the context with its kernels, and cuBLAS' workspace (32 MiB on Hopper), on an H100.
CUDA_BYTES = 0.55e9
# Buffers of the communicators for all-reduce, gather and scatter: 1.6 GB in NVIDIA/nccl issue 864.
NCCL_BYTES = 1.6e9
# Buffers per peer, from the first all-to-all on (Muon): 3.3 GB more in NVIDIA/nccl issue 1685.
NCCL_ALL_TO_ALL_BYTES = 3.3e9


@dataclass(frozen=True)
class GroupSize:
    """One parameter group of the optimizer.

    Attributes:
        numel: The number of elements of all its parameters.
        has_muon: Whether Muon updates it, rather than AdamW.
        is_query_key: Whether it holds query/key weights.
    """

    numel: int
    has_muon: bool = False
    is_query_key: bool = False


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model's parameters that determine its memory.

    Attributes:
        groups: The parameter groups in the optimizer's order.
        largest: The number of elements of the largest parameter.
        muon_working: The number of elements that Muon's iteration holds at once.
    """

    groups: tuple[GroupSize, ...]
    largest: int
    muon_working: int = 0

    @property
    def num_parameters(self) -> int:
        return sum(group.numel for group in self.groups)

    @property
    def num_muon(self) -> int:
        return sum(group.numel for group in self.groups if group.has_muon)

    @property
    def num_query_key(self) -> int:
        return sum(group.numel for group in self.groups if group.is_query_key)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one rank.

    Attributes:
        moments: Moment of a step -> part -> bytes.
    """

    moments: Mapping[str, Mapping[str, float]]

    @property
    def peak_moment(self) -> str:
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def peak(self) -> float:
        return sum(self.moments[self.peak_moment].values())

    @property
    def parts(self) -> dict[str, float]:
        """The maximum of each part; their sum exceeds the peak."""
        return {part: max(moment.get(part, 0.0) for moment in self.moments.values()) for part in PARTS}


def model_sizes(config: Config) -> ModelSizes:
    """The sizes of a resolved configuration's model, computed without allocating it."""
    with torch.device("meta"):
        model = GPT(config.model)
    specs = collect_specs(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    groups = tuple(
        GroupSize(
            numel=sum(math.prod(shapes[name]) for name in names),
            has_muon=group_algorithm(group, config) == MUON,
            is_query_key=group.is_query_key,
        )
        for group, names in optimizer_groups(specs, config).items()
    )
    blocks = [block for parts in muon_blocks(specs, shapes, config).values() for block in parts]
    largest = max(math.prod(shape) for shape in shapes.values())
    return ModelSizes(groups, largest, _muon_working(blocks))


def _muon_working(blocks: list[Block]) -> int:
    """Elements in the iteration's largest batch: matrices before and after a step, and two Gram matrices of each."""
    counts: dict[tuple[int, int], int] = {}
    for block in blocks:
        counts[block.shape] = counts.get(block.shape, 0) + 1
    return max(
        (
            min(count, max(1, MAX_BATCH_NUMEL // (rows * cols))) * 2 * (rows * cols + min(rows, cols) ** 2)
            for (rows, cols), count in counts.items()
        ),
        default=0,
    )


def checkpoint_bytes(sizes: ModelSizes) -> int:
    """The size of a checkpoint: fp32 masters, and AdamW's two moments or Muon's one."""
    return 12 * sizes.num_parameters - 4 * sizes.num_muon


def plan_memory(sizes: ModelSizes, config: Config, stage: int, num_ranks: int, on_gpu: bool = True) -> MemoryPlan:
    """Plans the bytes of a rank at each moment of a step after the first, when the optimizer has its state.

    Args:
        stage: The ZeRO stage, instead of the configured one.
        on_gpu: If False, the resident memory of a CPU process, beyond that before the model is built.
    """
    at_stage = config.model_copy(update={"deepspeed": config.deepspeed.model_copy(update={"zero_stage": stage})})
    return _Planner(sizes, at_stage, num_ranks, on_gpu).plan()


class _Planner:
    """Computes the parts of every moment. P is the number of parameters, R the number of ranks."""

    def __init__(self, sizes: ModelSizes, config: Config, num_ranks: int, on_gpu: bool) -> None:
        self.sizes, self.config, self.num_ranks, self.on_gpu = sizes, config, num_ranks, on_gpu
        self.stage = config.deepspeed.zero_stage
        self.is_bf16 = config.train.precision == "bf16"
        self.accumulation = accumulation_steps(config, num_ranks)
        settings = deepspeed_config(config, num_ranks, self.accumulation, sizes.num_parameters)
        self.zero: dict[str, Any] = settings["zero_optimization"]

    def plan(self) -> MemoryPlan:
        """Returns every moment, including the parts that are present at all of them."""
        P, R = self.sizes.num_parameters, self.num_ranks
        masters = 0 if self.stage == 0 else 4
        weight_bytes = self._weight_bytes() * P / (R if self.stage == 3 else 1)
        always = {
            "weights": weight_bytes,
            "optimizer": ((masters + 8) * P - 4 * self.sizes.num_muon) / (R if self.stage > 0 else 1),
            "libraries": self._library_bytes(),
        }
        moments = {"forward": self._forward(), "backward": self._backward()}
        moments |= {"reduction": self._reduction(), "step": self._step()}
        return MemoryPlan({name: _sum_parts(always, parts) for name, parts in moments.items()})

    def _weight_bytes(self) -> int:
        return 2 if self.is_bf16 and self.stage > 0 else 4

    def _library_bytes(self) -> float:
        if not self.on_gpu:
            return 0.0
        communication = NCCL_BYTES + (NCCL_ALL_TO_ALL_BYTES if self.sizes.num_muon else 0.0)
        return CUDA_BYTES + (communication if self.num_ranks > 1 else 0.0)

    def _forward(self) -> dict[str, float]:
        """The loss, in a micro-batch after the first."""
        return {
            "gradients": self._accumulated_gradients(),
            "activations": activation_bytes(self.config, self.stage, self.on_gpu),
            "logits": loss_bytes(self.config, self.stage),
            "buffers": self._persistent_bucket() + self._gathered() + self._autocast_copies(),
        }

    def _backward(self) -> dict[str, float]:
        """The beginning of a backward pass, when all activations are present."""
        parts = {
            "gradients": self._accumulated_gradients(),
            "activations": activation_bytes(self.config, self.stage, self.on_gpu)
            + working_bytes(self.config, self.stage, self.on_gpu),
            "logits": 2 * head_bytes(self.config, self.stage),  # as computed by the loss, and scaled
            "buffers": self._filling_bucket() + self._gathered() + self._autocast_copies(),
        }
        if self._accumulates_immediately():
            parts["buffers"] += 6 * self.sizes.largest  # a bf16 gradient, and the fp32 copy that is added
        return parts

    def _reduction(self) -> dict[str, float]:
        """The largest reduction: during each backward pass from stage 2 on, else after the last one."""
        P = self.sizes.num_parameters
        if self.stage == 0:
            return {"gradients": 4.0 * P, "buffers": 4.0 * min(P, ENGINE_BUCKET + self.sizes.largest)}
        if self._accumulates_immediately():
            return {"gradients": 4.0 * P, "buffers": 4.0 * self._copied_groups()}
        return max(self._bucket_reductions(), key=lambda parts: sum(parts.values()))

    def _step(self) -> dict[str, float]:
        P, R = self.sizes.num_parameters, self.num_ranks
        largest_group = max(group.numel for group in self.sizes.groups)
        share = 1 if self.stage == 0 else R
        if self.stage == 0 or self._accumulates_immediately():
            gradients, flattened = 4.0 * P, 0.0
        elif self.stage == 3:
            sub_group = int(self.zero.get("sub_group_size", DEFAULT_SUB_GROUP))
            gradients, flattened = 4.0 * P / R, 4.0 * min(largest_group / R, sub_group)
        else:
            gradients, flattened = 4.0 * P / R, 0.0 if self.is_bf16 else 4.0 * largest_group / R
        kept = 0.0
        if self.config.qk_control.chosen.scales_steps or self.config.monitor.every_steps is not None:
            kept = 4.0 * self.sizes.num_query_key / share  # the query/key masters before the step
        standing = self._persistent_bucket() if self.stage == 3 else 0.0
        return {"gradients": gradients, "buffers": flattened + kept + standing + self._muon_copies()}

    def _accumulates_immediately(self) -> bool:
        """Whether each gradient is added to fp32 sums of the whole model and freed (stage 1 in bf16)."""
        return self.stage == 1 and self.is_bf16

    def _accumulated_gradients(self) -> float:
        """Gradients accumulated by earlier micro-batches of the step."""
        P, R = self.sizes.num_parameters, self.num_ranks
        if self._accumulates_immediately():
            return 4.0 * P
        if self.stage == 3:
            return 4.0 * P / R
        if self.accumulation == 1:
            return 0.0
        return 4.0 * P / (R if self.stage == 2 else 1)

    def _bucket(self) -> int:
        """The number of elements of a bucket."""
        return int(self.zero["reduce_bucket_size"])

    def _bucket_bytes(self) -> int:
        """Bytes per element of a bucket; at stage 3 its type is that of the reduction."""
        return 2 if self.is_bf16 and self.stage == 2 else 4

    def _persistent_bucket(self) -> float:
        """The bucket outside the backward pass: at stage 3, and at stage 1 in fp32 after the first micro-batch."""
        if self.stage == 3:
            full = self._bucket() if self.on_gpu else min(self._bucket(), self.sizes.num_parameters)
            return float(self._bucket_bytes() * full)
        is_there = self.stage == 1 and not self.is_bf16 and self.accumulation > 1 and self.on_gpu
        return float(self._bucket_bytes() * self._bucket()) if is_there else 0.0

    def _filling_bucket(self) -> float:
        if self.stage == 0 or self._accumulates_immediately():
            return 0.0
        if self.stage == 3:
            return self._persistent_bucket()
        return float(self._bucket_bytes() * self._bucket()) if self.on_gpu else 0.0

    def _bucket_reductions(self) -> Iterator[dict[str, float]]:
        """The memory at each reduction of a full bucket, or of a parameter larger than a bucket."""
        P, share = self.sizes.num_parameters, 4.0 * self.sizes.num_parameters / self.num_ranks
        bucket_bytes, size = self._bucket_bytes(), min(self._bucket(), P)
        bucket = float(bucket_bytes * (self._bucket() if self.on_gpu else size))
        copy_bytes = 4 if bucket_bytes == 4 else 2 + 4  # a copy in the same type, in bf16 also one in fp32
        for index in range(math.ceil(P / size)):
            before, after = index * size / P, min(1.0, (index + 1) * size / P)
            copies = copy_bytes * (after - before) * P
            gradients = share
            if self.stage == 3 and not self.on_gpu:
                copies *= 2  # gloo scatters a copy
            if self.stage < 3 and not self.is_bf16:
                # After the first copy is freed, this rank's shard gets a new buffer; on a CPU it counts as it fills.
                filled_before, filled_after = (float(index > 0), 1.0) if self.on_gpu else (before, after)
                gradients, copies = max((filled_before * share, copies), (filled_after * share, 0.0), key=sum)
                gradients += self._accumulated_gradients() if self.stage == 2 else 4 * (1 - after) * P
            yield self._reducing(gradients, bucket + copies, after)
        if self.sizes.largest > size:
            yield self._reducing(
                share + self._accumulated_gradients(), bucket + (2 + copy_bytes) * self.sizes.largest, 0.0
            )

    def _reducing(self, gradients: float, buffers: float, done: float) -> dict[str, float]:
        """The parts of a reduction; from stage 2 on, the fraction `done` of the backward pass is over by then."""
        parts = {"gradients": gradients, "buffers": buffers + self._gathered()}
        if self.stage >= 2:
            activations = activation_bytes(self.config, self.stage, self.on_gpu)
            parts["activations"] = (1 - done) * activations
            if done < 1:
                parts["activations"] += working_bytes(self.config, self.stage, self.on_gpu)
        return parts

    def _copied_groups(self) -> int:
        """The most elements in one chunk of several groups' gradients; a chunk of one group is not copied."""
        most, chunk, num_groups = 0, 0, 0
        for group in self.sizes.groups:
            chunk, num_groups = chunk + group.numel, num_groups + 1
            most = max(most, chunk if num_groups > 1 else 0)
            if chunk > ENGINE_BUCKET:
                chunk, num_groups = 0, 0
        return most

    def _gathered(self) -> float:
        """Weights that stage 3 has gathered. A single rank has them already."""
        if self.stage < 3 or self.num_ranks == 1:
            return 0.0
        live = int(self.zero.get("stage3_max_live_parameters", DEFAULT_LIVE_PARAMETERS))
        return float(self._weight_bytes() * min(self.sizes.num_parameters, live))

    def _autocast_copies(self) -> float:
        """Rounded weights that the products of the forward pass save."""
        assert self.config.model.vocab_size is not None
        if self.stage > 0 or not self.is_bf16:
            return 0.0
        vocabulary = self.config.model.vocab_size * self.config.model.dim
        hidden = self.sizes.num_parameters - vocabulary * (1 if self.config.model.tie_embeddings else 2)
        return 2.0 * hidden

    def _muon_copies(self) -> float:
        """Temporary memory of `launch.optim.muon` in a call, which sees all groups, one group, or a sub-group."""
        if self.sizes.num_muon == 0:
            return 0.0
        if self.stage == 0 or self._accumulates_immediately():
            seen = self.sizes.num_muon
        else:
            seen = max(group.numel for group in self.sizes.groups if group.has_muon)
        if self.stage == 3:
            sub_group = int(self.zero.get("sub_group_size", DEFAULT_SUB_GROUP))
            seen = min(seen, sub_group * self.num_ranks)
        num_copies = 2 if self.num_ranks == 1 else 3
        working = self.sizes.muon_working * (3 if self.on_gpu else 4)  # on a GPU in bf16, with fp32 input and output
        return 4.0 * num_copies * seen / (1 if self.stage == 0 else self.num_ranks) + working


def _sum_parts(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Adds two moments part by part."""
    return {part: first.get(part, 0.0) + second.get(part, 0.0) for part in PARTS}
