"""A GPT trained with Steadyhead whose attention no architecture of `transformers` implements.

Load it with `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`. `attention` in config.json has its
options: multi-head or latent attention (MLA), norms of queries and keys or of latents, a cap on the logits,
Scalable-Softmax, a sink, a gate. The cache of `transformers` stores the keys and values themselves, not the latents.

Shapes: B batch, T new positions, S visible positions, D model width, H query heads, G key/value heads, K width of a
query or key head, V of a value head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

LATENT_NORM_EPS = 1e-6
# `transformers` 5.2x renamed the output's cache field.
CACHE_FIELD = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class SteadyheadConfig(PretrainedConfig):
    """See config.json."""

    model_type = "steadyhead"

    def __init__(
        self,
        vocab_size=64,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        attention=None,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.attention = attention or {"kind": "mha"}
        super().__init__(**kwargs)


class RMSNorm(nn.Module):
    """gain * x / sqrt(mean(x²) + eps), in fp32."""

    def __init__(self, dim, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(x.dtype)


class Scale(nn.Module):
    """The learned factor s of every head (Scalable-Softmax)."""

    def __init__(self, num_heads):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads))


def linear(in_features, out_features):
    """A matrix without a bias."""
    return nn.Linear(in_features, out_features, bias=False)


def rotate(x_BHTK, cos_BTR, sin_BTR):
    """Applies rotary positions to the last R of K elements; element i is paired with i + R/2."""
    num_rotated = cos_BTR.shape[-1]
    plain, turned = x_BHTK.split((x_BHTK.shape[-1] - num_rotated, num_rotated), dim=-1)
    first, second = turned.float().chunk(2, dim=-1)
    other = torch.cat((-second, first), dim=-1)
    turned = turned.float() * cos_BTR.unsqueeze(1) + other * sin_BTR.unsqueeze(1)
    return torch.cat((plain, turned.to(x_BHTK.dtype)), dim=-1)


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-head latent attention with the options of `config.attention`."""

    def __init__(self, config, layer):
        super().__init__()
        options, mla = config.attention, config.attention.get("mla") or {}
        self.layer = layer
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.is_latent = options["kind"] == "mla"
        self.softcap = options.get("softcap")
        dim, num_heads = config.hidden_size, self.num_heads
        if self.is_latent:
            self.nope_dim, self.rope_dim, value_dim = mla["nope_dim"], mla["rope_dim"], mla["value_dim"]
            self.query_key_dim = self.nope_dim + self.rope_dim
            has_norm, query_dim = mla["latent_norm"], mla["q_latent_dim"]
            self.query_down = linear(dim, query_dim) if query_dim else None
            self.query_latent_norm = RMSNorm(query_dim, LATENT_NORM_EPS) if query_dim and has_norm else None
            self.query_up = linear(query_dim or dim, num_heads * self.nope_dim)
            self.query_rope = linear(query_dim or dim, num_heads * self.rope_dim)
            self.kv_down = linear(dim, mla["kv_latent_dim"])
            self.kv_latent_norm = RMSNorm(mla["kv_latent_dim"], LATENT_NORM_EPS) if has_norm else None
            self.key_up = linear(mla["kv_latent_dim"], num_heads * self.nope_dim)
            self.key_rope = linear(dim, self.rope_dim)
            self.value_up = linear(mla["kv_latent_dim"], num_heads * value_dim)
        else:
            self.query_key_dim = self.rope_dim = value_dim = config.head_dim
            self.query = linear(dim, num_heads * value_dim)
            self.key = linear(dim, self.num_kv_heads * value_dim)
            self.value = linear(dim, self.num_kv_heads * value_dim)
        self.output = linear(num_heads * value_dim, dim)
        has_qk_norm = options.get("qk_norm")
        self.query_norm = RMSNorm(self.query_key_dim, config.rms_norm_eps) if has_qk_norm else None
        self.key_norm = RMSNorm(self.query_key_dim, config.rms_norm_eps) if has_qk_norm else None
        self.softmax_scale = Scale(num_heads) if options.get("ssmax") else None
        self.sink = nn.Parameter(torch.zeros(num_heads)) if options.get("sink") else None
        self.gate = linear(dim, num_heads * value_dim) if options.get("gated") else None

    def forward(self, x_BTD, rotary, visible_BTS, cache):
        q_BTHK, k_BTGK, v_BTGV = self.latent_heads(x_BTD) if self.is_latent else self.heads(x_BTD)
        if self.query_norm is not None:
            q_BTHK, k_BTGK = self.query_norm(q_BTHK), self.key_norm(k_BTGK)
        q_BHTK, k_BGTK = rotate(q_BTHK.transpose(1, 2), *rotary), rotate(k_BTGK.transpose(1, 2), *rotary)
        k_BGSK, v_BGSV = k_BGTK, v_BTGV.transpose(1, 2)
        if cache is not None:
            k_BGSK, v_BGSV = cache.update(k_BGSK, v_BGSV, self.layer)
        out_BTX = self.attend(q_BHTK, k_BGSK, v_BGSV, visible_BTS).transpose(1, 2).flatten(2)
        if self.gate is not None:
            out_BTX = out_BTX * self.gate(x_BTD).sigmoid()
        return self.output(out_BTX)

    def heads(self, x_BTD):
        """Queries, keys and values before norms and rotation."""
        q_BTHK = self.query(x_BTD).unflatten(-1, (self.num_heads, -1))
        k_BTGK = self.key(x_BTD).unflatten(-1, (self.num_kv_heads, -1))
        return q_BTHK, k_BTGK, self.value(x_BTD).unflatten(-1, (self.num_kv_heads, -1))

    def latent_heads(self, x_BTD):
        """As `heads`, for latent attention, in which all heads share the rotated part of the keys."""
        c_q = x_BTD if self.query_down is None else self.query_down(x_BTD)
        c_kv = self.kv_down(x_BTD)
        if self.query_latent_norm is not None:
            c_q = self.query_latent_norm(c_q)
        if self.kv_latent_norm is not None:
            c_kv = self.kv_latent_norm(c_kv)
        by_head = (self.num_heads, -1)
        q_BTHK = torch.cat((self.query_up(c_q).unflatten(-1, by_head), self.query_rope(c_q).unflatten(-1, by_head)), -1)
        k_rope = self.key_rope(x_BTD).unsqueeze(2).expand(-1, -1, self.num_heads, -1)
        k_BTHK = torch.cat((self.key_up(c_kv).unflatten(-1, by_head), k_rope), -1)
        return q_BTHK, k_BTHK, self.value_up(c_kv).unflatten(-1, by_head)

    def attend(self, q_BHTK, k_BGSK, v_BGSV, visible_BTS):
        """Softmax attention with all options, in fp32."""
        visible_B1TS, dtype = visible_BTS.unsqueeze(1), q_BHTK.dtype
        q_BHTK = q_BHTK.float()
        if self.softmax_scale is not None:
            log_visible_B1T1 = visible_B1TS.sum(-1, keepdim=True).float().log()
            q_BHTK = q_BHTK * self.softmax_scale.weight.float().view(-1, 1, 1) * log_visible_B1T1
        num_shared = self.num_heads // k_BGSK.shape[1]
        k_BHSK = k_BGSK.float().repeat_interleave(num_shared, dim=1)
        v_BHSV = v_BGSV.float().repeat_interleave(num_shared, dim=1)
        scores_BHTS = q_BHTK @ k_BHSK.mT * self.query_key_dim**-0.5
        if self.softcap is not None:
            scores_BHTS = self.softcap * torch.tanh(scores_BHTS / self.softcap)
        scores_BHTS = scores_BHTS.masked_fill(~visible_B1TS, -torch.inf)
        if self.sink is not None:
            sink_BHT1 = self.sink.float().view(-1, 1, 1).expand_as(scores_BHTS[..., :1])
            scores_BHTS = torch.cat((scores_BHTS, sink_BHT1), dim=-1)
        weights_BHTS = scores_BHTS.softmax(dim=-1)[..., : k_BHSK.shape[2]]
        return (weights_BHTS @ v_BHSV).to(dtype)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config):
        super().__init__()
        self.gate = linear(config.hidden_size, config.intermediate_size)
        self.up = linear(config.hidden_size, config.intermediate_size)
        self.down = linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config, layer):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x, rotary, visible, cache):
        x = x + self.attention(self.attention_norm(x), rotary, visible, cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


class SteadyheadForCausalLM(PreTrainedModel, GenerationMixin):
    """The whole model."""

    config_class = SteadyheadConfig
    base_model_prefix = ""
    _no_split_modules = ["Block"]  # noqa: RUF012 - `transformers` expects a plain attribute
    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList([Block(config, layer) for layer in range(config.num_hidden_layers)])
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def set_input_embeddings(self, value):
        self.embedding = value

    def get_output_embeddings(self):
        return self.head

    def set_output_embeddings(self, value):
        self.head = value

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        cache=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **kwargs,
    ):
        """Returns logits, and the loss if there are `labels`.

        Args:
            input_ids: (B, T) new tokens.
            attention_mask: (B, S) 0 for padding, over cached and new positions.
            cache, past_key_values: the cache of earlier positions, under either name; it is updated.
        """
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DynamicCache()
        num_cached = cache.get_seq_length() if cache is not None else 0
        visible_BTS = self.visible(input_ids, attention_mask, num_cached)
        if position_ids is None:
            position_ids = visible_BTS.sum(-1) - 1  # padding before the text does not count
        rotary = self.rotary(position_ids)
        x_BTD = self.embedding(input_ids)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotary, visible_BTS, cache)
        x_BTD = self.final_norm(x_BTD)
        # 0 keeps all positions, since -0 is 0.
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.head(x_BTD[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE_FIELD: cache})

    def visible(self, input_ids, attention_mask, num_cached) -> Tensor:
        """(B, T, S): the positions that each new position attends to. Padding attends only to itself."""
        (B, T), S = input_ids.shape, num_cached + input_ids.shape[1]
        causal_TS = torch.ones(T, S, dtype=torch.bool, device=input_ids.device).tril(num_cached)
        if attention_mask is None:
            return causal_TS.expand(B, T, S)
        if attention_mask.dim() != 2:
            raise ValueError("attention_mask must be (batch, positions); static caches are not supported")
        itself_TS = torch.ones_like(causal_TS).triu(num_cached) & causal_TS
        return (causal_TS & attention_mask.bool().unsqueeze(1)) | itself_TS

    def rotary(self, position_ids):
        """Cosines and sines (B, T, R). Not stored as a buffer, which a cast to bf16 would round."""
        num_rotated = self.blocks[0].attention.rope_dim
        exponents = torch.arange(0, num_rotated, 2, device=position_ids.device).float() / num_rotated
        angles = position_ids.float().unsqueeze(-1) / self.config.rope_theta**exponents
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()
