"""Find the forms of a policy: the selections that its options allow, and the engine's ways to execute them.

The module names no policy. Each value of an option that changes the kind of selection is a form, and so is each way to
execute a selection.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparsebp_cli.errors import PolicyError, UsageError
from sparsebp_cli.policy import Elements, GradientSelector, Policy, Selection, make_policy
from sparsebp_cli.policy.composition import PolicyFacts, Setup, refuse
from sparsebp_cli.policy.discovery import FoundPolicy, find_policy
from sparsebp_cli.policy.router import EdgeRouter

SITES = ("linears", "nodes")
KEEPS = (0.5, 0.25, 0.1)
FEW_KEEPS = (0.05, 0.02, 0.01, 0.005)  # single entries can be faster only if very few are kept

Execution = Literal["fast", "csr", "masked"]


class BenchForm(BaseModel):
    """One form of a policy at one kind of site."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    site: Literal["linears", "nodes"]
    label: str  # distinguishes it from other forms there: option values, and the execution if there is a choice
    options: dict[str, object]  # the policy's options, without ``keep``
    # ``fast``: the only way; ``csr`` or ``masked``: single entries, as a sparse matrix or as a dense one with zeros.
    execution: Execution
    # Measured fractions, each in (0, 1); one None for a policy without the option.
    keeps: tuple[Annotated[float, Field(gt=0.0, lt=1.0)] | None, ...] = Field(min_length=1)

    def make(self, name: str, keep: float | None) -> Policy:
        """Return the policy ``name`` in this form; ``keep`` is one of ``keeps``."""
        return make_policy(name, **self.options, **({} if keep is None else {"keep": keep}))


def find_forms(
    name: str,
    *,
    sites: Sequence[str] | None = None,
    keeps: Sequence[float] | None = None,
    options: Mapping[str, object] | None = None,
) -> tuple[BenchForm, ...]:
    """Return the forms of a policy that could be faster than dense somewhere.

    Without ``sites`` these are all kinds of site at which the policy has a fast form. Without ``keeps`` the fractions
    are a half, a quarter and a tenth, and smaller ones for single entries. ``options`` hold for every form; forms that
    refuse them are left out. Returns at least one form, in the order of the sites and of the policy's own options.

    Raises ``PolicyError`` if the policy is unknown or broken or an option is wrong, and ``UsageError`` for a site where
    the policy does not act or has no faster form.
    """
    found, options = find_policy(name), dict(options or {})
    assert found.policy_class is not None
    if "keep" in options:
        raise UsageError("give the values of the option keep with --keep, not with --set")
    if found.kind == EdgeRouter.__name__:
        return _router_forms(found, sites, keeps, options)
    if not issubclass(found.policy_class, GradientSelector):
        raise UsageError(f"bench cannot time policies of the kind {found.kind}, such as {name!r}")
    sites = sites or SITES[:1]
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
                    words += [execution] if execution != "fast" else []
                    label = " ".join(words) or name
                    forms.append(
                        BenchForm(site=site, label=label, options=options | values, execution=execution, keeps=valid)
                    )
    if not forms:
        raise UsageError(
            f"{name!r} needs as many multiplications at {', '.join(sites)} as dense training, so there is nothing "
            "to time"
        )
    return tuple(forms)


def _router_forms(
    found: FoundPolicy, sites: Sequence[str] | None, keeps: Sequence[float] | None, options: dict[str, object]
) -> tuple[BenchForm, ...]:
    """Return a router with its defaults, and with each other value of each option of its own class."""
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
        BenchForm(
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
        raise PolicyError(f"policy {found.name!r} refuses {options}, whatever its other options are: change --set")


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
    """Return the policy; None if it refuses this combination of options."""
    try:
        return found.make({**options, **({} if keep is None else {"keep": keep})})
    except ValidationError:
        return None


def _executions(selection: type[Selection] | None, site: str) -> tuple[Execution, ...]:
    if site == "nodes":
        return ("masked",)
    return ("csr", "masked") if selection is Elements else ("fast",)
