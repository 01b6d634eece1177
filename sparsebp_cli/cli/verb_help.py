"""Show in ``--help`` the word by which users know a value, instead of its Python type."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from sparsebp_cli.cli.plugin import BROKEN
from sparsebp_cli.entry_point import tell_home
from sparsebp_cli.errors import UsageError, did_you_mean

# Commands of 0.5, and their replacements.
REMOVED = {
    "diff": "`sparsebp compare RUN OTHER` shows what differs",
    "note": "`sparsebp tag RUN NAME` marks a run; existing notes stay",
    "top": "`sparsebp runs --watch` shows what is running",
    "ui": "the last line of `sparsebp runs` is the command that opens MLflow's pages",
}
# Words of other tools for our commands.
MEANT = {
    "train": "run",
    "start": "run",
    "launch": "run",
    "status": "runs",
    "list": "runs",
    "ls": "runs",
    "stop": "cancel",
    "kill": "cancel",
    "delete": "rm",
    "remove": "rm",
    "eval": "evaluate",
    "test": "evaluate",
    "check": "validate",
    "plot": "compare",
}
# Commands of packages that come with SparseBP.
HOMES = {
    "audit": "sparsebp-audit",
    "bench": "sparsebp-tools",
    "datasets": "sparsebp-tools",
    "evaluate": "sparsebp-tools",
    "export": "sparsebp-tools",
    "fetch": "sparsebp-tools",
    "judge": "sparsebp-lab",
    "model": "sparsebp-tools",
    "models": "sparsebp-tools",
    "rerun": "sparsebp-tools",
    "study": "sparsebp-lab",
    "worth": "sparsebp-lab",
}

# An example of each command; packages give their own.
EXAMPLES = {
    "quickstart": "quickstart --set training.max_steps=20",
    "init": "init sums --task completion --data sums.jsonl",
    "validate": "validate sums/*.yaml",
    "data": "data sums/dense.yaml",
    "run": "run quickstart --set training.max_steps=20 --seeds 0-2",
    "compare": "compare @2 --html report.html",
    "show": "show @last",
    "new": "new policy peak-rows",
    "recipes": "recipes copy topk-rows here",
    "policies": "policies topk",
    "schema": "schema --all",
    "runs": "runs --watch",
    "logs": "logs @last",
    "resume": "resume @last",
    "cancel": "cancel @last",
    "tag": "tag @2 figure-2",
    "archive": "archive @figure-2 --to figure-2.tar.gz",
    "prune": "prune --dry-run",
    "rm": "rm @last --yes",
    "sync": "sync --all",
    "doctor": "doctor",
    "targets": "targets check gpu1",
}


def name_values(parameters: list[Any]) -> list[Any]:
    """Hide the type of flags, and of arguments that have their own word, in the help."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) or parameter.param_type_name == "argument":
            # Otherwise Typer writes <bool> beside a flag and <list[str]> beside RUN. Older versions do not call this.
            parameter.display_type_rich = _no_type
    return parameters


def _no_type(ctx: Any) -> None:  # noqa: ARG001 - the signature of typer's method
    return None


class Verb(TyperCommand):
    """A command whose help names its values."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, including ``--help``."""
        return name_values(super().get_params(ctx))


class Verbs(TyperGroup):
    """The command that contains all commands. Its own options are named in the same way."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, including ``--help``."""
        return name_values(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names. Raise UsageError, with the nearest name, for an unknown one."""
        if args and args[0] in REMOVED:
            raise UsageError(f"`sparsebp {args[0]}` was removed: {REMOVED[args[0]]}")
        known = self.list_commands(ctx)
        if args and args[0] in BROKEN:
            raise UsageError(f"`sparsebp {args[0]}` cannot be loaded: {BROKEN[args[0]]}")
        if args and args[0] in HOMES and args[0] not in known:
            raise UsageError(f"`sparsebp {args[0]}` is {tell_home(HOMES[args[0]])}")
        if args and args[0] not in known and not args[0].startswith("-") and not ctx.resilient_parsing:
            meant = f"; did you mean {MEANT[args[0]]}?" if args[0] in MEANT else did_you_mean(args[0], known)
            raise UsageError(f"No such command: {args[0]}; `sparsebp --help` lists the commands{meant}")
        return super().resolve_command(ctx, args)
