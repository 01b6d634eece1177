"""The request that ``sparsebp bench`` sends to the process that measures."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from sparsebp_cli.recipe.schema import ModelSection, Recipe
from sparsebp_tools.bench.form import BenchForm

MODEL = "austen-llama"  # model, length and batch of recipes/start/python-docs.yaml
LENGTH, BATCH = 128, 16


class Request(BaseModel):
    """One benchmark."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    policy: str  # name of the policy
    forms: tuple[BenchForm, ...]  # measured in addition to dense
    model: ModelSection  # the model, as in a recipe
    classification: bool = False  # whether it has a classification head
    batch: PositiveInt = BATCH  # examples a pass; None: 16, or the recipe's
    length: Annotated[int, Field(ge=8)] = LENGTH  # tokens an example
    exclude: tuple[str, ...] = ()  # sites that stay dense: globs over module names
    mixed_precision: Literal["no", "bf16"] = "no"  # ``bf16`` is autocast
    compile: bool = False  # whether dense is measured compiled, too
    threads: PositiveInt | None = None  # CPU threads of torch; None: torch's own choice
    device: Literal["auto", "cpu", "cuda"] = "auto"  # ``auto`` is CUDA where there is one
    rounds: PositiveInt = 9  # measured rounds, in each of which every form runs once
    warmup: Annotated[int, Field(ge=0)] = 2  # rounds before the measured ones
    seed: int = 0  # of weights, tokens and random policies

    @classmethod
    def of_recipe(cls, recipe: Recipe, policy: str, forms: tuple[BenchForm, ...]) -> Request:
        """Return the request for a resolved recipe's model, shapes and threads; its policies and data are ignored."""
        return cls(
            policy=policy,
            forms=forms,
            model=recipe.model,
            classification=recipe.dataset.format == "classification",
            batch=recipe.training.per_device_train_batch_size,
            length=recipe.dataset.max_seq_length,
            exclude=tuple(recipe.backward.exclude),
            mixed_precision=recipe.training.mixed_precision,
            compile=recipe.training.compile,
            threads=recipe.target.threads,
            device=recipe.target.device,
            seed=recipe.training.seed,
        )
