"""Discovery of policies by entry point, built-in ones like those of plugins. A broken plugin is listed with its
problem."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint
from typing import TypeGuard

from pydantic import ValidationError

from sparsebp_cli.entry_point import entry_points, find_source
from sparsebp_cli.errors import PolicyError, did_you_mean
from sparsebp_cli.policy.contract import Policy
from sparsebp_cli.policy.error_text import shorten
from sparsebp_cli.policy.field_error import describe_errors
from sparsebp_cli.policy.hidden_state import find_hidden_state, refuse_hidden_state
from sparsebp_cli.policy.option import validate_options
from sparsebp_cli.policy.reference import ReferenceReader
from sparsebp_cli.policy.scheduled_option import split_schedules
from sparsebp_cli.policy.shelf import tell_home, tell_shelf

GROUP = "sparsebp.policies"
LONGEST_REASON = 300
_OF_PHASES = {"schedule", "until", "policy"}  # keys of a recipe's phases
PolicyLike = Policy | str | Mapping[str, object]


@dataclass(frozen=True)
class FoundPolicy:
    """One installed policy.

    Args:
        name: The name that recipes use.
        source: The distribution it comes from, and its version.
        policy_class: The class; None when the plugin is broken.
        problem: Why it is broken, one line; empty when it works.
    """

    name: str
    source: str
    policy_class: type[Policy] | None
    problem: str = ""

    @property
    def kind(self) -> str:
        """The contract class that it derives from, by name; ``broken`` for a broken plugin."""
        if self.policy_class is None:
            return "broken"
        return _find_kinds(self.policy_class)[-1].__name__

    def make(self, options: Mapping[str, object]) -> Policy:
        """Make the policy from options as plan.json stores them, where a list may stand for a tuple.

        Args:
            options: The policy's options by name.

        Returns:
            The policy, frozen.

        Raises:
            PolicyError: The plugin is broken.
            ValidationError: An option is wrong; pydantic's own error, so that a recipe can locate it.
        """
        if self.policy_class is None:
            raise PolicyError(f"policy {self.name!r} of {self.source} is broken: {self.problem}")
        plain, schedules = split_schedules(self.policy_class, options)
        if not schedules:
            return self._validate(self.policy_class, plain)
        ends = [
            self._validate(self.policy_class, plain | {name: getattr(s, end) for name, s in schedules.items()})
            for end in ("to", "start")
        ]
        # What a policy declares of itself must hold at every step, so the end that promises less stands for all.
        return min(ends, key=lambda policy: policy.exact + policy.unbiased).follow(schedules)

    def _validate(self, policy_class: type[Policy], options: Mapping[str, object]) -> Policy:
        try:
            return validate_options(policy_class, options)
        except ValidationError:
            raise
        except Exception as error:  # a plugin's own checks may fail in any way
            reason = f"policy {self.name!r} of {self.source} is broken: {_describe_failure(error)}"
            raise PolicyError(reason) from None


def find_policies() -> dict[str, FoundPolicy]:
    """Return every installed policy by name, sorted; broken ones carry their problem.

    Returns:
        Name to policy. A name that two distributions offer is broken, and its problem names both.
    """
    entries = entry_points(group=GROUP)
    return {name: _load(name, entries.select(name=name)) for name in sorted(entries.names)}


def find_policy(name: str) -> FoundPolicy:
    """Return one installed policy, importing only its own plugin, so that another broken or slow one does no harm.
    Raise PolicyError if the name is unknown or the plugin broken."""
    entries = entry_points(group=GROUP)
    if name not in entries.names:
        names, home = sorted(entries.names), tell_home(name)
        if home:
            raise PolicyError(f"policy {name!r} is not installed: {home}")
        more = did_you_mean(name, names) or tell_shelf({entry.dist.name for entry in entries if entry.dist is not None})
        raise PolicyError(f"unknown policy {shorten(repr(name))}; installed: {', '.join(names)}{more}")
    policy = _load(name, entries.select(name=name))
    if policy.policy_class is None:
        raise PolicyError(f"policy {name!r} of {policy.source} is broken: {policy.problem}")
    return policy


def make_policy(name: str, /, **options: object) -> Policy:
    """Make a policy by name, with its options checked.

    Args:
        name: A name that ``sparsebp policies`` lists.
        **options: The policy's options.

    Returns:
        The policy, frozen.

    Raises:
        PolicyError: The name is unknown, the plugin broken, or an option wrong.
    """
    policy = find_policy(name)
    try:
        return policy.make(options)
    except ValidationError as error:
        assert policy.policy_class is not None
        finding = describe_errors(error, policy.policy_class, options)[0]
        raise PolicyError(": ".join(part for part in (f"policy {name!r}", finding.key, finding.text) if part)) from None


def make_policies(given: PolicyLike | Iterable[PolicyLike]) -> tuple[Policy, ...]:
    """Make policies from one or several of: a policy, its name, a mapping of ``name`` and options.

    Args:
        given: Policies, their names, or mappings of ``name`` and options; or one of these.

    Returns:
        The policies, in the same order.

    Raises:
        PolicyError: One is neither of these, its name is unknown, the plugin broken, an option wrong, or it could keep
            state by itself.
    """
    if isinstance(given, str | Policy | Mapping):
        given = [given]
    if not isinstance(given, Iterable):
        raise PolicyError(f"policies must be a policy, its name, a mapping or a list of these, got {given!r}")
    return tuple(_make_one(policy) for policy in given)


def _make_one(policy: PolicyLike) -> Policy:
    if isinstance(policy, Policy):
        refuse_hidden_state(policy)
        return policy
    if isinstance(policy, str):
        return make_policy(policy)
    if not isinstance(policy, Mapping):
        raise PolicyError(f"a policy must be a name, a mapping or a Policy, got {policy!r}")
    options = dict(policy)
    name = options.pop("name", None)
    if not isinstance(name, str) and options.keys() & _OF_PHASES:
        raise PolicyError(
            "phases (schedule, until, policy) are no policy: give them to attach_phases(model, schedule, ...), or to "
            "schedule= of PolicyTrainer and PolicyCallback"
        )
    if not isinstance(name, str):
        raise PolicyError(f"a policy's mapping needs its name, got {dict(policy)!r}")
    return make_policy(name, **options)


def _load(name: str, entries: Iterable[EntryPoint]) -> FoundPolicy:
    """Import the policy of one name."""
    by_target = {(find_source(entry), entry.value): entry for entry in entries}
    sources = " and ".join(dict.fromkeys(source for source, _ in by_target))
    if len(by_target) > 1:
        return FoundPolicy(name, sources, None, f"this name is offered more than once, by {sources}")
    ((source, value), entry), *_ = by_target.items()
    try:
        policy_class = entry.load()
    except (Exception, SystemExit) as error:  # a plugin may fail in any way; its name and reason are shown
        return FoundPolicy(name, source, None, _describe_failure(error))
    problem = _find_problem(policy_class) if _is_policy(policy_class) else "is not a Policy class"
    return FoundPolicy(name, source, None if problem else policy_class, f"{value} {problem}" if problem else "")


def _is_policy(found: object) -> TypeGuard[type[Policy]]:
    return inspect.isclass(found) and issubclass(found, Policy)


@cache  # half a millisecond each, of fifty policies, three times a run
def _find_problem(policy_class: type[Policy]) -> str:
    """Return why this is not a usable policy; empty when it is."""
    if inspect.isabstract(policy_class):
        return f"leaves abstract: {', '.join(sorted(policy_class.__abstractmethods__))}"
    if not _find_kinds(policy_class):
        return "makes no decision: derive it from a kind, such as GradientSelector, not from Policy"
    if "name" in policy_class.model_fields:
        return "has an option called name: recipes use that key for the policy itself"
    return find_hidden_state(policy_class)


def _find_kinds(policy_class: type[Policy]) -> list[type[Policy]]:
    """Return the abstract policies that a class derives from; the last is the contract's, those before are a plugin's
    own. Options that several kinds share decide nothing."""
    above = policy_class.__mro__[1:]
    shared = (Policy, ReferenceReader)
    return [c for c in above if inspect.isabstract(c) and issubclass(c, Policy) and c not in shared]


def _describe_failure(error: BaseException) -> str:
    return shorten(" ".join(f"{type(error).__name__}: {error}".split()), LONGEST_REASON)
