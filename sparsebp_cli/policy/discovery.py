"""Discovery of built-in policies and plug-ins by entry point. A broken plug-in is listed with its problem."""

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
from sparsebp_cli.policy.shelf import REMOVED, tell_moved, tell_shelf

GROUP = "sparsebp.policies"
LONGEST_REASON = 300
PolicyLike = Policy | str | Mapping[str, object]


@dataclass(frozen=True)
class FoundPolicy:
    """An installed policy: its name, class and package, or why it cannot be imported.

    Args:
        name: The name that recipes use.
        source: Name and version of its distribution.
        policy_class: The class; None if the plug-in is broken.
        problem: Why it is broken, one line; empty if it works.
    """

    name: str
    source: str
    policy_class: type[Policy] | None
    problem: str = ""

    @property
    def kind(self) -> str:
        """The name of the contract class that it derives from; ``broken`` for a broken plug-in."""
        if self.policy_class is None:
            return "broken"
        return _find_kinds(self.policy_class)[-1].__name__

    def make(self, options: Mapping[str, object]) -> Policy:
        """Make the policy from options as plan.json stores them, with lists for tuples.

        Args:
            options: The policy's options by name.

        Returns:
            The policy, frozen.

        Raises:
            PolicyError: The plug-in is broken.
            ValidationError: An option is wrong. This is pydantic's own error, so that a recipe can locate it.
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
        # Declarations must be true at every step, so use the end of the schedule that promises less.
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
    """Return every installed policy by name, sorted. A policy that cannot be imported has a ``problem``.

    Returns:
        Name to policy. A name that two distributions register is broken, and its problem names both.
    """
    entries = entry_points(group=GROUP)
    return {name: _load(name, entries.select(name=name)) for name in sorted(entries.names)}


def find_policy(name: str) -> FoundPolicy:
    """Return one installed policy. Import only its own plug-in, so that another broken or slow one does no harm.
    Raise PolicyError if the name is unknown or the plug-in broken."""
    entries = entry_points(group=GROUP)
    if name not in entries.names:
        names, home = sorted(entries.names), tell_moved(name)
        if home:
            raise PolicyError(f"policy {name!r} is not installed: {home}")
        if name in REMOVED:
            raise PolicyError(f"policy {name!r} was removed after version 0.5: {REMOVED[name]}")
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
        PolicyError: The name is unknown, the plug-in broken, or an option wrong.
    """
    policy = find_policy(name)
    try:
        return policy.make(options)
    except ValidationError as error:
        assert policy.policy_class is not None
        finding = describe_errors(error, policy.policy_class, options)[0]
        raise PolicyError(": ".join(part for part in (f"policy {name!r}", finding.key, finding.text) if part)) from None


def make_policies(given: PolicyLike | Iterable[PolicyLike]) -> tuple[Policy, ...]:
    """Make policies from one or several descriptions: a policy, its name, or a mapping of ``name`` and options.

    Args:
        given: One description, or an iterable of them.

    Returns:
        The policies, in the same order.

    Raises:
        PolicyError: A description has another type, its name is unknown, the plug-in is broken, an option is wrong, or
            the policy could keep hidden state.
    """
    if isinstance(given, str | Policy | Mapping):
        given = [given]
    if not isinstance(given, Iterable):
        raise PolicyError(f"policies must be a policy, a policy's name, a mapping or a list of these, got {given!r}")
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
    if not isinstance(name, str):
        raise PolicyError(f"the mapping of a policy needs the key 'name', got {dict(policy)!r}")
    return make_policy(name, **options)


def _load(name: str, entries: Iterable[EntryPoint]) -> FoundPolicy:
    """Import the policy of one name."""
    by_target = {(find_source(entry), entry.value): entry for entry in entries}
    sources = " and ".join(dict.fromkeys(source for source, _ in by_target))
    if len(by_target) > 1:
        return FoundPolicy(name, sources, None, f"several packages register this name: {sources}")
    ((source, value), entry), *_ = by_target.items()
    try:
        policy_class = entry.load()
    except (Exception, SystemExit) as error:  # a plug-in may fail in any way; the list shows its name and reason
        return FoundPolicy(name, source, None, _describe_failure(error))
    problem = _find_problem(policy_class) if _is_policy(policy_class) else "is not a Policy class"
    return FoundPolicy(name, source, None if problem else policy_class, f"{value} {problem}" if problem else "")


def _is_policy(found: object) -> TypeGuard[type[Policy]]:
    return inspect.isclass(found) and issubclass(found, Policy)


@cache  # 0.5 ms for each of fifty policies, three times a run
def _find_problem(policy_class: type[Policy]) -> str:
    """Return why a class is not a usable policy; empty if it is usable."""
    if inspect.isabstract(policy_class):
        return f"does not implement: {', '.join(sorted(policy_class.__abstractmethods__))}"
    if not _find_kinds(policy_class):
        return "derives from Policy directly: derive it from a kind, such as GradientSelector"
    if "name" in policy_class.model_fields:
        return "has an option called name, but recipes use this key for the policy's name: rename the option"
    return find_hidden_state(policy_class)


def _find_kinds(policy_class: type[Policy]) -> list[type[Policy]]:
    """Return the abstract policies that a class derives from. The last is the contract's, earlier ones are a plug-in's.
    Leave out classes with options that several kinds share."""
    above = policy_class.__mro__[1:]
    shared = (Policy, ReferenceReader)
    return [c for c in above if inspect.isabstract(c) and issubclass(c, Policy) and c not in shared]


def _describe_failure(error: BaseException) -> str:
    return shorten(" ".join(f"{type(error).__name__}: {error}".split()), LONGEST_REASON)
