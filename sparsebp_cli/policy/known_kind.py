"""The known kinds of policies: first the built-in ones, then those of installed packages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint

from sparsebp_cli.entry_point import entry_points, find_source
from sparsebp_cli.policy.contract import GRADIENT_SELECTOR, Policy
from sparsebp_cli.policy.error_text import shorten
from sparsebp_cli.policy.informed import INFORMED_SELECTOR
from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.packer import BATCH_PACKER
from sparsebp_cli.policy.parameter import PARAMETER_SELECTOR
from sparsebp_cli.policy.reference import REFERENCE_READER
from sparsebp_cli.policy.router import EDGE_ROUTER
from sparsebp_cli.policy.token import TOKEN_SELECTOR

GROUP = "sparsebp.kinds"
LONGEST_REASON = 300
# A policy's kind is the first whose class it derives from. Messages and the reference list kinds in this order.
KINDS = (
    GRADIENT_SELECTOR,
    EDGE_ROUTER,
    TOKEN_SELECTOR,
    PARAMETER_SELECTOR,
    BATCH_PACKER,
)
ASPECTS = (INFORMED_SELECTOR, REFERENCE_READER)


@dataclass(frozen=True, eq=False)  # eq=False: rules have no hash, and one installation has one object
class KnownKinds:
    """The kinds of this installation.

    Args:
        kinds: Built-in kinds in their order, then kinds of packages, sorted by the names of their entry points.
        problems: One line for each broken entry point.
        aspects: Built-in aspects in their order, then aspects of packages.
    """

    kinds: tuple[Kind, ...]
    problems: tuple[str, ...] = ()
    aspects: tuple[Kind, ...] = ASPECTS


def find_kinds() -> KnownKinds:
    """Return the kinds of this installation. Broken ones of packages are among the problems."""
    return _load_all(tuple(entry_points(GROUP)))


@lru_cache(maxsize=8)
def _load_all(entries: tuple[EntryPoint, ...]) -> KnownKinds:
    kinds, aspects, problems = list(KINDS), list(ASPECTS), list[str]()
    for entry in sorted(entries, key=lambda entry: entry.name):
        try:
            found = entry.load()
        except (Exception, SystemExit) as error:  # a package may fail in any way; the problem says how
            problem = shorten(" ".join(f"{type(error).__name__}: {error}".split()), LONGEST_REASON)
        else:
            problem = _find_problem(found, kinds)
        if problem:
            problems.append(f"{entry.name!r} of {find_source(entry)} is broken: {problem}")
        else:
            (aspects if found.fact else kinds).append(found)
    return KnownKinds(tuple(kinds), tuple(problems), tuple(aspects))


def _find_problem(found: object, kinds: Sequence[Kind]) -> str:
    """Return why an object cannot be added as a kind; empty if it can."""
    if not isinstance(found, Kind):
        return f"it is a {type(found).__name__}, not a Kind"
    if found.fact:
        return ""
    if not issubclass(found.policy, Policy):
        return f"{found.name} is not a Policy class"
    above = next((kind.name for kind in kinds if issubclass(found.policy, kind.policy)), "")
    if above:
        return f"{found.name} derives from {above}, which is a kind already: derive {found.name} from Policy"
    if any(kind.name == found.name for kind in kinds):
        return f"another kind is called {found.name} already: rename one of them"
    return ""


def find_kind(policy: Policy) -> Kind | None:
    """Return the kind of a policy, the first whose class it derives from; None if its kind is not known."""
    return next((kind for kind in find_kinds().kinds if isinstance(policy, kind.policy)), None)


def list_kinds(policies: Iterable[Policy]) -> list[Kind]:
    """Return the kind of each policy, in their order. Skip policies of no known kind."""
    return [kind for policy in policies if (kind := find_kind(policy)) is not None]


def find_aspects(policy: Policy) -> tuple[Kind, ...]:
    """Return the aspects whose class a policy derives from."""
    return tuple(aspect for aspect in find_kinds().aspects if isinstance(policy, aspect.policy))


def find_facts(policy: Policy) -> Mapping[str, object]:
    """Return the facts that a policy's kind and aspects derive from the policy and its options.

    Args:
        policy: A policy with its options.

    Returns:
        Facts by name. Among them is ``kind``, which is empty for a policy of no known kind.
    """
    kind, aspects = find_kind(policy), find_aspects(policy)
    facts: dict[str, object] = {"kind": "" if kind is None else kind.name}
    facts |= {aspect.fact: aspect in aspects for aspect in find_kinds().aspects}
    for each in (*([] if kind is None else [kind]), *aspects):
        facts |= each.facts(policy)
    return facts


def find_columns(policies: Iterable[Policy]) -> frozenset[str]:
    """Return the names of the columns of the data that policies read."""
    found = (find_facts(policy).get("columns", ()) for policy in policies)
    return frozenset(name for names in found if isinstance(names, frozenset) for name in names)
