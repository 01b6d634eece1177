"""Targets: the places where a plan can run. The command line uses only the contract."""

from collections.abc import Callable

from pydantic import ValidationError

from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy.field_error import describe_errors
from sparsebp_cli.recipe.schema import TargetOptions, TargetSection
from sparsebp_cli.recipe.target import find_target
from sparsebp_cli.target.contract import CheckResult, Job, Target

__all__ = ["CheckResult", "Job", "Target", "TargetOptions", "make_target"]


def make_target(section: TargetSection) -> Target:
    """Make the target that a recipe's checked ``target`` section describes.

    Args:
        section: The recipe's ``target``, checked.

    Returns:
        The target.

    Raises:
        UsageError: The kind is not installed here or is broken, or an option is refused, as one of a plan that was
            made on another machine may be.
    """
    found = find_target(section.kind)
    if found.target_class is None or not issubclass(found.target_class, Target):
        raise UsageError(f"target {section.kind!r} of {found.source} is broken: it is not a Target")
    try:
        options = found.options_class.model_validate(section.options)
    except ValidationError as error:
        finding = describe_errors(error, found.options_class, section.options)[0]
        raise UsageError(f"target.{finding.key}: {finding.text}") from None
    make: Callable[[TargetOptions], Target] = found.target_class
    return make(options)
