"""Read a study's file: the study, and one checked recipe for each arm and combination, with places for errors."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sparsebp_cli.errors import RecipeError, did_you_mean
from sparsebp_cli.policy.error_text import describe_kind, show
from sparsebp_cli.policy.field_error import FieldError, Location, describe_errors
from sparsebp_cli.recipe import PlacedRecipe
from sparsebp_cli.recipe.check import check_recipe, first_error
from sparsebp_cli.recipe.document import Node, Place, read_document
from sparsebp_cli.recipe.loader import expand_shorthand, lay_over, read_text
from sparsebp_cli.recipe.override import set_value
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_lab.study.published import Paper, PaperClaim
from sparsebp_lab.study.scale import describe_scale, find_prefix, find_wrong_scale, read_base, scale_down
from sparsebp_lab.study.schema import FIXED_KEYS, NO_RESULT, STEPS_KEY, TRAIN_EXAMPLES_KEY, RangeSection, Study

MOST_VARIANTS = 10_000
ENDS = ("from", "to")  # of a range
FUSED = ("adam", "adamw", "adagrad", "sgd")  # optimizers of torch.optim with a fused form on each device

Combination = tuple[tuple[str, object], ...]  # key and value of each varied key, in the file's order


def describe(combination: Combination) -> str:
    """Return a combination in one line, such as ``learning_rate=0.001 keep=0.25``."""
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in combination)


@dataclass(frozen=True)
class ArmVariant:
    """An arm with one combination of the varied values."""

    arm: str
    combination: Combination
    placed: PlacedRecipe  # checked, with the steps and seed of the base

    @property
    def recipe(self) -> Recipe:
        """The recipe, named after the arm."""
        return self.placed.recipe

    @property
    def label(self) -> str:
        """The combination in one line, such as ``learning_rate=0.001 keep=0.25``; empty if nothing is varied."""
        return describe(self.combination)


@dataclass(frozen=True)
class LoadedStudy:
    """A study with the recipes of all its variants."""

    file: Path
    study: Study
    base_file: Path
    variants: tuple[ArmVariant, ...]  # arm by arm, in the file's order; for a search, the proposed ones
    firsts: Mapping[str, ArmVariant]  # first combination by arm; ranges at their lower ends
    tree: Node  # content of the file, with places
    base: Node  # recipe under every arm, with places
    scaled: tuple[str, ...] = ()  # what the small study changes, as key=value
    options: tuple[str, ...] = ()  # options of `sparsebp study` that made it from the file

    @property
    def words(self) -> str:
        """Words after `sparsebp study` that continue it."""
        return shlex.join([str(self.file), *self.options])

    @property
    def paper(self) -> Paper | None:
        """The publication whose setting the study reproduces, in full or scaled down."""
        paper = self.study.paper
        if paper is None:
            return None
        claims = [PaperClaim(one.arm, one.metric, one.value, one.where, one.of or "") for one in paper.claimed]
        return Paper(paper.title, paper.link, tuple(claims), self.scaled)

    def error(self, location: Location, text: str) -> RecipeError:
        """Return an error at a key of the file; the caller raises it."""
        return first_error(self.tree, [FieldError(location, text)])

    def of_arm(self, arm: str) -> list[ArmVariant]:
        """Return the variants of one arm."""
        return [variant for variant in self.variants if variant.arm == arm]

    def with_combinations(self, asked: Mapping[str, Sequence[Combination]]) -> LoadedStudy:
        """Return the study with the combinations that a search has proposed for each arm. Raise RecipeError if one
        makes no valid recipe."""
        content = self.tree.content
        assert isinstance(content, dict)
        arms, place = content["arms"].content, content["vary"].place
        assert isinstance(arms, dict)
        variants = [
            _make_variant(arm, changed, [(key, _make_node(value, place)) for key, value in combination], content)
            for arm, combinations in asked.items()
            for changed in [_change(self.base, arms[arm])]
            for combination in combinations
        ]
        return replace(self, variants=tuple(variants))

    @property
    def folders(self) -> list[Path]:
        """Where relative paths of models and data are searched, in order."""
        return [self.file.resolve().parent, self.base_file.resolve().parent, Path.cwd()]


def load_study(file: Path, *, scaled: bool = False) -> LoadedStudy:
    """Read and check a study and the recipe of every arm and combination; ``scaled`` reads the small study of its key
    ``scale``. Raise RecipeError with ``file:line:column: key:`` for the first error."""
    tree = read_document(read_text(file), str(file))
    if tree is None:
        raise Place(str(file), 1, 1).error(
            "the file is empty, but a study needs at least the keys version, study, base, arms and seeds"
        )
    if not isinstance(tree.content, dict):
        raise tree.place.error(f"a study must be a mapping, got {describe_kind(tree.plain)}")
    study = _check(tree)
    base_file, base = read_base(file, tree)
    other: tuple[str, ...] = ()
    if scaled:
        tree, base = scale_down(tree, base)
        other = () if study.scale is None else describe_scale(study.scale)
        study = _check(tree)
    if study.controls == "auto" and study.budget is not None and study.budget.same == "cost":
        tree = _add_controls(tree, base, study)
        study = _check(tree)
    assert isinstance(tree.content, dict)
    variants = () if study.search.is_sampled else tuple(_make_variants(tree.content, base))
    # Reversed, so that the first variant of each arm remains in the mapping.
    found = _make_firsts(tree.content, base) if study.search.is_sampled else reversed(variants)
    firsts = {variant.arm: variant for variant in found}
    return LoadedStudy(file, study, base_file, variants, firsts, tree, base, other, ("--scaled",) if scaled else ())


def read_arms(file: Path) -> list[str]:
    """Return the names of a study's arms without reading their recipes, whose models and plug-ins may be missing here.
    Raise RecipeError for a file that is no study."""
    tree = read_document(read_text(file), str(file))
    if tree is None:
        raise Place(str(file), 1, 1).error(
            "the file is empty, but a study needs at least the keys version, study, base, arms and seeds"
        )
    return [*_check(tree).arms]


def _check(tree: Node) -> Study:
    data = tree.plain
    try:
        study = Study.model_validate(data)
    except ValidationError as error:
        raise first_error(tree, describe_errors(error, Study, data)) from None
    if wrong := [*_find_misplaced(study)]:
        raise first_error(tree, wrong)
    return study


def _add_controls(tree: Node, base: Node, study: Study) -> Node:
    """Add two controls: dense in batches of similar length if texts are padded, and dense with the optimizer's fused
    form, which shares dense's values. Both follow the paying arm if it is dense, unless an arm has them already."""
    assert isinstance(tree.content, dict)
    assert study.budget is not None
    arms, name = tree.content["arms"], str(study.budget.as_arm)
    assert isinstance(arms.content, dict)
    changes = arms.content[name]
    recipes = [_make_variant(arm, _change(base, node), [], tree.content).recipe for arm, node in arms.content.items()]
    recipe = recipes[[*arms.content].index(name)]
    if any(entry.name != "dense" for entry in recipe.policy):
        return tree
    added: dict[str, dict[str, object]] = {}
    shares = dict(study.shares)
    padded = recipe.dataset.format != "text" and recipe.training.per_device_train_batch_size > 1
    if padded and all(one.training.group_by is None for one in recipes):
        added[f"{name}-by-length"] = {"training.group_by": "length"}
    has_fused = recipe.training.optim in FUSED and recipe.backward.update != "eager"
    if has_fused and not any("fused" in one.training.optim_args for one in recipes):
        added[f"{name}-fused"] = {"training.optim_args": {**recipe.training.optim_args, "fused": True}}
        shares[f"{name}-fused"] = shares.get(name, name)
    plain = changes.plain if isinstance(changes.plain, dict) else {}
    new = {arm: replace(_make_node(plain | more, changes.place), key_place=None) for arm, more in added.items()}
    content = {**tree.content, "arms": replace(arms, content={**arms.content, **new})}
    return replace(tree, content=content | {"shares": _make_node(shares, changes.place)})


def _find_misplaced(study: Study) -> Iterator[FieldError]:
    """Yield keys that the study itself decides, and arms that do not exist."""
    yield from _find_unknown_payers(study)
    yield from find_wrong_scale(study)
    yield from _find_wrong_sharing(study)
    yield from _find_seeds_of_both(study)
    for arm, changes in study.arms.items():
        for key in _dotted(changes):
            location = ("arms", arm, *_find_location(changes, key))
            if key in FIXED_KEYS:
                yield FieldError(
                    location,
                    "an arm cannot set this key: under arms, its key is its name, and the key seeds sets its seeds",
                )
            if key == STEPS_KEY and study.budget is not None:
                yield FieldError(location, "leave it out: the study's key budget sets the steps of every arm")
            if key.split(".")[0] == "target" and study.where is not None:
                yield FieldError(location, "leave it out: the study's key where sets the target of every arm")
    if study.search.is_sampled and not study.vary:
        yield FieldError(
            ("search",), f"kind: {study.search.kind} needs the key vary, with the keys whose values it chooses"
        )
    for key, values in study.vary.items():
        location = ("vary", key)
        yield from _find_wrong_values(location, values, study)
        if key in FIXED_KEYS or key.split(".")[0] in NO_RESULT:
            yield FieldError(location, "cannot be varied: either it does not change the training, or the study sets it")
        if key.split(".")[0] == "dataset" and key != TRAIN_EXAMPLES_KEY:
            text = "cannot be varied, since validation data would differ; of dataset, only max_train_examples can be"
            yield FieldError(location, text)
        if key == STEPS_KEY and study.budget is not None:
            yield FieldError(location, "leave it out: the study's key budget sets the steps of every arm")


def _find_unknown_payers(study: Study) -> Iterator[FieldError]:
    """Yield errors of budget keys that name arms that do not exist."""
    if study.budget is None:
        return
    named: list[tuple[tuple[str, ...], str | None]] = [(("budget", "as"), study.budget.as_arm)]
    named += [(("budget", "part", arm), arm) for arm in study.budget.part]
    for place, arm in named:
        if arm not in {None, *study.arms}:
            text = f"must be one of the arms ({', '.join(study.arms)}), got {arm!r}{did_you_mean(str(arm), study.arms)}"
            yield FieldError(place, text)


def _find_seeds_of_both(study: Study) -> Iterator[FieldError]:
    """Yield seeds that both tune and report: a choice that a lucky seed caused would look good on that seed."""
    chooses = any(isinstance(values, RangeSection) or len(values) > 1 for values in study.vary.values())
    both = [seed for seed in study.seeds.report if chooses and seed in study.seeds.tune]
    if both:
        fresh = max(study.seeds.tune) + 1
        yield FieldError(
            ("seeds", "report"),
            f"must not contain seeds of seeds.tune, got {', '.join(map(str, both))} in both; for example, use "
            f"{fresh}-{fresh + 2}",
        )


def _find_wrong_sharing(study: Study) -> Iterator[FieldError]:
    tuned = [arm for arm in study.arms if arm not in study.shares]
    for arm, source in study.shares.items():
        if arm not in study.arms:
            text = f"{arm!r} is none of the arms ({', '.join(study.arms)}){did_you_mean(arm, study.arms)}"
            yield FieldError(("shares",), text)
        if source not in tuned:
            text = f"must be one of the arms that are tuned ({', '.join(tuned)}), got {source!r}"
            yield FieldError(("shares", arm), text + did_you_mean(source, tuned))


def _find_wrong_values(
    location: Location, values: RangeSection | Sequence[object], study: Study
) -> Iterator[FieldError]:
    if not isinstance(values, RangeSection):
        for number, value in enumerate(values):  # 5e-4 equals 0.0005, but true does not equal 1
            if any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values[:number]):
                yield FieldError(
                    location, f"{show(value)} is given twice: the same training would count as two choices"
                )
        return
    if not study.search.is_sampled:
        yield FieldError(
            location, f"{study.search.kind} needs a list of values; search: {{kind: tpe, trials: 12}} takes a range"
        )
    if values.start >= values.to:
        yield FieldError((*location, "to"), f"must be above the key from ({values.start:g}), got {values.to:g}")
    if values.by == "log" and values.start <= 0:
        yield FieldError((*location, "from"), f"must be above 0 with by: log, got {values.start:g}")


def _dotted(changes: Mapping[str, object], path: str = "") -> Iterator[str]:
    for key, value in changes.items():
        whole = f"{path}.{key}" if path else key
        yield whole
        if isinstance(value, Mapping):
            yield from _dotted(value, whole)


def _find_location(changes: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the keys that lead to a dotted key; the first may contain dots itself."""
    for first, value in changes.items():
        if key == first:
            return (first,)
        if key.startswith(f"{first}.") and isinstance(value, Mapping):
            return (first, *_find_location(value, key.removeprefix(f"{first}.")))
    return ()


Choice = tuple[str, Node]  # a varied key and one of its values


def _make_variants(content: Mapping[str, Node], base: Node) -> Iterator[ArmVariant]:
    """Yield every combination of the values of each arm."""
    choices = _find_choices(content)
    arms = content["arms"].content
    assert isinstance(arms, dict)
    if (count := math.prod(len(choice) for choice in choices) * len(arms)) > MOST_VARIANTS:
        raise content["vary"].place.error(
            (f"the study has {count} combinations of arms and values, allowed: at most {MOST_VARIANTS}"), "vary"
        )
    for arm, changes in arms.items():
        changed = _change(base, changes)
        for combination in itertools.product(*choices):
            yield _make_variant(arm, changed, combination, content)


def _make_firsts(content: Mapping[str, Node], base: Node) -> Iterator[ArmVariant]:
    """Yield the first combination of each arm, ranges at their lower ends; check every other value with it."""
    choices = _find_choices(content)
    first = [choice[0] for choice in choices]
    arms = content["arms"].content
    assert isinstance(arms, dict)
    for arm, changes in arms.items():
        changed = _change(base, changes)
        for number, choice in enumerate(choices):
            for one in choice[1:]:
                _make_variant(arm, changed, [*first[:number], one, *first[number + 1 :]], content)
        yield _make_variant(arm, changed, first, content)


def _find_choices(content: Mapping[str, Node]) -> list[list[Choice]]:
    """Return the values of each varied key; a range counts with its ends."""
    vary = content["vary"].content if "vary" in content else {}
    assert isinstance(vary, dict)
    choices = []
    for key, values in vary.items():
        inner = values.content
        nodes = inner if isinstance(inner, list) else [inner[end] for end in ENDS] if isinstance(inner, dict) else []
        choices.append([(key, node) for node in nodes])
    return choices


def _make_variant(arm: str, changed: Node, combination: Sequence[Choice], content: Mapping[str, Node]) -> ArmVariant:
    arms = content["arms"].content
    assert isinstance(arms, dict)
    tree = changed
    try:
        for key, node in combination:
            tree = expand_shorthand(set_value(tree, key.split("."), node))
        assert isinstance(tree.content, dict)
        tree = replace(tree, content={**tree.content, "name": Node(arm, arms[arm].key_place or arms[arm].place)})
        placed = check_recipe(tree)
        if placed.recipe.training.num_train_epochs is not None:
            raise placed.error(
                ("training", "num_train_epochs"),
                "a study needs training.max_steps instead of training.num_train_epochs",
            )
    except RecipeError as error:
        raise _locate(error, arm, content, [key for key, _ in combination]) from None
    return ArmVariant(arm, tuple((key, node.plain) for key, node in combination), placed)


def _make_node(value: object, place: Place) -> Node:
    """Return a value that a search proposed as a node at the place of its range."""
    if isinstance(value, dict):
        return Node({key: _make_node(inner, place) for key, inner in value.items()}, place)
    if isinstance(value, list):
        return Node([_make_node(inner, place) for inner in value], place)
    assert value is None or isinstance(value, str | int | float | bool)
    return Node(value, place)


def _change(base: Node, changes: Node) -> Node:
    """Lay an arm's sections over the base, then set its dotted keys, in the file's order."""
    assert isinstance(changes.content, dict)
    sections = {key: node for key, node in changes.content.items() if "." not in key}
    tree = lay_over(base, expand_shorthand(replace(changes, content=sections)))
    for key, node in changes.content.items():
        if "." in key:
            tree = expand_shorthand(set_value(tree, key.split("."), node))
    return tree


def _locate(error: RecipeError, arm: str, content: Mapping[str, Node], varied: list[str]) -> RecipeError:
    """Return an error of an arm's recipe with its key in the study's file, if the error's place is there."""
    own = content["arms"].place.file
    if error.file != own:
        return RecipeError(
            f"{error.text} (arm {arm})", file=error.file, line=error.line, column=error.column, key=error.key
        )
    prefix = find_prefix(content, error, arm)
    key = next((f"vary.{one}" for one in varied if error.key == one), f"{prefix}.{error.key}" if error.key else "arms")
    return RecipeError(error.text, file=error.file, line=error.line, column=error.column, key=key)
