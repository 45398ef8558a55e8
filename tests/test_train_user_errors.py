"""A user's mistakes end in one readable line and a failure, and nothing is lost."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from data.indexed import IndexedShardWriter, token_dtype
from data.order import SampleOrder
from launch.checkpoint.files import find_faults
from launch.distributed.topology import free_port
from tests.conftest import (
    ROOT,
    Finished,
    finish,
    launcher_command,
    preloaded_python,
    python,
    read_metrics,
    start,
    write_shard,
)
from tests.launch.helpers.supervised import wait_until


def train(config: Path, *overrides: str) -> Finished:
    return preloaded_python("train.py", config, *overrides)


def train_command(config: Path, *overrides: str) -> Finished:
    """The real command line, for some mistakes of each kind: of input, of the run's folder, and while training."""
    return python("train.py", config, *overrides)


def only_error(finished: Finished, code: int = 1) -> str:
    """The one line that says what is wrong; there must be no traceback. The exit code is 2 for a configuration's."""
    assert finished.code == code, finished.output + finished.errors
    assert "Traceback" not in finished.output + finished.errors
    lines = [line for line in finished.errors.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, finished.errors
    return lines[0]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory, shards: dict[str, Path]) -> Path:
    """The configuration file of a run that has finished; tests copy it."""
    folder = tmp_path_factory.mktemp("finished")
    config = {
        "run": {"dir": str(folder / "runs"), "name": "done"},
        "model": {"vocab_size": 96, "dim": 32, "num_layers": 1, "num_heads": 2, "max_seq_len": 32},
        "optim": {"warmup_steps": 0},
        "data": {"sources": [{"path": str(shards["train"])}]},
        "train": {"steps": 4, "global_batch_tokens": 64, "micro_batch_size": 2, "precision": "fp32"},
        "checkpoint": {"every_steps": 2},
    }
    path = folder / "done.yaml"
    path.write_text(yaml.safe_dump(config))
    assert train(path).code == 0
    return path


@pytest.fixture
def run_copy(finished_run: Path, tmp_path: Path) -> tuple[Path, Path, list[str]]:
    """(configuration, run folder, overrides) of a private copy of the finished run."""
    shutil.copytree(finished_run.parent / "runs", tmp_path / "copies")
    return finished_run, tmp_path / "copies/done", [f"run.dir={tmp_path}/copies", "train.steps=6"]


def test_missing_truncated_and_short_shards_are_all_named(tiny_config: Path, tmp_path: Path) -> None:
    cut = write_shard(tmp_path / "cut", seed=3)
    (tmp_path / "cut.bin").write_bytes((tmp_path / "cut.bin").read_bytes()[:-10])
    short = write_shard(tmp_path / "short", seed=3, num_tokens=20)
    finished = train_command(
        tiny_config,
        f"data.sources=[{{path: {cut}}}, {{path: {tmp_path}/nothing}}]",
        f"data.val_sources={{small: {short}}}",
    )
    assert finished.code == 1
    assert "error: 3 problems" in finished.errors
    assert "data.sources.0.path" in finished.errors
    assert "cut.bin" in finished.errors
    assert "data.sources.1.path" in finished.errors
    assert "data.val_sources.small" in finished.errors
    assert "20 tokens" in finished.errors
    assert "Traceback" not in finished.errors


def test_a_token_beyond_the_vocabulary_names_file_and_offset(tiny_config: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "bad"
    tokens = [5] * 3000
    tokens[1234] = 96
    with IndexedShardWriter(prefix, token_dtype(200)) as writer:
        writer.add_document(np.array(tokens))
    error = only_error(train_command(tiny_config, f"data.sources.0.path={prefix}", "train.steps=30"))
    assert "bad.bin" in error
    assert "1,234" in error
    assert "96" in error


def test_a_vocabulary_without_manifest_must_be_given(tiny_config: Path) -> None:
    assert "model.vocab_size: is required" in only_error(train(tiny_config, "model.vocab_size=null"))


def test_another_model_or_data_in_the_run_folder(run_copy: tuple[Path, Path, list[str]]) -> None:
    config, folder, overrides = run_copy
    before = (folder / "metrics.jsonl").read_text()
    error = only_error(train(config, *overrides, "model.dim=48"))
    assert "model.dim was 32 and is now 48" in error
    error = only_error(train(config, *overrides, "data.seq_len=16"))
    assert "data.seq_len was 32 and is now 16" in error
    assert (folder / "metrics.jsonl").read_text() == before


def test_a_changed_rate_wins_and_is_said(run_copy: tuple[Path, Path, list[str]]) -> None:
    config, folder, overrides = run_copy
    finished = train(config, *overrides, "optim.lr=0.01", "qk_control={policy: constant, alpha: 0.5}")
    assert finished.code == 0, finished.errors
    assert "optim.lr: 0.0003 -> 0.01" in finished.output
    last = read_metrics(folder)[-1]
    assert last["step"] == 6
    assert last["lr_qk"] == last["lr"] * 0.5


def test_never_resume_refuses_a_used_folder(run_copy: tuple[Path, Path, list[str]]) -> None:
    config, _, overrides = run_copy
    assert "run.resume=never" in only_error(train(config, *overrides, "run.resume=never"))


def test_a_folder_of_something_else_is_not_touched(tiny_config: Path, tmp_path: Path) -> None:
    stranger = tmp_path / "runs/tiny"
    stranger.mkdir(parents=True)
    (stranger / "thesis.tex").write_text("years of work")
    assert "contains thesis.tex" in only_error(train_command(tiny_config))
    assert [path.name for path in stranger.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("key", ["run.resume", "run.init_from"])
def test_a_checkpoint_that_does_not_exist_is_fatal(tiny_config: Path, tmp_path: Path, key: str) -> None:
    assert "no such checkpoint or run folder" in only_error(train(tiny_config, f"{key}={tmp_path}/nothing"))
    assert not (tmp_path / "runs/tiny/checkpoints").exists()


def test_a_damaged_checkpoint_is_named_and_the_older_one_taken(run_copy: tuple[Path, Path, list[str]]) -> None:
    config, folder, overrides = run_copy
    newest = folder / "checkpoints/step_00000004/rank_00000.safetensors"
    content = bytearray(newest.read_bytes())
    content[-7] ^= 1
    newest.write_bytes(content)
    finished = train_command(config, *overrides)
    assert finished.code == 0, finished.errors
    assert f"{newest}: its content does not match its hash" in finished.output
    assert "step_00000002 at step 2" in finished.output
    assert [record["step"] for record in read_metrics(folder)] == [1, 2, 3, 4, 5, 6]


def test_pruning_keeps_the_new_checkpoints_and_not_the_damaged_ones(run_copy: tuple[Path, Path, list[str]]) -> None:
    config, folder, overrides = run_copy
    damaged = folder / "checkpoints/step_00000004/rank_00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-10])
    settings = [*overrides, "checkpoint={every_steps: 1, keep_last: 1}", "train.stop_step=3"]
    (folder / "DONE").unlink()
    assert train(config, *settings).code == 0
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step_00000003", "step_00000004.superseded"]
    finished = train(config, *overrides)
    assert "step_00000003 at step 3" in finished.output


def test_a_resume_path_starts_a_branch_that_auto_follows(run_copy: tuple[Path, Path, list[str]]) -> None:
    config, folder, overrides = run_copy
    older = folder / "checkpoints/step_00000002"
    settings = [*overrides, "checkpoint.every_steps=1", "optim.lr=1e-5"]
    finished = train(config, *settings, f"run.resume={older}", "train.stop_step=3")
    assert finished.code == 0, finished.errors
    assert [record["step"] for record in read_metrics(folder)] == [1, 2, 3]
    finished = train(config, *settings)
    assert "step_00000003 at step 3" in finished.output
    records = read_metrics(folder)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert max(record["lr"] for record in records[2:]) <= 1e-5


def test_only_damaged_checkpoints_never_mean_a_fresh_start(run_copy: tuple[Path, Path, list[str]]) -> None:
    config, folder, overrides = run_copy
    for checkpoint in (folder / "checkpoints").iterdir():
        file = checkpoint / "rank_00000.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    finished = train_command(config, *overrides)
    assert "all 2 checkpoints are damaged" in only_error(finished)
    assert "bytes, expected" in finished.output


def test_a_checkpoint_beyond_the_last_step(run_copy: tuple[Path, Path, list[str]]) -> None:
    config, folder, overrides = run_copy
    (folder / "DONE").unlink()
    assert "beyond the last step 3" in only_error(train(config, *overrides, "train.stop_step=3"))


def test_a_checkpoint_of_another_model(run_copy: tuple[Path, Path, list[str]]) -> None:
    config, folder, overrides = run_copy
    settings = [*overrides, "run.name=other", "model.num_layers=2"]
    error = only_error(train(config, *settings, f"run.resume={folder}"))
    assert "model.num_layers was 1 and is now 2" in error
    error = only_error(train(config, *settings, f"run.init_from={folder}"))
    assert "blocks.1.attention.query.weight: missing in the checkpoint" in error


def test_shards_of_another_tokenizer_than_the_checkpoints(run_copy: tuple[Path, Path, list[str]]) -> None:
    config, folder, overrides = run_copy
    checkpoint = folder / "checkpoints/step_00000004"
    state = json.loads((checkpoint / "state.json").read_text())
    state["tokenizer_sha256"] = "0" * 64
    (checkpoint / "state.json").write_text(json.dumps(state, indent=1))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    from launch.checkpoint.files import file_entry

    manifest["files"]["state.json"] = file_entry(checkpoint / "state.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    tokenizer = folder / "other.model"
    tokenizer.write_bytes(b"another tokenizer")
    error = only_error(
        train(config, *overrides, "run.name=new", f"run.init_from={checkpoint}", f"data.tokenizer={tokenizer}")
    )
    assert "made with another tokenizer" in error


def test_a_non_finite_loss_stops_with_step_rank_and_checkpoint(run_copy: tuple[Path, Path, list[str]]) -> None:
    config, folder, overrides = run_copy
    error = only_error(train_command(config, *overrides, "optim.lr=1e30", "train.steps=40"))
    assert "non-finite loss at step" in error
    assert "on rank 0" in error
    assert f"the last good checkpoint is {folder}/checkpoints/step_0000000" in error
    assert f"the run ended: {error.removeprefix('error: ')}" in (folder / "log.txt").read_text()
    assert all(record["loss"] < float("inf") for record in read_metrics(folder))


def test_a_full_disk_keeps_the_previous_checkpoint(run_copy: tuple[Path, Path, list[str]]) -> None:
    config, folder, overrides = run_copy
    # A limit on the size of a file makes the system refuse the checkpoint's tensors, as a full disk does.
    script = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)); "
        "sys.argv = ['train.py', *sys.argv[1:]]; runpy.run_path('train.py', run_name='__main__')"
    )
    finished = python("-c", script, config, *overrides, "checkpoint.every_steps=1")
    assert "the checkpoint of step 5 could not be saved" in finished.output
    assert "step_00000004; training continues" in finished.output
    assert "the checkpoint of step 6 could not be saved" in only_error(finished)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_00000002", "step_00000004"]
    assert not (folder / "DONE").exists()
    settings = ["checkpoint.every_steps=1", "train.steps=20", "checkpoint.max_failures=2"]
    finished = preloaded_python("-c", script, config, *overrides, *settings)
    assert finished.output.count("training continues, and the next checkpoint is tried") == 2
    error = only_error(finished)
    assert "the checkpoint of step 7 could not be saved" in error
    assert "3 saves in a row have failed (checkpoint.max_failures)" in error
    assert train(config, *overrides).code == 0
    assert (folder / "checkpoints/step_00000006").is_dir()


def test_a_rank_that_never_comes_is_said_in_a_line(tiny_config: Path) -> None:
    command = [sys.executable, "train.py", str(tiny_config), "deepspeed.timeout_seconds=3"]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    setting = [f"{key}={value}" for key, value in {**alone, "MASTER_PORT": str(free_port())}.items()]
    error = only_error(finish(start(["env", *setting, *command])))
    assert "lost contact with another rank" in error


def test_ranks_share_the_verification_of_all_files(run_copy: tuple[Path, Path, list[str]]) -> None:
    checkpoint = run_copy[1] / "checkpoints/step_00000004"
    files = sorted(json.loads((checkpoint / "manifest.json").read_text())["files"])
    for name in files:
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        for num_parts in (1, 2, 3, 5):
            faults = [find_faults(checkpoint, part, num_parts) for part in range(num_parts)]
            assert [bool(found) for found in faults].count(True) == 1
            assert f"{checkpoint / name}: its content does not match its hash" in str(faults)
        (checkpoint / name).write_bytes(content)


def test_a_vanished_folder_is_not_made_again_and_may_come_back(tiny_config: Path, tmp_path: Path) -> None:
    """Renaming the run's folder looks to the run like a network disk that is gone, and then there again."""
    folder, away = tmp_path / "runs/tiny", tmp_path / "runs/away"
    settings = ["train.steps=100000", "checkpoint.every_steps=3", "checkpoint.max_failures=100000"]
    process = start([sys.executable, "train.py", str(tiny_config), *settings])
    wait_until((folder / "checkpoints/step_00000006").is_dir, "a checkpoint", process)
    folder.rename(away)
    num_steps = len(read_metrics(away))
    wait_until(lambda: len(read_metrics(away)) > num_steps + 6, "more steps", process)
    assert not folder.exists()
    away.rename(folder)
    process.send_signal(signal.SIGTERM)
    finished = finish(process)
    assert finished.code == 75, finished.errors
    assert f"{folder}: the run's folder no longer exists; {folder} is missing, with all checkpoints" in finished.output
    last = read_metrics(folder)[-1]["step"]
    assert (folder / f"checkpoints/step_{last:08d}/manifest.json").is_file()
    assert not list((folder / "checkpoints").glob("*.partial"))


def test_moved_data_goes_on_and_other_data_does_not(
    run_copy: tuple[Path, Path, list[str]], shards: dict[str, Path], tmp_path: Path
) -> None:
    config, _, overrides = run_copy
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{shards['train']}{suffix}", tmp_path / f"moved{suffix}")
    other = write_shard(tmp_path / "other", seed=9)  # the same lengths, other tokens
    error = only_error(train(config, *overrides, f"data.sources.0.path={other}"))
    assert "data.sources.0" in error
    assert "differs from the data that the run was trained on" in error
    finished = train(config, *overrides, f"data.sources.0.path={tmp_path}/moved")
    assert finished.code == 0, finished.errors


def test_another_seed_is_another_order(run_copy: tuple[Path, Path, list[str]]) -> None:
    config, folder, overrides = run_copy
    assert "run.seed was 0 and is now 1" in only_error(train(config, *overrides, "run.seed=1"))
    error = only_error(train(config, *overrides, "run.seed=1", "run.name=branch", f"run.resume={folder}"))
    assert "run.seed was 0 and is now 1" in error


def test_a_zero_value_that_deepspeed_refuses_is_named(tiny_config: Path) -> None:
    error = only_error(
        train_command(tiny_config, "deepspeed.overrides.zero_optimization.reduce_bucket_size=-5"), code=2
    )
    assert "deepspeed.overrides.zero_optimization.reduce_bucket_size" in error


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file but those that say who was there."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name not in ("log.txt", "lock"))
    return {path: path.read_bytes() for path in paths}


def test_a_refused_or_idle_start_changes_nothing(run_copy: tuple[Path, Path, list[str]]) -> None:
    config, folder, overrides = run_copy
    files = contents(folder)
    idle = train(config, overrides[0], "optim.lr=0.9")
    assert idle.code == 0
    assert "is finished (step 4); nothing to do" in idle.output
    assert "no such checkpoint" in only_error(train(config, *overrides, "run.resume=/nowhere"))
    assert "no such checkpoint" in only_error(train(config, overrides[0], "run.resume=/nowhere"))
    only_error(train(config, *overrides, "model.dim=48"))
    only_error(train(config, *overrides, "deepspeed.overrides.zero_optimization.reduce_bucket_size=-5"), code=2)
    assert contents(folder) == files


def test_never_resume_refuses_checkpoints_without_metrics(run_copy: tuple[Path, Path, list[str]]) -> None:
    config, folder, overrides = run_copy
    (folder / "metrics.jsonl").unlink()
    assert "run.resume=never" in only_error(train(config, *overrides, "run.resume=never"))


@pytest.mark.parametrize("damage", ["emptied", "deleted"])
def test_a_lost_configuration_file_is_replaced_by_the_checkpoints(
    run_copy: tuple[Path, Path, list[str]], damage: str
) -> None:
    config, folder, overrides = run_copy
    if damage == "emptied":
        (folder / "config.yaml").write_text("")
    else:
        (folder / "config.yaml").unlink()
    assert "model.dim was 32 and is now 48" in only_error(train(config, *overrides, "model.dim=48"))
    finished = train(config, *overrides)
    assert finished.code == 0, finished.errors
    assert "train.steps: 4 -> 6" in finished.output


def test_damaged_metrics_lines_are_dropped(run_copy: tuple[Path, Path, list[str]]) -> None:
    config, folder, overrides = run_copy
    with (folder / "metrics.jsonl").open("ab") as stream:
        stream.write(b'3\n\xff\xfe\n{"loss": 1}\n[]\n')
    assert train(config, *overrides).code == 0
    assert [record["step"] for record in read_metrics(folder)] == [1, 2, 3, 4, 5, 6]


def test_a_disk_too_full_for_records_is_said_once(run_copy: tuple[Path, Path, list[str]]) -> None:
    """Neither metrics.jsonl, TensorBoard nor a checkpoint has room."""
    config, folder, overrides = run_copy
    script = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000)); "
        "sys.argv = ['train.py', *sys.argv[1:]]; runpy.run_path('train.py', run_name='__main__')"
    )
    finished = python("-c", script, config, *overrides, "train.steps=12", "checkpoint.every_steps=100")
    assert "the checkpoint of step 12 could not be saved" in only_error(finished)
    assert finished.output.count("could not be recorded") == 1
    assert "metrics.jsonl: step" in finished.output
    records = read_metrics(folder)  # every line is whole
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))


def test_a_second_run_is_kept_out_of_the_folder(tiny_config: Path, tmp_path: Path) -> None:
    first = start([sys.executable, "train.py", str(tiny_config), "train.steps=100000"])
    while not (tmp_path / "runs/tiny/metrics.jsonl").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    error = only_error(train(tiny_config, "optim.lr=1e-5"))
    assert f"another run is training in it (host {socket.gethostname()}, process {first.pid})" in error
    first.send_signal(signal.SIGTERM)
    assert finish(first).code == 75


def test_a_fault_on_one_rank_is_told_by_all_in_one_line(
    tiny_config: Path, tmp_path: Path, shards: dict[str, Path]
) -> None:
    """Data that only rank 1 cannot see, as on a node-local disk."""
    script = tmp_path / "train_on_two_nodes.py"
    script.write_text(
        f"""import os, runpy, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from data.source import TokenSource
whole = TokenSource.open.__func__
def open_on_rank(cls, path):
    return whole(cls, path if os.environ["RANK"] == "0" else Path(str(path) + "_absent"))
TokenSource.open = classmethod(open_on_rank)
sys.argv[0] = "train.py"
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""
    )
    finished = finish(start(launcher_command("deepspeed", 2, script, str(tiny_config))))
    assert finished.code == 1
    text = finished.output + finished.errors
    assert "Traceback" not in text
    assert text.count("error: ") == 1
    assert f"rank 1: data.sources.0.path: {shards['train']}_absent" in text


def test_a_bad_token_on_one_rank_leaves_no_traceback_on_the_other(tiny_config: Path, tmp_path: Path) -> None:
    tokens = np.full(20_000, 5)
    order = SampleOrder([(20_000 - 1) // 32], [1.0], seed=0)
    # The first sample of rank 1 in the second step: 8 samples a step, 2 rows of rank 0 before it.
    window = int(order.locate(np.array([8 + 2])).window[0])
    tokens[window * 32 + 3] = 96
    with IndexedShardWriter(tmp_path / "bad", token_dtype(200)) as writer:
        writer.add_document(tokens)
    command = launcher_command("torchrun", 2, "train.py", str(tiny_config), f"data.sources.0.path={tmp_path}/bad")
    finished = finish(start(command))
    assert finished.code == 1
    assert "error: rank 1: " in finished.errors
    assert "bad.bin: token" in (tmp_path / "runs/tiny/rank_1.log").read_text()
    assert "bad.bin: token" in finished.errors
    # torchrun may end rank 0 before it notices; else rank 0 prints this line, and no other.
    errors = [line for line in finished.errors.splitlines() if line.startswith("error: ")]
    others = [line for line in errors if "bad.bin: token" not in line]
    assert len(errors) - len(others) == 1
    assert all("lost contact with another rank, whose message says why" in line for line in others), others
    assert finished.errors.count("Traceback") == 1  # torchrun's own, after the ranks' lines


def test_a_fault_of_the_programs_own_leaves_its_stack_in_the_log(tiny_config: Path, tmp_path: Path) -> None:
    script = (
        "import runpy, sys; from launch.training import trainer; trainer.group_learning_rates = lambda *_: 1 / 0; "
        "sys.argv = ['train.py', *sys.argv[1:]]; runpy.run_path('train.py', run_name='__main__')"
    )
    finished = python("-c", script, tiny_config)
    assert finished.code == 1
    assert "ZeroDivisionError" in finished.errors
    text = (tmp_path / "runs/tiny/log.txt").read_text()
    assert "the run ended: division by zero" in text
    assert "Traceback" in text
