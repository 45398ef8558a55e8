"""Starts Python processes as forks of one that has imported torch and DeepSpeed, since importing takes seconds.

A started process is one of its own in every other respect: `sys.argv`, environment, output and exit code are those of
`python ARGUMENTS…` at the project's root. Tests use `preloaded_python` and `run_cases` in tests/conftest.py.

The server reads one JSON request a line from stdin, `{"processes": [{"arguments", "environ", "output", "errors"}, …],
"timeout": seconds}`, starts the processes together, and answers with a JSON list of exit codes when all have ended. A
negative code is the signal that ended a process. The server kills what is left at the timeout, or half a minute after a
process failed. It has a single thread and no process group, so that a fork is safe.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
GRACE_SECONDS = 30.0
PRELOADED = (
    "torch",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.parameter_offload",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "launch.engine.build",
    "launch.engine.engine",
    "launch.training.resume",
    "launch.training.rollback",
    "launch.training.start",
    "launch.training.trainer",
)


def serve() -> None:
    """Answers requests until stdin is closed."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        processes = []
        for wanted in request["processes"]:
            process = os.fork()
            if process == 0:
                become(wanted)
                return
            processes.append(process)
        print(json.dumps(wait(processes, time.monotonic() + request["timeout"])), flush=True)


def become(wanted: dict[str, Any]) -> None:
    """Turns this forked process into `python ARGUMENTS…` and runs it."""
    os.setsid()
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, wanted["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, wanted["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(wanted["environ"])
    first, *rest = wanted["arguments"]
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = [rest[0], *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def wait(processes: list[int], end: float) -> list[int | None]:
    """Returns the exit codes of processes; None for those that had to be killed at the end."""
    codes: dict[int, int | None] = {}
    while len(codes) < len(processes):
        for process in processes:
            if process not in codes:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    codes[process] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):
            end = min(end, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > end:
            for process in set(processes) - codes.keys():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                codes[process] = None
        time.sleep(0.005)
    return [codes[process] for process in processes]


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)
    serve()
