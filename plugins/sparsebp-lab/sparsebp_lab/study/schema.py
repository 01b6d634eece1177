"""The schema of a study's file: arms over one base recipe, what is varied, at which budget, with which seeds, where."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy.error_text import show
from sparsebp_cli.recipe import parse_seeds
from sparsebp_cli.recipe.schema import CountFromZero, Name, PositiveInt, Section

FEWEST_STEPS = 10  # a smaller budget is refused: a schedule over so few steps shows nothing about a method
STEPS_KEY = "training.max_steps"
FIXED_KEYS = ("name", "base", "version", "training.seed")  # the study itself decides these
TRAIN_EXAMPLES_KEY = "dataset.max_train_examples"  # the only key of the data that leaves validation data alone
NO_RESULT = ("target", "tracking", "checkpoint")  # varying them would train the same model several times

Value = str | int | float | bool | None | list[object] | dict[str, object]


class BudgetSection(BaseModel):
    """What the arms have in common: their number of steps, or the cost of their steps in FLOPs, time or tokens."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True
    )

    same: Literal["steps", "cost", "time", "tokens"] = Field(
        description=(
            "Quantity of which all arms get the same amount. steps: optimizer steps. cost: FLOPs of forward, "
            "backward and update. time: seconds of steps. tokens: input tokens, padding included. For cost, time "
            "and tokens, SparseBP first measures a step of each arm in a short rehearsal."
        )
    )
    as_arm: str | None = Field(
        None,
        alias="as",
        description=(
            "For 'same: cost', 'same: time' and 'same: tokens': name of the arm whose training sets the budget of "
            "all arms."
        ),
    )
    steps: Annotated[int, Field(ge=FEWEST_STEPS)] | None = Field(
        None,
        description=(
            "Number of optimizer steps of every arm; with `as`, only of the arm that `as` names. null: "
            "training.max_steps of the base."
        ),
    )
    seconds: Annotated[float, Field(gt=0.0)] | None = Field(
        None,
        description=(
            "For 'same: time', instead of `as`: seconds that each arm may spend in steps. If `same` is missing, it "
            "is time."
        ),
    )
    tokens: PositiveInt | None = Field(
        None,
        description=(
            "Number of input tokens for each arm, padding included. Use this key with 'same: tokens', in place of "
            "the key `as`."
        ),
    )
    part: dict[Name, Annotated[float, Field(gt=0.0, le=1.0)]] = Field(
        default_factory=dict,
        description=(
            "For 'same: cost', 'same: time' and 'same: tokens': map from an arm to its fraction of the budget. "
            "For example, {lossless: 0.5} tests whether lossless is as good with half of the budget. Other "
            "arms get the whole budget."
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _read_seconds_alone(cls, data: object) -> object:
        return {"same": "time", **data} if isinstance(data, dict) and "seconds" in data else data

    @model_validator(mode="after")
    def _belongs(self) -> Self:
        if self.same == "steps" and self.as_arm is not None:
            raise ValueError(
                "the key `as` needs 'same: cost', 'same: time' or 'same: tokens'; with 'same: steps', every arm "
                "trains the same number of steps"
            )
        for name, same in (("seconds", "time"), ("tokens", "tokens")):
            if getattr(self, name) is not None and self.same != same:
                raise ValueError(f"{name} needs 'same: {same}', got 'same: {self.same}'")
        if self.same == "cost" and self.as_arm is None:
            raise ValueError("'same: cost' needs 'as: ARM', where ARM is the arm whose cost every other arm may spend")
        if self.same in {"time", "tokens"} and (self.as_arm is None) is (self.amount is None):
            amount = "seconds: N" if self.same == "time" else "tokens: N"
            raise ValueError(
                f"'same: {self.same}' needs either '{amount}' or 'as: ARM', where ARM is the arm whose steps set "
                "the amount"
            )
        if self.amount is not None and self.steps is not None:
            raise ValueError("`steps` is used only with `as`: leave `steps` out if you give seconds or tokens")
        if self.part and self.same == "steps":
            raise ValueError(
                "the key `part` needs 'same: cost', 'same: time' or 'same: tokens'; with 'same: steps', every "
                "arm trains the same number of steps"
            )
        return self

    @property
    def amount(self) -> float | None:
        """Seconds or tokens of each arm; None if an arm's steps define the amount, or if steps are counted."""
        return self.tokens if self.seconds is None else self.seconds

    def part_of(self, arm: str) -> float:
        """Return an arm's part of the budget, in (0, 1]."""
        return self.part.get(arm, 1.0)


def _read_seeds(value: object) -> object:
    """Return the list for ``0-4``, ``0,2,5`` or one number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if not isinstance(value, str):
        return value
    try:
        return parse_seeds(value)
    except UsageError as error:
        raise ValueError(str(error).partition(": ")[2]) from None


Seeds = Annotated[list[CountFromZero], BeforeValidator(_read_seeds), Field(min_length=1)]


class SeedsSection(Section):
    """The seeds for tuning, and the seeds for the comparison."""

    tune: Seeds = Field(
        default_factory=lambda: [0, 1, 2],
        description=(
            "Seeds for tuning, such as 0, [0, 1] or 0-2. With fewer than three seeds, results hold only for the "
            "chosen values, not for the method."
        ),
    )
    report: Seeds = Field(
        description="Seeds of the runs that are compared, such as 3-7. Statements such as 'better' need three seeds "
        "or more."
    )

    @field_validator("tune", "report")
    @classmethod
    def _each_once(cls, value: list[int]) -> list[int]:
        if repeated := [seed for seed in value if value.count(seed) > 1]:
            raise ValueError(f"seed {repeated[0]} is given twice")
        return value


class SearchSection(Section):
    """How the combinations of ``vary`` are tried."""

    kind: Literal["grid", "halving", "tpe", "random"] = Field(
        "grid",
        description=(
            "grid: train every combination. halving: train every combination for some steps, then continue the "
            "best. tpe: Optuna proposes each combination from earlier results. random: draw each combination at "
            "random, as a control for tpe."
        ),
    )
    trials: Annotated[int, Field(ge=2)] | None = Field(
        None, description="For tpe and random: number of combinations that each arm tries."
    )
    reduction: Annotated[int, Field(ge=2)] = Field(
        3,
        description=("For halving: a number N. After 1/N of the steps, the best 1/N of the combinations continues."),
    )
    extend: CountFromZero = Field(
        4,
        description=(
            "For grid: if the best value of an arm is the first or last of a list of numbers, the study extends the "
            "list there. At most this many values are added at each end."
        ),
    )
    seed: CountFromZero = Field(
        0, description="For tpe and random: seed of the search, which proposes the combinations."
    )

    @property
    def is_sampled(self) -> bool:
        """Whether combinations are proposed by a search; otherwise all are tried."""
        return self.kind in {"tpe", "random"}

    @model_validator(mode="after")
    def _has_trials(self) -> Self:
        if self.is_sampled and self.trials is None:
            raise ValueError(
                f"'kind: {self.kind}' needs 'trials: N', where N is the number of combinations that each arm tries"
            )
        if not self.is_sampled and self.trials is not None:
            raise ValueError(
                f"trials needs 'kind: tpe' or 'kind: random'; 'kind: {self.kind}' trains every combination"
            )
        return self


class RangeSection(BaseModel):
    """A range of numbers for a search."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True
    )

    start: int | float = Field(
        alias="from",
        description=(
            "Smallest value of the range, included. If both ends are whole numbers, the search proposes only whole "
            "numbers."
        ),
    )
    to: int | float = Field(description="Largest value of the range, included.")
    by: Literal["linear", "log"] = Field(
        "linear", description="linear: equal differences are equally likely. log: equal factors are equally likely."
    )


class PlaceSection(Section):
    """A place where trials run."""

    target: Name = Field(description="A kind of target, or a name in targets.yaml. `sparsebp targets` lists both.")
    max_parallel: PositiveInt = Field(1, description="Number of trials that run on this target at once.")


class ClaimSection(Section):
    """A number from the publication, to compare with the measured one."""

    arm: Name = Field(description="Name of the arm whose value the publication gives.")
    metric: str = Field(
        description=(
            "Name of a logged metric. For eval/ and test/, SparseBP reads the value after the last step, for "
            "memory/ the largest, for time/ the median after warm-up. For other metrics, it reads the mean over "
            "steps."
        )
    )
    value: float = Field(
        description="The published number, in the metric's unit. Write percentages as fractions, such as 0.4."
    )
    of: Name | None = Field(
        None,
        description=(
            "For a relative number, such as 0.56 times the memory of dense: the arm to compare with. compare "
            "divides the value of `arm` by the value of this arm. null: the number is not relative."
        ),
    )
    where: Annotated[str, Field(min_length=1)] = Field(
        description="Where the paper states this number, such as `table 2`."
    )


class PaperSection(Section):
    """The publication whose setting the study reproduces."""

    title: Annotated[str, Field(min_length=1)] = Field(description="Authors, title and year, in one line.")
    link: Annotated[str, Field(pattern=r"^https://")] = Field(
        description="Link to the publication; it begins with https://."
    )
    claimed: list[ClaimSection] = Field(
        default_factory=list,
        description=(
            "Numbers that the publication gives for these arms. compare shows them beside the measured numbers."
        ),
    )


class ScaleSection(Section):
    """Changes for the small study that `study --scaled` runs, key by key."""

    base: dict[str, object] = Field(
        default_factory=dict,
        description=(
            "Changes of the base, as sections of a recipe. A dataset with a name replaces the whole section dataset "
            "of the base."
        ),
    )
    arms: dict[Name, dict[str, object]] = Field(
        default_factory=dict,
        description=("For some arms: more changes to the recipe. SparseBP applies them after the arm's own changes."),
    )
    vary: dict[str, Annotated[list[Value], Field(min_length=1)] | RangeSection] = Field(
        default_factory=dict, description="Map from a varied key to other values for it."
    )
    budget: BudgetSection | None = Field(
        None, description="Another budget for the small study; null: the study's own budget."
    )
    seeds: SeedsSection | None = Field(
        None, description="Other seeds for the small study; null: the study's own seeds."
    )


def _refuse_other_ones(value: object) -> object:
    if type(value) is not int:
        raise ValueError(f"got {show(value)}, allowed: 1")
    return value


class Study(Section):
    """A study: which of these arms is better, each tuned, at the same budget?"""

    version: Annotated[Literal[1], BeforeValidator(_refuse_other_ones)] = Field(
        description="Version of the study format."
    )
    study: Name = Field(description="Name of the study: letters, digits, dot, dash, underscore.")
    base: Annotated[str, Field(min_length=1)] | dict[str, object] = Field(
        description=(
            "The recipe that every arm changes: the path of a file, relative to this study's file, or the recipe's "
            "sections themselves."
        )
    )
    arms: Annotated[dict[Name, dict[str, object]], Field(min_length=1)] = Field(
        description=(
            "Map from the name of an arm to its changes of the base: sections of a recipe, or dotted keys. {} "
            "changes nothing."
        )
    )
    vary: dict[str, Annotated[list[Value], Field(min_length=1)] | RangeSection] = Field(
        default_factory=dict,
        description=(
            "Map from a dotted key to its values. If a search proposes the values, give a range: {from: 1e-4, to: "
            "1e-2, by: log}. Each arm is tuned separately. Its best combination by the validation metric is "
            "reported."
        ),
    )
    shares: dict[Name, Name] = Field(
        default_factory=dict,
        description=(
            "Map from an arm to another arm, whose best combination it uses. For example, {lossless: dense}, "
            "because both have the same gradient."
        ),
    )
    search: SearchSection = Field(
        default_factory=SearchSection, description="How the combinations of the varied values are tried."
    )
    budget: BudgetSection | None = Field(
        None, description="The budget that all arms get; null: each arm trains as its recipe says."
    )
    controls: Literal["none", "auto"] = Field(
        "none",
        description=(
            "auto: train the control runs that compare needs. For each arm these are dense training with fewer "
            "steps or a smaller batch at the same cost, and a random choice with the same budget. none: train no "
            "controls."
        ),
    )
    seeds: SeedsSection = Field(description="Seeds for tuning, and seeds for the comparison.")
    where: Annotated[list[Literal["local"] | PlaceSection], Field(min_length=1)] | None = Field(
        None,
        description=(
            "Targets among which the trials are divided, such as [local, {target: NAME, max_parallel: 8}]. null: "
            "the base's target."
        ),
    )
    paper: PaperSection | None = Field(
        None, description="The publication whose setting this study repeats, and the numbers that it gives."
    )
    scale: ScaleSection | None = Field(
        None, description="The same study at a size that fits a small machine, for `study --scaled`."
    )


def study_schema() -> dict[str, object]:
    """Return the JSON schema (draft 2020-12) of a study, for editors; seeds also in their short forms."""
    schema = Study.model_json_schema()
    seeds = schema["$defs"]["SeedsSection"]["properties"]
    for name in ("tune", "report"):
        described = {key: seeds[name].pop(key) for key in ("description", "default") if key in seeds[name]}
        short = {"type": "string", "pattern": r"^\s*[0-9]+\s*(-\s*[0-9]+\s*)?(,\s*[0-9]+\s*(-\s*[0-9]+\s*)?)*$"}
        seeds[name] = {"anyOf": [seeds[name], {"type": "integer", "minimum": 0}, short], **described}
    budget = schema["$defs"]["BudgetSection"]
    budget["anyOf"] = [{"required": budget.pop("required")}, {"required": ["seconds"]}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "SparseBP study"}
