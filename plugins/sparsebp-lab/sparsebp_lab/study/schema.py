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
NO_RESULT = ("target", "tracking", "checkpoint")  # varying them would train the same model several times

Value = str | int | float | bool | None | list[object] | dict[str, object]


class BudgetSection(BaseModel):
    """What the arms have in common: their number of steps, or the cost of their steps in FLOPs, time or tokens."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True
    )

    same: Literal["steps", "cost", "time", "tokens"] = Field(
        description="What all arms get the same amount of: steps; cost, the FLOPs of steps with the update; time "
        "of steps; or input tokens, padding included. A rehearsal of each arm measures cost, time and tokens of a step."
    )
    as_arm: str | None = Field(
        None, alias="as", description="For cost, time and tokens: the arm whose steps are the budget of all."
    )
    steps: Annotated[int, Field(ge=FEWEST_STEPS)] | None = Field(
        None, description="Optimizer steps; with `as`, those of that arm. null: those of the base."
    )
    seconds: Annotated[float, Field(gt=0.0)] | None = Field(
        None,
        description="For same: time, instead of `as`: seconds of steps of each arm. Alone it implies same: time.",
    )
    tokens: PositiveInt | None = Field(
        None, description="For same: tokens, instead of `as`: input tokens that each arm has."
    )
    part: dict[Name, Annotated[float, Field(gt=0.0, le=1.0)]] = Field(
        default_factory=dict,
        description="For cost, time and tokens: arm to its fraction of the budget, such as {lossless: 0.5}, to test "
        "whether it is as good for less. The other arms get the whole budget.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_seconds_alone(cls, data: object) -> object:
        return {"same": "time", **data} if isinstance(data, dict) and "seconds" in data else data

    @model_validator(mode="after")
    def _belongs(self) -> Self:
        if self.same == "steps" and self.as_arm is not None:
            raise ValueError("as needs same: cost, time or tokens; with same: steps every arm trains the same number")
        for name, same in (("seconds", "time"), ("tokens", "tokens")):
            if getattr(self, name) is not None and self.same != same:
                raise ValueError(f"{name} goes with same: {same}, got same: {self.same}")
        if self.same == "cost" and self.as_arm is None:
            raise ValueError("same: cost needs as: ARM, the arm whose steps the others pay for")
        if self.same in {"time", "tokens"} and (self.as_arm is None) is (self.amount is None):
            amount = "seconds: N" if self.same == "time" else "tokens: N"
            raise ValueError(
                f"same: {self.same} needs {amount}, or as: ARM, the arm whose steps set the amount; not both"
            )
        if self.amount is not None and self.steps is not None:
            raise ValueError("steps belong to the arm under `as`; leave them out with seconds or tokens")
        if self.part and self.same == "steps":
            raise ValueError("part needs same: cost, time or tokens; with same: steps every arm trains the same number")
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
        description="Seeds of tuning: 0, [0, 1] or 0-2. With fewer than three, statements hold for the chosen values.",
    )
    report: Seeds = Field(description="Seeds of the runs that are compared: three or more allow statements.")

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
        description="grid: train every combination. halving: train every combination for some steps, then continue the "
        "best. tpe: Optuna proposes each from earlier results. random: draw each at random, the control of tpe.",
    )
    trials: Annotated[int, Field(ge=2)] | None = Field(
        None, description="For tpe and random: combinations of each arm."
    )
    reduction: Annotated[int, Field(ge=2)] = Field(
        3,
        description="For halving: one of this many combinations continues after one of this many parts of the steps.",
    )
    extend: CountFromZero = Field(
        4,
        description="For grid: how many values to add at most at an end of a list of numbers, while an arm's best is "
        "there.",
    )
    seed: CountFromZero = Field(0, description="For tpe and random: the seed of what is proposed.")

    @property
    def is_sampled(self) -> bool:
        """Whether combinations are proposed by a search; otherwise all are tried."""
        return self.kind in {"tpe", "random"}

    @model_validator(mode="after")
    def _has_trials(self) -> Self:
        if self.is_sampled and self.trials is None:
            raise ValueError(f"kind: {self.kind} needs trials: N, the combinations of each arm")
        if not self.is_sampled and self.trials is not None:
            raise ValueError(f"trials needs kind: tpe or random; {self.kind} trains every combination")
        return self


class RangeSection(BaseModel):
    """A range of numbers for a search."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True
    )

    start: int | float = Field(alias="from", description="The least. Two whole numbers make a range of whole numbers.")
    to: int | float = Field(description="The largest, included.")
    by: Literal["linear", "log"] = Field("linear", description="log: equal factors are equally likely.")


class PlaceSection(Section):
    """A place where trials run."""

    target: Name = Field(description="A kind, or a name from targets.yaml: `sparsebp targets` lists them.")
    max_parallel: PositiveInt = Field(1, description="Trials at once there.")


class ClaimSection(Section):
    """A number from the publication, to compare with the measured one."""

    arm: Name = Field(description="The arm that it is about.")
    metric: str = Field(
        description="A logged metric. The value is for eval/ and test/ that after the last step, for memory/ the "
        "largest, for time/ the median after warm-up, for others the mean over steps."
    )
    value: float = Field(description="The number, in the metric's unit: a share and not percent.")
    of: Name | None = Field(
        None, description="Divide the value of `arm` by that of this arm: 0.56 of dense. null: the value itself."
    )
    where: Annotated[str, Field(min_length=1)] = Field(
        description="Where the paper gives the number, such as `table 2`."
    )


class PaperSection(Section):
    """The publication whose setting the study reproduces."""

    title: Annotated[str, Field(min_length=1)] = Field(description="Authors, title and year, in one line.")
    link: Annotated[str, Field(pattern=r"^https://")] = Field(description="Where it can be read.")
    claimed: list[ClaimSection] = Field(
        default_factory=list, description="Its numbers for these arms; compare shows them beside the measured ones."
    )


class ScaleSection(Section):
    """Changes for the small study that `study --scaled` runs, key by key."""

    base: dict[str, object] = Field(
        default_factory=dict,
        description="Changes of the base: sections as in a recipe. A dataset with a name takes the place of the whole.",
    )
    arms: dict[Name, dict[str, object]] = Field(
        default_factory=dict, description="Further changes of arms, which lie over those of the arm."
    )
    vary: dict[str, Annotated[list[Value], Field(min_length=1)] | RangeSection] = Field(
        default_factory=dict, description="Other values of varied keys."
    )
    budget: BudgetSection | None = Field(None, description="Another budget; null: that of the study.")
    seeds: SeedsSection | None = Field(None, description="Other seeds; null: those of the study.")


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
        description="The recipe under every arm: a file, relative to this one, or its sections themselves."
    )
    arms: Annotated[dict[Name, dict[str, object]], Field(min_length=1)] = Field(
        description="Arm to its changes of the base: sections as in a recipe, or dotted keys. {} changes nothing."
    )
    vary: dict[str, Annotated[list[Value], Field(min_length=1)] | RangeSection] = Field(
        default_factory=dict,
        description="Dotted key to its values, or to {from: 1e-4, to: 1e-2, by: log} where the search proposes them. "
        "Each arm has its own; the best combination by the validation metric is reported.",
    )
    shares: dict[Name, Name] = Field(
        default_factory=dict,
        description="Arm to the arm whose combination it takes, as both have the same gradient: lossless: dense.",
    )
    search: SearchSection = Field(default_factory=SearchSection, description="How the combinations are tried.")
    budget: BudgetSection | None = Field(None, description="What all arms may spend; null: what each recipe says.")
    controls: Literal["none", "auto"] = Field(
        "none",
        description="auto: also dense with fewer steps and with a smaller batch at the cost of each arm, and random at "
        "its budget, where compare finds none.",
    )
    seeds: SeedsSection = Field(description="Seeds of tuning and of the report.")
    where: Annotated[list[Literal["local"] | PlaceSection], Field(min_length=1)] | None = Field(
        None,
        description="Places that share the trials: local, {target: NAME, max_parallel: 8}. null: the base's target.",
    )
    paper: PaperSection | None = Field(None, description="The publication whose setting this is, and its numbers.")
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
