"""Define the schema of a recipe. Unknown keys are refused; names follow ``transformers.TrainingArguments``."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails

from sparsebp_cli.composition import ADAPTER_TYPES, BackwardOptions, find_adapter_options
from sparsebp_cli.errors import did_you_mean
from sparsebp_cli.policy.error_text import shorten, show
from sparsebp_cli.run.policy_phase import PolicyPhase, find_wrong_end, lay_out

PositiveInt = Annotated[int, Field(ge=1)]
CountFromZero = Annotated[int, Field(ge=0)]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]


class Section(BaseModel):
    """A part of a recipe: strict types, no unknown keys, no NaN."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


ATTENTIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
# Kernels are compiled code, and recipes may come from strangers. So allow only the owner that transformers itself
# trusts. A revision and a function may follow the name.
HUB_KERNEL = r"kernels-community/[\w.-]+(@[\w.-]+)?(:\w+)?"
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY", re.IGNORECASE)
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CHANGES_BASE = ("olora", "pissa")  # initialisations of adapters that subtract them from the base


class LoraSection(Section):
    """Low-rank adapters by peft, with the names of ``peft.LoraConfig``."""

    r: PositiveInt = Field(8, description="Rank of the adapters.")
    lora_alpha: PositiveInt = Field(
        16, description="Scale: the update is multiplied by lora_alpha / r, with use_rslora by lora_alpha / sqrt(r)."
    )
    lora_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.0, description="Dropout before the adapters.")
    target_modules: list[str] | Literal["all-linear"] = Field("all-linear", description="Linears that get adapters.")
    exclude_modules: list[str] | None = Field(
        None, description="Linears of target_modules that get no adapter; null: none."
    )
    use_rslora: bool = Field(False, description="Rank-stabilised scale.")
    use_dora: bool = Field(False, description="DoRA: the magnitude of each output is trained apart.")
    init_lora_weights: bool | Literal["gaussian", "olora", "orthogonal", "pissa"] = Field(
        True, description="Initial values, as in peft. olora and pissa change the base, so the model is saved merged."
    )
    bias: Literal["none", "all", "lora_only"] = Field("none", description="Biases that are trained.")
    modules_to_save: list[str] | None = Field(
        None, description="Modules that are trained whole, such as lm_head; null: none but a new classification head."
    )
    trainable_token_indices: list[CountFromZero] | None = Field(
        None, description="Ids of tokens whose rows of the embedding are trained; null: none."
    )
    layers_to_transform: list[CountFromZero] | None = Field(
        None, description="Numbers of the layers that get adapters, from 0; null: all."
    )
    layers_pattern: list[str] | None = Field(
        None, description="Names of the lists of layers that layers_to_transform counts; null: the usual ones."
    )
    rank_pattern: dict[str, PositiveInt] = Field(default_factory=dict, description="Ranks of some modules, by name.")
    alpha_pattern: dict[str, PositiveInt] = Field(default_factory=dict, description="lora_alpha of some modules.")

    @model_validator(mode="after")
    def _layers_need_names(self) -> Self:
        if self.layers_to_transform is not None and isinstance(self.target_modules, str):
            raise ValueError("layers_to_transform needs target_modules as a list, such as [q_proj, v_proj]")
        return self


if TYPE_CHECKING:
    AdapterType = str  # type checkers cannot know names that are read from the installed peft
else:
    AdapterType = Literal[ADAPTER_TYPES]


class PeftSection(BaseModel):
    """Another peft method, selected by type. Its further keys are the names in that method's config."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="allow")
    type: AdapterType = Field(description="A type of peft; LoRA has the key lora.")

    @property
    def options(self) -> dict[str, Any]:
        """The method's own options."""
        return dict(self.__pydantic_extra__ or {})

    @model_validator(mode="wrap")
    @classmethod
    def _options_are_known(cls, given: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(given, dict) and given.get("type") == "lora":
            raise _error_at(("type",), "lora", "LoRA is written model.lora: {r: 8, ...}, without a type")
        section = handler(given)
        known = find_adapter_options(str(section.type))
        if not known:
            raise _error_at(("type",), section.type, f"the installed peft has no {section.type}")
        for key in section.options:
            if key not in known:
                text = f"{section.type} takes {', '.join(known)}{did_you_mean(key, known)}"
                raise _error_at((key,), section.options[key], text)
        return section


class QuantizationSection(Section):
    """A frozen base with quantised linears, under adapters (QLoRA)."""

    type: Literal["nf4", "fp4", "int8"] = Field(
        description="nf4 and fp4: 4 bits, by bitsandbytes; int8: 8 bits, by torchao. The head keeps its precision."
    )
    bnb_4bit_use_double_quant: bool = Field(False, description="Only nf4 and fp4: quantise the scales as well.")
    bnb_4bit_compute_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Only nf4 and fp4: dtype of the matrix products; null: model.dtype."
    )

    @property
    def package(self) -> str:
        """The package that quantises."""
        return "torchao" if self.type == "int8" else "bitsandbytes"

    @model_validator(mode="after")
    def _options_fit_the_type(self) -> Self:
        for key in ("bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype"):
            if self.type == "int8" and getattr(self, key):
                raise ValueError(f"{key} applies only to type: nf4 or fp4, got type: {self.type}")
        return self


class ModelSection(Section):
    """The model: by name, or with random weights from a config."""

    name: str | None = Field(
        None,
        description="Hub id, local folder, an installed model's name, or package:PACKAGE/FOLDER. Safetensors only.",
    )
    config: dict[str, object] | None = Field(
        None, description="Instead of name: a transformers config with its model_type, for random weights."
    )
    tokenizer: str | None = Field(None, description="Hub id, folder or name of the tokenizer; null: the model's.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Type of the weights; bfloat16 computes in bfloat16 throughout."
    )
    attention: str = Field(
        "sdpa",
        description="transformers' attention implementation: sdpa or eager; on CUDA also flash_attention_2, "
        "flash_attention_3 or kernels-community/NAME, where the package is installed, and flex_attention.",
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] | None = Field(
        None, description="Probability of every dropout of the model; null: as its config says."
    )
    float8: Literal["emulated", "native"] | None = Field(
        None,
        description="Linears multiply in float8, by torchao: native in a GPU's float8 units, emulated with the same "
        "rounding on any device. The head and adapters keep their precision.",
    )
    quantization: QuantizationSection | None = Field(
        None,
        description="Load the linears quantised. They stay frozen, so it needs lora, peft or adapter; what is saved is "
        "merged and no longer quantised. null: as the model's files say.",
    )
    lora: LoraSection | None = Field(None, description="Train only low-rank adapters.")
    peft: PeftSection | None = Field(None, description="Train only weights that a peft method other than LoRA adds.")
    adapter: str | None = Field(
        None,
        description="Train a peft adapter further: a folder, or a run's model folder. name is its base model.",
    )

    @field_validator("attention")
    @classmethod
    def _attention_is_known(cls, name: str) -> str:
        if name not in ATTENTIONS and not re.fullmatch(HUB_KERNEL, name):
            near = did_you_mean(name, ATTENTIONS)
            raise ValueError(f"got {show(name)}, allowed: {', '.join(ATTENTIONS)}, kernels-community/NAME{near}")
        return name

    @property
    def adapters(self) -> LoraSection | PeftSection | str | None:
        """The trained adapters; None if the model's own weights are trained."""
        return self.lora or self.peft or self.adapter

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        given = [key for key in ("lora", "peft", "adapter") if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of lora, peft and adapter, got {' and '.join(given)}")
        if self.quantization is not None and self.name is None:
            raise ValueError("quantization needs name, a trained model; a config gives random weights")
        if self.quantization is not None and self.lora is not None and self.lora.init_lora_weights in CHANGES_BASE:
            raise ValueError(
                f"lora.init_lora_weights: {self.lora.init_lora_weights} changes the base weights, but quantised "
                "weights cannot change; use true, gaussian or orthogonal"
            )
        if self.adapter is not None and self.name is None:
            raise ValueError("adapter needs name, the base model that it was trained on; a config gives random weights")
        if self.name is None and self.config is None:
            raise ValueError("give name, or a config for random weights")
        if self.name is not None and self.config is not None:
            raise ValueError("give either name or config, not both")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("config needs model_type")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("a config has no tokenizer: give tokenizer as well")
        return self


CHAT_PARTS = ("messages", "tools", "role", "content", "system", "user", "assistant", "tool")


class DatasetSection(Section):
    """The data, and how it is tokenised."""

    name: str = Field(description="Hub id, local file or folder, an installed dataset's name, or package:PACKAGE/FILE.")
    subset: str | None = Field(None, description="Configuration of a hub id.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id.")
    format: Literal["text", "completion", "chat", "classification", "regression"] = Field(
        "text",
        description="text: packed into blocks, of which a masked language model fills gaps; completion: the prompt is "
        "not trained on; chat: messages of roles, by a chat template; classification: one label "
        "a text, or a pair of texts; regression: one number.",
    )
    max_seq_length: Annotated[int, Field(ge=8)] = Field(128, description="Largest number of positions of an example.")
    split: str = Field("train", description="Training split.")
    eval_split: str | None = Field(None, description="Validation split; null: eval_fraction of the training split.")
    eval_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.1, description="Share of the training split for validation, where there is no eval_split."
    )
    held_out: Literal["drawn", "tail"] | None = Field(
        None,
        description="How eval_fraction selects rows. drawn: by a hash of their text or prompt, equal rows together; "
        "tail: the end of the split. null: drawn, but tail for packed text.",
    )
    group_column: str | None = Field(
        None, description="Column of the document of a row: rows of one document are held out together. null: none."
    )
    test_split: str | None = Field(None, description="Split that is read once, after the last step, for test/loss.")
    test_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None,
        description="Instead of test_split: share of the validation data to keep for test/loss, in whole rows. It does "
        "not change the training data. null: none.",
    )
    text_column: str = Field("text", description="Column of texts, for formats text and classification.")
    text_pair_column: str | None = Field(
        None, description="Column of second texts, for classification of pairs; null: single texts."
    )
    prompt_column: str = Field("prompt", description="Column of prompts, for format completion; not trained on.")
    completion_column: str = Field("completion", description="Column of completions, for format completion.")
    columns: dict[str, str | list[str]] = Field(
        default_factory=dict,
        description="For format chat: what the data call its parts. messages (the column of lists of messages), tools, "
        "role and content, and of roles system, user, assistant and tool their names in the data; or without messages, "
        "the columns of the system's, the user's and the assistant's message, a list of which is joined by empty "
        "lines: {user: [instruction, input], assistant: output}.",
    )
    chat_template: str | None = Field(
        None,
        description="For messages: a file with a Jinja template, which the plan holds; null: the tokenizer's own.",
    )
    train_on: Literal["assistant", "last", "all"] = Field(
        "assistant",
        description="For format chat: the assistant's turns, the last of them, or everything. A message's own weight, "
        "such as 0, multiplies its loss.",
    )
    weight_column: str | None = Field(
        None,
        description="Column of weights of the training loss: a number for a row, a list with one for each message, or "
        "[[start, end, weight], ...] in characters of the text; other tokens weigh 1, and those of weight 0 are not "
        "trained. Evaluations do not weigh. null: none.",
    )
    completion_only_loss: bool = Field(
        True,
        description="For format completion: whether prompts are not trained on; in evaluations they never count.",
    )
    label_column: str = Field(
        "label",
        description="Column of labels, for classification: names, whole numbers or booleans; for regression: numbers.",
    )
    max_examples: PositiveInt | None = Field(None, description="Number of rows to use of each split, from its start.")
    max_train_examples: PositiveInt | None = Field(
        None,
        description="Number of training examples to use, from the start; of packed text, number of blocks. It does not "
        "change the held-out data. null: all.",
    )
    policy_validation_examples: PositiveInt | None = Field(
        None,
        description="Number of training examples to set aside, drawn by training.seed, for policies that compare with "
        "validation examples. Neither training nor evaluations use them. null: none.",
    )

    @field_validator("columns")
    @classmethod
    def _columns_are_known(cls, columns: dict[str, str | list[str]]) -> dict[str, str | list[str]]:
        for key, value in columns.items():
            if key not in CHAT_PARTS:
                raise ValueError(f"{key}: allowed: {', '.join(CHAT_PARTS)}{did_you_mean(key, CHAT_PARTS)}")
            if isinstance(value, list) and ("messages" in columns or key not in ("system", "user", "assistant")):
                raise ValueError(f"{key}: must be one name, got a list")
        if "messages" not in columns and ("user" in columns) != ("assistant" in columns):
            raise ValueError(
                "give both user and assistant if they name columns; if they name roles, give messages as well"
            )
        return columns

    @property
    def read_columns(self) -> list[str]:
        """The text columns that make up an example, in order."""
        if self.format == "completion":
            return [self.prompt_column, self.completion_column]
        if self.format == "chat" and "messages" not in self.columns and "assistant" in self.columns:
            given = [self.columns[role] for role in ("system", "user", "assistant") if role in self.columns]
            return [name for some in given for name in ([some] if isinstance(some, str) else some)]
        if self.format == "chat":
            return [str(self.columns.get("messages", "messages"))]
        return [self.text_column, *([self.text_pair_column] if self.text_pair_column is not None else [])]

    @property
    def draws_rows(self) -> bool:
        """Whether eval_fraction draws rows at random instead of taking the tail."""
        return (
            self.held_out or ("tail" if self.format == "text" and self.group_column is None else "drawn")
        ) == "drawn"

    @model_validator(mode="after")
    def _columns_fit_the_format(self) -> Self:
        if self.text_pair_column is not None and self.format not in ("classification", "regression"):
            raise ValueError(f"text_pair_column needs format: classification or regression, got {self.format}")
        for key in ("columns", "train_on"):
            if self.format != "chat" and getattr(self, key) != type(self).model_fields[key].get_default(
                call_default_factory=True
            ):
                raise ValueError(f"{key} needs format: chat, got {self.format}")
        if self.chat_template is not None and self.format not in ("chat", "completion"):
            raise ValueError(f"chat_template needs format: chat, or completion of messages, got {self.format}")
        if self.weight_column is not None and self.format in ("classification", "regression"):
            raise ValueError(f"weight_column weights tokens, which format: {self.format} does not train; leave it out")
        if self.weight_column is not None and not self.completion_only_loss:
            raise ValueError("weight_column needs completion_only_loss: true; got false")
        if self.group_column is not None and self.held_out == "tail":
            raise ValueError("group_column needs held_out: drawn, got tail")
        return self

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
    """A policy by name, and its options as further keys."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="allow")
    name: str = Field(description="A name that `sparsebp policies` lists.")

    @property
    def options(self) -> dict[str, Any]:
        """The policy's own options."""
        return dict(self.__pydantic_extra__ or {})


class PhaseSection(Section):
    """A part of the training with its own policies."""

    until: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None, description="Share of training.max_steps at which the phase ends; the last phase has none."
    )
    policy: list[PolicyEntry] = Field(description="Policies of this phase, as the recipe's own; empty: dense.")


def _refuse_float16(value: object) -> object:
    if value == "fp16":
        raise ValueError(
            "got 'fp16', allowed: no, bf16; float16 needs a loss scaler, which drops steps that overflow, and recipes "
            "have none; a loop of your own may have one (guide, library)"
        )
    return value


# The arguments of schedules in transformers.optimization; constant schedules have none.
SCHEDULE_ARGUMENTS = {
    "cosine": ("num_cycles",),
    "inverse_sqrt": ("timescale",),
    "polynomial": ("lr_end", "power"),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles"),
}


class TrainingSection(Section):
    """Optimisation, with the names of transformers.TrainingArguments."""

    max_steps: PositiveInt = Field(200, description="Optimizer steps.")
    num_train_epochs: Annotated[float, Field(gt=0.0)] | None = Field(
        None,
        description="Instead of max_steps: passes over the training examples. The client counts the examples and "
        "writes max_steps into the plan, so the data must be on this machine.",
    )
    early_stopping_patience: PositiveInt | None = Field(
        None,
        description="Finish after so many evaluations in a row that are no better than the best before, by the metric "
        "of checkpoint.keep_best. The schedule of the learning rate stays that of max_steps. null: never.",
    )
    max_seconds: Annotated[float, Field(gt=0.0)] | None = Field(
        None,
        description="Finish after the step that brings the time of all steps to so many seconds, if max_steps is not "
        "reached before. Measurements and checkpoints are not counted; a resumed run goes on counting. The schedule of "
        "the learning rate stays that of max_steps. null: no limit.",
    )
    max_cost: Annotated[float, Field(gt=0.0)] | None = Field(
        None,
        description="Like max_seconds, but limits the FLOPs of forward, backward and update, in units of a dense step "
        "over the run's own batches. null: no limit.",
    )
    max_flops: Annotated[float, Field(gt=0.0)] | None = Field(
        None, description="Like max_cost, but in FLOPs, whatever the batches are: a study's budget. null: no limit."
    )
    learning_rate: Annotated[float, Field(gt=0.0)] = Field(3e-4, description="Peak learning rate.")
    per_device_train_batch_size: PositiveInt = Field(8, description="Examples in a forward pass.")
    gradient_accumulation_steps: PositiveInt = Field(1, description="Forward passes in an optimizer step.")
    max_grad_norm: Annotated[float, Field(gt=0.0)] | None = Field(
        1.0, description="Clip the gradient to this norm; null: never."
    )
    optim: str = Field(
        "adamw",
        description="The optimizer: an entry point of the group sparsebp.optimizers, such as apollo, or a class of "
        "torch.optim in lower case, such as adamw; muon updates hidden matrices by Muon and all else by AdamW.",
    )
    weight_decay: Annotated[float, Field(ge=0.0)] | None = Field(
        None, description="Weight decay; null: the optimizer's default."
    )
    weight_decay_of: Literal["all", "matrices"] | None = Field(
        None,
        description="Which parameters decay: matrices leaves out norms and biases, as transformers.Trainer does; "
        "null or all: every trained parameter.",
    )
    optim_args: dict[str, object] = Field(
        default_factory=dict, description="The optimizer's other arguments: betas, eps, momentum."
    )
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "polynomial",
        "cosine_with_restarts",
        "cosine_with_min_lr",
    ] = Field("linear", description="Schedule of the learning rate, by transformers' name.")
    lr_scheduler_kwargs: dict[str, float] | None = Field(
        None,
        description="The schedule's arguments, by transformers' names, such as min_lr of cosine_with_min_lr and "
        "num_cycles of cosine.",
    )
    warmup_steps: CountFromZero = Field(0, description="Steps over which the learning rate rises from 0.")
    warmup_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] | None = Field(
        None, description="Instead of warmup_steps: their share of max_steps, rounded up."
    )
    mixed_precision: Annotated[Literal["no", "bf16"], BeforeValidator(_refuse_float16)] = Field(
        "no", description="bf16: autocast; weights keep their type. float16 needs a loss scaler, which recipes lack."
    )
    compile: bool = Field(
        False,
        description="Compile the model with torch.compile for the training steps; it needs a C++ compiler, on a GPU "
        "Triton. Evaluations, probes and other measurements run uncompiled, so what they time is eager; the memory of "
        "steps is not traced.",
    )
    group_by: Literal["length", "prefix"] | None = Field(
        None,
        description="What the examples of a batch have in common: a similar length, or their first 16 tokens. It "
        "changes the order of the data. null: nothing, a random order.",
    )
    seed: CountFromZero = Field(0, description="Seed of data order, dropout, adapters and policies.")

    @property
    def num_warmup_steps(self) -> int:
        """The number of warm-up steps. Ratios are converted as transformers does."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(self.warmup_ratio * self.max_steps)

    @model_validator(mode="after")
    def _said_once(self) -> Self:
        if self.warmup_ratio is not None and self.warmup_steps:
            raise ValueError(
                f"give warmup_steps or warmup_ratio, got both ({self.warmup_steps} and {self.warmup_ratio:g})"
            )
        if self.weight_decay is not None and "weight_decay" in self.optim_args:
            raise ValueError("give weight_decay or optim_args.weight_decay, got both")
        if self.num_train_epochs is not None and "max_steps" in self.model_fields_set:
            raise ValueError(
                f"give max_steps or num_train_epochs, got both ({self.max_steps} and {self.num_train_epochs:g}); "
                "--set ~training.max_steps removes the recipe's"
            )
        return self

    @model_validator(mode="after")
    def _schedule_has_its_arguments(self) -> Self:
        kind, given = self.lr_scheduler_type, self.lr_scheduler_kwargs or {}
        known = SCHEDULE_ARGUMENTS.get(kind, ())
        for name, value in given.items():
            if name not in known:
                takes = ", ".join(known) or "no arguments"
                raise ValueError(f"lr_scheduler_kwargs.{name}: {kind} takes {takes}{did_you_mean(name, known)}")
            most = {"lr_end": self.learning_rate, "min_lr": self.learning_rate, "min_lr_rate": 1.0}.get(name, math.inf)
            if not 0.0 <= value < most:
                limit = f" and below {most:g}" if most < math.inf else ""
                raise ValueError(f"lr_scheduler_kwargs.{name}: must be at least 0{limit}, got {value:g}")
        if kind == "cosine_with_min_lr" and len({"min_lr", "min_lr_rate"} & set(given)) != 1:
            raise ValueError("lr_scheduler_type: cosine_with_min_lr needs lr_scheduler_kwargs: min_lr or min_lr_rate")
        return self


class GenerateSection(Section):
    """Metrics of texts that the model generates, greedily, from the prompts of held-out rows."""

    every: PositiveInt | None = Field(
        None, description="Steps between generations on validation; null: only before the first and after the last."
    )
    examples: PositiveInt = Field(
        100,
        description="Largest number of prompts of a generation on validation, from the start of the split. After the "
        "last step the test split is generated once, all of it.",
    )
    max_new_tokens: PositiveInt = Field(64, description="Largest number of tokens that are generated for a prompt.")
    metrics: Annotated[list[str], Field(min_length=1)] = Field(
        default_factory=lambda: ["exact_match"],
        description="Entry points of the group sparsebp.metrics: exact_match, numeric_match (GSM8K's rule), bleu, "
        "rouge_l, cer, wer, or a package's own. Logged as eval/NAME and test/NAME.",
    )


class MeasureSection(Section):
    """Measurements during training, and how often they are taken. None of them changes the run."""

    eval_every: PositiveInt = Field(50, description="Steps between evaluations of the held-out split.")
    eval_examples: PositiveInt | None = Field(
        None, description="Largest number of examples of an evaluation, from the start of the split; null: all."
    )
    eval_batches: PositiveInt | None = Field(
        None,
        description="Like eval_examples, in training batches. Prefer eval_examples, which does not depend on the batch "
        "size, so that runs with different batch sizes can be compared. null: all.",
    )
    test: bool = Field(
        True,
        description="Evaluate the test split after the last step. false: it is set aside and not read, as in tuning.",
    )
    per_device_eval_batch_size: PositiveInt | None = Field(
        None, description="Examples in a forward pass of an evaluation; null: per_device_train_batch_size."
    )
    probe_every: PositiveInt | None = Field(
        50, description="Steps between probes: dense and policy on one batch, timed in turn, work counted; null: none."
    )
    fidelity_every: PositiveInt | None = Field(
        50, description="Steps between comparisons of the policy's gradient with the dense one; null: none."
    )
    fidelity_draws: PositiveInt = Field(
        1,
        description="Gradients that a random policy draws in each comparison; from 2 on, bias and variance are "
        "measured.",
    )
    independent_examples: PositiveInt | None = Field(
        None,
        description="Number of other training examples whose dense gradient fidelity also compares with, for the "
        "policy and for dense with a smaller batch of the same cost. It needs dense passes over them. null: none.",
    )
    metric: str | None = Field(
        None,
        description="Validation metric that decides: studies choose by it, and compare shows it, or its value on the "
        "test split. null: the loss, of a classification the accuracy.",
    )
    generate: GenerateSection | None = Field(
        None,
        description="Metrics of generated texts, for dataset.format: completion or chat. They cost a forward for each "
        "token of the longest answer. null: none.",
    )
    warmup_steps: CountFromZero = Field(3, description="First steps of each attempt that time statistics leave out.")

    @model_validator(mode="after")
    def _independent_beside_fidelity(self) -> Self:
        if self.independent_examples is not None and self.fidelity_every is None:
            raise ValueError(
                f"independent_examples: {self.independent_examples} needs fidelity_every, the steps between "
                "comparisons; got null"
            )
        return self

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.eval_examples is not None and self.eval_batches is not None:
            raise ValueError(
                f"give eval_examples or eval_batches, got both ({self.eval_examples} and {self.eval_batches}); "
                "eval_batches: null removes the base's"
            )
        return self


class CheckpointSection(Section):
    """Checkpoints from which a run can be resumed."""

    every: PositiveInt = Field(50, description="Steps between checkpoints.")
    keep_last: PositiveInt = Field(2, description="Number of checkpoints to keep.")
    keep_best: str | None = Field(
        None,
        description="Metric of the best evaluation, such as eval/loss: any that the run measures on validation, which "
        "declares its direction. Its checkpoint is kept beside the last ones, and its weights are "
        "saved in best/ at the end, beside model/, which has the last ones. null: only the last.",
    )
    stop_at: PositiveInt | None = Field(
        None,
        description="Stop after this step with a checkpoint; `sparsebp resume` goes on to the end. Studies that halve "
        "set it. null: train to the end.",
    )


class TargetSection(Section):
    """The target that executes the plan. Further keys are the options of its kind."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    kind: Name = Field("local", description="A kind, or a name from targets.yaml: `sparsebp targets` lists them.")
    threads: PositiveInt | None = Field(
        None, description="CPU threads of torch, in each process; null: one for each physical core."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA if available, else the CPU.")

    @property
    def options(self) -> dict[str, Any]:
        """The kind's own options."""
        return dict(self.__pydantic_extra__ or {})


class TargetOptions(Section):
    """Options that every kind of target has."""

    worker: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*$")] = Field(
        "sparsebp_cli.worker", description="Module that trains; a replacement must behave like the built-in worker."
    )
    nodes: PositiveInt = Field(
        1,
        description="Number of machines with equally many processes. More than 1: for slurm and kubernetes, with the "
        "run's folder on a file system that all machines share.",
    )
    processes: PositiveInt = Field(
        1,
        description="Processes that train together, counted over all nodes, each with per_device_train_batch_size "
        "examples and, if there are GPUs, one of them.",
    )
    sharding: Literal["none", "fsdp2"] = Field(
        "none", description="none: each process holds the whole model (DDP); fsdp2: a part of it."
    )
    peer_timeout_min: Annotated[float, Field(gt=0)] = Field(
        10.0,
        description="Minutes that a process waits for the others, for example while one downloads or writes a "
        "checkpoint. Then the run ends.",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables of the worker, which gets only these and a fixed list. No secrets: other "
        "users of the machine can read them.",
    )
    # Whether the class's kind of target can start a run on several machines.
    spans_nodes: ClassVar[bool] = False

    @field_validator("env")
    @classmethod
    def _public_words(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not VARIABLE_NAME.fullmatch(name):
                raise ValueError(
                    f"names have letters, digits and _, and do not begin with a digit; got {shorten(repr(name))}"
                )
            if "\0" in value:
                raise ValueError(f"{name} has a NUL character, which is not allowed")
            if SECRET.search(name):
                raise ValueError(f"{name} looks like a secret, and a container's environment is public: mount a file")
        return env

    @model_validator(mode="after")
    def _even_nodes(self) -> Self:
        if self.processes % self.nodes:
            text = f"is the total over all nodes: must be a multiple of nodes ({self.nodes}), got {self.processes}"
            raise _error_at(("processes",), self.processes, text)
        return self


SECRET_URI = "holds a user name or password: set MLFLOW_TRACKING_URI in the environment instead"


class TrackingSection(Section):
    """Tracking of metrics in MLflow."""

    uri: str | None = Field(
        None,
        description="MLflow store, without a password; null: MLFLOW_TRACKING_URI, else the default database.",
    )
    experiment: str = Field("sparsebp", min_length=1, max_length=250, description="MLflow experiment.")
    tags: dict[str, str] = Field(
        default_factory=dict, description="Additional MLflow tags, such as {figure: one}, by which runs can be found."
    )

    also: list[str] = Field(
        default_factory=list,
        description="Other programs that show the run beside MLflow, while it lives: entry points of the group "
        "sparsebp.trackers, such as tensorboard and trackio.",
    )
    code_diff: bool = Field(
        False,
        description="Whether the plan and the store hold the uncommitted changes of imported files, in addition to "
        "their digest; files whose changes may contain a credential are left out.",
    )

    @field_validator("uri")
    @classmethod
    def _no_password(cls, uri: str | None) -> str | None:
        if uri is not None and "@" in uri.partition("://")[2].partition("/")[0]:
            # Recipes are displayed, logged and sent to other machines, so they must not hold secrets.
            raise ValueError(SECRET_URI)
        return uri


def _refuse_other_ones(value: object) -> object:
    """Refuse true and 1.0, which pydantic accepts as the literal 1."""
    if type(value) is not int:
        raise ValueError(f"got {show(value)}, allowed: 1")
    return value


def _error_at(location: tuple[str | int, ...], value: object, text: str) -> ValidationError:
    """Return an error at a key below the one that is validated, to be raised."""
    line = InitErrorDetails(type="value_error", loc=location, input=value, ctx={"error": ValueError(text)})
    return ValidationError.from_exception_data("recipe", [line])


class Recipe(Section):
    """One experiment: a model, a dataset, policies and a target."""

    version: Annotated[Literal[1], BeforeValidator(_refuse_other_ones)] = Field(
        description="Version of the recipe format."
    )
    name: Name = Field(description="Name of the run: letters, digits, dot, dash, underscore. Default: the file's name.")
    model: ModelSection = Field(description="The model: by name, or with random weights from a config.")
    dataset: DatasetSection = Field(description="The data, and how it is tokenised.")
    schedule: list[PhaseSection] | None = Field(
        None, description="Instead of policy: phases of the training, each with its own policies. null: one phase."
    )
    policy: list[PolicyEntry] = Field(
        default_factory=lambda: [PolicyEntry(name="dense")],
        description="Policies, applied in this order; empty: dense.",
    )
    backward: BackwardOptions = Field(default_factory=BackwardOptions)
    training: TrainingSection = Field(default_factory=TrainingSection)
    measure: MeasureSection = Field(default_factory=MeasureSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    target: TargetSection = Field(default_factory=TargetSection, description="The target, or its kind alone.")
    tracking: TrackingSection = Field(default_factory=TrackingSection)

    @field_validator("schedule")
    @classmethod
    def _phases_follow(cls, schedule: list[PhaseSection] | None) -> list[PhaseSection] | None:
        if schedule is None:
            return None
        if len(schedule) < 2:
            raise ValueError(f"needs 2 phases or more, got {len(schedule)}; one phase is written as policy")
        wrong = find_wrong_end([phase.until for phase in schedule])
        if wrong is not None:
            raise _error_at((wrong[0], "until"), schedule[wrong[0]].until, wrong[1])
        return schedule

    @model_validator(mode="wrap")
    @classmethod
    def _policy_or_schedule(cls, given: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        recipe = handler(given)
        if recipe.schedule is None or isinstance(given, Recipe):
            return recipe
        if "policy" in recipe.model_fields_set:
            raise _error_at(("schedule",), given, "give policy or schedule, got both")
        # Store an empty policy, because readers would take dense for the whole training
        return recipe.model_copy(update={"policy": []})

    @model_serializer(mode="wrap")
    def _write(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Write either policy or schedule. Recipes without phases keep their serialised form, and so their ids."""
        written: dict[str, object] = handler(self)
        written.pop("schedule" if self.schedule is None else "policy", None)
        return written

    @property
    def phases(self) -> list[PolicyPhase[PolicyEntry]]:
        """The parts of the training in order, each with its policies; one phase if there is no schedule."""
        schedule = None if self.schedule is None else [(phase.until, phase.policy) for phase in self.schedule]
        return lay_out(self.policy, schedule, self.training.max_steps)

    @property
    def policies(self) -> list[PolicyEntry]:
        """The policies of all phases."""
        return [entry for phase in self.phases for entry in phase.policies]
