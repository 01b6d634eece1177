"""The kinds of policies that there are: those built in, in their order, and those of installed packages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint

from sparsebp_cli.entry_point import entry_points, find_source
from sparsebp_cli.policy.contract import GRADIENT_SELECTOR, Policy
from sparsebp_cli.policy.epoch import EPOCH_SELECTOR
from sparsebp_cli.policy.error_text import shorten
from sparsebp_cli.policy.example import EXAMPLE_SELECTOR
from sparsebp_cli.policy.informed import INFORMED_SELECTOR
from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.layer import LAYER_SAMPLER
from sparsebp_cli.policy.packer import BATCH_PACKER
from sparsebp_cli.policy.parameter import PARAMETER_SELECTOR
from sparsebp_cli.policy.reference import REFERENCE_READER
from sparsebp_cli.policy.router import EDGE_ROUTER
from sparsebp_cli.policy.saver import INPUT_SAVER
from sparsebp_cli.policy.token import TOKEN_SELECTOR

GROUP = "sparsebp.kinds"
LONGEST_REASON = 300
# A policy is of the first kind whose class it derives from. Messages and the reference name kinds in this order.
KINDS = (
    GRADIENT_SELECTOR,
    EDGE_ROUTER,
    TOKEN_SELECTOR,
    EXAMPLE_SELECTOR,
    EPOCH_SELECTOR,
    PARAMETER_SELECTOR,
    BATCH_PACKER,
    INPUT_SAVER,
)
ASPECTS = (INFORMED_SELECTOR, LAYER_SAMPLER, REFERENCE_READER)


@dataclass(frozen=True, eq=False)  # rules have no hash; one installation has one object
class KnownKinds:
    """The kinds of this installation.

    Args:
        kinds: Built-in kinds in their order, then those of packages by the names of their entry points.
        problems: One line for each entry point that gives none.
    """

    kinds: tuple[Kind, ...]
    problems: tuple[str, ...] = ()


def find_kinds() -> KnownKinds:
    """Return the kinds of this installation; a broken one of a package is among the problems.

    Returns:
        The kinds that are built in, then those of packages.
    """
    return _load_all(tuple(entry_points(GROUP)))


@lru_cache(maxsize=8)
def _load_all(entries: tuple[EntryPoint, ...]) -> KnownKinds:
    kinds, problems = list(KINDS), list[str]()
    for entry in sorted(entries, key=lambda entry: entry.name):
        try:
            found = entry.load()
        except (Exception, SystemExit) as error:  # a package may fail in any way; its name and reason are shown
            problem = shorten(" ".join(f"{type(error).__name__}: {error}".split()), LONGEST_REASON)
        else:
            problem = _find_problem(found, kinds)
        if problem:
            problems.append(f"{entry.name!r} of {find_source(entry)} is broken: {problem}")
        else:
            kinds.append(found)
    return KnownKinds(tuple(kinds), tuple(problems))


def _find_problem(found: object, kinds: Sequence[Kind]) -> str:
    """Return why this is not a kind that can be added; empty when it is."""
    if not isinstance(found, Kind):
        return f"it is a {type(found).__name__}, not a Kind"
    if not issubclass(found.policy, Policy):
        return f"{found.name} is not a Policy class"
    if found.fact:
        return f"{found.name} says fact={found.fact!r}: a package brings kinds, not aspects of policies"
    above = next((kind.name for kind in kinds if issubclass(found.policy, kind.policy)), "")
    if above:
        return f"{found.name} derives from {above}, which is a kind: derive it from Policy"
    if any(kind.name == found.name for kind in kinds):
        return f"another kind has the name {found.name}"
    return ""


def find_kind(policy: Policy) -> Kind | None:
    """Return the kind of a policy; None for one of no kind that is known.

    Args:
        policy: A policy of any class.

    Returns:
        The first kind whose class it derives from.
    """
    return next((kind for kind in find_kinds().kinds if isinstance(policy, kind.policy)), None)


def list_kinds(policies: Iterable[Policy]) -> list[Kind]:
    """Return the kinds of some policies, those of no known kind left out.

    Args:
        policies: Policies of any class.

    Returns:
        A kind for each policy, in their order.
    """
    return [kind for policy in policies if (kind := find_kind(policy)) is not None]


def find_aspects(policy: Policy) -> tuple[Kind, ...]:
    """Return the aspects that a policy has beside its kind.

    Args:
        policy: A policy of any class.

    Returns:
        Those whose class it derives from.
    """
    return tuple(aspect for aspect in ASPECTS if isinstance(policy, aspect.policy))


def find_facts(policy: Policy) -> Mapping[str, object]:
    """Return what a policy declares with its options, as its kind and its aspects say.

    Args:
        policy: A policy with its options, on which facts depend.

    Returns:
        Facts by name, ``kind`` among them, which is empty for a policy of no known kind.
    """
    kind, aspects = find_kind(policy), find_aspects(policy)
    facts: dict[str, object] = {"kind": "" if kind is None else kind.name}
    facts |= {aspect.fact: aspect in aspects for aspect in ASPECTS}
    for each in (*([] if kind is None else [kind]), *aspects):
        facts |= each.facts(policy)
    return facts


def find_columns(policies: Iterable[Policy]) -> frozenset[str]:
    """Return the names of the columns of the data that policies read.

    Args:
        policies: Policies with their options, on which columns depend.

    Returns:
        Names of columns.
    """
    found = (find_facts(policy).get("columns", ()) for policy in policies)
    return frozenset(name for names in found if isinstance(names, frozenset) for name in names)
