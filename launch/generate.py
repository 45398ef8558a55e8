"""Continues a text: `python -m launch.generate CHECKPOINT --prompt "…"`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.errors import ConfigError
from launch.errors import EXIT_DONE, EXIT_FAILURE, RunError

DEFAULT_NEW_TOKENS = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse_arguments(arguments)
    try:
        print_continuation(options)
    except (RunError, ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    return EXIT_DONE


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m launch.generate", description=__doc__)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run's folder")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument(
        "--max-new-tokens", type=int, help=f"default: {DEFAULT_NEW_TOKENS}, or what the model's context has room for"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the most likely token (default: 0.8)")
    parser.add_argument("--top-p", type=float, default=0.95, help="nucleus sampling (default: 0.95)")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (default: 0)")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer file; default: the one in the checkpoint")
    return parser.parse_args(arguments)


def print_continuation(options: argparse.Namespace) -> None:
    """Prints the prompt and its continuation as it is drawn.

    Raises:
        RunError, ConfigError, ValueError: a fault in the checkpoint, the tokenizer or an option.
    """
    import torch

    from data.tokenizer import Tokenizer
    from launch.checkpoint_files import read_config
    from launch.load_model import load_model
    from model.generate import check_sampling, generate

    check_sampling(options.temperature, options.top_p)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, checkpoint = load_model(
        options.checkpoint, device, torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    tokenizer_path = options.tokenizer or next(iter(checkpoint.glob("tokenizer.*")), None)
    if tokenizer_path is None:
        raise RunError(f"{checkpoint} holds no tokenizer (its data had none); name one with --tokenizer")
    tokenizer = Tokenizer.load(tokenizer_path)
    prompt = tokenizer.encode(options.prompt)
    room = model.config.max_seq_len - len(prompt)
    max_new_tokens = options.max_new_tokens if options.max_new_tokens is not None else min(DEFAULT_NEW_TOKENS, room)
    tokens = list(prompt)
    shown = ""
    chosen_eod_id = read_config(checkpoint).data.eod_id
    new_tokens = generate(
        model,
        prompt,
        max_new_tokens,
        options.temperature,
        options.top_p,
        options.seed,
        eod_id=tokenizer.eod_id if chosen_eod_id is None else chosen_eod_id,
        num_token_ids=tokenizer.vocab_size,
    )
    cache = model.new_cache(batch_size=1, length=1, device="meta")
    print(f"cache: {cache.num_bytes_per_token:,} bytes a token", file=sys.stderr)
    for token in new_tokens:
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # the middle of a character of several bytes
            print(text.removeprefix(shown), end="", flush=True)
            shown = text
    print(tokenizer.decode(tokens).removeprefix(shown))


if __name__ == "__main__":
    sys.exit(main())
