"""Parameters that a run trains over all its steps, including those that a policy freezes at the current step."""

from __future__ import annotations

from torch import nn

from sparsebp_cli.backward import Engine
from sparsebp_cli.backward.selection.parameter import ParameterExtension
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.worker.process import Ranks

NO_DENSE = (
    "target.processes: gradients of parameters that a policy freezes are not summed over processes, so there is no "
    "dense gradient to measure against: runs without probes and fidelity (measure.probe_every, measure.fidelity_every)"
)


def trainable_parameters(model: nn.Module, engine: Engine) -> dict[str, nn.Parameter]:
    """Return by name, in the model's order, the parameters that the model would train without policies; a shared one
    once. Optimizer, clipping, checkpoints and measurements include all of them, because a parameter that is frozen at
    one step may be trained at another."""
    with engine.disabled():
        return {name: p for name, p in model.named_parameters() if p.requires_grad}


def freezes_parameters(engine: Engine) -> bool:
    """Return whether a policy selects the parameters that are trained."""
    return any(isinstance(part, ParameterExtension) for part in engine.extensions)


def limit_measurements(recipe: Recipe, ranks: Ranks, engine: Engine) -> Recipe:
    """Return the recipe without the measurements that these processes cannot make: probes if parameters are sharded;
    probes and fidelity if a policy freezes parameters of several processes."""
    update: dict[str, None] = {"probe_every": None} if ranks.is_sharded else {}
    if ranks.count > 1 and freezes_parameters(engine):
        update = {"probe_every": None, "fidelity_every": None}
    return recipe.model_copy(update={"measure": recipe.measure.model_copy(update=update)}) if update else recipe
