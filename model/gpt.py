"""The language model: embedding, blocks, norm, output head.

Shapes: B batch, T time, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from configs.schema import ModelConfig
from model.attention.cache import Cache
from model.attention.documents import Documents
from model.attention.rotary import rotary_table
from model.block import Block
from model.embedding import Embedding, OutputHead
from model.norm import RMSNorm


class GPT(nn.Module):
    """A decoder-only transformer like Llama, Qwen3 (with query/key norms) or DeepSeek-V3's dense layers.

    Parameters are allocated but undefined after construction; `model.initialisation.initialise` or a
    checkpoint sets them. Construction under `torch.device("meta")` allocates nothing.

    Args:
        config: Resolved sizes (`configs.schema.resolve_model`), including the vocabulary size.
        activation_checkpointing: Keep only each block's input for the backward pass and recompute the rest.

    Raises:
        ValueError: A size is missing (null) or sizes are incompatible.
    """

    def __init__(self, config: ModelConfig, activation_checkpointing: bool = False) -> None:
        super().__init__()
        check_sizes(config)
        assert config.vocab_size is not None
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.embedding = Embedding(config.vocab_size, config.dim, config.init_std)
        blocks = [Block(config) for _ in range(config.num_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = RMSNorm(config.dim, config.norm_eps)
        tied_weight = self.embedding.weight if config.tie_embeddings else None
        self.head = OutputHead(config.vocab_size, config.dim, config.init_std, tied_weight)
        self.rotary_dim = blocks[0].attention.rotary_dim

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GPT:
        """Keeps tied weights tied, since leaving the meta device creates a new Parameter in every module."""
        super()._apply(fn, recurse)
        if self.config.tie_embeddings:
            self.head.weight = self.embedding.weight
        return self

    @property
    def num_parameters(self) -> int:
        """Number of trained elements; tied weights count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        z_loss_weight: float = 0.0,
        positions_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns loss sums over the targets other than -100, in fp32.

        Sums rather than means, since only the caller knows the number of targets in the global batch.

        Args:
            tokens_BT: Token ids; T is at most max_seq_len.
            targets_BT: The token that follows each one, or -100 for positions without loss.
            z_loss_weight: Weight of logsumexp(logits)² in the objective.
            positions_BT: Each token's position in its document, counted from 0; attention stays within documents.
                None: each row is one document.

        Returns:
            The objective to differentiate (cross-entropy + z_loss_weight * z-loss), and the cross-entropy and
            z-loss without gradients.

        Raises:
            ValueError: T is larger than max_seq_len.
        """
        return self.head(self._hidden(tokens_BT, positions_BT=positions_BT), targets_BT, z_loss_weight)

    def logits(
        self,
        tokens_BT: Tensor,
        cache: Cache | None = None,
        last_only: bool = False,
        positions_BT: Tensor | None = None,
    ) -> Tensor:
        """Returns the logits of the next token at every position (B, T, V), or only at the last one (B, 1, V).

        With a cache, the tokens continue the cached positions and are added to the cache. Use caches under
        `torch.no_grad()`: with gradients enabled, every cached step would keep its graph alive. `positions_BT` is the
        same as in `forward` and cannot be combined with a cache.

        Raises:
            ValueError: The context would exceed max_seq_len or the cache.
        """
        hidden_BTD = self._hidden(tokens_BT, cache, positions_BT)
        return self.head(hidden_BTD[:, -1:] if last_only else hidden_BTD)

    def new_cache(
        self,
        batch_size: int,
        length: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Cache:
        """Returns an empty cache for decoding.

        Args:
            batch_size: Number of sequences.
            length: Number of positions to allocate, max_seq_len by default.
            dtype, device: Those of the weights by default.
        """
        length = length or self.config.max_seq_len
        dtype = dtype or self.embedding.weight.dtype
        device = torch.device(device or self.embedding.weight.device)
        blocks = cast("Iterable[Block]", self.blocks)
        return Cache([block.attention.new_cache(batch_size, length, dtype, device) for block in blocks], length)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rotary table of positions (T) or (B, T) for the attention layers."""
        return rotary_table(positions, self.rotary_dim, self.config.rope_theta)

    def attention_inputs(self, tokens_BT: Tensor) -> Iterator[Tensor]:
        """Yields the attention input (B, T, D) of each block, without running compiled code.

        Each row is one document.
        """
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        rotary = self.rotary(positions_T)
        x_BTD = self.embedding(tokens_BT)
        for block in cast("Iterable[Block]", self.blocks):
            yield block.attention_norm(x_BTD)
            x_BTD = block.forward(x_BTD, rotary)

    def compile_blocks(self) -> None:
        """Compiles every block in place. The blocks are identical, so they share the compiled code."""
        for block in self.blocks:
            block.compile()

    def _hidden(self, tokens_BT: Tensor, cache: Cache | None = None, positions_BT: Tensor | None = None) -> Tensor:
        """Returns the output head's input (B, T, D)."""
        start = cache.length if cache is not None else 0
        end = start + tokens_BT.shape[1]
        max_length = self.config.max_seq_len if cache is None else min(self.config.max_seq_len, cache.max_length)
        if end > max_length:
            raise ValueError(f"{end} tokens exceed the maximum context of {max_length}")

        documents: Documents | None = None
        if positions_BT is None:
            rotary = self.rotary(torch.arange(start, end, device=tokens_BT.device))
        else:
            assert cache is None, "documents cannot be combined with a cache"
            rotary = self.rotary(positions_BT)
            documents = Documents.of(positions_BT, has_sink=self.config.attention.sink)
        x_BTD = self.embedding(tokens_BT)
        layer_caches = [None] * len(self.blocks) if cache is None else cache.layers
        for block, layer_cache in zip(self.blocks, layer_caches, strict=True):
            if self.activation_checkpointing and cache is None and torch.is_grad_enabled():
                # A block uses no random numbers, so there is no generator state to save.
                arguments = (x_BTD, rotary, None, documents)
                x_BTD = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BTD = block(x_BTD, rotary, layer_cache, documents)
        return self.final_norm(x_BTD)


def check_sizes(config: ModelConfig) -> None:
    """Raises ValueError that lists every missing or incompatible size."""
    required: dict[str, int | None] = {"vocab_size": config.vocab_size, "ffn_dim": config.ffn_dim}
    if config.attention.kind == "mla":
        mla = config.attention.mla
        for key in ("kv_latent_dim", "nope_dim", "rope_dim", "value_dim"):
            required[f"attention.mla.{key}"] = getattr(mla, key)
        rotated_key, rotated_dim, num_kv_heads = "attention.mla.rope_dim", mla.rope_dim, None
    else:
        required |= {"num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        rotated_key, rotated_dim, num_kv_heads = "head_dim", config.head_dim, config.num_kv_heads
    problems = [f"model.{key} is not set" for key, value in required.items() if value is None]
    if rotated_dim is not None and rotated_dim % 2:
        problems.append(f"model.{rotated_key} is {rotated_dim}; rotary positions need an even width")
    if num_kv_heads is not None and config.num_heads % num_kv_heads:
        problems.append(f"model.num_heads is {config.num_heads}; expected a multiple of {num_kv_heads}")
    if problems:
        raise ValueError("; ".join(problems))
