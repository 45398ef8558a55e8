"""Finds the files that `--input` refers to by path, folder or glob, each with its format and compression."""

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from data.command_line import Progress
from data.errors import DataError
from data.files import fingerprint_file
from data.manifest import MANIFEST_NAME

_FORMAT_OF_SUFFIX = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_COMPRESSION_OF_SUFFIX = {".gz": "gzip", ".zst": "zstd"}
_UNSUPPORTED_SUFFIXES = (".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".br")
_METADATA_NAMES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # of `datasets`


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file.

    Attributes:
        path: The file's path.
        format: "text", "jsonl", "json", "parquet" or "arrow".
        compression: "gzip", "zstd" or None.
        size_bytes: The size as stored, compressed or not.
    """

    path: Path
    format: str
    compression: str | None
    size_bytes: int

    @classmethod
    def open(cls, path: Path) -> "InputFile":
        """Describe a file by the suffixes of its name; it is text if they are unknown.

        Raises:
            DataError: If the suffix is that of an archive type that is not supported.
            OSError: If there is no such file.
        """
        format, compression = _split_suffixes(path.name)
        if format is None and path.suffix.lower() in _UNSUPPORTED_SUFFIXES:
            raise DataError(f"{path}: {path.suffix} files are not supported; unpack it first, or use .gz or .zst")
        return cls(path, format or "text", compression, path.stat().st_size)


def find_input_files(inputs: Iterable[str], ignored: Counter[str], excluded: Sequence[Path] = ()) -> list[InputFile]:
    """Find the files that paths, folders and globs refer to: each once, in the order given, sorted by name within each.

    A folder stands for all files below it that have a known suffix. Hidden files and folders and the outputs of
    data.prepare are skipped; links are followed.

    Args:
        inputs: Paths, folders and globs as the user typed them.
        ignored: Receives the number of other files in folders, by the suffix of their names.
        excluded: Folders whose files are skipped, since the output may lie within an input.

    Raises:
        DataError: If an input refers to no file, or to one that is not supported.
    """
    files: dict[str, InputFile] = {}
    for given in inputs:
        for path in _find(given, {os.path.realpath(folder) for folder in excluded}, ignored):
            files.setdefault(os.path.realpath(path), InputFile.open(path))
    return list(files.values())


def describe_files(files: Sequence[InputFile]) -> dict[str, Any]:
    """Return number, total size and hash of the input files.

    The hash covers formats and contents but not names, so that a folder may be moved. Of files above 16 MiB it covers
    only the size and evenly spaced samples.
    """
    total_bytes = sum(file.size_bytes for file in files)
    digest = xxhash.xxh3_128()
    done_bytes = 0
    with Progress("hashing the input", total_bytes) as progress:
        for file in files:
            suffix = _whole_suffix(file.path.name)
            digest.update(os.fsencode(f"{suffix} {fingerprint_file(file.path)}\n"))
            done_bytes += file.size_bytes
            progress.update(done_bytes)
    return {"num_files": len(files), "size_bytes": total_bytes, "xxh3": digest.hexdigest()}


def _split_suffixes(name: str) -> tuple[str | None, str | None]:
    """Return (format, compression) according to the suffixes of a name, each None if it is unknown."""
    stem, suffix = os.path.splitext(name.lower())
    compression = _COMPRESSION_OF_SUFFIX.get(suffix)
    if compression is not None:
        suffix = os.path.splitext(stem)[1]
    return _FORMAT_OF_SUFFIX.get(suffix), compression


def _whole_suffix(name: str) -> str:
    """Return the suffix in lower case, with that before the compression: ".txt", ".txt.gz"."""
    stem, suffix = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] + suffix if suffix in _COMPRESSION_OF_SUFFIX else suffix


def _find(given: str, excluded: set[str], ignored: Counter[str]) -> list[Path]:
    if os.path.isdir(given):
        found = sorted(_files_below(given, excluded, ignored))
        if not found:
            raise DataError(f"--input {given}: no {', '.join(_FORMAT_OF_SUFFIX)} file in this folder")
        return found
    if os.path.exists(given):
        if not os.path.isfile(given):
            raise DataError(f"--input {given}: neither a file nor a folder")
        return [Path(given)]
    found = []
    for match in sorted(glob.glob(given, recursive=True)):
        if os.path.isdir(match) and "**" not in given:
            found += sorted(_files_below(match, excluded, ignored))
        elif _is_file(match) and not _is_below(os.path.realpath(match), excluded):
            found.append(Path(match))
    if not found:
        raise DataError(f"--input {given}: no such file or folder, and no file matches it as a pattern")
    return found


def _files_below(folder: str, excluded: set[str], ignored: Counter[str]) -> Iterator[Path]:
    visited: set[str] = set()  # links may form a cycle

    def stop(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}")

    for parent, children, names in os.walk(folder, followlinks=True, onerror=stop):
        resolved = os.path.realpath(parent)
        is_output = MANIFEST_NAME in names and any(name.endswith(".idx") for name in names)
        if resolved in visited or is_output or (resolved in excluded and parent != folder):
            children.clear()
            continue
        visited.add(resolved)
        children[:] = sorted(name for name in children if not name.startswith("."))
        for name in names:
            if name.startswith(".") or name in _METADATA_NAMES:
                continue
            path = os.path.join(parent, name)
            if _split_suffixes(name)[0] is None:
                ignored[_whole_suffix(name)] += 1
            elif _is_file(path):
                yield Path(path)


def _is_file(path: str) -> bool:
    """Whether a path, not that of a folder, is a file.

    Raises:
        DataError: If it is a broken link.
    """
    if os.path.islink(path) and not os.path.exists(path):
        raise DataError(f"{path}: a broken link to {os.readlink(path)}")
    return os.path.isfile(path)


def _is_below(resolved: str, folders: set[str]) -> bool:
    return any(resolved.startswith(folder + os.sep) for folder in folders)
