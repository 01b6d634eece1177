"""Where a plan runs. One contract; the command line knows no more than that."""

from sparsebp_cli.recipe.schema import TargetSection
from sparsebp_cli.target.contract import Job, Target
from sparsebp_cli.target.local import LocalTarget

__all__ = ["Job", "LocalTarget", "Target", "make_target"]


def make_target(section: TargetSection) -> Target:
    """Make the target that a recipe asks for.

    Args:
        section: The recipe's ``target``.

    Returns:
        The target.
    """
    match section.kind:
        case "local":
            return LocalTarget()
