"""Optimizer groups: which parameters share a learning rate and weight decay."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from model.parameters import Kind, ParameterSpec


class GroupName(str, enum.Enum):
    """The optimizer groups, in their order in the optimizer.

    Learning rate and weight decay are set per group, so the query/key parameters need two: the matrices
    decay, the gains of query/key and latent norms do not. The second one exists only in models with such norms. An
    untied output head is one of `DECAY`, unless the optimizer treats it otherwise than hidden matrices (`HEAD`).
    """

    QUERY_KEY = "query_key"
    QUERY_KEY_NO_DECAY = "query_key_no_decay"
    DECAY = "decay"
    NO_DECAY = "no_decay"
    HEAD = "head"

    def __str__(self) -> str:
        return self.value

    @property
    def is_query_key(self) -> bool:
        return self in (GroupName.QUERY_KEY, GroupName.QUERY_KEY_NO_DECAY)

    @property
    def is_decayed(self) -> bool:
        return self in (GroupName.QUERY_KEY, GroupName.DECAY, GroupName.HEAD)

    @property
    def is_hidden(self) -> bool:
        """Whether its parameters are matrices between hidden states, where the output head has a group of its own."""
        return self in (GroupName.QUERY_KEY, GroupName.DECAY)


def group_of(spec: ParameterSpec, separate_head: bool = False) -> GroupName:
    """The optimizer group of a parameter.

    Args:
        separate_head: whether the output head has a group of its own.
    """
    if separate_head and spec.kind is Kind.HEAD:
        return GroupName.HEAD
    if spec.is_query_key:
        return GroupName.QUERY_KEY if spec.is_decayed else GroupName.QUERY_KEY_NO_DECAY
    return GroupName.DECAY if spec.is_decayed else GroupName.NO_DECAY


def group_names(specs: Mapping[str, ParameterSpec], separate_head: bool = False) -> dict[GroupName, list[str]]:
    """Parameter names of every group that has any; groups in `GroupName`'s order, names in `specs`' order."""
    members: dict[GroupName, list[str]] = {group: [] for group in GroupName}
    for name, spec in specs.items():
        members[group_of(spec, separate_head)].append(name)
    return {group: names for group, names in members.items() if names}
