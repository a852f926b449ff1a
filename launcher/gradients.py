"""The size of the gradients that a script's optimizers step with."""

import sys
from typing import Any, Final

from muri.launcher.isolation.import_hooks import after_import

STEPS: Final = 3
"""So many steps of one optimizer are looked at; in the first some parameters may have no gradient yet."""

_MIB: Final = 1024**2


class GradientSize:
    """Listens to the first steps of all optimizers of the process, from PyTorch's import on."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        after_import("torch", self._listen)

    @property
    def mib(self) -> float | None:
        """Size of all gradients of an iteration; None when no optimizer stepped."""
        return sum(self._bytes.values()) / _MIB if self._bytes else None

    def _listen(self) -> None:
        try:
            from torch.optim.optimizer import register_optimizer_step_post_hook  # (once it is there)

            register_optimizer_step_post_hook(self._stepped)
        except Exception as error:
            print(f"muri: the size of the gradients is not measured: {error}", file=sys.stderr)

    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        key = id(optimizer)
        steps = self._steps[key] = self._steps.get(key, 0) + 1
        if steps > STEPS:
            return
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        size = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
        self._bytes[key] = max(size, self._bytes.get(key, 0))
