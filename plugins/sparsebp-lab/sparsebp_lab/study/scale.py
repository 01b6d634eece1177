"""Read a study's base, from a file or inside the study, and make the small study that ``scale`` describes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from sparsebp_cli.compare.loaded import flatten
from sparsebp_cli.errors import RecipeError, did_you_mean
from sparsebp_cli.policy.field_error import FieldError
from sparsebp_cli.recipe.document import Node, Place
from sparsebp_cli.recipe.loader import expand_shorthand, find_base, lay_over, load_tree
from sparsebp_cli.run.metric import METRICS
from sparsebp_lab.study.schema import ScaleSection, Study

SUFFIX = "-scaled"  # suffix of a scaled study's name, because its runs differ
WITHOUT = ("name", "base")  # keys that a base inside a study does not have
EVALUATED = ("eval/", "test/")  # prefixes of metrics that a package may add
SAME_RESULT = ("measure", "checkpoint", "tracking", "target")  # sections that do not affect the trained model


def read_base(file: Path, tree: Node) -> tuple[Path, Node]:
    """Return the file and expanded tree of a study's base; the study's own file if it holds the base."""
    assert isinstance(tree.content, dict)
    node = tree.content["base"]
    if not isinstance(node.content, dict):
        found = find_base(file, node)
        return found, load_tree(found, node)
    return file, expand_shorthand(replace(node, content={"version": tree.content["version"]} | node.content))


def scale_down(tree: Node, base: Node) -> tuple[Node, Node]:
    """Return the trees of a study and its base with the key ``scale`` applied. Raise RecipeError without that key."""
    assert isinstance(tree.content, dict)
    scale = tree.content.get("scale")
    if scale is None or not isinstance(scale.content, dict):
        raise tree.place.error("--scaled needs the study's key scale, which describes the small study", "scale")
    content = dict(tree.content)
    name = content["study"]
    content["study"] = replace(name, content=f"{name.content}{SUFFIX}")
    for key in ("vary", "budget", "seeds"):
        if key in scale.content:
            content[key] = lay_over(content[key], scale.content[key]) if key in content else scale.content[key]
    arms = scale.content.get("arms")
    if arms is not None:
        content["arms"] = replace(content["arms"], content=_scale_arms(content["arms"], arms))
    if "base" in scale.content:
        base = _scale_base(base, expand_shorthand(scale.content["base"]))
    return replace(tree, content=content), base


def _scale_base(base: Node, over: Node) -> Node:
    """Apply changes to a base. A dataset with another name replaces the old section completely."""
    assert isinstance(base.content, dict)
    assert isinstance(over.content, dict)
    dataset = over.content.get("dataset")
    if dataset is not None and isinstance(dataset.content, dict) and "name" in dataset.content:
        base = replace(base, content={key: node for key, node in base.content.items() if key != "dataset"})
    return lay_over(base, over)


def _scale_arms(arms: Node, scaled: Node) -> dict[str, Node]:
    assert isinstance(arms.content, dict)
    assert isinstance(scaled.content, dict)
    found = dict(arms.content)
    for arm, over in scaled.content.items():
        # The keys keep the places of the arms, so that errors name the arm.
        found[arm] = replace(lay_over(found[arm], over), key_place=found[arm].key_place)
    return found


def find_prefix(content: Mapping[str, Node], error: RecipeError, arm: str) -> str:
    """Return the study's keys that contain an error's key of an arm's recipe, by the error's place."""
    for prefix in (("scale", "base"), ("scale", "arms", arm), ("base",)):
        node: Node | None = Node(dict(content), Place(""))
        for part in prefix:
            node = node.content.get(part) if node is not None and isinstance(node.content, dict) else None
        if node is not None and _is_at(node, error):
            return ".".join(prefix)
    return f"arms.{arm}"


def _is_at(node: Node, error: RecipeError) -> bool:
    """Return whether an error concerns the node that its key leads to, or the last node on the way."""
    # An arm may have the whole dotted key at once.
    whole = node.content.get(error.key) if isinstance(node.content, dict) else None
    for part in () if whole is not None else error.key.split("."):
        below = node.content.get(part) if isinstance(node.content, dict) else None
        if below is None:
            break
        node = below
    node = whole or node
    places = [place for place in (node.place, node.key_place) if place is not None]
    return any((place.line, place.column) == (error.line, error.column) for place in places)


def describe_scale(scale: ScaleSection) -> tuple[str, ...]:
    """Return what a scaled study changes in the paper's setting, as ``key=value``."""
    parts = {"": scale.base} | {f"{arm} ": changes for arm, changes in scale.arms.items()}
    found = [(before, key, value) for before, part in parts.items() if part for key, value in flatten(part).items()]
    shown = [one for one in found if one[1].split(".")[0] not in SAME_RESULT]
    return tuple(f"{before}{key}={'null' if value is None else value}" for before, key, value in shown)


def find_wrong_scale(study: Study) -> Iterator[FieldError]:
    """Yield errors in the keys ``scale`` and ``paper``, and in a base inside the study."""
    if isinstance(study.base, Mapping):
        yield from _find_fixed(("base",), study.base)
    for place, claim in enumerate(study.paper.claimed if study.paper is not None else ()):
        for key, arm in (("arm", claim.arm), ("of", claim.of)):
            if arm is not None and arm not in study.arms:
                yield FieldError(("paper", "claimed", place, key), _name_arms(arm, study))
        if claim.metric not in METRICS and not claim.metric.startswith(EVALUATED):
            text = f"{claim.metric!r} is no metric that runs log{did_you_mean(claim.metric, METRICS)}"
            yield FieldError(("paper", "claimed", place, "metric"), text)
    if study.scale is None:
        return
    yield from _find_fixed(("scale", "base"), study.scale.base)
    for arm, changes in study.scale.arms.items():
        if arm not in study.arms:
            yield FieldError(("scale", "arms", arm), _name_arms(arm, study))
            continue
        # Dotted keys of an arm override sections, so a section here would have no effect.
        hidden = [key for key in flatten(_sections(changes)) if key in study.arms[arm]]
        if hidden:
            text = f"the arm sets {hidden[0]} as a dotted key: write it as a dotted key here, too"
            yield FieldError(("scale", "arms", arm, hidden[0].split(".")[0]), text)


def _find_fixed(location: tuple[str, ...], base: Mapping[str, object]) -> Iterator[FieldError]:
    for key in base:
        if key in WITHOUT:
            yield FieldError((*location, key), "leave it out: the base of a study has no name and no base")


def _sections(changes: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in changes.items() if "." not in key}


def _name_arms(arm: str, study: Study) -> str:
    return f"must be one of the arms ({', '.join(study.arms)}), got {arm!r}{did_you_mean(arm, study.arms)}"
