"""Optimizer groups: sets of parameters that share a learning rate and weight decay."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from model.parameters import Kind, ParameterSpec


class GroupName(str, enum.Enum):
    """The optimizer groups, in their order in the optimizer.

    Learning rate and weight decay are set per group, so the query/key parameters need two groups: matrices decay, but
    the gains of query/key and latent norms and the scales of Scalable-Softmax do not. The second group exists only in
    models with such parameters. An untied output head belongs to `DECAY`, or to `HEAD` if the optimizer treats it
    differently from hidden matrices.
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
        """Whether its parameters are matrices between hidden states, if the output head has its own group."""
        return self in (GroupName.QUERY_KEY, GroupName.DECAY)


def group_of(spec: ParameterSpec, separate_head: bool = False) -> GroupName:
    """Returns the optimizer group of a parameter.

    Args:
        separate_head: Whether the output head has its own group.
    """
    if separate_head and spec.kind is Kind.HEAD:
        return GroupName.HEAD
    if spec.is_query_key:
        return GroupName.QUERY_KEY if spec.is_decayed else GroupName.QUERY_KEY_NO_DECAY
    return GroupName.DECAY if spec.is_decayed else GroupName.NO_DECAY


def group_names(specs: Mapping[str, ParameterSpec], separate_head: bool = False) -> dict[GroupName, list[str]]:
    """Returns the parameter names of every non-empty group, in the order of `GroupName` and, within it, of `specs`."""
    members: dict[GroupName, list[str]] = {group: [] for group in GroupName}
    for name, spec in specs.items():
        members[group_of(spec, separate_head)].append(name)
    return {group: names for group, names in members.items() if names}
