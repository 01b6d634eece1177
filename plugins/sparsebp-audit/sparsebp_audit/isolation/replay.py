"""Run a script's loss again with other values of the model's outputs.

A derivative does not show what a script has detached, such as weights that it normalises over the batch. So the torch
functions between the model's outputs and the loss are recorded, and run again with one example's outputs changed. If
the gradient of another example's outputs changes, the loss couples them.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from sparsebp_audit.isolation.channel import Forward, find_owners

MOST_EXAMPLES = 16  # examples to change
# Two sizes of the change: a small one, and one that also changes an order or a threshold.
CHANGES = ((1.0, 0.1), (-2.0, 1.0))
COUPLED = 1e-4  # relative change of a gradient that rounding does not explain
WRITERS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__", "__iand__"}
SAME = 1e-5  # relative difference of the loss between two runs


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class LossRecorder(TorchFunctionMode):
    """Record the functions that read outputs of a model, from :meth:`follow` until :meth:`clear`."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._known: dict[int, Tensor] = {}  # held, so that no other tensor gets their id
        self._before: dict[int, Tensor] = {}  # earlier content of other tensors that a recorded function changed

    def follow(self, outputs: Sequence[Tensor]) -> None:
        """Record the functions that read these tensors."""
        self._known |= {id(output): output for output in outputs}

    def clear(self) -> None:
        """Forget everything, and record nothing before the next output."""
        self._calls, self._known, self._before = [], {}, {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function, and record it if it reads a followed tensor."""
        kwargs = kwargs or {}
        if not self._known or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(id(tensor) in self._known for tensor in given):
            return func(*args, **kwargs)
        written = args[0] if _writes(func) and isinstance(args[0], Tensor) else None
        if written is not None and id(written) not in self._known:
            self._before[id(written)] = written.detach().clone()
        result = func(*args, **kwargs)
        # Reading attributes such as a shape also calls this function, and gives no tensor.
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        made += [] if written is None else [written]
        if made and self._known:  # not if a backward pass has cleared it
            self._known |= {id(tensor): tensor for tensor in made}
            self._calls.append(_Call(func, args, kwargs, result))
        return result

    def find_coupling(
        self, losses: Sequence[Tensor], given: Sequence[Tensor], forwards: Sequence[Forward]
    ) -> bool | None:
        """Return whether the gradient of one example's outputs changes with the outputs of another; None if the loss
        cannot be run again."""
        if not self._calls:
            return False  # the loss is an output itself
        roots, owners, count = list[Tensor](), list[Tensor](), 0
        for forward in forwards:
            for output in forward.outputs:
                owner = find_owners(forward.examples, output.shape)
                if owner is not None and id(output) in self._known:
                    roots.append(output)
                    owners.append(torch.where(owner < 0, owner, owner + count))
            count += len(forward.examples.found)
        if not roots or any(id(loss) not in self._known for loss in losses):
            return None
        first, plain = self._run(losses, given, roots, [root.detach() for root in roots])
        for one, two in zip(first, losses, strict=True):
            if not torch.allclose(one.detach().double(), two.detach().double(), rtol=SAME, atol=0.0):
                return None
        generator = torch.Generator().manual_seed(0)
        noise = [torch.randn(root.shape, generator=generator).to(root) * root.detach().std() for root in roots]
        scale = max(float(grad.double().norm()) for grad in plain)
        for example in range(0, count, max(1, count // MOST_EXAMPLES)):
            is_changed = [_wide(owner == example, root) for owner, root in zip(owners, roots, strict=True)]
            for factor, size in CHANGES:
                values = [
                    torch.where(chosen, factor * root.detach() + size * more, root.detach())
                    for chosen, root, more in zip(is_changed, roots, noise, strict=True)
                ]
                _, grads = self._run(losses, given, roots, values)
                for one, two, chosen in zip(plain, grads, is_changed, strict=True):
                    change = float(((two - one) * ~chosen).double().norm())
                    if change > COUPLED * max(float((one * ~chosen).double().norm()), 1e-3 * scale, 1e-30):
                        return True
        return False

    def _run(
        self, losses: Sequence[Tensor], given: Sequence[Tensor], roots: list[Tensor], values: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the losses and the gradients of the roots with other values in their places."""
        leaves = [value.clone().requires_grad_() for value in values]
        # Copies, because a script may write into an output.
        known = {id(root): leaf.clone() for root, leaf in zip(roots, leaves, strict=True)}
        known |= {name: tensor.clone() for name, tensor in self._before.items()}

        def find(leaf: Any) -> Any:
            return known.get(id(leaf), leaf)

        for call in self._calls:
            args, kwargs = tree_map(find, (call.args, call.kwargs))
            result = call.function(*args, **kwargs)
            pairs = zip(tree_leaves(call.result), tree_leaves(result), strict=True)
            known |= {id(old): new for old, new in pairs if isinstance(old, Tensor)}
        found = [known[id(loss)] for loss in losses]
        grads = torch.autograd.grad(found, leaves, list(given), allow_unused=True)
        return found, [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]


def _writes(func: Callable[..., Any]) -> bool:
    """Return whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    return name in WRITERS or (name.endswith("_") and not name.endswith("__"))


def _wide(chosen: Tensor, like: Tensor) -> Tensor:
    return chosen.view(*chosen.shape, *[1] * (like.dim() - chosen.dim())).to(like.device)
