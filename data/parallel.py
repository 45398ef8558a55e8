"""A function over many tasks, in processes of their own, with the results in the order of the tasks."""

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
_BYTES_AHEAD = 4 * BLOCK_BYTES  # a worker; bounds the memory


def map_tasks(
    make_function: Callable[[], Callable[[list[Block]], Result]], tasks: Iterable[Task], num_workers: int
) -> Generator[tuple[Task, Result], None, None]:
    """Each task and the function's result for its blocks: in the order given, whatever `num_workers`.

    One worker is this process. More are processes of their own, and this one reads the tasks and hands them out; as
    many tasks are on their way as keep the workers busy.

    Args:
        make_function: makes the function, once in each worker; it is sent there, and must be of a kind that can be.
        tasks: read a little ahead.
        num_workers: processes.

    Raises:
        DataError: one of them was killed.
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
        raise DataError("a worker process was killed, perhaps for want of memory; try fewer --workers") from None
    finally:
        executor.shutdown(cancel_futures=True)


_function: Callable[[list[Block]], Any] | None = None  # of this worker


def _start_worker(make_function: Callable[[], Callable[[list[Block]], Any]]) -> None:
    global _function  # noqa: PLW0603 - the pool offers no other place for what a worker keeps
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Hugging Face's library would start a thread a core in each worker
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _function = make_function()


def _exit_with_parent() -> None:
    """End this process if its parent is killed; the pool would leave it waiting for work."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _call(blocks: list[Block]) -> Any:
    assert _function is not None
    return _function(blocks)
