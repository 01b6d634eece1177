"""Which parameters a run trains over all its steps, whatever a policy has switched off for the step under way."""

from __future__ import annotations

from torch import nn

from sparsebp_cli.backward import Engine
from sparsebp_cli.backward.selection.parameter import ParameterExtension
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.worker.process import Ranks

NO_DENSE = (
    "target.processes: parameters that a policy freezes have no sum of gradients over processes, so there is no dense "
    "gradient to measure against: runs without probes and fidelity (measure.probe_every, measure.fidelity_every)"
)


def trainable_parameters(model: nn.Module, engine: Engine) -> dict[str, nn.Parameter]:
    """Return the parameters that the model would train without policies.

    Optimizer, clipping, checkpoints and measurements are about all of them: what is not trained at one step may be at
    another, and is then to be found as it was left.

    Args:
        model: With the engine attached.
        engine: Carries the policies out.

    Returns:
        By name, in the model's order; a shared one once.
    """
    with engine.disabled():
        return {name: p for name, p in model.named_parameters() if p.requires_grad}


def freezes(engine: Engine) -> bool:
    """Return whether a policy chooses which parameters are trained."""
    return any(isinstance(part, ParameterExtension) for part in engine.extensions)


def measurable(recipe: Recipe, ranks: Ranks, engine: Engine) -> Recipe:
    """Return the recipe with the measurements that these processes can make.

    Args:
        recipe: As it was written.
        ranks: Those that train together.
        engine: Carries the policies out.

    Returns:
        Without probes where weights are sharded; without probes and fidelity where parameters of several processes are
        frozen by a policy.
    """
    update: dict[str, None] = {"probe_every": None} if ranks.is_sharded else {}
    if ranks.count > 1 and freezes(engine):
        update = {"probe_every": None, "fidelity_every": None}
    return recipe.model_copy(update={"measure": recipe.measure.model_copy(update=update)}) if update else recipe
