"""Gradients apart from the parameters that they belong to: collected, summed, changed, and then applied.

Several backward passes whose gradients must be summed before one optimizer step need one place for the sums: the
segments of a network that share weights, two losses, or micro-batches. That place is a :class:`GradStore`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Self, overload

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from sparsebp_cli.backward.execution.grad_check import check_dtype, check_gradient, check_max_norm, pair_up
from sparsebp_cli.backward.execution.grad_key import Key, Keys
from sparsebp_cli.backward.observe.leaves import accumulate, find_leaves
from sparsebp_cli.errors import UsageError, did_you_mean

_NO_DEFAULT = object()


class GradStore:
    """Gradients by parameter. Works with any model, optimizer and way of differentiating.

        store = sbp.GradStore()
        store.backward(loss_a)          # in place of loss_a.backward(): `.grad` stays as it is
        store.backward(loss_b)          # summed
        store.clip(1.0)
        store.apply()                   # to `.grad`, and the store is empty
        optimizer.step()

    Keys are tensors that gradients accumulate in (parameters, or an input that requires grad), or names. With a model,
    names and parameters are two ways to say the same, nothing else is accepted, and errors name parameters. A tensor
    that is handed in is neither copied nor changed; sums and clipped gradients are new tensors of the store's own.

    Args:
        model: Whose parameters these are; None: any parameters, and names stand for themselves until :meth:`apply`.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._keys = Keys(model)
        self._entries: dict[Key, GradEntry] = {}

    def add(self, key: Key, grad: Tensor) -> None:
        """Add a gradient to what is there under a key, or put it there.

        Args:
            key: A parameter, another leaf that requires grad, or a name.
            grad: Of the parameter's shape and device, or of its entry's where there is one. Of two dtypes the wider
                one holds the sum.

        Raises:
            UsageError: Something other than a gradient is added, the key is none, foreign to the model or not a leaf,
                or shape, device or kind of number do not fit.
        """
        check_gradient(grad)
        key = self._keys.resolve(key)
        entry = self._entries.get(key)
        like = entry.grad if entry is not None else key if isinstance(key, Tensor) else grad
        self._keys.check_fit(key, grad, like)
        self._add(key, grad.detach())

    def backward(
        self, outputs: Tensor | Iterable[Tensor], grads: Tensor | Iterable[Tensor | None] | None = None
    ) -> None:
        """Differentiate, and add the gradients of all leaves to the store. ``.grad`` is neither read nor changed.

        Hooks on a parameter's gradient (``register_hook``) run here; those that follow its accumulation
        (``register_post_accumulate_grad_hook``) in :meth:`apply`. What reduces gradients over processes in the backward
        itself, as DDP does, takes no part.

        Args:
            outputs: What is differentiated, such as a loss.
            grads: Gradient of each output; None for a loss of one number.

        Raises:
            UsageError: Nothing that is differentiated depends on a leaf that requires grad, a leaf is foreign, or
                outputs and gradients do not fit.
        """
        pairs = pair_up(outputs, grads)
        leaves = find_leaves(root for root, _ in pairs)
        for leaf in leaves:
            self._keys.resolve(leaf)
        found = torch.autograd.grad([r for r, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
        for leaf, grad in zip(leaves, found, strict=True):
            if grad is not None:
                self._add(leaf, grad)

    def merge(self, other: GradStore) -> Self:
        """Add everything that another store holds; shared parameters are summed.

        Args:
            other: Stays as it is.

        Returns:
            This store.

        Raises:
            UsageError: It is no store or this one, a key is foreign to this store's model, or two gradients of one key
                do not fit.
        """
        if not isinstance(other, GradStore):
            raise UsageError(f"only a GradStore can be merged, got {type(other).__name__}")
        if other is self:
            raise UsageError("a store cannot be merged with itself: every gradient would double")
        keys = [(self._keys.resolve(key), entry) for key, entry in other._entries.items()]
        for key, entry in keys:  # all of them before the first changes
            if key in self._entries:
                self._keys.check_fit(key, entry.grad, self._entries[key].grad)
        for key, entry in keys:
            entry.is_own = False  # from now on it is in two stores
            self._add(key, entry.grad)
        return self

    @overload
    def pop(self, key: Key) -> Tensor: ...
    @overload
    def pop(self, key: Key, default: None) -> Tensor | None: ...

    def pop(self, key: Key, default: object = _NO_DEFAULT) -> Tensor | None:
        """Take one gradient out.

        Args:
            key: Whose.
            default: None, to be returned where there is no gradient.

        Returns:
            The gradient.

        Raises:
            UsageError: There is none, and no default was given; or the key cannot be one.
        """
        key = self._keys.resolve(key)
        if key not in self._entries:
            if default is None:
                return None
            raise UsageError(self._missing(key))
        return self._entries.pop(key).grad

    def items(self) -> Iterator[tuple[Key, Tensor]]:
        """Return every key with its gradient, in the order in which keys were first added.

        Keys are parameters where the store knows them, else the names that were given.
        """
        return ((key, entry.grad) for key, entry in list(self._entries.items()))

    def apply(self, model: nn.Module | None = None) -> None:
        """Move all gradients to ``.grad``, as a backward pass would: added to what is there. The store is empty then.

        Each parameter receives its whole sum at once, and hooks that follow an accumulation run once. A gradient on
        another device or of another dtype is brought to its parameter's.

        Args:
            model: Where names are looked up that the store does not know; its parameters are the only ones allowed.

        Raises:
            UsageError: A name or parameter is not the model's, a name has no model, or shapes do not fit. Nothing is
                applied then.
        """
        known = self._keys if model is None else Keys(model)
        targets: list[tuple[Tensor, Key]] = []
        for key, entry in self._entries.items():
            target = known.resolve(key)
            if isinstance(target, str):
                raise UsageError(f"{target!r} is a name, and the store has no model: give it to apply, or to GradStore")
            known.check_fit(target, entry.grad, target, on_device=False)
            targets.append((target, key))
        for target, key in targets:
            entry = self._entries.pop(key)
            accumulate(target, entry.grad, is_spare=entry.is_own)

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients together, as ``torch.nn.utils.clip_grad_norm_`` does.

        Args:
            norm_type: 2.0, ``inf`` or another p.

        Returns:
            One number, in a tensor; 0 for an empty store.
        """
        return get_total_norm([entry.values() for entry in self._entries.values()], norm_type)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients down so that their norm is at most a number.

        Args:
            max_norm: More than 0.
            norm_type: As in :meth:`norm`.

        Returns:
            The norm before.

        Raises:
            UsageError: ``max_norm`` is no number above 0.
        """
        check_max_norm(max_norm)
        norm = self.norm(norm_type)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # clip_grad_norm_'s own formula
        for entry in self._entries.values():
            entry.scale(scale)
        return norm

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> GradStore:
        """Return a store with the same gradients on another device, or in another dtype, such as wider sums.

        Args:
            device: None: as they are.
            dtype: None: as they are.

        Returns:
            Another store; gradients that need no change are shared with this one, and changed by neither.

        Raises:
            UsageError: ``dtype`` is none of floating point.
        """
        if dtype is not None:
            check_dtype(dtype)
        store = GradStore(self._keys.model)
        for key, entry in self._entries.items():
            entry.is_own = False
            store._entries[key] = GradEntry(entry.grad.to(device=device, dtype=dtype))
        return store

    def __getitem__(self, key: Key) -> Tensor:
        """Return the gradient of a parameter.

        Args:
            key: A parameter or a name.

        Returns:
            The gradient; it stays in the store.

        Raises:
            UsageError: There is none.
        """
        key = self._keys.resolve(key)
        if key not in self._entries:
            raise UsageError(self._missing(key))
        return self._entries[key].grad

    def __contains__(self, key: object) -> bool:
        """Return whether there is a gradient for a parameter or name; a foreign one has none."""
        found = self._keys.find(key)
        return found is not None and found in self._entries

    def __iter__(self) -> Iterator[Key]:
        """Return the keys, as :meth:`items` does."""
        return iter(list(self._entries))

    def __len__(self) -> int:
        """Return how many parameters have a gradient."""
        return len(self._entries)

    def __repr__(self) -> str:
        """Return the number of gradients and their bytes."""
        size = sum(entry.grad.numel() * entry.grad.element_size() for entry in self._entries.values())
        return f"GradStore({len(self)} gradients, {size} bytes)"

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Refuse copies: their keys would be copies of the parameters, which nobody trains.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "a GradStore cannot be copied or pickled, since its keys are parameters: GradStore().merge(store) is "
            "another with the same gradients"
        )

    def _add(self, key: Key, grad: Tensor) -> None:
        entry = self._entries.get(key)
        self._entries[key] = GradEntry(grad) if entry is None else entry.plus(grad)

    def _missing(self, key: Key) -> str:
        near = did_you_mean(key, (k for k in self._entries if isinstance(k, str))) if isinstance(key, str) else ""
        return f"the store holds no gradient of {self._keys.describe(key)}{near}"


@dataclass
class GradEntry:
    """A gradient, and whether it is the store's own.

    Args:
        grad: The gradient.
        is_own: What was handed in may be used elsewhere, and autograd returns one tensor for two parameters where it
            can: such a gradient is never changed. What the store has computed itself is.
    """

    grad: Tensor
    is_own: bool = False

    def plus(self, grad: Tensor) -> GradEntry:
        """Return the sum, in this entry's own tensor where that can hold it.

        Args:
            grad: Of the same shape, on the same device.

        Returns:
            This entry or another.
        """
        fits = torch.result_type(self.grad, grad) == self.grad.dtype and self.grad.is_sparse == grad.is_sparse
        if self.is_own and fits:
            self.grad += grad
            return self
        first, second = (grad, self.grad) if self.grad.is_sparse else (self.grad, grad)  # sparse + dense is not built
        return GradEntry(first + second, is_own=True)

    def scale(self, factor: Tensor) -> None:
        """Multiply by one number, a tensor on any device."""
        factor = factor.to(self.grad.device)
        self.grad, self.is_own = self.grad.mul_(factor) if self.is_own else self.grad * factor, True

    def values(self) -> Tensor:
        """Return the entries that are stored: all of a dense gradient."""
        return self.grad.coalesce().values() if self.grad.is_sparse else self.grad
