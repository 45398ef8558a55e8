"""Applies a function to many tasks in worker processes, and returns the results in order."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any, TypeVar

from data.blocks import BLOCK_BYTES, Block, Task
from data.errors import DataError

Result = TypeVar("Result")
_BYTES_AHEAD = 4 * BLOCK_BYTES  # per worker; bounds the memory


def map_tasks(
    make_function: Callable[[], Callable[[list[Block]], Result]], tasks: Iterable[Task], num_workers: int
) -> Generator[tuple[Task, Result], None, None]:
    """Yield each task with the function's result for its blocks, in the order of the tasks.

    With one worker, everything runs in this process. With more, this process reads the tasks and passes them to worker
    processes, with enough tasks in flight to keep these busy.

    Args:
        make_function: Creates the function, once in each worker; must be picklable.
        tasks: The tasks, which are read slightly ahead.
        num_workers: Number of workers.

    Raises:
        DataError: If a worker was killed.
    """
    if num_workers == 1:
        function = make_function()
        for task in tasks:
            yield task, function(task.blocks)
        return
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(num_workers, context, _start_worker, (make_function,))
    try:
        pending: deque[tuple[Task, Future[Result]]] = deque()
        pending_bytes = 0
        for task in tasks:
            pending.append((task, executor.submit(_call, task.blocks)))
            pending_bytes += task.num_bytes
            while pending_bytes > num_workers * _BYTES_AHEAD and len(pending) > num_workers:
                oldest, result = pending.popleft()
                pending_bytes -= oldest.num_bytes
                yield oldest, result.result()
        while pending:
            oldest, result = pending.popleft()
            yield oldest, result.result()
    except BrokenProcessPool:
        raise DataError("a worker process was killed, perhaps because memory ran out; try fewer --workers") from None
    finally:
        executor.shutdown(cancel_futures=True)


_function: Callable[[list[Block]], Any] | None = None  # the function of this worker process


def _start_worker(make_function: Callable[[], Callable[[list[Block]], Any]]) -> None:
    global _function  # noqa: PLW0603 - the pool has no other place for a worker's state
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # otherwise each worker would start one thread per core
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _function = make_function()


def _exit_with_parent() -> None:
    """Exit when the parent is killed; otherwise the worker would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _call(blocks: list[Block]) -> Any:
    assert _function is not None
    return _function(blocks)
