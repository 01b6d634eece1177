"""A store of gradients outside of their parameters, to collect, sum and change them before they are applied.

A :class:`GradStore` holds the sums if several backward passes contribute to one optimizer step: segments of a network
that share weights, two losses, or micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn, Self, overload

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from sparsebp_cli.backward.execution.grad_check import check_dtype, check_gradient, check_max_norm, pair_up
from sparsebp_cli.backward.execution.grad_key import Key, Keys
from sparsebp_cli.backward.observe.leaves import accumulate, find_leaves
from sparsebp_cli.errors import UsageError, did_you_mean

_NO_DEFAULT = object()


class GradStore:
    """A store of gradients outside of ``.grad``, by parameter. Works with any model, optimizer and way of
    differentiating.

        store = sbp.GradStore()
        store.backward(loss_a)          # instead of loss_a.backward(); `.grad` is unchanged
        store.backward(loss_b)          # summed
        store.clip(1.0)
        store.apply()                   # moves the sums to `.grad` and empties the store
        optimizer.step()

    Keys are tensors that accumulate gradients (parameters, or inputs that require grad), or names. With a model, a
    parameter and its name are the same key, the store accepts no other key, and errors name parameters. The store
    neither copies nor changes a tensor that is passed in; sums and clipped gradients are new tensors.

    Args:
        model: The model of the parameters; None: any parameters, and :meth:`apply` resolves names.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._keys = Keys(model)
        self._entries: dict[Key, GradEntry] = {}

    def add(self, key: Key, grad: Tensor) -> None:
        """Add a gradient to the entry of a key, or create the entry.

        Args:
            key: A parameter, another leaf that requires grad, or a name.
            grad: A gradient with the shape and device of the parameter, or of the existing entry. The wider of two
                dtypes holds the sum.

        Raises:
            UsageError: The value is not a gradient, the key is invalid, unknown to the model or not a leaf, or shape,
                device or kind of number do not fit.
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

        Hooks on a parameter's gradient (``register_hook``) run here; hooks after its accumulation
        (``register_post_accumulate_grad_hook``) run in :meth:`apply`. Wrappers that reduce gradients over processes
        during the backward, such as DDP, do not reduce these.

        Args:
            outputs: The tensors to differentiate, such as a loss.
            grads: The gradient of each output; None for a scalar loss.

        Raises:
            UsageError: No output depends on a leaf that requires grad, a leaf is not the model's, or outputs and
                gradients do not fit.
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
        """Add all gradients of another store. Gradients of the same parameter are summed.

        Args:
            other: The other store, which is not changed.

        Returns:
            This store.

        Raises:
            UsageError: ``other`` is not a store or is this one, a key is unknown to this store's model, or two
                gradients of one key do not fit.
        """
        if not isinstance(other, GradStore):
            raise UsageError(f"only a GradStore can be merged, got {type(other).__name__}")
        if other is self:
            raise UsageError("a GradStore cannot be merged with itself: every gradient would double")
        keys = [(self._keys.resolve(key), entry) for key, entry in other._entries.items()]
        for key, entry in keys:  # check all before changing any
            if key in self._entries:
                self._keys.check_fit(key, entry.grad, self._entries[key].grad)
        for key, entry in keys:
            entry.is_own = False  # both stores share the tensor now
            self._add(key, entry.grad)
        return self

    @overload
    def pop(self, key: Key) -> Tensor: ...
    @overload
    def pop(self, key: Key, default: None) -> Tensor | None: ...

    def pop(self, key: Key, default: object = _NO_DEFAULT) -> Tensor | None:
        """Remove one gradient and return it.

        Args:
            key: A parameter or a name.
            default: Pass None to get None if there is no gradient.

        Returns:
            The gradient.

        Raises:
            UsageError: There is no gradient and no default, or the key is invalid.
        """
        key = self._keys.resolve(key)
        if key not in self._entries:
            if default is None:
                return None
            raise UsageError(self._missing(key))
        return self._entries.pop(key).grad

    def items(self) -> Iterator[tuple[Key, Tensor]]:
        """Return every key with its gradient, in the order in which keys were first added.

        A key is the parameter if the store knows it, else the given name.
        """
        return ((key, entry.grad) for key, entry in list(self._entries.items()))

    def apply(self, model: nn.Module | None = None) -> None:
        """Add all gradients to ``.grad``, like a backward pass, and empty the store.

        Each parameter gets its whole sum at once, and its post-accumulation hooks run once. Gradients move to their
        parameter's device and dtype.

        Args:
            model: Resolves names that the store does not know; only its parameters are allowed.

        Raises:
            UsageError: A name or parameter is not the model's, a name has no model, or shapes do not fit. Then no
                gradient is applied.
        """
        known = self._keys if model is None else Keys(model)
        targets: list[tuple[Tensor, Key]] = []
        for key, entry in self._entries.items():
            target = known.resolve(key)
            if isinstance(target, str):
                raise UsageError(f"{target!r} is a name, but the store has no model: give one to GradStore or apply")
            known.check_fit(target, entry.grad, target, on_device=False)
            targets.append((target, key))
        for target, key in targets:
            # Remove the entry first, so that the sum is freed early, and a failing hook leaves the other entries here.
            entry = self._entries.pop(key)
            accumulate(target, entry.grad, is_spare=entry.is_own)

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients together, like ``torch.nn.utils.clip_grad_norm_``.

        Args:
            norm_type: 2.0, ``inf`` or another p.

        Returns:
            A scalar tensor; 0 for an empty store.
        """
        return get_total_norm([entry.values() for entry in self._entries.values()], norm_type)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients down so that their total norm is at most ``max_norm``.

        Args:
            max_norm: The bound, greater than 0.
            norm_type: 2.0, ``inf`` or another p, as in :meth:`norm`.

        Returns:
            The norm before scaling.

        Raises:
            UsageError: ``max_norm`` is not a number above 0.
        """
        check_max_norm(max_norm)
        norm = self.norm(norm_type)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # clip_grad_norm_'s own formula
        for entry in self._entries.values():
            entry.scale(scale)
        return norm

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> GradStore:
        """Return a store with the same gradients on another device or in another dtype, such as a wider one for sums.

        Args:
            device: The device; None keeps it.
            dtype: The dtype; None keeps it.

        Returns:
            Another store. Gradients that need no change are shared with this one; neither store changes them.

        Raises:
            UsageError: ``dtype`` is not a floating-point dtype.
        """
        if dtype is not None:
            check_dtype(dtype)
        store = GradStore(self._keys.model)
        for key, entry in self._entries.items():
            # `to` may return the same tensor.
            entry.is_own = False
            store._entries[key] = GradEntry(entry.grad.to(device=device, dtype=dtype))
        return store

    def __getitem__(self, key: Key) -> Tensor:
        """Return the gradient of a key; it stays in the store.

        Args:
            key: A parameter or a name.

        Returns:
            The gradient.

        Raises:
            UsageError: The key has no gradient.
        """
        key = self._keys.resolve(key)
        if key not in self._entries:
            raise UsageError(self._missing(key))
        return self._entries[key].grad

    def __contains__(self, key: object) -> bool:
        """Return whether there is a gradient of a parameter or name."""
        found = self._keys.find(key)
        return found is not None and found in self._entries

    def __iter__(self) -> Iterator[Key]:
        """Return the keys, in the order of :meth:`items`."""
        return iter(list(self._entries))

    def __len__(self) -> int:
        """Return how many parameters have a gradient."""
        return len(self._entries)

    def __repr__(self) -> str:
        """Return the number of gradients and their bytes."""
        size = sum(entry.grad.numel() * entry.grad.element_size() for entry in self._entries.values())
        return f"GradStore({len(self)} gradients, {size} bytes)"

    def __reduce_ex__(self, _: object) -> NoReturn:
        """Refuse copies: their keys would be copied parameters, which are not trained.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "a GradStore cannot be copied or pickled, because its keys are parameters: GradStore().merge(store) "
            "makes a store with the same gradients"
        )

    def _add(self, key: Key, grad: Tensor) -> None:
        entry = self._entries.get(key)
        self._entries[key] = GradEntry(grad) if entry is None else entry.plus(grad)

    def _missing(self, key: Key) -> str:
        near = did_you_mean(key, (k for k in self._entries if isinstance(k, str))) if isinstance(key, str) else ""
        return f"the store holds no gradient of {self._keys.describe(key)}{near}"


@dataclass
class GradEntry:
    """A gradient, and whether the store may change its tensor."""

    grad: Tensor
    # Change only tensors that the store computed itself: the caller may use others elsewhere, and autograd can return
    # one tensor for two parameters.
    is_own: bool = False

    def plus(self, grad: Tensor) -> GradEntry:
        """Return the sum with a gradient of the same shape and device, in this entry's own tensor if possible."""
        fits = torch.result_type(self.grad, grad) == self.grad.dtype and self.grad.is_sparse == grad.is_sparse
        if self.is_own and fits:
            self.grad += grad
            return self
        # The sparse one must be second, since torch does not support sparse + dense.
        first, second = (grad, self.grad) if self.grad.is_sparse else (self.grad, grad)
        return GradEntry(first + second, is_own=True)

    def scale(self, factor: Tensor) -> None:
        """Multiply by a scalar tensor on any device."""
        factor = factor.to(self.grad.device)
        self.grad, self.is_own = self.grad.mul_(factor) if self.is_own else self.grad * factor, True

    def values(self) -> Tensor:
        """Return the stored entries; for a dense gradient all entries."""
        return self.grad.coalesce().values() if self.grad.is_sparse else self.grad
