"""Texts to ids, in parallel and in order."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from data.documents import CleanDocument
from data.errors import DataError
from data.indexed import token_dtype
from data.tokenizer import Tokenizer

_TASK_CHARS = 1 << 19  # text sent to a worker at once
_TASKS_AHEAD = 4  # per worker; bounds the memory


def encode_documents(
    documents: Iterable[CleanDocument], tokenizer: Tokenizer, num_workers: int
) -> Iterator[tuple[CleanDocument, np.ndarray]]:
    """Each document and its ids, the end-of-document id last: in the order given, whatever `num_workers`.

    Ids have the type of a shard with this vocabulary. One worker is this process; more are processes of their
    own that load the tokenizer from its file.

    Raises:
        DataError: one of them was killed.
    """
    tasks = _group_into_tasks(documents)
    if num_workers == 1:
        for task in tasks:
            yield from zip(task, _encode(tokenizer, [document.text for document in task]), strict=True)
        return
    executor = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), _start_worker)
    try:
        pending: deque[tuple[list[CleanDocument], Future[list[np.ndarray]]]] = deque()
        for task in tasks:
            texts = [document.text for document in task]
            pending.append((task, executor.submit(_encode_in_worker, tokenizer.path, texts)))
            if len(pending) > num_workers * _TASKS_AHEAD:
                oldest, encoded = pending.popleft()
                yield from zip(oldest, encoded.result(), strict=True)
        for oldest, encoded in pending:
            yield from zip(oldest, encoded.result(), strict=True)
    except BrokenProcessPool:
        raise DataError("a tokenizing process was killed, perhaps for want of memory; try fewer --workers") from None
    finally:
        executor.shutdown(cancel_futures=True)


def _group_into_tasks(documents: Iterable[CleanDocument]) -> Iterator[list[CleanDocument]]:
    task: list[CleanDocument] = []
    num_chars = 0
    for document in documents:
        task.append(document)
        num_chars += len(document.text)
        if num_chars >= _TASK_CHARS:
            yield task
            task, num_chars = [], 0
    if task:
        yield task


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    dtype = token_dtype(tokenizer.vocab_size)
    return [np.array([*tokenizer.encode(text), tokenizer.eod_id], dtype) for text in texts]


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End this process if its parent is killed; the pool would leave it waiting for work."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(tokenizer_path: Path, texts: list[str]) -> list[np.ndarray]:
    return _encode(_load_once(tokenizer_path), texts)


@cache
def _load_once(tokenizer_path: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_path)
