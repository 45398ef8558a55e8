"""Compares the facts of all ranks and returns one line for each problem, with its node and remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from configs.load import differences
from launch.preflight_checks.facts import Need, RankFacts

MAX_CLOCK_SECONDS = 5.0
_MAX_NAMED = 3
_GIGABYTE = 1e9
_WRITABLE = "give this user write permission, or choose another run.dir"


def find_problems(facts: Sequence[RankFacts]) -> list[str]:
    """Returns all problems that the ranks' facts, given in rank order, reveal."""
    nodes = first_of_each_node(facts)
    problems = list(dict.fromkeys(f"{name_node(rank)}: {fault}" for rank in facts for fault in rank.faults))
    problems += _compare(nodes, lambda rank: rank.sources, _source_problem)
    problems += _compare(nodes, lambda rank: rank.versions, _version_problem)
    problems += _compare([rank for rank in nodes if rank.config is not None], lambda rank: rank.config, _config_problem)
    problems += _compare([rank for rank in nodes if rank.data], lambda rank: rank.data, _data_problem)
    problems += _compare(nodes, lambda rank: rank.device == "CPU", _device_problem)
    problems += [_sharing_problem(ranks) for ranks in _ranks_that_share(facts)]
    problems += _memory_problems(facts, nodes)
    problems += [_disk_problem(rank, rank.disk) for rank in facts if rank.disk is not None and not rank.disk.is_met]
    if len({rank.host for rank in nodes}) > 1:
        problems += [
            f"{name_node(rank)}: its host name resolves to {rank.loopback}, which other nodes cannot reach; set "
            "GLOO_SOCKET_IFNAME to the network's interface, or fix /etc/hosts"
            for rank in nodes
            if rank.loopback is not None
        ]
    return problems


def can_communicate(facts: Sequence[RankFacts]) -> bool:
    """Whether an all-reduce can be expected to work, or at least to fail quickly."""
    is_alike = len({(rank.versions["torch"], rank.device == "CPU") for rank in facts}) == 1
    return (
        is_alike
        and not _ranks_that_share(facts)
        and (len({rank.host for rank in facts}) == 1 or all(rank.loopback is None for rank in facts))
    )


def find_reported_problems(
    facts: Sequence[RankFacts], reports: Sequence[Mapping[str, Any]], folder: str, folder_fault: str | None
) -> list[str]:
    """Returns the problems that the ranks' reports of their common checks reveal.

    Args:
        facts: The facts of all ranks, in rank order.
        reports: For each rank `clock`, read in seconds at the same moment; `folder`, if it tried to acknowledge rank
            0's file in `run.dir`, see `SharedFolder.acknowledge`; `network`, the error if the all-reduce failed.
        folder: `run.dir` as rank 0 names it.
        folder_fault: Why rank 0 cannot write to it; None if it can.
    """
    problems = _clock_problems(facts, [report["clock"] for report in reports])
    if folder_fault is not None:
        problems.append(f"{name_node(facts[0])}: run.dir: {folder} cannot be written: {folder_fault}; {_WRITABLE}")
    for rank in first_of_each_node(facts):
        fault = reports[rank.rank].get("folder")
        if fault == "unseen":
            problems.append(
                f"{name_node(rank)}: run.dir: {folder} is not the folder that {name_node(facts[0])} has at that "
                "path; mount the same one on every node, or use its absolute path"
            )
        elif fault is not None:
            problems.append(f"{name_node(rank)}: run.dir: {folder} cannot be written: {fault}; {_WRITABLE}")
    network: dict[str, list[RankFacts]] = {}
    for rank in facts:
        if "network" in reports[rank.rank]:
            network.setdefault(reports[rank.rank]["network"], []).append(rank)
    for fault, ranks in network.items():
        names = ", ".join(dict.fromkeys(name_node(rank) for rank in ranks))
        problems.append(
            f"{names}: the all-reduce over all ranks failed: {fault}; check the firewall between the nodes, and "
            "NCCL_SOCKET_IFNAME or, on CPU, GLOO_SOCKET_IFNAME"
        )
    return problems


def _clock_problems(facts: Sequence[RankFacts], clocks: Sequence[float]) -> list[str]:
    median = sorted(clocks)[(len(clocks) - 1) // 2]
    problems = []
    for rank in first_of_each_node(facts):
        offset = clocks[rank.rank] - median
        if abs(offset) > MAX_CLOCK_SECONDS:
            direction = "ahead of" if offset > 0 else "behind"
            problems.append(
                f"{name_node(rank)}: its clock is {abs(offset):.0f} s {direction} the others'; synchronise it "
                "(chronyd or systemd-timesyncd)"
            )
    return problems


def first_of_each_node(facts: Sequence[RankFacts]) -> list[RankFacts]:
    """Returns the facts of each node's lowest rank, ordered by node."""
    first: dict[int, RankFacts] = {}
    for rank in facts:
        first.setdefault(rank.node, rank)
    return [first[node] for node in sorted(first)]


def name_node(rank: RankFacts) -> str:
    """Returns the name of a rank's node in messages."""
    return f"node {rank.node} ({rank.host})"


def _compare(
    nodes: Sequence[RankFacts],
    value_of: Callable[[RankFacts], Any],
    describe: Callable[[Any, Any, str], str],
) -> list[str]:
    """Returns a line for each node that differs from the majority; ties go to the group with the lowest node."""
    values = [repr(value_of(rank)) for rank in nodes]
    if len(set(values)) < 2:
        return []
    usual = Counter(values).most_common(1)[0][0]  # the first one on a tie
    reference = nodes[values.index(usual)]
    return [
        f"{name_node(rank)}: {describe(value_of(rank), value_of(reference), name_node(reference))}"
        for rank, value in zip(nodes, values, strict=True)
        if value != usual
    ]


def _source_problem(ours: Mapping[str, str], usual: Mapping[str, str], elsewhere: str) -> str:
    paths = [path for path in sorted({*ours, *usual}) if ours.get(path) != usual.get(path)]
    return f"different source code than {elsewhere}: {_some(paths)}; check out the same revision"


def _version_problem(ours: Mapping[str, str], usual: Mapping[str, str], elsewhere: str) -> str:
    names = [name for name in dict.fromkeys((*ours, *usual)) if ours.get(name) != usual.get(name)]
    here = [f"{name} {ours.get(name, 'none')} instead of {usual.get(name, 'none')}" for name in names]
    return f"different versions than {elsewhere}: {', '.join(here)}; install the same ones (bash launch/setup.sh)"


def _config_problem(ours: Mapping[str, Any], usual: Mapping[str, Any], elsewhere: str) -> str:
    changes = [f"{key} is {now} instead of {before}" for key, before, now in differences(dict(usual), dict(ours))]
    return f"different configuration than {elsewhere}: {_some(changes)}; use the same file and arguments"


def _data_problem(ours: Mapping[str, str], usual: Mapping[str, str], elsewhere: str) -> str:
    keys = [key for key in dict.fromkeys((*ours, *usual)) if ours.get(key) != usual.get(key)]
    return f"different data than {elsewhere}: {_some(keys)} (by manifest, or file sizes and samples); copy it again"


def _device_problem(is_cpu: bool, usual_is_cpu: bool, elsewhere: str) -> str:
    here, there = ("no GPU", "has one") if is_cpu else ("a GPU", "has none")
    return f"{here} is visible, while {elsewhere} {there}; check nvidia-smi and CUDA_VISIBLE_DEVICES"


def _ranks_that_share(facts: Sequence[RankFacts]) -> list[list[RankFacts]]:
    """Returns the ranks of each GPU that several ranks share; NCCL allows one rank per GPU."""
    ranks: dict[str, list[RankFacts]] = {}
    for rank in facts:
        if rank.device_id:
            ranks.setdefault(rank.device_id, []).append(rank)
    return [sharing for sharing in ranks.values() if len(sharing) > 1]


def _sharing_problem(ranks: Sequence[RankFacts]) -> str:
    names = ", ".join(dict.fromkeys(name_node(rank) for rank in ranks))
    numbers = ", ".join(str(rank.rank) for rank in ranks)
    return (
        f"{names}: ranks {numbers} share one {ranks[0].device}; start one rank for each GPU, and check "
        "CUDA_VISIBLE_DEVICES"
    )


def _memory_problems(facts: Sequence[RankFacts], nodes: Sequence[RankFacts]) -> list[str]:
    problems = []
    lowest = {rank.rank for rank in nodes}
    for rank in facts:
        need = rank.memory
        if need is None or need.is_met or (rank.device == "CPU" and rank.rank not in lowest):
            continue
        where = "memory" if rank.device == "CPU" else f"memory of rank {rank.rank}'s {rank.device}"
        share = f", {need.count} ranks" if need.count > 1 else ""
        problems.append(
            f"{name_node(rank)}: {_gigabytes(need.free_bytes)} of {where} are free, but the run needs about "
            f"{_gigabytes(need.each_bytes * need.count)}{share}; stop what else uses it, or set a higher "
            "deepspeed.zero_stage, train.activation_checkpointing or a lower train.micro_batch_size"
        )
    return problems


def _disk_problem(rank: RankFacts, need: Need) -> str:
    return (
        f"{name_node(rank)}: run.dir: {_gigabytes(need.free_bytes)} are free, but {need.count} checkpoints of "
        f"{_gigabytes(need.each_bytes)} (checkpoint.keep_last and the one being written) need "
        f"{_gigabytes(need.each_bytes * need.count - need.used_bytes)} more; free disk space or choose another run.dir"
    )


def _some(items: Sequence[str]) -> str:
    more = len(items) - _MAX_NAMED
    return ", ".join(items[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / _GIGABYTE:.3g} GB"
