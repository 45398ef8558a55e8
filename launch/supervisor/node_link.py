"""The link between the coordinator and a node's worker: one JSON object per line, over ssh's pipes or a socket.

Both ends send a heartbeat every second, even while they are busy, so that each can tell a dead peer from an idle one.
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

HEARTBEAT_SECONDS = 1.0
MAX_LINE_BYTES = 1 << 20
_HEARTBEAT = "beat"


def encode(message: Message) -> bytes:
    """Encodes a message, which has at least the key `kind`, as one line."""
    return json.dumps(message).encode() + b"\n"


class LineReader:
    """Splits a stream of bytes, which may arrive in chunks of any size, into messages.

    Attributes:
        last_unparsed: The last line that was not a message, e.g. a login banner.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.last_unparsed = ""

    def feed(self, chunk: bytes) -> list[Message]:
        """Returns the messages that the chunk completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest = b""
        return [message for line in lines if (message := self._decode(line)) is not None]

    def _decode(self, line: bytes) -> Message | None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if isinstance(message, dict) and isinstance(message.get("kind"), str):
            return message
        self.last_unparsed = line.decode(errors="replace").strip() or self.last_unparsed
        return None


class Link:
    """One end of the link.

    Args:
        reader, writer: The file descriptors to read from and to write to; a socket has one for both.
        on_close: Closes what owns them, e.g. kills ssh.
    """

    def __init__(self, reader: int, writer: int, on_close: Callable[[], None]) -> None:
        self._reader = reader
        self._writer = writer
        self._on_close = on_close
        self._lock = threading.Lock()
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lines = LineReader()
        self._last_received = time.monotonic()
        self._closed = threading.Event()
        for target in (self._read, self._send_heartbeats):
            threading.Thread(target=target, name=f"Link {target.__name__}", daemon=True).start()

    def send(self, kind: str, **values: Any) -> None:
        """Sends a message. Never raises: a lost peer shows in `is_closed`. Must not be called in a signal handler."""
        with self._lock:
            content = encode({"kind": kind, **values})
            try:
                while content:
                    content = content[os.write(self._writer, content) :]
            except OSError:
                self._closed.set()

    def receive(self) -> list[Message]:
        """Returns the messages received since the last call, without heartbeats."""
        messages = []
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._messages.get_nowait())
        return messages

    @property
    def is_closed(self) -> bool:
        """Whether either end has closed the link."""
        return self._closed.is_set()

    @property
    def silent_seconds(self) -> float:
        """Seconds since anything, even a heartbeat, was received."""
        return time.monotonic() - self._last_received

    @property
    def last_unparsed(self) -> str:
        """The last line received that was not a message."""
        return self._lines.last_unparsed

    def close(self) -> None:
        """Closes the link."""
        self._closed.set()
        self._on_close()

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._reader, 1 << 16)
            except OSError:
                chunk = b""
            if not chunk:
                self._closed.set()
                return
            self._last_received = time.monotonic()
            for message in self._lines.feed(chunk):
                if message["kind"] != _HEARTBEAT:
                    self._messages.put(message)

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            self.send(_HEARTBEAT)
