"""What a model is made of, by one walk over its modules: in a small model's step, walks are a good part of the time."""

from __future__ import annotations

from torch import Tensor, nn


class Anatomy:
    """Modules, parameters and buffers by name, each once, in the model's order; as they are at the moment."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        self._visit(model, "", set())

    @property
    def modes(self) -> tuple[bool, ...]:
        """Whether each module is in training mode."""
        return tuple([module.training for module in self.modules.values()])

    def _visit(self, module: nn.Module, prefix: str, known: set[int]) -> None:
        known.add(id(module))
        self.modules[prefix[:-1]] = module
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in known:
                known.add(id(parameter))
                self.parameters[prefix + name] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in known:
                known.add(id(buffer))
                self.buffers[prefix + name] = buffer
        for name, child in module._modules.items():
            if child is not None and id(child) not in known:
                self._visit(child, f"{prefix}{name}.", known)
