"""Which texts a step was trained on, so that a user can look at what may have spoilt it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from data.files import write_file
from data.indexed import bin_path
from data.loader import BatchGeometry
from launch.run_folder.folder import RunFolder
from launch.training.data import TrainingData

NUM_NAMED = 3


def suspicious_samples(bad_micro_batches: Sequence[int | None], geometry: BatchGeometry) -> list[int]:
    """Samples of a step, counted within it: of each rank's first micro-batch without a finite loss, or all.

    Args:
        bad_micro_batches: of each rank, its number; None: all were finite.
    """
    slots: list[int] = []
    for rank, micro_batch in enumerate(bad_micro_batches):
        if micro_batch is not None:
            slots += geometry.slots(rank)[micro_batch].tolist()
    return [slot for slot in slots if slot < geometry.samples_per_step] or list(range(geometry.samples_per_step))


def locate_samples(data: TrainingData, samples: Sequence[int], seq_len: int) -> list[dict[str, Any]]:
    """Where the texts of samples of the run are: one record each, for JSON.

    Each names its place in the data order (see `data.skips`), its source, epoch and window, and of every shard that the
    window touches the file, and the first and last document and token, all counted within that file from 0.
    """
    located, places = data.order.locate(np.array(samples)), data.order.skipped.places(np.array(samples))
    records = []
    columns = (located.source.tolist(), located.epoch.tolist(), located.window.tolist(), places.tolist())
    for sample, number, epoch, window, place in zip(samples, *columns, strict=True):
        source = data.sources[number]
        pieces = [
            {
                "shard": str(bin_path(shard.prefix)),
                "documents": [shard.document_of(start), shard.document_of(stop - 1)],
                "tokens": [start, stop - 1],
            }
            for shard, start, stop in source.shard_ranges(window, seq_len)
        ]
        records.append(
            {
                "sample": sample,
                "place": place,
                "source": str(source.path),
                "epoch": epoch,
                "window": window,
                "pieces": pieces,
            }
        )
    return records


def report_samples(folder: RunFolder, step: int, records: Sequence[dict[str, Any]]) -> str:
    """Writes the records of a step's samples to its file, and names the first of them and the file in a few words."""
    path, number = folder.bad_batches / f"step_{step:08d}.jsonl", 1
    try:
        path.parent.mkdir(exist_ok=True)
        while path.exists():  # a step's number comes again after a rollback
            number += 1
            path = folder.bad_batches / f"step_{step:08d}_{number}.jsonl"
        write_file(path, "".join(json.dumps(record) + "\n" for record in records).encode())
        where = f"all {len(records)} samples are in {path}"
    except OSError as error:
        where = f"{path} could not be written: {error}"
    named = [_name_piece(piece) for record in records for piece in record["pieces"]]
    more = ", …" if len(named) > NUM_NAMED else ""
    return f"trained on {', '.join(named[:NUM_NAMED])}{more}; {where}"


def _name_piece(piece: dict[str, Any]) -> str:
    first, last = piece["documents"]
    return f"{piece['shard']} document{'' if first == last else 's'} {first}" + ("" if first == last else f"-{last}")
