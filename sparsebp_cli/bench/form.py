"""The forms of a policy: the selections that its options allow, and the engine's ways to execute them.

No policy is named here. An option whose values change the kind of selection makes one form a value, and so does each
way to execute one kind of selection.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparsebp_cli.composition import PolicyFacts, Setup, refuse
from sparsebp_cli.errors import PolicyError, UsageError
from sparsebp_cli.policy import Elements, GradientSelector, Policy, Rows, Selection, make_policy
from sparsebp_cli.policy.discovery import FoundPolicy, find_policy
from sparsebp_cli.policy.router import EdgeRouter

SITES = ("linears", "branches", "nodes")
KEEPS = (0.5, 0.25, 0.1)
FEW_KEEPS = (0.05, 0.02, 0.01, 0.005)  # single entries pay, if at all, where very few are kept

Execution = Literal["fast", "csr", "masked", "stored", "recomputed"]


class Form(BaseModel):
    """One form of a policy at one kind of site."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    site: Literal["linears", "branches", "nodes"]  # ``linears``, ``branches`` or ``nodes``
    label: str  # tells it from the other forms there: values of options, and the execution where there is a choice
    options: dict[str, object]  # the policy's options, without ``keep``
    # how the engine executes it. ``fast``: in its only way; ``csr`` or ``masked``: single entries multiplied as a
    # sparse matrix or as a dense one with zeros; ``stored`` or ``recomputed``: branches keep what the backward of their
    # kept rows reads, or compute it again
    execution: Execution
    # shares that are measured, each in (0, 1); one None for a policy without the option
    keeps: tuple[Annotated[float, Field(gt=0.0, lt=1.0)] | None, ...] = Field(min_length=1)

    def make(self, name: str, keep: float | None) -> Policy:
        """Return the policy of this name in this form; ``keep`` is one of ``keeps``."""
        return make_policy(name, **self.options, **({} if keep is None else {"keep": keep}))


def find_forms(
    name: str,
    *,
    sites: Sequence[str] | None = None,
    keeps: Sequence[float] | None = None,
    options: Mapping[str, object] | None = None,
) -> tuple[Form, ...]:
    """Find the forms of a policy that could be faster than dense somewhere.

    Without ``sites``, every kind of site at which the policy has a fast form; without ``keeps``, a half, a quarter and
    a tenth, and smaller shares of single entries. ``options`` hold for every form; forms that refuse them are left out.
    Returns at least one form, in the order of the sites and of the policy's own options.

    Raises ``PolicyError`` if the policy is unknown or broken or an option is wrong, and ``UsageError`` for a site where
    the policy does not act or has no faster form.
    """
    found, options = find_policy(name), dict(options or {})
    assert found.policy_class is not None
    if "keep" in options:
        raise UsageError("keep is what is varied: give the shares with --keep")
    if found.kind == EdgeRouter.__name__:
        return _router_forms(found, sites, keeps, options)
    if not issubclass(found.policy_class, GradientSelector):
        raise UsageError(f"{name!r} is a {found.kind}, which has no forms to measure")
    sites = sites or SITES[:2]
    has_keep = "keep" in found.policy_class.model_fields
    if keeps and not has_keep:
        raise UsageError(f"{name!r} has no option keep: leave --keep out")
    forms = []
    variants = list(_variants(found, options, keeps or KEEPS if has_keep else (None,)))
    for site in sites:
        for values, selection in variants:
            for execution in _executions(selection, site):
                wanted: Sequence[float | None] = keeps or KEEPS if has_keep else (None,)
                if selection is Elements and keeps is None and has_keep and site == "linears":
                    wanted = (*KEEPS, *FEW_KEEPS)
                valid = tuple(k for k in wanted if _make(found, options | values, k) is not None)
                if valid:
                    words = [str(value) for value in values.values()]
                    words += [execution] if execution in ("csr", "masked", "stored", "recomputed") else []
                    label = " ".join(words) or name
                    forms.append(
                        Form(site=site, label=label, options=options | values, execution=execution, keeps=valid)
                    )
    if not forms:
        raise UsageError(f"{name!r} has no form at {', '.join(sites)} that multiplies less than dense")
    return tuple(forms)


def _router_forms(
    found: FoundPolicy, sites: Sequence[str] | None, keeps: Sequence[float] | None, options: dict[str, object]
) -> tuple[Form, ...]:
    """A router with its defaults, and with each other value of each of its own options."""
    for site in sites or ():
        refuse(Setup([PolicyFacts(repr(found.name), {"kind": EdgeRouter.__name__})], {"sites": site}))
    if keeps:
        raise UsageError(f"{found.name!r} has no option keep: leave --keep out")
    assert found.policy_class is not None
    variants: list[dict[str, object]] = [{}]
    for field, values in _choices(found, options).items():
        if field not in EdgeRouter.model_fields:
            default = found.policy_class.model_fields[field].default
            variants += [{field: value} for value in values if value != default]
    forms = [
        Form(
            site="nodes",
            label=" ".join(f"{key} {value}" for key, value in values.items()) or found.name,
            options=options | values,
            execution="fast",
            keeps=(None,),
        )
        for values in variants
        if _make(found, options | values, None) is not None
    ]
    if not forms:
        make_policy(found.name, **options)  # raises the error that explains why
    return tuple(forms)


def _variants(
    found: FoundPolicy, options: dict[str, object], keeps: Sequence[float | None]
) -> Iterator[tuple[dict[str, object], type[Selection] | None]]:
    """Yield the values of the options that change the selection, each with the selection."""
    choices = {
        field: values
        for field, values in _choices(found, options).items()
        if _is_required(found, field) or len(_selections(found, options, field, values, keeps)) > 1
    }
    num_yielded = 0
    for values in itertools.product(*choices.values()):
        variant = dict(zip(choices, values, strict=True))
        made = [policy for keep in keeps if (policy := _make(found, options | variant, keep)) is not None]
        if made:
            num_yielded += 1
            yield variant, made[0].selection
    if not num_yielded:  # no form is possible: raise the error that a recipe would get
        make_policy(found.name, **options, **({} if keeps[0] is None else {"keep": keeps[0]}))
        raise PolicyError(f"policy {found.name!r}: no form goes with the options {options}")


def _selections(
    found: FoundPolicy, options: dict[str, object], field: str, values: Sequence[object], keeps: Sequence[float | None]
) -> set[type[Selection] | None]:
    made = (_make(found, options | {field: value}, keep) for value in values for keep in keeps)
    return {policy.selection for policy in made if policy is not None}


def _choices(found: FoundPolicy, options: Mapping[str, object]) -> dict[str, tuple[object, ...]]:
    """Return the options that take one of a few words and are not given."""
    assert found.policy_class is not None
    fields = found.policy_class.model_fields
    return {
        name: get_args(field.annotation)
        for name, field in fields.items()
        if get_origin(field.annotation) is Literal and name not in options
    }


def _is_required(found: FoundPolicy, field: str) -> bool:
    assert found.policy_class is not None
    return found.policy_class.model_fields[field].is_required()


def _make(found: FoundPolicy, options: Mapping[str, object], keep: float | None) -> Any:
    """Return the policy; None where it refuses these options together."""
    try:
        return found.make({**options, **({} if keep is None else {"keep": keep})})
    except ValidationError:
        return None


def _executions(selection: type[Selection] | None, site: str) -> tuple[Execution, ...]:
    if site == "nodes":
        return ("masked",)
    if site == "branches":
        return ("stored", "recomputed") if selection is Rows else ()
    return ("csr", "masked") if selection is Elements else ("fast",)
