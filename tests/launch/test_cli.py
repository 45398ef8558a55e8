"""What the commands share: number parsers, one-line errors, and folders that appear whole or not at all."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.errors import ConfigError
from launch.cli import (
    add_run_arguments,
    byte_size,
    byte_size_argument,
    new_folder,
    non_negative_integer,
    positive_integer,
    print_problems,
    run_command,
)
from launch.errors import EXIT_DONE, EXIT_FAILURE, RunError


def test_a_run_is_named_by_its_configuration_and_changed_keys() -> None:
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    options = parser.parse_args(["a.yaml", "optim.lr=1", "train.steps=2"])
    assert (options.config, options.overrides) == ("a.yaml", ["optim.lr=1", "train.steps=2"])


@pytest.mark.parametrize(
    ("parse", "good", "bad"),
    [
        (positive_integer, {"1": 1, "12": 12}, ["0", "-1", "1.5", "", "two", "1e3"]),
        (non_negative_integer, {"0": 0, "12": 12}, ["-1", "0x1", " "]),
        (
            byte_size_argument,
            {"4096": 4096, "5GB": 5 * 10**9, "500 MB": 5 * 10**8, " 80GiB ": 80 * 2**30},
            ["0", "0.1", "lots", "", "-5GB"],
        ),
    ],
)
def test_numbers_are_parsed_or_refused_with_their_text(
    parse: Callable[[str], int], good: dict[str, int], bad: list[str]
) -> None:
    assert {text: parse(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError) as refused:
            parse(text)
        assert str(refused.value).startswith(repr(text))


@pytest.mark.parametrize("text", ["5,000MB", "1.5.5GB", "5GB junk", "8kbit", "1e3", "-1GB", "GB", ""])
def test_only_a_whole_size_is_parsed(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        byte_size(text)


def test_a_size_below_one_byte_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'0' is not a size; expected e\.g\. 5GB"):
        byte_size("0")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RunError("runs/a: no such run"), "error: runs/a: no such run\n"),
        (ValueError("--seed: -1"), "error: --seed: -1\n"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), "error: [Errno 2] No such file or directory: "),
        (KeyboardInterrupt(), "error: interrupted\n"),
    ],
)
def test_a_mistake_is_one_line_and_a_failure(
    error: BaseException, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise error

    assert run_command(command) == EXIT_FAILURE
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(line) and captured.err.count("\n") == 1


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: print(1 / 0))


def test_sigterm_interrupts_a_command_only_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run_command(lambda: os.kill(os.getpid(), signal.SIGTERM)) == EXIT_FAILURE
    assert capsys.readouterr().err == "error: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) == before
    assert run_command(lambda: print("done")) == EXIT_DONE
    assert capsys.readouterr().out == "done\n"
    assert signal.getsignal(signal.SIGTERM) == before


def test_every_problem_of_a_configuration_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_problems(ConfigError(["optim.lr: is negative", "model.dim: is odd"]))
    assert capsys.readouterr().err == "error: optim.lr: is negative\nerror: model.dim: is odd\n"


def test_a_folder_appears_at_the_end_of_the_block(tmp_path: Path) -> None:
    out = tmp_path / "a/b/out"
    with new_folder(out) as folder:
        (folder / "file").write_text("text")
        assert not out.exists()
        with pytest.raises(RunError, match="another process is writing it"), new_folder(out):
            pass
    assert (out / "file").read_text() == "text"
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    with pytest.raises(RunError, match="exists and is not an empty folder"), new_folder(out):
        pass


@pytest.mark.parametrize("error", [RunError("no"), KeyboardInterrupt()])
def test_a_block_that_fails_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    def fail() -> None:
        with new_folder(tmp_path / "a/b/out") as folder:
            (folder / "file").write_text("text")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert list(tmp_path.iterdir()) == []
