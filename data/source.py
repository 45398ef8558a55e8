"""A source: the tokens that one entry of `data.sources` refers to, in any number of shards.

    shards     | train-00000     | train-00001   | train-00002        |     end to end
    windows    |   0   |   1   |   2   |   3   |   4   |   5   |  ..        seq_len tokens each
    reads      |--------|                                                   seq_len + 1 tokens: window 0 ends
                       |--------|                                           on the first token of window 1

The last token of a read is only used as a target, so every token but the first one is a target once per epoch, except
for a remainder of fewer than seq_len tokens at the end.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np

from data.errors import DataError
from data.indexed import IndexedShard, bin_path, idx_path
from data.manifest import MANIFEST_NAME, Manifest, is_unfinished


class TokenSource:
    """The shards of one source as one stream of tokens.

    Attributes:
        path: The source's path as given.
        name: Name for logs, that of the dataset rather than the split: "corpus" for both `corpus/train` and
            `corpus/val`.
        manifest: The manifest; None for shards that were prepared elsewhere.
        shards: The shards in reading order.
        num_tokens: Total number of tokens in the shards.
    """

    def __init__(self, path: Path, manifest: Manifest | None, shards: list[IndexedShard]) -> None:
        """Called by `open`."""
        self.path = path
        self.manifest = manifest
        self.shards = shards
        self.name = path.absolute().name
        if manifest is not None and self.name == manifest.split:
            self.name = path.absolute().parent.name
        # Token at which each shard starts, and the total. A list, since indexing single elements of an array is slow.
        self._starts = list(accumulate((shard.num_tokens for shard in shards), initial=0))
        self.num_tokens = self._starts[-1]

    @classmethod
    def open(cls, path: str | Path) -> "TokenSource":
        """Open a folder of shards, with or without a manifest, or a Megatron pair `PATH.bin`, `PATH.idx`.

        The path of a pair may include a suffix. Without a manifest, a folder's shards are all its pairs, sorted by name
        with numbers compared by value. Sizes are checked, hashes are not (`data.inspect` does that).

        Raises:
            DataError: If there is nothing at the path, or the manifest or a shard is missing, damaged or inconsistent.
        """
        path = Path(path)
        if path.is_dir():
            if not (path / MANIFEST_NAME).exists() and (prefixes := _find_pairs(path)):
                return cls(path, None, [IndexedShard.open(prefix) for prefix in prefixes])
            manifest = Manifest.read(path)
            shards = [IndexedShard.open(path / name) for name in manifest.shard_names]
            source = cls(path, manifest, shards)
            if source.num_tokens != manifest.num_tokens:
                raise DataError(
                    f"{path}: {source.num_tokens:,} tokens in the shards, {manifest.num_tokens:,} in the manifest"
                )
            return source
        prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        if not bin_path(prefix).exists() and not idx_path(prefix).exists():
            raise DataError(f"{path}: neither a folder of shards nor the prefix of a .bin/.idx pair")
        return cls(prefix, None, [IndexedShard.open(prefix)])

    def num_windows(self, seq_len: int) -> int:
        """Return the number of windows of `seq_len` tokens that have a target for every token.

        Raises:
            DataError: If there is not a single one.
        """
        if self.num_tokens <= seq_len:
            raise DataError(
                f"{self.path}: {self.num_tokens:,} tokens; one sequence of {seq_len:,} needs {seq_len + 1:,}"
            )
        return (self.num_tokens - 1) // seq_len

    def read_window(self, window: int, seq_len: int, out: np.ndarray) -> None:
        """Copy tokens window·seq_len … (window + 1)·seq_len, both inclusive, to `out` [seq_len + 1]."""
        filled = 0
        for shard, start, stop in self.shard_ranges(window, seq_len):
            out[filled : filled + stop - start] = shard.read(start, stop)
            filled += stop - start

    def shard_ranges(self, window: int, seq_len: int) -> Iterator[tuple[IndexedShard, int, int]]:
        """Yield the shards that contain a window's tokens, each with the range of these tokens in it."""
        start = window * seq_len
        stop = start + seq_len + 1
        shard = self._shard_of(start)
        while start < stop:
            shard_start = self._starts[shard]
            shard_stop = min(stop, self._starts[shard + 1])
            if start < shard_stop:
                yield self.shards[shard], start - shard_start, shard_stop - shard_start
            start = shard_stop
            shard += 1

    def document_starts(self, window: int, seq_len: int) -> np.ndarray:
        """Return the tokens of a window at which documents start, counted from its first token: int64 [N], ascending.

        They range from 1 to seq_len + 1; the last one shows whether the last target ends its document. The end of the
        source counts as a start, and a token may be listed more than once.
        """
        start = window * seq_len
        shard, stop = self._shard_of(start), start + seq_len + 2
        found = []
        while shard < len(self.shards) and (shard_start := self._starts[shard]) < stop:
            first = max(start + 1 - shard_start, 0)
            last = min(stop - shard_start, self.shards[shard].num_tokens)
            found.append(self.shards[shard].document_starts(first, last) + (shard_start - start))
            shard += 1
        if stop > self.num_tokens:
            found.append(np.array([self.num_tokens - start]))
        return found[0] if len(found) == 1 else np.concatenate(found)

    def describe_offset(self, token_offset: int) -> str:
        """Describe the place of token `token_offset` of the source: "FILE: token N", counted within that file."""
        shard = self._shard_of(token_offset)
        return f"{bin_path(self.shards[shard].prefix)}: token {token_offset - self._starts[shard]:,}"

    def _shard_of(self, token_offset: int) -> int:
        # Bisect from the right, to skip empty shards, which start at the same token as the next one.
        return bisect_right(self._starts, token_offset) - 1


def _find_pairs(folder: Path) -> list[Path]:
    """Return the prefixes of the shards in a folder without a manifest; none if there are none or it is unfinished."""
    if is_unfinished(folder):
        return []
    paths = [path for path in folder.iterdir() if path.suffix in (".bin", ".idx") and not path.name.startswith(".")]
    return sorted({path.with_suffix("") for path in paths}, key=lambda prefix: _natural_order(prefix.name))


def _natural_order(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key that puts "part_2" before "part_10"."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if index % 2 else (0, part) for index, part in enumerate(parts)], name
