"""Keys of a :class:`~sparsebp_cli.backward.execution.grad_store.GradStore`: parameters and their names."""

from __future__ import annotations

from torch import Tensor, nn

from sparsebp_cli.errors import UsageError, did_you_mean

Key = Tensor | str


class Keys:
    """The allowed keys: parameters of a model and their names; without a model, any leaf that requires grad and any
    name.
    """

    def __init__(self, model: nn.Module | None) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise UsageError(f"model must be an nn.Module, got {type(model).__name__}")
        self.model = model
        self._parameters: dict[str, Tensor] = {}
        if model is not None:
            self._parameters = dict(model.named_parameters(remove_duplicate=False))
        # Reversed, so that the first of several names of a parameter remains.
        self._names = {parameter: name for name, parameter in reversed(self._parameters.items())}

    def resolve(self, key: Key) -> Key:
        """Return the key under which an entry is stored: the parameter if it is known, else the name.

        Raises :class:`UsageError` for anything else, or a parameter that is not the model's.
        """
        if isinstance(key, str):
            if self.model is None:
                return key
            if key not in self._parameters:
                near = did_you_mean(key, self._parameters)
                raise UsageError(f"{type(self.model).__name__} has no parameter {key!r}{near}")
            key = self._parameters[key]
        elif not isinstance(key, Tensor):
            raise UsageError(f"a key must be a parameter or its name, got {type(key).__name__}")
        elif self.model is not None and key not in self._names:
            raise UsageError(f"{self.describe(key)} is not a parameter of {type(self.model).__name__}")
        if not key.is_leaf or not key.requires_grad:
            why = "does not require grad" if key.is_leaf else "is a computed tensor"
            raise UsageError(f"{self.describe(key)} {why}: give a parameter, its name, or an input that requires grad")
        return key

    def find(self, key: object) -> Key | None:
        """Return the stored key like :meth:`resolve`; None for an invalid key."""
        if isinstance(key, str):
            return self._parameters.get(key, key)
        return key if isinstance(key, Tensor) else None

    def describe(self, key: Key) -> str:
        """Return the key's description for errors."""
        if isinstance(key, str):
            return repr(key)
        return repr(self._names[key]) if key in self._names else f"a tensor of shape {tuple(key.shape)}"

    def check_fit(self, key: Key, grad: Tensor, like: Tensor, *, on_device: bool = True) -> None:
        """Raise :class:`UsageError` unless a gradient has the shape, kind of number and, with ``on_device``, device of
        ``like``.
        """
        if grad.shape != like.shape:
            allowed = f"allowed: {tuple(like.shape)}"
            raise UsageError(f"{self.describe(key)}: the gradient has shape {tuple(grad.shape)}, {allowed}")
        if grad.is_complex() and not like.is_complex():
            raise UsageError(f"{self.describe(key)}: the gradient is complex, but the weight is real ({like.dtype})")
        if on_device and grad.device != like.device:
            raise UsageError(f"{self.describe(key)}: the gradient is on {grad.device}, allowed: {like.device}")
