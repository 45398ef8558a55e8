"""Hashes files, and writes them so that a file is either absent or complete."""

import contextlib
import os
from pathlib import Path

import xxhash

_CHUNK_BYTES = 1 << 22
_FINGERPRINT_WHOLE_BYTES = 16 << 20
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 64 << 10


def hash_file(path: Path) -> str:
    """Return the hex xxh3-128 hash of a file's content."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint_file(path: Path) -> str:
    """Return the hex xxh3-128 hash of a file's content or, above 16 MiB, of its size and of samples of it."""
    size_bytes = path.stat().st_size
    if size_bytes <= _FINGERPRINT_WHOLE_BYTES:
        return hash_file(path)
    digest = xxhash.xxh3_128(f"{size_bytes} ".encode())
    update_with_samples(digest, path)
    return digest.hexdigest()


def update_with_samples(digest: xxhash.xxh3_128, path: Path) -> None:
    """Update `digest` with 64 evenly spaced samples of 64 KiB of a file, which overlap if it is small."""
    last_start = max(path.stat().st_size - _SAMPLE_BYTES, 0)
    with path.open("rb") as file:
        for sample in range(_NUM_SAMPLES):
            file.seek(last_start * sample // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))


def sync(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to disk. Raises OSError with the path."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write `path` so that a crash at any moment leaves the old file, no file, or the complete new one.

    Raises:
        OSError: If writing fails; names the path. No temporary file is left.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None
