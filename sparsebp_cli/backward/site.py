"""Sites: the linears of a model whose output gradient the policy is asked about, and how each is covered.

A covered module gets a ``forward`` of its own in its instance dictionary; its class, parameters and state_dict keys
stay as they are. Removing that one entry gives the module back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.linear import Conv1DForm, Form, LinearForm, Needs, SelectedLinear
from sparsebp_cli.errors import UnsupportedError, UsageError, did_you_mean
from sparsebp_cli.policy import Selection, Site

if TYPE_CHECKING:
    from sparsebp_cli.backward.engine import Engine


@dataclass(frozen=True)
class FoundSites:
    """The linears of a model, sorted by what can be done with them.

    Args:
        covered: Name, module and form of each linear that the engine can carry.
        not_covered: Names of linears that compute in their own way.
        excluded: Names of linears that the user left out.
    """

    covered: tuple[tuple[str, nn.Module, Form], ...]
    not_covered: tuple[str, ...]
    excluded: tuple[str, ...]


def find_sites(model: nn.Module, exclude: Iterable[str] = ()) -> FoundSites:
    """Find the linears of a model.

    Args:
        model: Any module; a linear that is shared is found once, under its first name.
        exclude: Globs over module names; what matches stays dense.

    Returns:
        The linears in the model's order.

    Raises:
        UsageError: A pattern of ``exclude`` matches no linear.
    """
    forms = _known_forms()
    linears = {name: module for name, module in model.named_modules() if any(isinstance(module, k) for k in forms)}
    patterns = list(exclude)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in linears):
            raise UsageError(f"exclude: {pattern!r} matches no linear of the model{did_you_mean(pattern, linears)}")
    covered, not_covered, excluded = [], [], []
    for name, module in linears.items():
        form = next((f for kind, f in forms.items() if type(module).forward is kind.forward), None)
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            excluded.append(name)
        elif form is None or type(cast("Tensor", module.weight).data) is not Tensor:  # quantised or sharded weights
            not_covered.append(name)
        else:
            covered.append((name, module, form))
    return FoundSites(tuple(covered), tuple(not_covered), tuple(excluded))


class BoundSite:
    """The ``forward`` of one covered module: as before without gradients, else through :class:`SelectedLinear`.

    Args:
        name: The module's name in the model.
        module: The linear layer.
        form: How it stores its weight.
        engine: Who knows the step and the policy.
    """

    def __init__(self, name: str, module: nn.Module, form: Form, engine: Engine) -> None:
        self.name, self.module, self.form, self.engine = name, module, form, engine

    def __call__(self, x: Tensor) -> Tensor:
        weight = cast("nn.Parameter", self.module.weight)
        bias = cast("nn.Parameter | None", self.module.bias)
        needs_grad = any(t is not None and t.requires_grad for t in (x, weight, bias))
        if not (needs_grad and torch.is_grad_enabled() and self.engine.enabled):
            return cast("Tensor", type(self.module).forward(self.module, x))
        if torch.is_autocast_enabled(x.device.type):
            # Here and not in the Function, so that autograd records the casts and returns gradients in full precision.
            x, weight, bias = (_autocast(t) for t in (x, weight, bias))  # type: ignore[assignment]
        return cast("Tensor", SelectedLinear.apply(x, weight, bias, self))  # type: ignore[no-untyped-call]

    @property
    def reference(self) -> bool:
        """Whether selections are carried out by masking, then multiplying densely."""
        return self.engine.reference

    def decide(self, grad_NO: Tensor, batch_shape: torch.Size, num_inputs: int, needs: Needs) -> Selection | None:
        """Ask the policy what is kept; see :class:`sparsebp_cli.backward.linear.Decider`.

        Args:
            grad_NO: The gradient of the output.
            batch_shape: The output's shape without features.
            num_inputs: The layer's input width.
            needs: Which gradients autograd asks for.

        Returns:
            What is kept; None for everything.
        """
        site = Site(self.name, grad_NO.shape[1], tuple(batch_shape))
        return self.engine.decide(site, grad_NO, num_inputs, needs)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        # A copy would share this module's weights with the copied model, without a word.
        raise UnsupportedError("an attached model cannot be copied or pickled: call engine.detach() first")


def _known_forms() -> dict[type[nn.Module], Form]:
    forms: dict[type[nn.Module], Form] = {nn.Linear: LinearForm()}
    loaded = sys.modules.get("transformers.pytorch_utils")  # a model that has a Conv1D has loaded it
    if loaded is not None:
        forms[loaded.Conv1D] = Conv1DForm()
    return forms


def _autocast(tensor: Tensor | None) -> Tensor | None:
    # What autocast itself does to the arguments of a linear: floating, not double. It also caches the cast of a weight,
    # so that a layer used twice adds its gradients up in low precision; here they add up in full precision.
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
