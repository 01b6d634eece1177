"""Training parts of weights: what a model needs so that an optimizer sees leaves of the parts' shapes.

The weights stay ordinary parameters of the model, under their own names, and always hold what was trained: after each
step of the optimizer the leaves are written into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from sparsebp_cli.backward.decoder.decoder import find_reentrant
from sparsebp_cli.backward.linear.function import WeightLayout, weight_of
from sparsebp_cli.backward.linear.part import run_part
from sparsebp_cli.backward.linear.site import find_linears
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches, call_module, check_free
from sparsebp_cli.errors import UnsupportedError, UsageError, did_you_mean
from sparsebp_cli.policy.part import WeightPart


@final
class PartTraining:
    """Parts of a model's linears that are trained, while everything else is frozen, biases included.

    Args:
        model: Changed in place until :meth:`remove`; the keys and shapes of its state_dict stay as they are.
        parts: The part of each trained linear, by the linear's name; at least one.
        execution: ``reference`` computes the dense gradient of each weight and restricts it.

    Raises:
        PolicyError: A part does not fit its weight.
        UsageError: There is no part, or a name is not that of a linear.
        UnsupportedError: A weight is tied, frozen, quantised, sharded or in float8, the model is attached, compiled or
            wrapped by DDP, or it uses reentrant checkpointing.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Mapping[str, WeightPart],
        *,
        execution: Literal["fast", "reference"] = "fast",
    ) -> None:
        if execution not in ("fast", "reference"):
            raise UsageError(f"execution must be fast or reference, got {execution!r}")
        linears = _check(model, parts)
        self._patches, self._handles = ForwardPatches(), list[RemovableHandle]()
        self._overrides: dict[str, PartOverride] = {}
        self._frozen = [p for p in model.parameters() if p.requires_grad]
        for name, part in parts.items():
            module, form = linears[name]
            override = PartOverride(name, module, form, part, reference=execution == "reference")
            self._overrides[name] = override
            self._patches.install(module, override)
        for parameter in self._frozen:
            parameter.requires_grad_(False)
            parameter.grad = None  # a gradient of an earlier step would be applied if the user's optimizer has it
        self._handles.append(model.register_load_state_dict_post_hook(lambda *_: self.read_weights()))

    @property
    def shares(self) -> dict[str, float]:
        """Share of each weight's entries that is trained, which is that of wgrad's multiplications too."""
        return {
            name: each.part.claim(*each.form.by_output(weight_of(each.module)).shape)
            for name, each in self._overrides.items()
        }

    def parameters(self) -> list[nn.Parameter]:
        """Return the leaves, for an optimizer and for clipping, in the order of the parts."""
        return [each.leaf for each in self._overrides.values()]

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Write the leaves into the weights after each step of an optimizer.

        Args:
            optimizer: It must train all leaves and nothing else of the model.

        Raises:
            UsageError: A leaf is missing, or a frozen parameter of the model is given.
        """
        given = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = next((name for name, each in self._overrides.items() if id(each.leaf) not in given), None)
        if missing is not None:
            raise UsageError(f"the optimizer does not train the part of {missing!r}: make it from parameters()")
        if any(id(parameter) in given for parameter in self._frozen):
            raise UsageError("the optimizer has parameters that are frozen beside the parts: make it from parameters()")
        self._handles.append(optimizer.register_step_post_hook(lambda *_: self.write_weights()))

    @torch.no_grad()
    def write_weights(self) -> None:
        """Write the leaves into the weights."""
        for each in self._overrides.values():
            each.part.write(each.form.by_output(weight_of(each.module)), each.leaf)

    @torch.no_grad()
    def read_weights(self) -> None:
        """Read the leaves from the weights, as after loading a state_dict, which does so by itself."""
        for each in self._overrides.values():
            each.leaf.copy_(each.part.restrict(each.form.by_output(weight_of(each.module))))

    def remove(self) -> None:
        """Give the model back: forwards and trained parameters are as before, the weights keep what was trained."""
        self._patches.remove()
        for handle in self._handles:
            handle.remove()
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = []


@final
class PartOverride(ForwardOverride):
    """The ``forward`` of one linear of which a part is trained."""

    name: str
    module: nn.Module
    form: WeightLayout
    part: WeightPart
    leaf: nn.Parameter

    def __init__(self, name: str, module: nn.Module, form: WeightLayout, part: WeightPart, *, reference: bool) -> None:
        self.name, self.module, self.form, self.part, self._reference = name, module, form, part, reference
        self.leaf = nn.Parameter(part.restrict(form.by_output(weight_of(module).detach())))

    @override
    def __call__(self, input: Tensor) -> Tensor:  # the parameter's name is that of nn.Linear
        if self.is_removed or not torch.is_grad_enabled():
            output: Tensor = call_module(self.module, input)
            return output
        weight = weight_of(self.module)
        if weight.device != self.leaf.device or weight.dtype != self.leaf.dtype:
            raise UnsupportedError(
                f"{self.name!r} has become {weight.dtype} on {weight.device} since its part was chosen "
                f"({self.leaf.dtype} on {self.leaf.device}): move or convert the model before"
            )
        return run_part(self.module, input, self.leaf, self.form, self.part, reference=self._reference)


def _check(model: nn.Module, parts: Mapping[str, WeightPart]) -> dict[str, tuple[nn.Module, WeightLayout]]:
    """Return the covered linears by name; refuse what is not built before anything changes."""
    _refuse_model(model, parts)
    found = find_linears(model)
    linears = {name: (module, form) for name, module, form in found.covered}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, part in parts.items():
        if name in found.not_covered:
            raise UnsupportedError(f"{name!r}: parts of a quantised, sharded or parametrized weight are not built")
        if name not in linears:
            raise UsageError(f"{name!r} is not a linear of the model{did_you_mean(name, linears)}")
        module, form = linears[name]
        weight = weight_of(module)
        check_free(name, module)
        if form.replaces:
            raise UnsupportedError(f"{name!r}: parts of a weight in float8 are not built")
        if not weight.requires_grad:
            raise UnsupportedError(f"{name!r} has a frozen weight, as under LoRA: parts of it are not built")
        if len(names[id(weight)]) > 1:
            raise UnsupportedError(f"parts of a tied weight are not built: {' is '.join(names[id(weight)])}")
        part.check(*form.by_output(weight).shape)
        if part.index_K.device != weight.device:
            raise UsageError(f"{name!r}: the part's index is on {part.index_K.device}, its weight on {weight.device}")
    return linears


def _refuse_model(model: nn.Module, parts: Mapping[str, WeightPart]) -> None:
    if not parts:
        raise UsageError("parts: got none, allowed: 1 or more")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise UnsupportedError("parts of weights and DDP, which would not see their gradients, are not built together")
    if "_orig_mod" in dict(model.named_children()):
        raise UnsupportedError("parts of weights in a model wrapped by torch.compile are not built: give the model")
    reentrant = find_reentrant(model)
    if reentrant is not None:
        raise UnsupportedError(
            f"parts of weights and reentrant checkpointing (at {reentrant!r}): use use_reentrant=False"
        )
