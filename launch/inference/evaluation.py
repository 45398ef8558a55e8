"""Computes the loss and perplexity of a text."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data.encode import encode_segments
from data.tokenizer import Tokenizer
from launch.errors import RunError
from launch.inference import DEFAULT_BATCH_TOKENS
from launch.inference.load_model import load_model, load_tokenizer
from model.cross_entropy import IGNORE_INDEX
from model.gpt import GPT

SECONDS_BETWEEN_LINES = 10.0
_Windows = list[tuple[int, int, int]]


@dataclass(frozen=True)
class Evaluation:
    """The loss of a text.

    Attributes:
        num_tokens: The number of predicted tokens.
        num_bytes: The size of the text in UTF-8, without its first token.
        loss: The mean negative log-likelihood of a token, in nats.
        perplexity: exp(loss).
        bits_per_byte: The summed loss in bits, divided by num_bytes.
        byte_perplexity: 2 to the power of bits_per_byte.
    """

    num_tokens: int
    num_bytes: int
    loss: float
    perplexity: float
    bits_per_byte: float
    byte_perplexity: float


def summarise(sum_nats: float, num_tokens: int, num_bytes: int) -> Evaluation:
    """Computes the metrics from a summed loss."""
    loss, nats_per_byte = sum_nats / num_tokens, sum_nats / num_bytes
    return Evaluation(num_tokens, num_bytes, loss, _exp(loss), nats_per_byte / math.log(2), _exp(nats_per_byte))


def plan_windows(num_tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first input, number of inputs, number of leading targets that do not count) of every window.

    Input i predicts token i + 1. Each of the targets 1 … num_tokens - 1 counts exactly once.

    Args:
        window: The largest number of inputs.
        stride: The number of inputs between the starts of two windows, at most `window`.
    """
    counted = 1  # the next target that has not been counted
    start = 0
    while counted < num_tokens:
        length = min(window, num_tokens - 1 - start)
        yield start, length, counted - 1 - start
        counted = start + length + 1
        start += stride


def encode_text(tokenizer: Tokenizer, text: str, max_tokens: int | None) -> np.ndarray:
    """The token ids of a text, int32 [num_tokens], up to `max_tokens` of them."""
    segments, num_tokens = [], 0
    for ids in encode_segments(tokenizer, text):
        segments.append(ids)
        num_tokens += len(ids)
        if max_tokens is not None and num_tokens >= max_tokens:
            break
    return np.concatenate(segments)[:max_tokens]


def evaluate_tokens(model: GPT, tokens: np.ndarray, window: int, stride: int, batch_size: int) -> tuple[float, int]:
    """Returns the summed loss in nats and the number of predicted tokens.

    Args:
        tokens: int32 [num_tokens].
        batch_size: The number of windows in a batch.
    """
    device = model.embedding.weight.device
    windows = list(plan_windows(len(tokens), window, stride))
    batches = [windows[first : first + batch_size] for first in range(0, len(windows), batch_size)]
    all_tokens = torch.from_numpy(tokens)
    sum_nats, num_tokens = 0.0, 0
    with torch.no_grad():
        for batch in _with_progress(batches):
            inputs_BT, targets_BT = _batch(all_tokens, batch)
            _, cross_entropy, _ = model(inputs_BT.to(device), targets_BT.to(device))
            sum_nats += float(cross_entropy)
            num_tokens += int((targets_BT >= 0).sum())
    return sum_nats, num_tokens


def _with_progress(batches: Sequence[_Windows]) -> Iterator[_Windows]:
    """Yields the batches, and reports progress on stderr: a bar on a terminal, otherwise a line from time to time."""
    last_line = time.monotonic()
    on_terminal = sys.stderr.isatty()
    for done, batch in enumerate(tqdm(batches, "evaluation", unit="batch", leave=False, disable=not on_terminal)):
        if not on_terminal and time.monotonic() - last_line >= SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            print(f"evaluation: {done} of {len(batches)} batches", file=sys.stderr, flush=True)
        yield batch


def _batch(tokens: torch.Tensor, windows: _Windows) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and targets. Shorter windows are padded at their end, which the causal mask hides."""
    longest = max(length for _, length, _ in windows)
    inputs_BT = torch.zeros(len(windows), longest, dtype=torch.long)
    targets_BT = torch.full((len(windows), longest), IGNORE_INDEX)
    for row, (start, length, skipped) in enumerate(windows):
        inputs_BT[row, :length] = tokens[start : start + length]
        targets_BT[row, skipped:length] = tokens[start + skipped + 1 : start + length + 1]
    return inputs_BT, targets_BT


def print_evaluation(options: argparse.Namespace) -> None:
    """Evaluates the text and prints the result.

    Raises:
        RunError, ConfigError, ValueError, OSError: The checkpoint, the tokenizer, the text or an option cannot be used.
    """
    text = _read_text(options.text)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, checkpoint = load_model(options.checkpoint, device, torch.float32)
    window = _in_range("--window", options.window, 1, model.config.max_seq_len, model.config.max_seq_len)
    stride = _in_range("--stride", options.stride, 1, window, window)
    batch_size = _in_range("--batch-size", options.batch_size, 1, None, max(1, DEFAULT_BATCH_TOKENS // window))
    max_tokens = None if options.max_tokens is None else _in_range("--max-tokens", options.max_tokens, 2, None, None)
    tokenizer = load_tokenizer(checkpoint, options.tokenizer, model.config.vocab_size)
    tokens = encode_text(tokenizer, text, max_tokens)
    counted_text = text if max_tokens is None else tokenizer.decode(tokens.tolist())
    num_bytes = len(counted_text.encode()) - len(tokenizer.decode(tokens[:1].tolist()).encode())
    if len(tokens) < 2 or num_bytes < 1:
        raise RunError(f"{options.text}: too short: it has {len(tokens)} tokens, and the first is not predicted")
    result = summarise(*evaluate_tokens(model, tokens, window, stride, batch_size), num_bytes)
    if options.json:
        print(json.dumps({**asdict(result), "window": window, "stride": stride}))
        return
    print(f"{result.num_tokens:,} tokens, {result.num_bytes:,} bytes; windows of {window}, stride {stride}")
    print(f"per token: loss {result.loss:.4f}, perplexity {result.perplexity:.3f}")
    print(f"per byte:  {result.bits_per_byte:.4f} bits, perplexity {result.byte_perplexity:.4f}")


def _read_text(path: Path) -> str:
    try:
        # Read as bytes, since text mode would convert \r\n.
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise RunError(f"{path}: not UTF-8 text: {error}") from None


def _in_range(name: str, value: int | None, low: int, high: int | None, default: int | None) -> int:
    """Returns an option's value or its default. Raises ValueError if it is out of range."""
    if value is None:
        assert default is not None
        return default
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{name} is {value}; expected {limits}")
    return value


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
