"""Runs the preflight on one rank: collects facts, exchanges them with the other ranks, and reports problems."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from launch.distributed.process_group import local_device
from launch.distributed.topology import Topology
from launch.errors import EXIT_DONE, EXIT_FAILURE
from launch.preflight_checks.checks import can_communicate, find_problems, find_reported_problems, first_of_each_node
from launch.preflight_checks.facts import RankFacts, collect_facts
from launch.preflight_checks.rendezvous import Rendezvous
from launch.preflight_checks.shared_folder import SharedFolder

ALL_REDUCE_SECONDS = 30.0
_ALL_REDUCE_BYTES = {"gloo": 4 << 20, "nccl": 256 << 20}
_NUM_ROUNDS = 3


def check(topology: Topology, config_path: str, overrides: Sequence[str], timeout_seconds: float) -> int:
    """Collects and compares facts; rank 0 prints the result. Returns the exit code, the same on all ranks. Collective.

    Raises:
        RunError: The ranks cannot reach each other.
    """
    begin = time.monotonic()
    rendezvous = Rendezvous(topology, timeout_seconds)
    own, config = collect_facts(topology, config_path, overrides)
    shared = None if config is None else SharedFolder(Path(config.run.dir))
    facts = [RankFacts.from_json(tree) for tree in rendezvous.gather("facts", asdict(own)) or ()]
    plan: dict[str, Any] = {}
    if facts:
        token, fault = shared.create_token() if shared is not None else ("", None)
        plan = {"token": token, "fault": fault, "all_reduce": topology.world_size > 1 and can_communicate(facts)}
    plan = rendezvous.broadcast("plan", plan)

    report: dict[str, Any] = {"clock": time.time()}
    if plan["token"] and shared is not None and not topology.is_main:
        report["folder"] = shared.acknowledge(plan["token"], topology.rank)
    if plan["all_reduce"]:
        report |= time_all_reduce(topology, rendezvous.store, own.device != "CPU")
    reports = rendezvous.gather("reports", report)

    exit_code = EXIT_DONE
    if reports is not None:
        if plan["token"] and shared is not None:
            answered = [rank for rank, one in enumerate(reports) if "folder" in one and one["folder"] is None]
            for rank in shared.clean_up(plan["token"], answered):
                reports[rank]["folder"] = "unseen"
        folder = "" if shared is None else str(shared.folder)
        problems = [*find_problems(facts), *find_reported_problems(facts, reports, folder, plan["fault"])]
        for line in problems:
            print(f"error: {line}", file=sys.stderr)
        if not problems:
            for line in describe(facts, reports):
                print(f"preflight: {line}")
            print(f"preflight: no problem found in {time.monotonic() - begin:.1f} s")
        exit_code = EXIT_FAILURE if problems else EXIT_DONE
    exit_code = int(rendezvous.broadcast("end", exit_code))
    rendezvous.close()
    return exit_code


def time_all_reduce(topology: Topology, store: dist.Store, on_gpu: bool) -> dict[str, Any]:
    """Joins a process group and times an all-reduce. Collective.

    Runs in a thread, since these calls may block for much longer than the timeout when the network drops packets.

    Returns:
        `seconds` of the fastest round and the buffer's `bytes`, or the error as `network`.
    """
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome.update(_reduce(topology, store, "nccl" if on_gpu else "gloo"))
        except Exception as error:  # whatever the backend raises is reported
            outcome["network"] = str(error).splitlines()[0]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ALL_REDUCE_SECONDS)
    return dict(outcome) or {"network": f"no answer within {ALL_REDUCE_SECONDS:.0f} s"}


def describe(facts: Sequence[RankFacts], reports: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines to print when there is no problem."""

    nodes = first_of_each_node(facts)
    lines = [
        f"{len(facts)} rank{'s' if len(facts) > 1 else ''} on {len(nodes)} node{'s' if len(nodes) > 1 else ''} "
        f"({', '.join(dict.fromkeys(node.host for node in nodes))}), {facts[0].device}"
    ]
    if "seconds" in reports[0]:
        seconds = max(one["seconds"] for one in reports)
        num_bytes, num_ranks = reports[0]["bytes"], len(facts)
        # As defined by nccl-tests: the bytes that pass each rank's link in each direction.
        bus_bytes = 2 * (num_ranks - 1) / num_ranks * num_bytes
        lines.append(
            f"all-reduce of {num_bytes / 1e6:.0f} MB: {1e3 * seconds:.1f} ms, bus bandwidth "
            f"{bus_bytes / seconds / 1e9:.2f} GB/s"
        )
    disk, memory = facts[0].disk, facts[0].memory
    if disk is not None and memory is not None:
        lines.append(
            f"checkpoints: {disk.count} of {disk.each_bytes / 1e9:.3g} GB; {disk.free_bytes / 1e9:.3g} GB free"
        )
        lines.append(
            f"memory: about {memory.each_bytes / 1e9:.3g} GB a rank; {memory.free_bytes / 1e9:.3g} GB free for "
            f"{memory.count} rank{'s' if memory.count > 1 else ''}"
        )
    return lines


def _reduce(topology: Topology, store: dist.Store, backend: str) -> dict[str, Any]:
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", local_device(topology, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("all_reduce", store),
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timedelta(seconds=ALL_REDUCE_SECONDS),
    )
    num_bytes = _ALL_REDUCE_BYTES[backend]
    seconds = []
    for _ in range(1 + _NUM_ROUNDS):  # the first round opens the connections
        buffer = torch.full((num_bytes // 4,), float(topology.rank + 1), device=device)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(buffer)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
        if not bool((buffer == topology.world_size * (topology.world_size + 1) / 2).all()):
            return {"network": "the sum over all ranks is wrong"}
    return {"seconds": min(seconds[1:]), "bytes": num_bytes}
