"""What a recipe may say. Unknown keys are refused; the words are those of ``transformers.TrainingArguments``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from sparsebp_cli.composition import BackwardOptions
from sparsebp_cli.policy.phrase import show
from sparsebp_cli.recipe.section import CountFromZero, Name, PositiveInt, Section


class LoraSection(Section):
    """Low-rank adapters, through peft; the names are ``peft.LoraConfig``'s."""

    r: PositiveInt = Field(8, description="Rank of the adapters.")
    lora_alpha: PositiveInt = Field(16, description="Scale: the update is multiplied by lora_alpha / r.")
    lora_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.0, description="Dropout before the adapters.")
    target_modules: list[str] | Literal["all-linear"] = Field("all-linear", description="Which linears get adapters.")


class ModelSection(Section):
    """The model: by name, or with random weights from a config."""

    name: str | None = Field(
        None,
        description="Hub id, local folder, an installed model's name, or package:PACKAGE/FOLDER. Safetensors only.",
    )
    config: dict[str, Any] | None = Field(
        None, description="Random weights instead: a transformers config with its model_type."
    )
    tokenizer: str | None = Field(None, description="Where the tokenizer is, when not with the model.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Of the weights; bfloat16 is pure bfloat16.")
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="transformers' attention implementation.")
    float8: Literal["emulated", "native"] | None = Field(
        None,
        description="Linears multiply in float8, by torchao: native in a GPU's float8 units, emulated with the same "
        "casts on any device. The head and adapters do not.",
    )
    lora: LoraSection | None = Field(None, description="Train low-rank adapters only.")

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if self.name is None and self.config is None:
            raise ValueError("give name, or a config for random weights")
        if self.name is not None and self.config is not None:
            raise ValueError("give either name or config, not both")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("config needs model_type")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("a config has no tokenizer: give tokenizer as well")
        return self


class DatasetSection(Section):
    """The data, and how it becomes tokens."""

    name: str = Field(description="Hub id, local file or folder, an installed dataset's name, or package:PACKAGE/FILE.")
    subset: str | None = Field(None, description="Configuration of a hub id.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id.")
    format: Literal["text", "completion", "classification"] = Field(
        "text", description="text: packed; completion: the prompt is masked; classification: one label a text."
    )
    max_seq_length: Annotated[int, Field(ge=8)] = Field(128, description="Positions an example has at most.")
    split: str = Field("train", description="Split that is trained on.")
    eval_split: str | None = Field(None, description="Held-out split; none: eval_fraction of the training split.")
    eval_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(0.1, description="Share held out, from the end.")
    test_split: str | None = Field(None, description="Split that is read once, after the last step: test/loss.")
    test_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None,
        description="Share of what is held out that is kept for test/loss instead of a test_split, by whole rows; what "
        "is trained on does not depend on it. null: none.",
    )
    text_column: str = Field("text", description="Column of text and classification.")
    prompt_column: str = Field("prompt", description="Column of completion: not trained on.")
    completion_column: str = Field("completion", description="Column of completion: trained on.")
    completion_only_loss: bool = Field(
        True, description="Of completion: whether the prompts stay untrained; held-out ones are never counted."
    )
    label_column: str = Field("label", description="Column of classification: integers from 0, or names.")
    max_examples: PositiveInt | None = Field(None, description="Use the first so many rows of each split.")
    max_train_examples: PositiveInt | None = Field(
        None,
        description="Train on the first so many examples, blocks of packed text; what is held out stays. null: all.",
    )

    @model_validator(mode="after")
    def _test_is_apart(self) -> Self:
        if self.test_split is not None and self.test_fraction is not None:
            raise ValueError(
                f"give test_split or test_fraction, got both ({self.test_split} and {self.test_fraction:g})"
            )
        if self.test_split is not None and self.test_split in (self.split, self.eval_split):
            used = "split" if self.test_split == self.split else "eval_split"
            raise ValueError(f"test_split must be another split than {used}, got {self.test_split} for both")
        return self


class PolicyEntry(BaseModel):
    """A gradient policy by name, with its options beside the name."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str = Field(description="A name that `sparsebp policies` lists.")

    @property
    def options(self) -> dict[str, Any]:
        """The policy's own options."""
        return dict(self.__pydantic_extra__ or {})


class TrainingSection(Section):
    """Optimisation, in the words of transformers.TrainingArguments."""

    max_steps: PositiveInt = Field(200, description="Optimizer steps.")
    learning_rate: Annotated[float, Field(gt=0.0)] = Field(3e-4, description="Peak learning rate.")
    per_device_train_batch_size: PositiveInt = Field(8, description="Examples a forward pass.")
    gradient_accumulation_steps: PositiveInt = Field(1, description="Forward passes an optimizer step.")
    max_grad_norm: Annotated[float, Field(gt=0.0)] | None = Field(1.0, description="Clip to this norm; null: never.")
    optim: str = Field(
        "adamw",
        description="The optimizer: an entry point of the group sparsebp.optimizers, such as apollo, or a class of "
        "torch.optim in lower case, such as adamw or muon.",
    )
    optim_args: dict[str, Any] = Field(
        default_factory=dict, description="The optimizer's other arguments: weight_decay, betas, momentum."
    )
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt", "polynomial", "cosine_with_restarts"
    ] = Field("linear", description="Schedule of the learning rate, by transformers' name.")
    warmup_steps: CountFromZero = Field(0, description="Steps over which the learning rate rises from 0.")
    mixed_precision: Literal["no", "bf16"] = Field("no", description="bf16: autocast, weights stay as they are.")
    seed: CountFromZero = Field(0, description="Of data order, dropout, adapters and policies.")


class MeasureSection(Section):
    """What is measured beside training, and how often. None of it changes the run."""

    eval_every: PositiveInt = Field(50, description="Steps between evaluations of the held-out split.")
    eval_examples: PositiveInt | None = Field(
        None, description="Examples an evaluation has at most, the first of the held-out split; null: all."
    )
    eval_batches: PositiveInt | None = Field(
        None,
        description="The same in training batches, so that it depends on their size: prefer eval_examples, which lets "
        "runs with different batch sizes be compared. null: all.",
    )
    per_device_eval_batch_size: PositiveInt | None = Field(
        None, description="Examples a forward pass of an evaluation; null: per_device_train_batch_size."
    )
    probe_every: PositiveInt | None = Field(
        50, description="Steps between probes: dense and policy on one batch, timed in turn, work counted; null: none."
    )
    fidelity_every: PositiveInt | None = Field(
        50, description="Steps between comparisons of the policy's gradient with the dense one; null: none."
    )
    fidelity_draws: PositiveInt = Field(
        1, description="Gradients that a random policy draws each time; from 2 on, its bias and variance are told."
    )
    independent_examples: PositiveInt | None = Field(
        None,
        description="Other training examples, with whose dense gradient the policy's and that of dense with the "
        "smaller batch of the same cost are compared, where fidelity is; costs dense passes over them. null: none.",
    )
    warmup_steps: CountFromZero = Field(3, description="First steps of each attempt that no time statistic counts.")

    @model_validator(mode="after")
    def _independent_beside_fidelity(self) -> Self:
        if self.independent_examples is not None and self.fidelity_every is None:
            raise ValueError(
                f"independent_examples: {self.independent_examples} needs fidelity_every, which says at which steps; "
                "got null"
            )
        return self

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.eval_examples is not None and self.eval_batches is not None:
            raise ValueError(
                f"give eval_examples or eval_batches, got both ({self.eval_examples} and {self.eval_batches}); "
                "eval_batches: null gives up one that a base has"
            )
        return self


class CheckpointSection(Section):
    """When the run can be picked up again."""

    every: PositiveInt = Field(50, description="Steps between checkpoints.")
    keep_last: PositiveInt = Field(2, description="Checkpoints that are kept.")


class TargetSection(Section):
    """Where the plan runs. The options of its kind stand beside these keys."""

    model_config = ConfigDict(extra="allow")

    kind: Name = Field("local", description="A kind, or a name from targets.yaml: `sparsebp targets` lists them.")
    threads: PositiveInt | None = Field(
        None, description="CPU threads of torch, in each process; null: one a physical core."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where there is one.")

    @property
    def options(self) -> dict[str, Any]:
        """The kind's own options."""
        return dict(self.__pydantic_extra__ or {})


class TargetOptions(Section):
    """What every kind of target understands."""

    worker: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*$")] = Field(
        "sparsebp_cli.worker", description="Module that is run as the worker; another one must keep its promises."
    )
    processes: PositiveInt = Field(
        1,
        description="Processes that train together on the one machine, each with per_device_train_batch_size examples "
        "and, where there are GPUs, one of them.",
    )
    sharding: Literal["none", "fsdp2"] = Field(
        "none", description="none: each process holds the whole model (DDP); fsdp2: a part of it."
    )


SECRET_URI = "holds a user name or password: set MLFLOW_TRACKING_URI in the environment instead"


class TrackingSection(Section):
    """Where the numbers go."""

    uri: str | None = Field(
        None,
        description="MLflow store, without a password; null: MLFLOW_TRACKING_URI, else the default database.",
    )
    experiment: str = Field("sparsebp", min_length=1, max_length=250, description="MLflow experiment.")
    tags: dict[str, str] = Field(
        default_factory=dict, description="MLflow tags of your own, by which runs are found: {figure: one}."
    )

    code_diff: bool = Field(
        False,
        description="Whether the plan and the store hold the uncommitted changes of files that Python had imported, "
        "beside their digest; files with something like a credential in their changes are left out.",
    )

    @field_validator("uri")
    @classmethod
    def _no_password(cls, uri: str | None) -> str | None:
        if uri is not None and "@" in uri.partition("://")[2].partition("/")[0]:
            # A recipe is shown, logged and sent.
            raise ValueError(SECRET_URI)
        return uri


def _refuse_other_ones(value: object) -> object:
    """For pydantic, true and 1.0 are the literal 1."""
    if type(value) is not int:
        raise ValueError(f"got {show(value)}, allowed: 1")
    return value


class Recipe(Section):
    """One experiment: a model, a dataset, a gradient policy and a target."""

    version: Annotated[Literal[1], BeforeValidator(_refuse_other_ones)] = Field(description="Of this format.")
    name: Name = Field(
        description="What the run is called; letters, digits, dot, dash, underscore. Not given: the file's name."
    )
    model: ModelSection = Field(description="The model: by name, or with random weights from a config.")
    dataset: DatasetSection = Field(description="The data, and how it becomes tokens.")
    policy: list[PolicyEntry] = Field(
        default_factory=lambda: [PolicyEntry(name="dense")], description="Applied in this order; none: dense."
    )
    backward: BackwardOptions = Field(default_factory=BackwardOptions)
    training: TrainingSection = Field(default_factory=TrainingSection)
    measure: MeasureSection = Field(default_factory=MeasureSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    target: TargetSection = Field(default_factory=TargetSection, description="A target, or its kind alone.")
    tracking: TrackingSection = Field(default_factory=TrackingSection)
