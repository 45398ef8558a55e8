"""Draws which processes are killed, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """One planned kill.

    Attributes:
        step: The kill happens once this step is recorded (0: during the start), or inside its save.
        in_save: Whether it happens inside the save.
        whole_group: Whether all processes are killed at once, or one random rank.
    """

    step: int
    in_save: bool
    whole_group: bool


@dataclass(frozen=True)
class Pace:
    """Seconds that the uninterrupted run took until its first step, per step, and per save."""

    start: float
    step: float
    save: float


def make_plans(rng: random.Random, num_kills: int, last_step: int, every_steps: int) -> list[Plan]:
    """Draws random kills and sorts them by step, so that each is reached; half of them are inside a save.

    None is in the last save, unless it is the only one, or just before the end: the run might finish first.
    """
    save_steps = range(every_steps, last_step, every_steps) or [last_step]
    plans = []
    for number in range(num_kills):
        in_save = number % 2 == 0
        step = rng.choice(save_steps) if in_save else rng.randrange(max(1, last_step - 3))
        plans.append(Plan(step, in_save, whole_group=rng.random() < 0.5))
    return sorted(plans, key=lambda plan: (plan.step, plan.in_save))
