"""The query/key policies, with the properties that other parts of the program depend on.

`qk_control.policy` chooses one of these objects. Parameter groups, the memory plan, the checks of a configuration, the
monitor and sweeps read its attributes; the rules of the policies that scale steps are in `launch.attention_control`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QkPolicy:
    """One value of `qk_control.policy`.

    Attributes:
        name: The value.
        uses_alpha: Whether the query/key groups have `qk_control.alpha` times the base learning rate.
        scales_steps: Whether each step of the query/key weights is scaled by head or layer, relative to the group's
            learning rate. The fp32 masters of these weights are then kept during the step.
        own_keys: Keys below `qk_control` that only this policy reads.
        max_alpha: Largest allowed alpha; None: unlimited.
    """

    name: str
    uses_alpha: bool = True
    scales_steps: bool = False
    own_keys: tuple[str, ...] = ()
    max_alpha: float | None = None

    def learning_rate_scale(self, alpha: float, is_query_key: bool) -> float:
        """Returns the ratio of a parameter group's learning rate to the base learning rate (arXiv 2511.21377).

        Args:
            alpha: `qk_control.alpha`.
            is_query_key: Whether the group holds query/key weights.
        """
        return alpha if self.uses_alpha and is_query_key else 1.0


NONE = QkPolicy("none", uses_alpha=False)
CONSTANT = QkPolicy("constant")
QUACK = QkPolicy("quack", scales_steps=True, own_keys=("max_ratio",))
ADAPTIVE = QkPolicy("adaptive", scales_steps=True, own_keys=("adaptive",), max_alpha=1.0)

POLICIES = {policy.name: policy for policy in (NONE, CONSTANT, QUACK, ADAPTIVE)}
