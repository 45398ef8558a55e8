"""The line between the head and a node's agent: JSON objects, one a line, over ssh's pipes or a socket.

Both ends send a beat every second, whatever else they do, so that each can tell a silent other end from an idle one.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]

BEAT_SECONDS = 1.0
LONGEST_LINE_BYTES = 1 << 20
_BEAT = "beat"


def encode(message: Message) -> bytes:
    """One line. A message has at least the key `kind`."""
    return json.dumps(message).encode() + b"\n"


class LineReader:
    """Takes a stream of bytes apart into messages, however it was cut into pieces.

    Attributes:
        noise: lines that were no messages, e.g. what a shell prints when somebody logs in; the last one only.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.noise = ""

    def feed(self, piece: bytes) -> list[Message]:
        """The messages that the piece completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            self._rest = b""
        return [message for line in lines if (message := self._decode(line)) is not None]

    def _decode(self, line: bytes) -> Message | None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if isinstance(message, dict) and isinstance(message.get("kind"), str):
            return message
        self.noise = line.decode(errors="replace").strip() or self.noise
        return None


class Link:
    """One end.

    Args:
        reader, writer: file descriptors; the same one for a socket.
        shut: closes what belongs to them, e.g. ends ssh.
    """

    def __init__(self, reader: int, writer: int, shut: Callable[[], None]) -> None:
        self._reader = reader
        self._writer = writer
        self._shut = shut
        self._lock = threading.Lock()
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lines = LineReader()
        self._heard = time.monotonic()
        self._has_ended = threading.Event()
        for work in (self._read, self._beat):
            threading.Thread(target=work, name=f"Link {work.__name__}", daemon=True).start()

    def send(self, kind: str, **values: Any) -> None:
        """It never raises: that the other end is gone shows in `is_closed`. Not for signal handlers."""
        with self._lock:
            content = encode({"kind": kind, **values})
            try:
                while content:
                    content = content[os.write(self._writer, content) :]
            except OSError:
                self._has_ended.set()

    def take(self) -> list[Message]:
        """What has come since the last call, beats apart."""
        messages = []
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._messages.get_nowait())
        return messages

    @property
    def is_closed(self) -> bool:
        """Whether the other end has closed the line, or this one has."""
        return self._has_ended.is_set()

    @property
    def silent_seconds(self) -> float:
        """For how long nothing has come, not even a beat."""
        return time.monotonic() - self._heard

    @property
    def noise(self) -> str:
        """The last line that was no message."""
        return self._lines.noise

    def close(self) -> None:
        """Ends the line."""
        self._has_ended.set()
        self._shut()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._reader, 1 << 16)
            except OSError:
                piece = b""
            if not piece:
                self._has_ended.set()
                return
            self._heard = time.monotonic()
            for message in self._lines.feed(piece):
                if message["kind"] != _BEAT:
                    self._messages.put(message)

    def _beat(self) -> None:
        while not self._has_ended.wait(BEAT_SECONDS):
            self.send(_BEAT)
