"""Exported folders: the same logits, generated tokens and tokenisation in `transformers`, and nothing half-written."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import test
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from data.load_tokenizer import load_tokenizer
from data.sentencepiece_tokenizer import train_sentencepiece
from launch.checkpoint.files import find_checkpoint, read_state
from launch.cli import byte_size, new_folder
from launch.export import main
from launch.hf import masters as masters_module
from launch.hf.export import export, generation_config, plan_shards
from launch.inference.load_model import load_model
from model.generate import generate
from model.gpt import GPT
from tests.conftest import python
from tests.launch.helpers.small_models import MLA_SIZES, make_model, save_model, trained_run

ALL_OPTIONS = {"softcap": 3.0, "ssmax": True, "sink": True, "gated": True, "qk_norm": True}
# name -> (keys of model.attention, other keys of the model, architecture)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "mha": ({}, {"norm_eps": 1e-2, "rope_theta": 500.0}, "LlamaForCausalLM"),
    "gqa tied": ({}, {"num_kv_heads": 2, "tie_embeddings": True}, "LlamaForCausalLM"),
    "wide heads": ({}, {"num_kv_heads": 1, "head_dim": 14, "ffn_dim": 50}, "LlamaForCausalLM"),
    "indivisible width": ({}, {"dim": 30, "head_dim": 6}, "SteadyheadForCausalLM"),
    "qk norm": ({"qk_norm": True}, {"num_kv_heads": 2, "head_dim": 10}, "Qwen3ForCausalLM"),
    "qk norm tied": ({"qk_norm": True}, {"tie_embeddings": True}, "Qwen3ForCausalLM"),
    "mla": ({"kind": "mla", "mla": MLA_SIZES}, {"norm_eps": 1e-2}, "DeepseekV3ForCausalLM"),
    "mla, no query latent, tied": (
        {"kind": "mla", "mla": {**MLA_SIZES, "q_latent_dim": None}},
        {"tie_embeddings": True},
        "DeepseekV3ForCausalLM",
    ),
    "mla without latent norm": (
        {"kind": "mla", "mla": {**MLA_SIZES, "latent_norm": False}},
        {"tie_embeddings": True},
        "SteadyheadForCausalLM",
    ),
    "mla with qk norm": ({"kind": "mla", "qk_norm": True, "mla": MLA_SIZES}, {}, "SteadyheadForCausalLM"),
    "softcap": ({"softcap": 2.0}, {"num_kv_heads": 2}, "SteadyheadForCausalLM"),
    "ssmax": ({"ssmax": True}, {}, "SteadyheadForCausalLM"),
    "sink": ({"sink": True}, {}, "SteadyheadForCausalLM"),
    "gated": ({"gated": True}, {}, "SteadyheadForCausalLM"),
    "mha with all": (ALL_OPTIONS, {"num_kv_heads": 2}, "SteadyheadForCausalLM"),
    "mla with all": ({"kind": "mla", "mla": MLA_SIZES, **ALL_OPTIONS}, {}, "SteadyheadForCausalLM"),
}
AWKWARD = [
    *("", " ", "  two  spaces  ", "\n", "\n\n\n a\n", "\t\ttabs\t", "\r\n and \r", "\0\x01\x0b\x0c\x1b\x7f\x85"),
    "\u00a0\u2003\u2028\u2029\u3000\ufeff",
    "👩🏽‍🚀 🇳🇱 🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "e\u0301 and é, ﬁ, Å, ①, ㌔",
    "العربية עברית हिन्दी ไทย 한국어 日本語 中文 ქართული አማርኛ ᚠᚢᚦ 𒀀𒀁 \U0001d518\U0001d52b",
    "\ufffd\ufffe\U0010ffff",
    "<unk> <s> </s> <pad> <0x0A> <0xFF> <0x0a>",
    "x" * 5_000,
    "0123456789" * 50,
    "a<|endoftext|>b <|endoftext|>",
    "a\u2581b \u2581\u2581 \u2581",
]


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()


def assert_same_continuation(model: GPT, twin: PreTrainedModel, prompt: list[int], num_tokens: int) -> None:
    """Greedily, until the two best logits are closer than 1e-4."""
    ours = [*prompt, *generate(model, prompt, num_tokens, temperature=0)]
    theirs = twin.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False)[0].tolist()
    assert len(theirs) == len(ours)
    with torch.no_grad():
        best_two = model.logits(torch.tensor([ours[:-1]]))[0, len(prompt) - 1 :].topk(2).values
    close = (best_two[:, 0] - best_two[:, 1] < 1e-4).nonzero()
    last = len(prompt) + (int(close[0]) if len(close) else num_tokens)
    assert theirs[:last] == ours[:last]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_generated_tokens_are_equal(name: str, tmp_path: Path) -> None:
    attention, sizes, architecture = VARIANTS[name]
    model = make_model(attention, **sizes)
    export(save_model(model, tmp_path / "checkpoint", num_ranks=3), tmp_path / "out", "fp32", 20_000)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == [architecture]
    assert (tmp_path / "out/modeling_steadyhead.py").exists() == (architecture == "SteadyheadForCausalLM")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    twin = load(tmp_path / "out")
    assert type(twin).__name__ == architecture
    tokens_BT = torch.randint(128, (3, 50), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, logits = model.logits(tokens_BT), twin(tokens_BT).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert_same_continuation(model, twin, [5, 6, 7], 100)


@pytest.mark.parametrize("name", ["mha with all", "mla with all"])
def test_the_own_modelling_file_in_all_ways_of_use(name: str, tmp_path: Path) -> None:
    """Padding in front, steps with a cache, no cache, the last logits only, a loss, and saving again."""
    attention, sizes, _ = VARIANTS[name]
    model = make_model(attention, **sizes)
    export(save_model(model, tmp_path / "checkpoint"), tmp_path / "out", "fp32")
    twin = load(tmp_path / "out")
    prompts = [[3, 4, 5, 6, 7, 8, 9], [11, 12, 13]]
    alone = [twin.generate(torch.tensor([p]), max_new_tokens=20, do_sample=False)[0, len(p) :] for p in prompts]
    without_cache = twin.generate(torch.tensor([prompts[0]]), max_new_tokens=20, do_sample=False, use_cache=False)
    assert torch.equal(without_cache[0, 7:], alone[0])
    padded = torch.tensor([prompts[0], [0] * 4 + prompts[1]])
    mask = torch.tensor([[1] * 7, [0] * 4 + [1] * 3])
    together = twin.generate(padded, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)[:, 7:]
    assert torch.equal(together, torch.stack(alone))

    tokens_BT = torch.randint(128, (2, 30), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        whole = twin(tokens_BT, labels=tokens_BT, use_cache=False)
        first = twin(tokens_BT[:, :17], use_cache=True)
        rest = twin(tokens_BT[:, 17:], cache=first.cache, logits_to_keep=2)
        loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:])[0] / (2 * 29)
    torch.testing.assert_close(rest.logits, whole.logits[:, -2:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.loss, loss, rtol=1e-5, atol=1e-5)
    twin.save_pretrained(tmp_path / "again")
    assert torch.equal(load(tmp_path / "again")(tokens_BT).logits, twin(tokens_BT).logits)


def test_bf16_weights_are_the_rounded_masters_from_any_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tie_embeddings=True)
    export(save_model(model, tmp_path / "one"), tmp_path / "out1")
    # As with a large model: in many pieces, with files that are opened again and again.
    monkeypatch.setattr(masters_module, "_CHUNK_ELEMENTS", 1000)
    monkeypatch.setattr(masters_module, "_ELEMENTS_BEFORE_REOPENING", 3000)
    export(save_model(model, tmp_path / "five", num_ranks=5), tmp_path / "out5")
    name = "model-00001-of-00001.safetensors"
    assert (tmp_path / "out1" / name).read_bytes() == (tmp_path / "out5" / name).read_bytes()
    weights = load_file(tmp_path / "out1" / name)
    assert torch.equal(weights["model.embed_tokens.weight"], model.embedding.weight.bfloat16())
    assert "lm_head.weight" not in weights
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out1")
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_the_index_lists_every_tensor_once(tmp_path: Path) -> None:
    export(save_model(make_model(), tmp_path / "checkpoint"), tmp_path / "out", "bf16", 20_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    found = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= dict.fromkeys(file.keys(), path.name)
    assert found == index["weight_map"]
    assert index["metadata"]["total_size"] == 2 * make_model().num_parameters


@given(st.lists(st.integers(1, 100), min_size=1), st.integers(1, 150))
def test_shards_keep_the_order_and_the_limit(sizes: list[int], max_bytes: int) -> None:
    shards = plan_shards(sizes, max_bytes)
    assert [index for shard in shards for index in shard] == list(range(len(sizes)))
    assert all(len(shard) == 1 or sum(sizes[index] for index in shard) <= max_bytes for shard in shards)
    # No shard could have taken the first tensor of the next one.
    for shard, following in itertools.pairwise(shards):
        assert sum(sizes[index] for index in shard) + sizes[following[0]] > max_bytes


def test_sizes() -> None:
    assert [byte_size(text) for text in ("5GB", "1.5 kb", "7", "2MiB", "3B")] == [5 * 10**9, 1500, 7, 2**21, 3]
    for text in ("", "GB", "-1GB", "5 XB", "0GB", "1e3"):
        with pytest.raises(ValueError, match="is not a size"):
            byte_size(text)


def test_ids_without_a_token_are_never_generated(tmp_path: Path) -> None:
    assert generation_config(7, 5, 8)["suppress_tokens"] == [5, 6, 7]
    assert "suppress_tokens" not in generation_config(None, 8, 8)
    assert generation_config(None, None, 8) == {"do_sample": False}


@pytest.fixture(scope="module", params=["unigram", "unigram, own code", "bpe"])
def tokenizer_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A tokenizer of ours, and the exported one."""
    kind, _, own_code = request.param.partition(", ")
    folder = tmp_path_factory.mktemp(kind)
    generator = random.Random(0)
    syllables = ("ka", "lo", "mi", "ne", "ru", "st", "to", "va", "xi", "zu", "qu", "ba")
    words = ["".join(generator.choices(syllables, k=3)) for _ in range(8000)]
    lines = [f"{' '.join(words[i : i + 10])} {i}  <a|b>\t{{}}" for i in range(0, 8000, 10)]
    # Only with its own code can a unigram tokenizer know long runs of one character: see launch/hf/tokenizer.py.
    more = AWKWARD if own_code else [text for text in AWKWARD if len(text) < 1000]
    train_sentencepiece([*lines, *more], folder / "tokenizer.model", 600, kind)
    ours = load_tokenizer(folder / "tokenizer.model")
    model = make_model(vocab_size=640)
    checkpoint = save_model(model, folder / "checkpoint", tokenizer=folder / "tokenizer.model")
    export(checkpoint, folder / "out")
    theirs = AutoTokenizer.from_pretrained(folder / "out", trust_remote_code=bool(own_code))
    assert (type(theirs).__name__ == "SteadyheadTokenizer") == bool(own_code)
    return ours, theirs


def test_awkward_text_is_tokenised_alike(tokenizer_pair: tuple[Any, Any]) -> None:
    ours, theirs = tokenizer_pair
    files = sorted(Path(test.__file__).parent.glob("cjkencodings/*-utf8.txt"))
    for text in [*AWKWARD, *(path.read_bytes().decode() for path in files)]:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids, text
        assert theirs.decode(ids) == ours.decode(ids), text


@given(text=st.text(st.one_of(st.sampled_from("ab  \n<>0x1F|endoftext/s▁é"), st.characters(exclude_categories=["Cs"]))))
@settings(max_examples=300, deadline=None)
def test_any_text_is_tokenised_alike(tokenizer_pair: tuple[Any, Any], text: str) -> None:
    ours, theirs = tokenizer_pair
    assert theirs(text)["input_ids"] == ours.encode(text)


def test_long_runs_and_documents_are_tokenised_alike(tokenizer_pair: tuple[Any, Any]) -> None:
    ours, theirs = tokenizer_pair
    if type(theirs).__name__ != "SteadyheadTokenizer" and "Unigram" in theirs.backend_tokenizer.to_str():
        # Equally likely splits may differ (docs/export.md); the text may not.
        text = "kalomi qu é x\n zu" + " " * 40 + "日本"
        assert theirs.decode(theirs(text)["input_ids"]) == text
        return
    words = ["kalomi", "x", "<0x0A>", "\n", " ", "qu", "é", "12", "\t", "zu<a|b>", "▁", "日本"]
    document = "".join(random.Random(1).choices(words, k=20_000))
    for text in [document, *(character * length for character in " x" for length in range(1, 150, 7))]:
        assert theirs(text)["input_ids"] == ours.encode(text)


def test_the_end_of_a_document_is_begin_end_and_padding(tokenizer_pair: tuple[Any, Any]) -> None:
    ours, theirs = tokenizer_pair
    assert theirs.bos_token_id == theirs.eos_token_id == theirs.pad_token_id == ours.eod_id
    assert theirs.decode([ours.eod_id], skip_special_tokens=True) == ""


def test_a_tokenizer_json_is_tokenised_alike_and_adds_nothing(tmp_path: Path) -> None:
    """One that would begin every text with a special token, which the training data has not."""
    fast = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(AWKWARD, trainer)
    fast.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    fast.enable_truncation(5)
    fast.save(str(tmp_path / "tokenizer.json"))
    model = make_model(vocab_size=320)
    export(save_model(model, tmp_path / "checkpoint", tokenizer=tmp_path / "tokenizer.json"), tmp_path / "out")
    ours, theirs = load_tokenizer(tmp_path / "tokenizer.json"), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.bos_token_id == theirs.eos_token_id == 0
    for text in [*AWKWARD, "<s> a <|endoftext|>"]:
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text


def test_a_sentencepiece_model_that_cannot_be_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Words as units: only SentencePiece itself can read it."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the people of the land", "peace of the land"] * 10),
        model_prefix=str(tmp_path / "words"),
        model_type="word",
        vocab_size=8,
        minloglevel=4,
    )
    checkpoint = save_model(make_model(), tmp_path / "checkpoint", tokenizer=tmp_path / "words.model")
    export(checkpoint, tmp_path / "out")
    assert "note: load the tokenizer with trust_remote_code=True" in capsys.readouterr().err
    assert "only unigram and bpe models" in (tmp_path / "out/README.md").read_text()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    ours = load_tokenizer(tmp_path / "words.model")
    for text in ("the people", "peace of  unknown land "):
        assert theirs(text)["input_ids"] == ours.encode(text)


@pytest.fixture(scope="module")
def trained(session_folder: Path) -> Path:
    return trained_run(session_folder)


def test_a_real_run(trained: Path, tmp_path: Path) -> None:
    """ZeRO stage 3 on two ranks, by the command: logits, text, evaluation, the card and its picture."""
    out = tmp_path / "out"
    finished = python("-m", "launch.export", trained, out, "--dtype", "fp32", "--max-shard-size", "50KB")
    assert finished.code == 0, finished.errors
    assert finished.errors == ""
    model, checkpoint = load_model(trained, torch.device("cpu"), torch.float32)
    ours, theirs = load_tokenizer(checkpoint / "tokenizer.model"), AutoTokenizer.from_pretrained(out)
    twin = load(out)
    assert model.config.vocab_size == 448  # 390, padded
    assert twin.generation_config.suppress_tokens == list(range(390, 448))
    prompt = ours.encode("We hold these")
    with torch.no_grad():
        torch.testing.assert_close(
            twin(torch.tensor([prompt])).logits, model.logits(torch.tensor([prompt])), rtol=1e-5, atol=1e-5
        )
    ids = twin.generate(**theirs("We hold these", return_tensors="pt"), max_new_tokens=40)[0]
    continued = list(generate(model, prompt, 40, 0, eod_id=ours.eod_id, num_token_ids=ours.vocab_size))
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode([*prompt, *continued])

    card = (out / "README.md").read_text()
    state = read_state(checkpoint)
    for fact in (
        "# text\n",
        "| steps (of the schedule's horizon) | 80 of 80 |",
        "| tokens seen | 81,920 |",
        "| query/key policy (`qk_control`) | constant, alpha 0.1 |",
        "| ZeRO stage, ranks | 3, 2 |",
        f"| training, last step | {state.loss:.4f} |",
        f"| validation, held out | {state.val_losses['held out']:.4f} |",
        f"`{state.data_fingerprints[0]}`",
        f"SHA-256 `{state.tokenizer_sha256}`",
        "![Loss over the steps](loss.png)",
    ):
        assert fact in card
    assert str(trained.parent) not in card
    assert re.search(r"\| shards/train \| 1 \| 1,\d\d\d \| [\d,]+ \|", card)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "tokenizer.model").read_bytes() == (checkpoint / "tokenizer.model").read_bytes()


def test_the_card_of_a_checkpoint_alone(trained: Path, tmp_path: Path) -> None:
    """Without the run's metrics there is no curve, and without its data no counts."""
    shutil.copytree(find_checkpoint(trained), tmp_path / "copy")
    assert main([str(tmp_path / "copy"), str(tmp_path / "out")]) == 0
    assert "loss.png" not in (tmp_path / "out/README.md").read_text()
    imported = save_model(make_model(), tmp_path / "imported")
    assert main([str(imported), str(tmp_path / "out2")]) == 0
    card = (tmp_path / "out2/README.md").read_text()
    assert "which has not trained it" in card
    assert "tokens seen" not in card
    assert "## Data" not in card


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_below_the_models_size(tmp_path: Path) -> None:
    """The peak of a process grows by less than 1.3 times the exported weights, compared with a tiny model's."""
    sizes = {"small": {}, "large": {"vocab_size": 65_536, "dim": 512, "num_layers": 2, "ffn_dim": 1024}}
    peaks = {}
    for name, keys in sizes.items():
        save_model(make_model(**keys), tmp_path / name, num_ranks=2)
        script = (
            "from launch.export import main; "
            f"main([{str(tmp_path / name)!r}, {str(tmp_path / f'out_{name}')!r}]); "
            "print(open('/proc/self/status').read())"
        )
        finished = python("-c", script)
        assert finished.code == 0, finished.errors
        peaks[name] = 1024 * int(re.findall(r"VmHWM:\s*(\d+) kB", finished.output)[0])
    weights = sum(path.stat().st_size for path in (tmp_path / "out_large").glob("*.safetensors"))
    assert weights > 130e6  # well above what reading a mapped file takes whatever the size
    assert peaks["large"] - peaks["small"] < 1.3 * weights


def assert_one_line(arguments: list[str], message: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert errors.startswith("error: ")
    assert message in errors
    assert not out.with_name(out.name + ".partial").exists()


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, out = save_model(make_model(), tmp_path / "good"), tmp_path / "out"
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("keep")
    assert_one_line([str(checkpoint), str(full)], "exists and is not an empty folder", full, capsys)
    assert [path.name for path in full.iterdir()] == ["mine.txt"]
    assert_one_line([str(checkpoint), str(full / "mine.txt")], "not an empty folder", full, capsys)
    assert_one_line([str(tmp_path / "nowhere"), str(out)], "no such checkpoint", out, capsys)
    assert_one_line([str(full), str(out)], "no checkpoint found", out, capsys)

    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    content = bytearray((damaged / "rank_00000.safetensors").read_bytes())
    content[-100] ^= 1
    (damaged / "rank_00000.safetensors").write_bytes(content)
    assert_one_line([str(damaged), str(out)], "does not match its hash", out, capsys)
    (damaged / "rank_00000.safetensors").unlink()
    assert_one_line([str(damaged), str(out)], "is missing", out, capsys)
    assert not out.exists()

    (tmp_path / "empty").mkdir()
    assert main([str(checkpoint), str(tmp_path / "empty")]) == 0
    for arguments in (["--dtype", "fp16"], ["--max-shard-size", "5XB"], []):
        finished = python("-m", "launch.export", *arguments, checkpoint)
        assert finished.code == 2
        assert "error: " in finished.errors


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_in_the_middle_leaves_nothing(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any, **keywords: Any) -> None:
        raise failure

    monkeypatch.setattr("launch.hf.export.write_model_card", fail)
    checkpoint = save_model(make_model(), tmp_path / "good")
    assert main([str(checkpoint), str(tmp_path / "new/folder/out")]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good"]
    assert capsys.readouterr().err.count("\n") == 1


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    with (
        new_folder(tmp_path / "out"),
        pytest.raises(RuntimeError, match="another process"),
        new_folder(tmp_path / "out"),
    ):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize("command", ["export", "import_hf", "evaluate"])
def test_help_is_fast(command: str) -> None:
    script = (
        f"import sys; from launch.{command} import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    finished = python("-c", script)
    assert finished.code == 0, finished.errors


def test_a_curve_is_drawn(tmp_path: Path) -> None:
    from launch.hf.model_card import draw_curve

    records = [{"step": step, "loss": 5 / math.sqrt(step)} for step in range(1, 40)]
    records[9]["val_loss"] = 2.0
    assert draw_curve(records, tmp_path / "loss.png")
