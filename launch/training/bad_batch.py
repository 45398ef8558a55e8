"""Finds and reports the documents that an anomalous step was trained on."""

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


def samples_to_report(bad_micro_batches: Sequence[int | None], geometry: BatchGeometry) -> list[int]:
    """Returns the step's samples to report: those of each rank's first non-finite micro-batch, or all if there is none.

    Samples are counted within the step.

    Args:
        bad_micro_batches: The index of each rank's first micro-batch with a non-finite loss; None if there is none.
    """
    slots: list[int] = []
    for rank, micro_batch in enumerate(bad_micro_batches):
        if micro_batch is not None:
            slots += geometry.slots(rank)[micro_batch].tolist()
    return [slot for slot in slots if slot < geometry.samples_per_step] or list(range(geometry.samples_per_step))


def locate_samples(data: TrainingData, samples: Sequence[int], seq_len: int) -> list[dict[str, Any]]:
    """Returns the location of each of the run's samples, as a JSON record.

    A record has the sample's place in the data order (see `data.skips`), its source, epoch and window, and for every
    shard that the window overlaps: the file, and the first and last document and token, counted in that file from 0.
    """
    located, places = data.order.locate(np.array(samples)), data.order.skipped.places(np.array(samples))
    records = []
    columns = (located.source.tolist(), located.epoch.tolist(), located.window.tolist(), places.tolist())
    for sample, number, epoch, window, place in zip(samples, *columns, strict=True):
        source = data.sources[number]
        ranges = [
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
                "pieces": ranges,
            }
        )
    return records


def report_samples(folder: RunFolder, step: int, records: Sequence[dict[str, Any]]) -> str:
    """Writes the records of a step's samples to a file, and returns a summary that names the first ones."""
    path, number = folder.bad_batches / f"step_{step:08d}.jsonl", 1
    try:
        path.parent.mkdir(exist_ok=True)
        while path.exists():  # the step may be repeated after a rollback
            number += 1
            path = folder.bad_batches / f"step_{step:08d}_{number}.jsonl"
        write_file(path, "".join(json.dumps(record) + "\n" for record in records).encode())
        where = f"all {len(records)} samples are in {path}"
    except OSError as error:
        where = f"{path} could not be written: {error}"
    named = [_describe_documents(part) for record in records for part in record["pieces"]]
    more = ", …" if len(named) > NUM_NAMED else ""
    return f"trained on {', '.join(named[:NUM_NAMED])}{more}; {where}"


def _describe_documents(part: dict[str, Any]) -> str:
    first, last = part["documents"]
    return f"{part['shard']} document{'' if first == last else 's'} {first}" + ("" if first == last else f"-{last}")
