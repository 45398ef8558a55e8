"""The memory plan against published figures, DeepSpeed's own estimates, what autograd keeps, and counts by hand.

`test_memory_measured.py` has what processes really take.
"""

from __future__ import annotations

import contextlib
import json

import pytest
import torch

from configs.load import load_config
from configs.schema import Config
from launch.planning.activations import activation_bytes, loss_bytes, working_bytes
from launch.planning.fit import STAGES
from launch.planning.memory import GroupSize, MemoryPlan, ModelSizes, model_sizes, plan_memory
from model.cross_entropy import MAX_CHUNK_BYTES
from model.gpt import GPT
from model.initialisation import initialise
from tests.conftest import ROOT, python

GIB = 2**30
LLAMA_2_7B = load_config(ROOT / "configs/gpt-7b.yaml", ["model.vocab_size=32000", "model.num_kv_heads=32"])
BF16, FP32 = ["train.precision=bf16"], ["train.precision=fp32"]


def one_group(num_parameters: int) -> ModelSizes:
    return ModelSizes((GroupSize(num_parameters),), largest=num_parameters // 1000)


def states(config: Config, num_parameters: int, stage: int, num_ranks: int) -> float:
    """What papers call model states: weights, optimizer, and gradients as they are kept until the step."""
    moment = plan_memory(one_group(num_parameters), config, stage, num_ranks).moments["step"]
    return moment["weights"] + moment["optimizer"] + moment["gradients"]


@pytest.mark.parametrize(
    ("stage", "gigabytes", "more_bytes"), [(0, 120, 0), (1, 31.4, 2), (2, 16.6, 2 / 64), (3, 1.9, 2 / 64)]
)
def test_model_states_by_the_zero_paper(stage: int, gigabytes: float, more_bytes: float) -> None:
    """ZeRO (arXiv 1910.02054), figure 1: 7.5B parameters on 64 GPUs, with 16-bit gradients.

    From stage 1 on ours are summed in fp32, 2 bytes a parameter more; at stage 1 on every rank. Stage 0 has fp32
    weights and gradients and no masters, which is as much.
    """
    assert states(LLAMA_2_7B, 7_500_000_000, stage, 64) - more_bytes * 7.5e9 == pytest.approx(1e9 * gigabytes, rel=0.02)


def test_model_states_by_deepspeeds_estimators() -> None:
    """At stage 3 exactly as there, without the largest layer; at stage 2 there are 16-bit gradients besides."""
    script = (
        "import json\n"
        "from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2\n"
        "from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3\n"
        "N, gpus = 7_000_000_000, dict(num_gpus_per_node=8, num_nodes=4, cpu_offload=False)\n"
        "third = zero3(N, 100_000_000, cpu_offload_params=False, **gpus)\n"
        "print(json.dumps([zero2(N, **gpus)[1], third[1] - third[2]]))"
    )
    finished = python("-c", script)
    assert finished.code == 0, finished.errors
    second, third = json.loads(finished.output.splitlines()[-1])
    assert states(LLAMA_2_7B, 7_000_000_000, 3, 32) == third
    assert states(LLAMA_2_7B, 7_000_000_000, 2, 32) == second - 2 * 7_000_000_000 / 32


def test_sharing_among_more_gpus_as_measured_with_torchtitan() -> None:
    """Llama 3.1 8B with FSDP: 82.4 GiB on 8 GPUs and 67.0 on 128, all else alike.

    From pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3. FSDP shares 16 bytes a
    parameter (fp32 weights and gradients), stage 3 shares 18.
    """
    num_parameters = 8_030_261_248
    saved = states(LLAMA_2_7B, num_parameters, 3, 8) - states(LLAMA_2_7B, num_parameters, 3, 128)
    assert saved == pytest.approx((82.4 - 67.0) * GIB, rel=0.05)


def test_llama_2_7b_fits_where_it_was_trained() -> None:
    """On A100 of 80 GB, sharded over the 8 of a node, 2 sequences of 4,096, without activation checkpointing.

    From the table in foundation-model-stack/fms-fsdp's README. Of our stages only the third shares as much.
    """
    overrides = ["model.vocab_size=32000", "model.num_kv_heads=32", "train.activation_checkpointing=false"]
    config = load_config(ROOT / "configs/gpt-7b.yaml", overrides)
    sizes = model_sizes(config)
    assert sizes.num_parameters == 6_738_415_616
    memory = plan_memory(sizes, config, 3, 8)
    assert 40e9 < memory.parts["activations"] < memory.peak < 80 * GIB


def test_activations_by_korthikanti() -> None:
    """34 s b h bytes of a layer in 16 bits (arXiv 2205.05198, equation 2 without the scores), two less and some more.

    Less: two dropout masks. More: two norms' inverse RMS, and the logsumexp of every head. A SwiGLU of width 2h keeps
    as much as their GELU of width 4h.
    """
    overrides = ["model.vocab_size=1000", "model.num_kv_heads=32", "model.ffn_dim=8192"]
    by_depth = []
    for num_layers in (1, 2):
        config = load_config(
            ROOT / "configs/gpt-7b.yaml",
            [*overrides, f"model.num_layers={num_layers}", "train.activation_checkpointing=false"],
        )
        by_depth.append(activation_bytes(config, stage=2, on_gpu=True))
    tokens, width, heads = 2 * 4096, 4096, 32
    assert by_depth[1] - by_depth[0] == tokens * (34 * width - 2 * width + 2 * 4 + 4 * heads)


def test_checkpointing_keeps_one_residual_a_layer_and_one_whole_layer() -> None:
    """2 s b h L bytes (Korthikanti et al., section 5), and a whole layer while it is recomputed."""
    kept = activation_bytes(LLAMA_2_7B, 2, on_gpu=True)
    tokens, width = 2 * 4096, 4096
    assert kept == pytest.approx(2 * tokens * width * (32 + 2), rel=1e-4)  # 2: around the last norm
    plain = load_config(
        ROOT / "configs/gpt-7b.yaml",
        ["model.vocab_size=32000", "model.num_kv_heads=32", "train.activation_checkpointing=false"],
    )
    layer = (activation_bytes(plain, 2, True) - 2 * 2 * tokens * width) / 32
    assert working_bytes(LLAMA_2_7B, 2, True) - working_bytes(plain, 2, True) == pytest.approx(layer, rel=1e-4)


ATTENTION = [
    "{}",
    "{qk_norm: true}",
    "{gated: true}",
    "{ssmax: true}",
    "{sink: true}",
    "{kind: mla}",
    "{kind: mla, qk_norm: true}",
    "{kind: mla, sink: true}",
    "{kind: mla, mla: {q_latent_dim: 96, value_dim: 80}}",
    "{kind: mla, gated: true, mla: {q_latent_dim: 96, latent_norm: false}}",
]


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(("precision", "stage"), [("fp32", 1), ("bf16", 1), ("bf16", 0)])
def test_activations_are_what_autograd_keeps(attention: str, precision: str, stage: int) -> None:
    """One layer on CPU, to the byte but for what does not grow with the tokens, as rotary tables."""
    overrides = ["model.vocab_size=64", "model.dim=128", "model.max_seq_len=256", f"model.attention={attention}"]
    kept_bytes, planned = [], []
    for num_layers in (1, 3):
        config = load_config(
            ROOT / "configs/debug.yaml", [*overrides, f"model.num_layers={num_layers}", f"train.precision={precision}"]
        )
        kept_bytes.append(_autograd_bytes(config, stage))
        planned.append(activation_bytes(config, stage, on_gpu=False))
    assert planned[1] - planned[0] == pytest.approx(kept_bytes[1] - kept_bytes[0], rel=0.02)


def _autograd_bytes(config: Config, stage: int) -> int:
    model = GPT(config.model)
    initialise(model, seed=0)
    is_autocast = config.train.precision == "bf16" and stage == 0
    if config.train.precision == "bf16" and not is_autocast:
        model.to(torch.bfloat16)
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    shapes = {tuple(shape) for parameter in model.parameters() for shape in (parameter.shape, parameter.shape[::-1])}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_rounded_weight = is_autocast and tuple(tensor.shape) in shapes
        if storage.data_ptr() not in weights and not is_rounded_weight:
            storages[storage.data_ptr()] = storage
        return tensor

    tokens = torch.zeros(config.train.micro_batch_size, config.model.max_seq_len, dtype=torch.long)
    autocast = torch.autocast("cpu", torch.bfloat16) if is_autocast else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        model(tokens, tokens)
    return sum(storage.nbytes() for storage in storages.values())


def test_the_loss_by_hand() -> None:
    """Logits of at most two chunks, and the head's fp32 gradient with the product that is added."""
    numbers = 32_000 * 4096
    chunk = MAX_CHUNK_BYTES // (4 * 32_000) * 4 * 32_000
    assert loss_bytes(LLAMA_2_7B, 2) == 3 * chunk + 4 * numbers + 2 * numbers
    small = load_config(ROOT / "configs/debug.yaml", ["model.vocab_size=1000", *FP32])
    assert loss_bytes(small, 1) == 4 * 4 * 64 * 1000 + 4 * 1000 * 64


def plan(overrides: list[str], sizes: ModelSizes, stage: int, num_ranks: int = 1) -> MemoryPlan:
    config = load_config(ROOT / "configs/debug.yaml", ["model.vocab_size=64", *overrides])
    return plan_memory(sizes, config, stage, num_ranks)


ACCUMULATION_1 = ["train.global_batch_tokens=64", "train.micro_batch_size=1", "monitor.every_steps=null"]
ACCUMULATION_2 = ["train.global_batch_tokens=128", "train.micro_batch_size=1", "monitor.every_steps=null"]
TWO_GROUPS = ModelSizes((GroupSize(300_000_000, is_query_key=True), GroupSize(700_000_000)), largest=1_000_000)
P = TWO_GROUPS.num_parameters
BUCKET = 200_000_000


@pytest.mark.parametrize(
    ("precision", "stage", "num_ranks", "gradients", "buffers"),
    [
        # From stage 2 on the plan's tiny activations are part of the reduction and looked at elsewhere.
        (FP32, 0, 4, 4 * P, 4 * (500_000_000 + 1_000_000)),
        (FP32, 1, 1, 4 * P, 4 * P),  # the last bucket, all others copied to this rank's share: 4P and twice a bucket
        (BF16, 1, 4, 4 * P, 4 * P),  # the first group is below 5e8, so both are one piece, which is copied
        (FP32, 2, 4, 4 * P / 4, 2 * 4 * BUCKET),
        (BF16, 2, 4, 4 * P / 4, (2 + 2 + 4) * BUCKET),
        (BF16, 3, 4, 4 * P / 4, 2 * 4 * BUCKET + 2 * P),
    ],
)
def test_the_reduction_by_hand(
    precision: list[str], stage: int, num_ranks: int, gradients: float, buffers: float
) -> None:
    moment = plan([*precision, *ACCUMULATION_1], TWO_GROUPS, stage, num_ranks).moments["reduction"]
    if (precision, stage) == (FP32, 1):
        assert moment["gradients"] + moment["buffers"] == 4 * P + max(4 * BUCKET, 4 * P - 4 * BUCKET + 4 * BUCKET)
    else:
        assert (moment["gradients"], moment["buffers"]) == pytest.approx((gradients, buffers))


def test_a_piece_of_one_group_is_not_copied() -> None:
    """BF16_Optimizer's gradients are one tensor a group, and pieces end behind 5e8 numbers."""
    sizes = ModelSizes((GroupSize(600_000_000), GroupSize(700_000_000), GroupSize(1000)), largest=1_000_000)
    assert plan([*BF16, *ACCUMULATION_1], sizes, 1).moments["reduction"]["buffers"] == 0
    joined = ModelSizes((GroupSize(400_000_000), GroupSize(700_000_000), GroupSize(1000)), largest=1_000_000)
    assert plan([*BF16, *ACCUMULATION_1], joined, 1).moments["reduction"]["buffers"] == 4 * 1_100_000_000


def test_the_step_by_hand() -> None:
    """fp32 flattens its gradients once more, group by group; policies keep the query/key masters."""
    moment = plan([*FP32, *ACCUMULATION_1], TWO_GROUPS, 2, 4).moments["step"]
    assert (moment["gradients"], moment["buffers"]) == (4 * P / 4, 4 * 700_000_000 / 4)
    moment = plan([*BF16, *ACCUMULATION_1, "qk_control.policy=quack"], TWO_GROUPS, 2, 4).moments["step"]
    assert (moment["gradients"], moment["buffers"]) == (4 * P / 4, 4 * 300_000_000 / 4)


def test_gradients_that_accumulate_are_there_in_the_forward_pass() -> None:
    expected = {(0, "fp32"): 4 * P, (1, "fp32"): 4 * P, (1, "bf16"): 4 * P, (2, "fp32"): P, (2, "bf16"): P}
    for (stage, precision), num_bytes in expected.items():
        many = ["train.global_batch_tokens=512", "train.micro_batch_size=1", "monitor.every_steps=null"]
        forward = plan([f"train.precision={precision}", *many], TWO_GROUPS, stage, 4).moments["forward"]
        assert forward["gradients"] == num_bytes
    once = plan([*FP32, *ACCUMULATION_1], TWO_GROUPS, 1, 1).moments["forward"]
    assert once["gradients"] == 0 and once["buffers"] == 0


def test_overrides_of_buckets_count() -> None:
    small = "deepspeed.overrides={zero_optimization: {reduce_bucket_size: 1000000}}"
    plans = [plan([*BF16, *ACCUMULATION_2, *more], TWO_GROUPS, 2, 8) for more in ([], [small])]
    buffers = [memory.parts["buffers"] for memory in plans]
    assert buffers[0] == pytest.approx((2 + 2 + 4) * BUCKET)
    assert buffers[1] == pytest.approx((2 + 2 + 4) * 1_000_000, rel=0.01)


def test_a_parameter_larger_than_a_bucket_is_reduced_on_its_own() -> None:
    sizes = ModelSizes((GroupSize(1_000_000_000),), largest=500_000_000)
    moment = plan([*BF16, *ACCUMULATION_1], sizes, 2, 4).moments["reduction"]
    assert moment["buffers"] == 2 * BUCKET + (2 + 2 + 4) * 500_000_000


@pytest.mark.parametrize("stage", STAGES)
def test_muon_needs_one_moment_less_and_copies_for_the_step(stage: int) -> None:
    """Muon: up to three fp32 copies of the matrices that a call sees, shared by the ranks but at stage 0."""
    adamw = ModelSizes((GroupSize(80_000_000), GroupSize(20_000_000)), largest=1_000_000)
    muon = ModelSizes((GroupSize(80_000_000, True), GroupSize(20_000_000)), largest=1_000_000, muon_working=10_000_000)
    settings = [*BF16, *ACCUMULATION_1]
    before, after = [plan(settings, sizes, stage, 4) for sizes in (adamw, muon)]
    share = 1 if stage == 0 else 4
    assert before.parts["optimizer"] - after.parts["optimizer"] == 4 * 80_000_000 / share
    added = after.moments["step"]["buffers"] - before.moments["step"]["buffers"]
    assert added == 3 * 4 * 80_000_000 / share + 3 * 10_000_000


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["gpt-124m", "gpt-1b", "gpt-7b", "mla-1b", "mla-7b"])
def test_more_ranks_never_need_more(name: str, stage: int) -> None:
    """From two on: a lone rank has no communication."""
    config = load_config(ROOT / f"configs/{name}.yaml", ["model.vocab_size=32000"])
    sizes = model_sizes(config)
    peaks = [plan_memory(sizes, config, stage, num_ranks).peak for num_ranks in (2, 3, 4, 8, 16, 64, 1000, 65_536)]
    assert peaks == sorted(peaks, reverse=True)


def test_the_peak_is_the_largest_moment_and_no_part_is_negative() -> None:
    for stage in STAGES:
        memory = plan_memory(model_sizes(LLAMA_2_7B), LLAMA_2_7B, stage, 8)
        assert memory.peak == max(sum(parts.values()) for parts in memory.moments.values())
        assert memory.peak <= sum(memory.parts.values())
        assert min(memory.parts.values()) >= 0
        assert memory.parts["libraries"] > 1e9
        on_cpu = plan_memory(model_sizes(LLAMA_2_7B), LLAMA_2_7B, stage, 8, on_gpu=False)
        assert on_cpu.parts["libraries"] == 0
