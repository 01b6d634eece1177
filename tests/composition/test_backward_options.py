"""The options of the backward pass: one definition for recipes, ``attach`` and trainers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy.composition import BackwardChoices, BackwardOptions
from sparsebp_cli.recipe.schema import Recipe


def _members(kind: Any) -> set[Any]:
    """Return what a union consists of, without annotations; a list counts as what it can be given as."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if kind == list[str]:
        return {"texts"}
    if kind in (Iterable[str], Sequence[str]):
        return {"texts"}
    if type(kind).__name__ in ("UnionType", "_UnionGenericAlias"):
        return set().union(*(_members(part) for part in get_args(kind)))
    return {kind}


def test_the_keywords_of_attach_are_the_fields_with_their_types() -> None:
    fields = get_type_hints(BackwardOptions, include_extras=True)
    keywords = get_type_hints(BackwardChoices)
    assert keywords.keys() == BackwardOptions.model_fields.keys()
    assert {name: _members(fields[name]) for name in keywords} == {n: _members(kind) for n, kind in keywords.items()}


def test_the_section_of_a_recipe_is_this_object() -> None:
    assert Recipe.model_fields["backward"].annotation is BackwardOptions


def test_choices_of_options_make_the_same_options() -> None:
    options = BackwardOptions(sites="nodes", exclude=["lm_head"], segments=["model.layers.0"])
    assert BackwardOptions.of(options.choices()) == options
    assert BackwardOptions.of(options) is options
    assert BackwardOptions.of(None) == BackwardOptions()
    assert BackwardOptions.of({"exclude": ("a", "b"), "segments": ("c",)}) == BackwardOptions(
        exclude=["a", "b"], segments=["c"]
    )


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"sites": "edges"}, "sites: got 'edges', allowed: 'linears', 'nodes'; did you mean nodes?"),
        ({"exclude": "lm_head"}, "exclude: must be a list, got 'lm_head' (text)"),
        ({"segments": 0}, "segments: must be "),
        ({"segments": True}, "segments: must be "),
        ({"sits": "nodes"}, "sits: unknown key 'sits'; allowed: execution, sites, .*did you mean sites"),
        ([1], "must be a mapping"),
    ],
    ids=str,
)
def test_a_wrong_choice_is_one_line(choices: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text.replace("(", r"\(").replace(")", r"\)")) as caught:
        BackwardOptions.of(choices)
    assert "\n" not in str(caught.value)
