"""Which kills are made, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """One kill to come.

    Attributes:
        step: kill once so many steps are recorded (0: during the start), or inside the save of this step.
        in_save: which of the two.
        whole_group: all processes at once, or one random rank.
    """

    step: int
    in_save: bool
    whole_group: bool


@dataclass(frozen=True)
class Pace:
    """Seconds that the uninterrupted run took to its first step, for a step and for a save."""

    start: float
    step: float
    save: float


def make_plans(rng: random.Random, num_kills: int, last_step: int, every_steps: int) -> list[Plan]:
    """Random kills in the order of their steps, so that each is reached; every second one is inside a save.

    None is in the last save where there are others, nor just before the end: the run might finish first.
    """
    save_steps = range(every_steps, last_step, every_steps) or [last_step]
    plans = []
    for number in range(num_kills):
        in_save = number % 2 == 0
        step = rng.choice(save_steps) if in_save else rng.randrange(max(1, last_step - 3))
        plans.append(Plan(step, in_save, whole_group=rng.random() < 0.5))
    return sorted(plans, key=lambda plan: (plan.step, plan.in_save))
