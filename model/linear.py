"""A linear layer that declares its role."""

from __future__ import annotations

from torch import nn

from model.parameters import ParameterSpec


class Linear(nn.Linear):
    """y = x Wᵀ without bias; W is undefined until `initialise` or a checkpoint sets it."""

    def __init__(self, in_features: int, out_features: int, spec: ParameterSpec) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.spec = spec

    def reset_parameters(self) -> None:
        """Does nothing, so that construction draws no random numbers."""

    def parameter_specs(self) -> dict[str, ParameterSpec]:
        return {"weight": self.spec}
