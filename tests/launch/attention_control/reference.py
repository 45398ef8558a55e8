"""Query/key control as a plain single-process loop over whole weights, written from the papers' formulas."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from configs.schema import Config
from data.loader import BatchGeometry, MicroBatch, StepLoader, validation_batches
from data.order import SampleOrder
from data.source import TokenSource
from launch.optim.schedule import learning_rate
from model.attention.rotary import rotary_table
from model.gpt import GPT
from model.initialisation import initialise
from model.parameters import collect_specs
from tests.conftest import VOCAB_SIZE

SEQ_LEN = 32
Weights = dict[str, torch.Tensor]
HeadTable = dict[str, list[float]]  # one value a head of each matrix, by the matrix' full name


@dataclass
class Reference:
    """What a plain loop gives.

    Attributes:
        initial, masters: fp32 weights before the first and after the last step.
        ratios: of each step.
        clipped_heads: number of heads whose largest logit passed the threshold in each step.
        alphas: of each layer, by step, with the adaptive policy.
    """

    initial: Weights
    masters: Weights
    ratios: list[HeadTable] = field(default_factory=list)
    clipped_heads: list[int] = field(default_factory=list)
    alphas: list[list[float]] = field(default_factory=list)


def is_controlled(name: str) -> bool:
    """Whether a parameter belongs to the query/key groups: all of attention but values and outputs."""
    return ".attention." in name and not name.endswith(("value.weight", "value_up.weight", "output.weight"))


def head_norms(weights: Weights, layer: int, name: str, head_dim: int) -> list[float]:
    """Frobenius norms of the heads of one matrix of a layer."""
    return [float(head.norm()) for head in weights[f"blocks.{layer}.attention.{name}.weight"].split(head_dim)]


def mha_factors(weights: Weights, layer: int, config: Config) -> dict[str, list[float]]:
    """Algorithm 1, with shared key heads and query/key norms."""
    q, k = (head_norms(weights, layer, name, 10) for name in ("query", "key"))
    shared = len(q) // len(k)
    if config.model.attention.qk_norm:
        return {"query": q, "key": k}
    return {
        "query": [1 / k[head // shared] for head in range(len(q))],
        "key": [1 / max(q[group * shared : (group + 1) * shared]) for group in range(len(k))],
    }


def mla_factors(weights: Weights, layer: int, config: Config) -> dict[str, list[float]]:
    """Algorithm 2; a normalised latent has the size of its gain, and its matrix counts relatively."""

    def norm(name: str) -> float:
        return float(weights[f"blocks.{layer}.attention.{name}.weight"].norm())

    has_query_latent = f"blocks.{layer}.attention.query_down.weight" in weights
    uq, uk, qr = (
        head_norms(weights, layer, name, width) for name, width in (("query_up", 10), ("key_up", 10), ("query_rope", 6))
    )
    kr, dkv, dq = norm("key_rope"), norm("kv_down"), norm("query_down") if has_query_latent else 1.0
    own_q = own_kv = 1.0
    if config.model.attention.mla.latent_norm:
        own_q, own_kv = dq / norm("query_latent_norm"), dkv / norm("kv_latent_norm")
        dq, dkv = norm("query_latent_norm"), norm("kv_latent_norm")
    pairs = [a * b for a, b in zip(uq, uk, strict=True)]
    if config.model.attention.qk_norm:
        # The logits are divided by the sizes of whole heads; a product's size is ‖W‖ ‖x‖ / sqrt(inputs).
        width = config.model.attention.mla.kv_latent_dim
        q_size = [math.hypot(a, b) for a, b in zip(uq, qr, strict=True)]
        k_size = [math.hypot(a * dkv / math.sqrt(width), kr) for a in uk]
        size = [a * b for a, b in zip(q_size, k_size, strict=True)]
        factors = {
            "query_up": [n / (key * dkv) for n, key in zip(size, uk, strict=True)],
            "key_up": [n / (query * dkv) for n, query in zip(size, uq, strict=True)],
            "query_rope": [n / kr for n in size],
            "kv_down": [own_kv / max(pair / n for pair, n in zip(pairs, size, strict=True))],
            "key_rope": [1 / max(a / n for a, n in zip(qr, size, strict=True))],
        }
        return factors | ({"query_down": [norm("query_down")]} if has_query_latent else {})
    factors = {
        "query_up": [1 / (dq * key * dkv) for key in uk],
        "key_up": [1 / (query * dq * dkv) for query in uq],
        "query_rope": [1 / (dq * kr)] * len(qr),
        "kv_down": [own_kv / (max(pairs) * dq)],
        "key_rope": [1 / (max(qr) * dq)],
    }
    if has_query_latent:
        factors["query_down"] = [own_q * min(1 / (max(pairs) * dkv), 1 / (max(qr) * kr))]
    return factors


def quack_by_hand(weights: Weights, initial: Weights, config: Config) -> dict[str, list[float]]:
    """The ratio of each head of every query/key matrix: factor now / factor at the start."""
    factors = mla_factors if config.model.attention.kind == "mla" else mha_factors
    ratios = {}
    for layer in range(config.model.num_layers):
        now, start = (factors(table, layer, config) for table in (weights, initial))
        for name in now:
            quotients = [a / b for a, b in zip(now[name], start[name], strict=True)]
            ratios[f"blocks.{layer}.attention.{name}.weight"] = quotients
    return ratios


def attention_inputs(model: GPT, tokens_BT: Tensor) -> list[Tensor]:
    """What each layer's attention gets, by hooks."""
    inputs: list[Tensor] = []
    handles = [
        block.attention.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
        for block in model.blocks
    ]
    with torch.no_grad():
        model.logits(tokens_BT)
    for handle in handles:
        handle.remove()
    return inputs


def causal_logits(attention: Any, x_BTD: Tensor, config: Config) -> Tensor:
    """All logits (B, H, T, T) of a layer in fp64; hidden ones are -inf."""
    T = x_BTD.shape[1]
    rotary = rotary_table(torch.arange(T), attention.rotary_dim, config.model.rope_theta)
    with torch.no_grad():
        q, k, _ = attention.project(x_BTD, rotary)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    return logits.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)


class Controller:
    """The adaptive policy: alpha <- clip(alpha (target / drift)^exponent, min_alpha, 1) every few steps."""

    def __init__(self, config: Config, tokens_BT: Tensor) -> None:
        self._config = config
        self._tokens_BT = tokens_BT
        self._old: tuple[list[Tensor], list[Any]] | None = None
        self._progress = 0.0
        self._clipped = torch.ones(config.model.num_layers, config.model.num_heads, dtype=torch.float64)
        self.alphas = [config.qk_control.alpha] * config.model.num_layers

    def next_alphas(self, model: GPT, step: int) -> list[float]:
        settings = self._config.qk_control.adaptive
        assert settings.target is not None
        if step % settings.every_steps == 0:
            layers = [copy.deepcopy(block.attention).float() for block in model.blocks]
            if self._old is not None:
                for layer, (x, old) in enumerate(zip(*self._old, strict=True)):
                    drift = self._drift(x.float(), layers[layer], old, self._clipped[layer]) / self._progress
                    factor = (settings.target / drift) ** settings.exponent
                    self.alphas[layer] = min(max(self.alphas[layer] * factor, settings.min_alpha), 1.0)
            self._old, self._progress = (attention_inputs(model, self._tokens_BT), layers), 0.0
            self._clipped.fill_(1.0)
        optim = self._config.optim
        self._progress += learning_rate(step, self._config.train.steps, optim) / optim.lr
        return list(self.alphas)

    def note_clipping(self, factors: list[list[float]]) -> None:
        """What clipping did to each head's logits: that is no drift."""
        self._clipped *= torch.tensor(factors, dtype=torch.float64)

    def _drift(self, x: Tensor, now: Any, old: Any, clipped_H: Tensor) -> float:
        """RMS over heads, visible keys, and the queries at evenly spaced positions up to the last."""
        new_logits, old_logits = (causal_logits(layer, x, self._config) for layer in (now, old))
        old_logits = old_logits * clipped_H[:, None, None]
        num_queries = self._config.monitor.probe_queries
        squares = []
        for query in [round(i * (SEQ_LEN - 1) / num_queries) for i in range(1, num_queries + 1)]:
            change = new_logits[:, :, query, : query + 1] - old_logits[:, :, query, : query + 1]
            squares += change.square().flatten().tolist()
        return math.sqrt(sum(squares) / len(squares))


def largest_logits(model: GPT, batch: MicroBatch, config: Config) -> list[Tensor]:
    """Largest logit of each head (H) in each layer, over the rows that have targets."""
    rows = (batch.targets >= 0).any(dim=1)
    inputs = attention_inputs(model, batch.tokens)
    return [
        causal_logits(block.attention, x, config)[rows].amax(dim=(0, 2, 3)) if rows.any() else torch.zeros(1)
        for block, x in zip(model.blocks, inputs, strict=True)
    ]


def clip(masters: Weights, largest: list[Tensor], config: Config) -> list[list[float]]:
    """QK-Clip: the query and key matrices share the factor; with latents, the rotated queries take all of theirs.

    Returns what becomes of each query head's logits, by layer.
    """
    threshold = config.qk_control.clip_threshold
    assert threshold is not None
    result = []
    for layer, maxima in enumerate(largest):
        gamma = [min(1.0, threshold / s) if s > 0 else 1.0 for s in maxima.tolist()]
        name = f"blocks.{layer}.attention."
        if config.model.attention.kind == "mla":
            factors = {"query_up": (gamma, 0.5), "key_up": (gamma, 0.5), "query_rope": (gamma, 1.0)}
            result.append(gamma)
        else:
            keys = config.model.num_kv_heads
            assert keys is not None
            shared = len(gamma) // keys
            by_key = [min(gamma[key * shared : (key + 1) * shared]) for key in range(keys)]
            factors = {"query": ([by_key[head // shared] for head in range(len(gamma))], 0.5), "key": (by_key, 0.5)}
            result.append(factors["query"][0])
        for matrix, (values, power) in factors.items():
            weight = masters[f"{name}{matrix}.weight"]
            for head, value in zip(weight.split(weight.shape[0] // len(values)), values, strict=True):
                head.mul_(value**power)
    return result


class MuonAndAdamW:
    """Muon for the hidden matrices, by singular values in float64, and AdamW for the rest."""

    def __init__(self, masters: Weights, groups: list[dict[str, Any]], config: Config) -> None:
        is_hidden = {
            name: master.dim() == 2 and not name.startswith(("embedding", "head")) for name, master in masters.items()
        }
        self.param_groups = groups
        self._muon = [group for group in groups if config.optim.name == "muon" and is_hidden[group["name"]]]
        self._names = {group["name"] for group in self._muon}
        rest = [group for group in groups if group["name"] not in self._names]
        self._adamw = torch.optim.AdamW(rest, betas=config.optim.betas, eps=config.optim.eps, fused=True)
        self._momentum = config.optim.muon.momentum
        self._buffers = {group["name"]: torch.zeros_like(group["params"][0]) for group in self._muon}

    def step(self) -> None:
        for own, group in zip(self._adamw.param_groups, self._rest(), strict=True):
            own["lr"] = group["lr"]
        self._adamw.step()
        for group in self._muon:
            (weight,), buffer = group["params"], self._buffers[group["name"]]
            buffer.lerp_(weight.grad, 1 - self._momentum)
            u, s, v = torch.linalg.svd(weight.grad.lerp(buffer, self._momentum).double(), full_matrices=False)
            s = s / s.norm()
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            change = 0.2 * math.sqrt(max(weight.shape)) * ((u * s) @ v)
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * change)

    def _rest(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["name"] not in self._names]


def reference(config: Config, num_ranks: int) -> tuple[Reference, GPT]:
    """Trains with the run's micro-batches; returns also the model with the final weights."""
    policy, threshold = config.qk_control.policy, config.qk_control.clip_threshold
    is_autocast = config.deepspeed.zero_stage == 0 and config.train.precision == "bf16"
    model = GPT(config.model)
    initialise(model, config.run.seed)
    if config.train.precision == "bf16" and not is_autocast:
        model.bfloat16()
    specs = collect_specs(model)
    parameters = dict(model.named_parameters())
    masters = {name: parameter.detach().float().clone() for name, parameter in parameters.items()}
    result = Reference(copy.deepcopy(masters), masters)
    controlled = [name for name in specs if is_controlled(name)]
    decayed = [name for name, master in masters.items() if master.dim() == 2 and name != "embedding.weight"]
    groups = [
        {"params": [master], "name": name, "weight_decay": config.optim.weight_decay if name in decayed else 0.0}
        for name, master in masters.items()
    ]
    optimizer = MuonAndAdamW(masters, groups, config)
    source = TokenSource.open(config.data.sources[0].path)
    order = SampleOrder([source.num_windows(SEQ_LEN)], [1.0], config.run.seed)
    rows = config.train.micro_batch_size
    samples = config.train.global_batch_tokens // SEQ_LEN
    geometry = BatchGeometry(samples, rows, -(-samples // rows), 1)
    controller = None
    with StepLoader([source], order, geometry, SEQ_LEN, 0, 0, VOCAB_SIZE) as loader:
        for step in range(config.train.steps):
            batch = next(loader)
            if controller is None and policy == "adaptive":
                # The first samples of the first batch are the run's first samples.
                first = torch.cat([micro_batch.tokens for micro_batch in batch.micro_batches])
                controller = Controller(config, first[: config.monitor.probe_sequences])
            alphas = controller.next_alphas(model, step) if controller else []
            sums = {name: torch.zeros_like(master) for name, master in masters.items()}
            maxima: list[list[Tensor]] = []
            for micro_batch in batch.micro_batches:
                with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
                    loss, _, _ = model(micro_batch.tokens, micro_batch.targets)
                    if threshold is not None:
                        maxima.append(largest_logits(model, micro_batch, config))
                (loss * (num_ranks / batch.num_targets)).backward()
                for name, parameter in parameters.items():
                    assert parameter.grad is not None
                    sums[name] += parameter.grad.float()
                    parameter.grad = None
            for name, master in masters.items():
                master.grad = sums[name] / num_ranks
            torch.nn.utils.clip_grad_norm_(list(masters.values()), config.optim.grad_clip)
            base = learning_rate(step, config.train.steps, config.optim)
            for group in optimizer.param_groups:
                group["lr"] = base
                if group["name"] in controlled and policy != "none":
                    group["lr"] *= config.qk_control.alpha
            old = copy.deepcopy(masters)
            ratios: HeadTable = {}
            if policy == "quack":
                ratios = quack_by_hand(masters, result.initial, config)
            elif controller is not None:
                matrices = [name for name in controlled if masters[name].dim() == 2]
                ratios = {name: [alphas[int(name.split(".")[1])] / config.qk_control.alpha] for name in matrices}
            optimizer.step()
            for name, values in ratios.items():
                width = masters[name].shape[0] // len(values)
                heads = zip(old[name].split(width), masters[name].split(width), values, strict=True)
                masters[name].copy_(torch.cat([before + ratio * (new - before) for before, new, ratio in heads]))
            if threshold is not None:
                largest = [torch.stack(layer).amax(dim=0) for layer in zip(*maxima, strict=True)]
                clipped = clip(masters, largest, config)
                result.clipped_heads.append(sum(factor < 1 for layer in clipped for factor in layer))
                if controller is not None:
                    controller.note_clipping(clipped)
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(masters[name])
            result.ratios.append(ratios)
            result.alphas.append(alphas)
    return result, model


def validation_loss(model: GPT, config: Config) -> float:
    """Mean loss of the run's fixed validation windows, on one rank."""
    source = TokenSource.open(next(iter(config.data.val_sources.values())))
    rows, samples = config.train.micro_batch_size, config.train.global_batch_tokens // SEQ_LEN
    is_autocast = config.deepspeed.zero_stage == 0 and config.train.precision == "bf16"
    total, targets = 0.0, 0
    windows = config.validation.batches * samples
    for batch in validation_batches(source, SEQ_LEN, windows, rows, rank=0, world_size=1, vocab_size=VOCAB_SIZE):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            total += float(model(batch.tokens, batch.targets)[1])
        targets += int((batch.targets >= 0).sum())
    return total / targets
