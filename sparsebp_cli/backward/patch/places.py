"""The modules of a model as they were when it was attached: overrides and decisions know these, and no later ones."""

from __future__ import annotations

from torch import nn

from sparsebp_cli.errors import UsageError


class ModulePlaces:
    """Finds a module that was replaced, as new heads are and embeddings that were resized.

    Wrappers are no replacement: ``torch.compile`` of a layer, activation checkpointing, an adapter around a linear.
    """

    def __init__(self, model: nn.Module) -> None:
        # The dictionaries themselves: looking a module up by its path takes ten times as long.
        self._places = [
            (parent._modules, child, module, f"{name}.{child}".lstrip("."))  # noqa: SLF001 - named_children are copies
            for name, parent in model.named_modules()
            for child, module in parent._modules.items()  # noqa: SLF001
        ]

    def check(self) -> None:
        """Raise :class:`UsageError` if a module is another one."""
        for modules, child, module, name in self._places:
            now = modules.get(child)
            if now is not module and (now is None or all(inner is not module for inner in now.modules())):
                raise UsageError(
                    f"{name!r} was replaced after the model was attached: call engine.detach(), change the model, make "
                    "its optimizer, and attach it again"
                )
