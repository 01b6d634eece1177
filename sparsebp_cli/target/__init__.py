"""PUBLIC. Targets: where a run can train. The command line uses only the contract, :class:`Target`.

A target that trains on this machine derives from :class:`LocalTarget`. A remote target derives from
:class:`RemoteTarget` and implements a :class:`TargetEngine`; the types that they exchange and the helpers that move a
run's files are exported here, too.
"""

from collections.abc import Callable

from pydantic import ValidationError

from sparsebp_cli.errors import UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.policy.field_error import describe_errors
from sparsebp_cli.policy.option import validate_options
from sparsebp_cli.recipe.schema import TargetOptions, TargetSection
from sparsebp_cli.recipe.target import find_target
from sparsebp_cli.run import RunFolder, State
from sparsebp_cli.run.budget import size_of
from sparsebp_cli.target.archive import append_lines, merge_into_run, pack, receive
from sparsebp_cli.target.contract import CheckResult, Job, Target
from sparsebp_cli.target.engine import Phase, TargetEngine, WorkerStatus, read_exit_code
from sparsebp_cli.target.local import LocalTarget
from sparsebp_cli.target.remote import RemoteTarget

__all__ = [
    "CheckResult",
    "Job",
    "LocalTarget",
    "Phase",
    "Plan",
    "RemoteTarget",
    "RunFolder",
    "State",
    "Target",
    "TargetEngine",
    "TargetOptions",
    "WorkerStatus",
    "append_lines",
    "make_target",
    "merge_into_run",
    "pack",
    "read_exit_code",
    "receive",
    "size_of",
]


def make_target(section: TargetSection) -> Target:
    """Return the target for a recipe's validated ``target`` section.

    Args:
        section: The validated section: the kind and its options.

    Returns:
        The target.

    Raises:
        UsageError: The kind is not installed here or is broken, or it refuses an option. Plans from another machine may
            contain such options.
    """
    found = find_target(section.kind)
    if found.target_class is None or not issubclass(found.target_class, Target):
        raise UsageError(f"target {section.kind!r} of {found.source} is broken: its class does not derive from Target")
    try:
        options = validate_options(found.options_class, section.options)
    except ValidationError as error:
        finding = describe_errors(error, found.options_class, section.options)[0]
        raise UsageError(f"{'.'.join(filter(None, ('target', finding.key)))}: {finding.text}") from None
    make: Callable[[TargetOptions], Target] = found.target_class
    return make(options)
