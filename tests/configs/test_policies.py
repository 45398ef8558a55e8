"""The policies' names in the schema and their objects belong together."""

from __future__ import annotations

from typing import get_args

import pytest

from configs.policies import POLICIES
from configs.schema import QkControlConfig


def test_every_name_in_the_schema_has_an_object_and_the_reverse() -> None:
    names = get_args(QkControlConfig.model_fields["policy"].annotation)
    assert sorted(names) == sorted(POLICIES)
    assert all(QkControlConfig(policy=name).chosen.name == name for name in names)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_own_keys_are_keys_of_the_section(policy) -> None:
    assert set(policy.own_keys) <= set(QkControlConfig.model_fields)
