"""Imported checkpoints: the same logits as in `transformers`, and every fault of a foreign folder named."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from configs.errors import ConfigError
from configs.schema import ModelConfig, resolve_model
from data.load_tokenizer import load_tokenizer
from data.sentencepiece_tokenizer import train_sentencepiece
from data.source import TokenSource
from launch.hf.architecture import from_hf_config
from launch.hf.export import export
from launch.hf.import_model import import_model
from launch.hf.layouts import parameter_shapes, rules
from launch.import_hf import main
from launch.inference.load_model import load_model
from model.gpt import GPT
from tests.conftest import VOCAB_SIZE, python, read_metrics, write_shard
from tests.launch.helpers.small_models import MLA_SIZES, make_model, save_model
from tests.launch.hf.test_export import VARIANTS

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "bos_token_id": None,
    "eos_token_id": 7,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "first_k_dense_replace": 2,
    "num_mtp_layers": 0,
}
MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "llama tied (SmolLM2)": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama, wide heads": (LlamaForCausalLM, LlamaConfig(**SIZES, head_dim=10)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8)),
    "qwen3 tied": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=10, tie_word_embeddings=True)),
    "deepseek": (DeepseekV3ForCausalLM, DeepseekV3Config(**{**SIZES, **MLA})),
    "deepseek, halves, no query latent": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**{**SIZES, **MLA, "q_lora_rank": None, "rope_interleave": False}),
    ),
}


def make_foreign(name: str) -> PreTrainedModel:
    """A model of `transformers` with random weights, gains included."""
    architecture, config = MODELS[name]
    torch.manual_seed(0)
    model = architecture(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape), alpha=0.3)
    return model


def load(checkpoint: Path) -> GPT:
    return load_model(checkpoint, torch.device("cpu"), torch.float32)[0]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_equal(name: str, tmp_path: Path) -> None:
    foreign = make_foreign(name)
    foreign.save_pretrained(tmp_path / "foreign", max_shard_size="20KB")
    assert len(list((tmp_path / "foreign").glob("*.safetensors"))) > 1
    import_model(tmp_path / "foreign", tmp_path / "checkpoint")
    model = load(tmp_path / "checkpoint")
    tokens_BT = torch.randint(VOCAB_SIZE, (3, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model.logits(tokens_BT), foreign(tokens_BT).logits, rtol=1e-5, atol=1e-5)
    assert model.config.tie_embeddings == foreign.config.tie_word_embeddings


def test_bf16_weights_come_exactly(tmp_path: Path) -> None:
    foreign = make_foreign("llama").bfloat16()
    foreign.save_pretrained(tmp_path / "folder.gguf")
    import_model(tmp_path / "folder.gguf", tmp_path / "checkpoint")
    expected = foreign.model.layers[1].mlp.up_proj.weight.float()
    assert torch.equal(load(tmp_path / "checkpoint").blocks[1].feed_forward.up.weight, expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_export_and_import_give_the_model_back(name: str, tmp_path: Path) -> None:
    attention, sizes, _ = VARIANTS[name]
    model = make_model(attention, **sizes)
    export(save_model(model, tmp_path / "checkpoint"), tmp_path / "out", "fp32", 20_000)
    import_model(tmp_path / "out", tmp_path / "again")
    again = load(tmp_path / "again")
    assert again.config == model.config
    for (key, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), key


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "gguf"])
def test_unpacking_undoes_packing(architecture: str) -> None:
    kind = {"kind": "mla", "mla": MLA_SIZES} if architecture.startswith("Deepseek") else {}
    model = resolve_model(ModelConfig(vocab_size=20, dim=32, num_heads=4, num_kv_heads=2, attention=kind))
    shapes = parameter_shapes(model)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    found = {}
    for rule in rules(architecture, model):
        packed = rule.pack([tensors[part.name] for part in rule.parts])
        assert tuple(packed.shape) == rule.shape(shapes)
        found |= rule.unpack(packed, shapes)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_the_tokenizer_comes_along_and_the_model_continues_text(tmp_path: Path) -> None:
    words = [f"{a}{b}{c} " for a in "kslm" for b in "aeiou" for c in "ntr"]
    train_sentencepiece(["".join(words) * 20], tmp_path / "tokenizer.model", 300, "bpe")
    model = make_model(vocab_size=320, tie_embeddings=True)
    export(save_model(model, tmp_path / "checkpoint", tokenizer=tmp_path / "tokenizer.model"), tmp_path / "out", "fp32")
    finished = python("-m", "launch.import_hf", tmp_path / "out", tmp_path / "again")
    assert finished.code == 0, finished.errors
    assert "LlamaForCausalLM" in finished.output
    ours = load_tokenizer(tmp_path / "tokenizer.model")
    assert load_tokenizer(tmp_path / "again/tokenizer.model").sha256 == ours.sha256
    outputs = [
        python("-m", "launch.generate", tmp_path / name, "--prompt", "kan sel", "--temperature", "0").output
        for name in ("checkpoint", "again")
    ]
    assert outputs[0].startswith("kan sel")
    assert outputs[0] == outputs[1]


def test_training_goes_on_from_it(tiny_config: Path, tmp_path: Path) -> None:
    """`run.init_from` an imported model, with a vanishing rate: its validation loss is the foreign model's."""
    foreign = make_foreign("llama")
    foreign.save_pretrained(tmp_path / "foreign")
    import_model(tmp_path / "foreign", tmp_path / "imported")
    one_window = write_shard(tmp_path / "one", seed=5, num_tokens=33)
    settings = ["model.ffn_dim=40", "model.norm_eps=1e-3", "model.rope_theta=500", "optim.lr=1e-12", "train.steps=1"]
    finished = python(
        *("train.py", tiny_config, f"run.init_from={tmp_path / 'imported'}"),
        *(*settings, f"data.val_sources={{one: {one_window}}}"),
    )
    assert finished.code == 0, finished.errors
    tokens_T = torch.from_numpy(TokenSource.open(one_window).shards[0].read(0, 33).astype("int64"))
    with torch.no_grad():
        expected = foreign(tokens_T[None], labels=tokens_T[None]).loss
    assert read_metrics(tmp_path / "runs/tiny")[-1]["val_loss"] == pytest.approx(float(expected), rel=1e-5)


def edit_config(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


def errors_of(path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says; nothing of OUT may be there."""
    capsys.readouterr()
    assert main([str(path), str(out)]) == 1
    assert not out.exists()
    assert not out.with_name(out.name + ".partial").exists()
    return capsys.readouterr().err


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    make_foreign("llama").save_pretrained(tmp_path / "foreign")
    return tmp_path / "foreign"


def test_all_wrong_tensors_are_listed(foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = foreign / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(32, 32)
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # known, and computed here
    save_file(tensors, path)
    lines = errors_of(foreign, tmp_path / "out", capsys).splitlines()
    assert len(lines) == 4
    for expected in (
        "model.layers.0.mlp.up_proj.weight: is missing",
        "model.norm.weight: is missing",
        "model.layers.1.self_attn.k_proj.weight: has shape [32, 32], expected [16, 32]",
        "model.layers.1.self_attn.q_proj.bias: is not part of this model",
    ):
        assert any(expected in line for line in lines)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8}}, "rope scaling 'llama3'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "rope scaling 'linear'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope scaling 'linear'"),
        ({"rope_scaling": {"rope_type": "default", "type": "yarn"}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor 2.0 is not supported"),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}}, "the values conflict"),
        ({"rope_theta": 1e6}, "rope_theta is 1000000.0; rope_parameters.rope_theta is 500.0: the values conflict"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters.full_attention"),
        ({"rope_parameters": "default"}, "rope_parameters 'default' is not supported; expected an object"),
        ({"rope_interleaved": True}, "rope_interleaved True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is unknown and might change"),
        ({"use_rope": False}, "use_rope False is unknown"),
        ({"n_routed_experts": 8}, "n_routed_experts 8 is unknown"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "expected LlamaForCausalLM"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_new.New"}}, "a model with custom code"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; only 'silu' is"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"sliding_window": 1024}, "sliding_window 1024"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported; expected llama, qwen3, deepseek_v3"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 8, "first_k_dense_replace": 1}, "mixture of experts"),
        ({"model_type": "deepseek_v3", **MLA, "num_key_value_heads": 2}, "num_key_value_heads 2"),
        ({"model_type": "deepseek_v3", **MLA, "qk_nope_head_dim": None}, "qk_nope_head_dim is missing"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "32"}, "dim: '32'"),
        ({"num_attention_heads": 3, "head_dim": 7}, "7; rotary positions need an even width"),
    ],
)
def test_unsupported_settings_are_named(
    keys: dict[str, Any], message: str, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_config(foreign, **keys)
    assert message in errors_of(foreign, tmp_path / "out", capsys)


SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 0],
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.0417,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}


def test_the_configuration_of_smollm2() -> None:
    """Of the time before `rope_parameters`."""
    imported = from_hf_config(SMOLLM2, "config.json")
    assert imported.architecture == "LlamaForCausalLM"
    assert imported.eod_id == 2
    assert imported.model.rope_theta == 100_000
    assert imported.model.head_dim == 64
    assert imported.model.attention == ModelConfig().attention
    scaled = {"rope_theta": None, "rope_scaling": {"type": "default", "rope_theta": 7e4}}
    assert from_hf_config({**SMOLLM2, **scaled}, "config.json").model.rope_theta == 7e4


@pytest.mark.parametrize("name", MODELS)
def test_every_key_is_checked(name: str) -> None:
    """All keys that `transformers` writes are known, and strange values of them are refused without a traceback."""
    keys = json.loads(json.dumps(MODELS[name][1].to_dict()))
    from_hf_config(keys, "config.json")
    for key in keys:
        for value in (None, True, "x", [], {}, [1], {"a": 1}, -1, 0, 1, 1.5, math.nan):
            with contextlib.suppress(ConfigError):
                from_hf_config({**keys, key: value}, "config.json")


def test_several_unsupported_settings_are_a_line_each(
    foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_config(foreign, attention_bias=True, mlp_bias=True, hidden_act="relu", vocab_size=None, hidden_size=None)
    assert errors_of(foreign, tmp_path / "out", capsys).count("\n") == 5


def test_bad_files_are_one_line(foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def one_line(path: Path, message: str, out: Path = tmp_path / "out") -> None:
        errors = errors_of(path, out, capsys)
        assert errors.startswith("error: ")
        assert message in errors
        assert errors.count("\n") == 1

    file, good = foreign / "model.safetensors", (foreign / "model.safetensors").read_bytes()
    one_line(tmp_path / "nowhere", "neither a folder nor a .gguf file")
    file.write_bytes(good[:-10])
    one_line(foreign, "model.safetensors: cannot be read")
    file.write_bytes(b"\xff" * 8 + good[8:])
    one_line(foreign, "model.safetensors: cannot be read")
    file.write_bytes(b"")
    one_line(foreign, "model.safetensors: cannot be read")
    tensors = load_file_bytes(good, tmp_path)
    save_file({**tensors, "model.norm.weight": torch.zeros(32, dtype=torch.int8)}, file)
    one_line(foreign, "model.norm.weight has type I8; expected one of F32, BF16, F16")
    save_file({**tensors, "model.norm.weight": torch.full((32,), torch.nan)}, file)
    one_line(foreign, "model.norm.weight: has NaN or infinite elements")
    file.unlink()
    one_line(foreign, "has neither model.safetensors nor model.safetensors.index.json")
    index = foreign / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-1.safetensors"}}))
    one_line(foreign, "model-1.safetensors: is missing")
    index.write_text("{}")
    one_line(foreign, "has no weight_map")
    places = dict.fromkeys(tensors, "model-1.safetensors")
    save_file(tensors, foreign / "model-1.safetensors")
    save_file({"model.norm.weight": torch.zeros(32)}, foreign / "model-2.safetensors")
    index.write_text(json.dumps({"weight_map": {**places, "lm_head.bias": "model-1.safetensors"}}))
    one_line(foreign, "model-1.safetensors: lm_head.bias is missing, but listed in model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {**places, "model.norm.weight": "model-2.safetensors"}}))
    one_line(foreign, "model-2.safetensors: model.norm.weight is also in model-1.safetensors")
    file.write_bytes(good)
    one_line(foreign, "has both model.safetensors and model.safetensors.index.json")
    index.unlink()
    config = (foreign / "config.json").read_text()
    (foreign / "config.json").write_text("{")
    one_line(foreign, "config.json: cannot be read")
    (foreign / "config.json").write_text("[]")
    one_line(foreign, "config.json: expected a JSON object")
    (foreign / "config.json").write_text(json.dumps({**json.loads(config), "hidden_size": None}))
    one_line(foreign, "hidden_size is missing")
    (foreign / "config.json").unlink()
    one_line(foreign, "config.json: is missing")
    (foreign / "config.json").write_text(config)
    assert main([str(foreign), str(foreign)]) == 1
    assert "not an empty folder" in capsys.readouterr().err


def load_file_bytes(content: bytes, folder: Path) -> dict[str, torch.Tensor]:
    (folder / "copy.safetensors").write_bytes(content)
    return load_file(folder / "copy.safetensors")


def test_a_tied_head_that_is_stored_must_equal_the_embedding(
    foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_config(foreign, tie_word_embeddings=True)
    assert "differs from the embedding" in errors_of(foreign, tmp_path / "out", capsys)
    tensors = load_file(foreign / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, foreign / "model.safetensors")
    assert main([str(foreign), str(tmp_path / "out")]) == 0


def write_gguf(
    path: Path,
    foreign: PreTrainedModel,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    cut: str = "smollm",
    norm_type: str = "float32",
) -> None:
    """A file written by the `gguf` package, with rows in llama.cpp's order.

    Args:
        more: adds settings.
        cut: name of the way in which the tokenizer cuts a text.
        norm_type: of the last gain.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(32)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(40)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-3)
    writer.add_rope_freq_base(500.0)
    tokens = ["ab", *(chr(code) for code in range(34, 127)), "Ġ", "<|endoftext|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 95 + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(95)
    more(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in foreign.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = tensor.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            config = foreign.config
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            # convert_hf_to_gguf.py's LlamaModel.permute
            values = values.reshape(heads, 2, len(values) // heads // 2, 32).swapaxes(1, 2).reshape(values.shape)
        if name == "model.norm.weight":
            values = values.astype(norm_type)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf(tmp_path: Path) -> None:
    foreign = make_foreign("llama tied (SmolLM2)")
    write_gguf(tmp_path / "model.gguf", foreign)
    import_model(tmp_path / "model.gguf", tmp_path / "out")
    tokens_BT = torch.randint(VOCAB_SIZE, (3, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = load(tmp_path / "out").logits(tokens_BT)
        torch.testing.assert_close(logits, foreign(tokens_BT).logits, rtol=1e-5, atol=1e-5)
    tokenizer = load_tokenizer(tmp_path / "out/tokenizer.json")
    assert tokenizer.eod_id == 95
    assert tokenizer.decode(tokenizer.encode("ab 12")) == "ab 12"


def test_gguf_files_that_cannot_be_imported_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = make_foreign("llama tied (SmolLM2)")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"more": lambda writer: writer.add_logit_scale(2.0)}, "llama.logit_scale is unknown and might change"),
        ({"more": lambda writer: writer.add_rope_scaling_factor(4.0)}, "llama.rope.scaling.factor is unknown"),
        ({"more": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)}, "rope scaling 'yarn'"),
        ({"more": lambda writer: writer.add_rope_dimension_count(4)}, "partial_rotary_factor 0.5"),
        (
            {"more": lambda writer: writer.add_string("llama.attention.key_length", "8")},
            "llama.attention.key_length is '8'; expected a number",
        ),
        ({"norm_type": "int32"}, "output_norm.weight of type I32 cannot be read"),
    ]
    for number, (keywords, message) in enumerate(cases):
        path = tmp_path / f"{number}.gguf"
        write_gguf(path, foreign, **keywords)
        errors = errors_of(path, tmp_path / "out", capsys)
        assert message in errors
        assert errors.count("\n") == 1
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    assert "bad.gguf: is not a readable GGUF file" in errors_of(tmp_path / "bad.gguf", tmp_path / "out", capsys)


def test_a_gguf_tokenizer_that_cuts_in_an_unknown_way_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "model.gguf", make_foreign("llama tied (SmolLM2)"), cut="default")
    assert main([str(tmp_path / "model.gguf"), str(tmp_path / "out")]) == 0
    assert "the file's tokenizer (gpt2, default) cannot be converted" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("tokenizer*"))
