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
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails

from sparsebp_cli.errors import did_you_mean
from sparsebp_cli.policy.composition import ADAPTER_TYPES, BackwardOptions, find_adapter_options
from sparsebp_cli.policy.error_text import shorten, show

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


class LoraSection(Section):
    """Low-rank adapters by peft, with the names of ``peft.LoraConfig``."""

    r: PositiveInt = Field(8, description="Rank of the adapters.")
    lora_alpha: PositiveInt = Field(
        16,
        description="Scale of the adapters. The factor of their output is lora_alpha / r. With use_rslora, it is "
        "lora_alpha / sqrt(r).",
    )
    lora_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="Dropout probability before the adapters."
    )
    target_modules: list[str] | Literal["all-linear"] = Field(
        "all-linear",
        description="Names of the linear layers that get adapters. all-linear: all except the output layer, as in "
        "peft.",
    )
    use_rslora: bool = Field(
        False, description="true: use rank-stabilised LoRA, which scales the update by lora_alpha / sqrt(r)."
    )
    use_dora: bool = Field(False, description="true: use DoRA, which trains the magnitude of each output separately.")
    modules_to_save: list[str] | None = Field(
        None,
        description="Names of modules, such as lm_head, that are trained completely, in addition to the adapters. "
        "null: only a new classification head.",
    )


if TYPE_CHECKING:
    AdapterType = str  # type checkers cannot know names that are read from the installed peft
else:
    AdapterType = Literal[ADAPTER_TYPES]


class PeftSection(BaseModel):
    """Another peft method, selected by type. Its further keys are the names in that method's config."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="allow")
    type: AdapterType = Field(
        description="Name of a peft method other than LoRA, such as vera. For LoRA, use the key lora instead."
    )

    @property
    def options(self) -> dict[str, Any]:
        """The method's own options."""
        return dict(self.__pydantic_extra__ or {})

    @model_validator(mode="wrap")
    @classmethod
    def _options_are_known(cls, given: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(given, dict) and given.get("type") == "lora":
            raise _error_at(("type",), "lora", "LoRA has its own key: write 'model.lora: {r: 8, ...}', without a type")
        section = handler(given)
        known = find_adapter_options(str(section.type))
        if not known:
            raise _error_at(("type",), section.type, f"the installed version of peft has no method {section.type}")
        for key in section.options:
            if key not in known:
                text = f"not an option of {section.type}; allowed: {', '.join(known)}{did_you_mean(key, known)}"
                raise _error_at((key,), section.options[key], text)
        return section


class QuantizationSection(Section):
    """Quantise the linear layers of a frozen base model under adapters (QLoRA)."""

    type: Literal["nf4", "fp4", "int8"] = Field(
        description=(
            "nf4 and fp4: 4 bits per weight, by bitsandbytes. int8: 8 bits per weight, by torchao. The output layer "
            "is not quantised."
        )
    )

    @property
    def package(self) -> str:
        """The package that quantises."""
        return "torchao" if self.type == "int8" else "bitsandbytes"


class ModelSection(Section):
    """The model: by name, or with random weights from a config."""

    name: str | None = Field(
        None,
        description="Hub id, local folder, name of an installed model, or package:PACKAGE/FOLDER. Weights must be in "
        "safetensors files.",
    )
    config: dict[str, object] | None = Field(
        None,
        description="Instead of name, for a model with random weights: a transformers config, which must contain "
        "model_type.",
    )
    tokenizer: str | None = Field(
        None, description="Hub id, folder or name of the tokenizer. null: the model's own tokenizer."
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of the model on the hub; null: the newest commit."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Data type of the weights. With bfloat16, the whole training computes in bfloat16."
    )
    attention: str = Field(
        "sdpa",
        description="Attention implementation of transformers. On every device: sdpa, eager. On CUDA: flex_attention. "
        "On CUDA with its package installed: flash_attention_2, flash_attention_3, kernels-community/NAME.",
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] | None = Field(
        None, description="Probability of every dropout in the model. null: the probabilities in the model's config."
    )
    float8: Literal["emulated", "native"] | None = Field(
        None,
        description="Compute linear layers in float8, by torchao. native: on a GPU with float8 units. emulated: the "
        "same rounding, on any device. null: no float8. The output layer and adapters keep their data type.",
    )
    quantization: QuantizationSection | None = Field(
        None,
        description="Load the linear layers quantised. They stay frozen, so give lora, peft or adapter, too. The "
        "saved model is merged and not quantised. null: load the model's files unchanged.",
    )
    lora: LoraSection | None = Field(None, description="Train only low-rank adapters (LoRA). null: no adapters.")
    peft: PeftSection | None = Field(
        None, description="An adapter of peft other than LoRA: train only the weights that it adds. null: none."
    )
    adapter: str | None = Field(
        None,
        description="Folder of a trained adapter, to continue its training: a peft adapter, or the model of a run. "
        "Set name to its base model. null: none.",
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
            raise ValueError(f"give only one of lora, peft and adapter, got {' and '.join(given)}")
        if self.quantization is not None and self.name is None:
            raise ValueError(
                "quantization needs a trained model: give model.name, since model.config makes random weights"
            )
        if self.adapter is not None and self.name is None:
            raise ValueError(
                "adapter needs the base model that it was trained on: give model.name, since model.config makes "
                "random weights"
            )
        if self.name is None and self.config is None:
            raise ValueError("the model is missing: give name, or give config for a model with random weights")
        if self.name is not None and self.config is not None:
            raise ValueError("give either name or config, not both")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("config needs the key model_type, as in 'model_type: llama'")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("a model from config has no tokenizer: also give model.tokenizer")
        return self


# The keys of dataset.columns, by format; every format also has group.
PARTS = {
    "text": ("text",),
    "completion": ("prompt", "completion"),
    "chat": ("messages", "tools", "role", "content", "system", "user", "assistant", "tool"),
    "classification": ("text", "label"),
}
GROUP = "group"


class DatasetSection(Section):
    """The data, and how it is tokenised."""

    name: str = Field(
        description="Hub id, local file or folder, name of an installed dataset, or package:PACKAGE/FILE."
    )
    subset: str | None = Field(None, description="Name of the dataset's subset (configuration) on the hub. null: none.")
    revision: str | None = Field(
        None, description="Branch, tag or commit of the dataset on the hub; null: the newest commit."
    )
    format: Literal["text", "completion", "chat", "classification"] = Field(
        "text",
        description="Content of a row. text: a text; SparseBP packs texts into blocks. completion: a prompt and a "
        "completion; only the completion is trained. chat: messages with roles. classification: one or two texts, and "
        "a label.",
    )
    max_seq_length: Annotated[int, Field(ge=8)] = Field(128, description="Largest number of tokens of an example.")
    split: str = Field("train", description="Name of the split for training.")
    eval_split: str | None = Field(
        None, description="Name of the split for validation. null: use a part of the training split (eval_fraction)."
    )
    eval_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.1,
        description="If eval_split is null: fraction of the training split that is used for validation. SparseBP draws "
        "rows by a hash of their text or prompt, so equal rows stay together. For format text without "
        "columns.group, SparseBP uses the last blocks.",
    )
    test_split: str | None = Field(
        None, description="Split of test data. A run evaluates it once, after the last step. null: none."
    )
    test_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None,
        description="Instead of test_split: fraction of the validation rows to use as test data. The training data "
        "stay the same. null: none.",
    )
    columns: dict[str, str | list[str]] = Field(
        default_factory=dict,
        description="Names in your data, where they differ from these keys. Format text: text. Format completion: "
        "prompt, completion. Format classification: text (a list of two for pairs), label. Format chat, if one "
        "column has all messages: messages and tools name columns; role and content name keys of a message; system, "
        "user, assistant and tool name roles. Otherwise: system, user and assistant name columns. An empty line joins "
        "several columns: {user: [instruction, input], assistant: output}. Any format: group names the column with a "
        "row's document, which SparseBP never divides between training and validation.",
    )
    chat_template: str | None = Field(
        None,
        description="For data with messages: file of a Jinja chat template. The run stores its text. null: the "
        "tokenizer's own template.",
    )
    train_on: Literal["assistant", "last", "all"] = Field(
        "assistant",
        description="For format chat: the messages to train on. assistant: all assistant messages. last: the last "
        "assistant message. all: all messages. The key weight of a message multiplies its loss. For format completion: "
        "assistant trains on completions, all on prompts, too. Evaluations always leave out prompts.",
    )
    max_examples: PositiveInt | None = Field(
        None, description="Largest number of rows to read from the start of each split. null: all."
    )
    max_train_examples: PositiveInt | None = Field(
        None,
        description="Largest number of training examples, from the start. For format text: number of blocks. "
        "Validation and test data stay the same. null: all.",
    )

    @property
    def read_columns(self) -> list[str]:
        """The text columns that make up an example, in order."""
        if self.format == "completion":
            return [self.column("prompt"), self.column("completion")]
        if self.format != "chat":
            roles: tuple[str, ...] = ("text",)
        elif "messages" not in self.columns and "assistant" in self.columns:
            roles = tuple(role for role in ("system", "user", "assistant") if role in self.columns)
        else:
            roles = ("messages",)
        given = [self.columns.get(role, role) for role in roles]
        return [name for some in given for name in ([some] if isinstance(some, str) else some)]

    @property
    def draws_rows(self) -> bool:
        """Whether eval_fraction draws rows at random instead of taking the tail of packed text."""
        return self.format != "text" or GROUP in self.columns

    def column(self, part: str) -> str:
        """Return the name of the column that holds a part of each row."""
        return str(self.columns.get(part, part))

    @model_validator(mode="after")
    def _columns_fit_the_format(self) -> Self:
        known = (*PARTS[self.format], GROUP)
        for key, value in self.columns.items():
            if key not in known:
                text = f"not a column of format {self.format}; allowed: {', '.join(known)}{did_you_mean(key, known)}"
                raise _error_at(("columns", key), value, text)
            may_be_list = "messages" not in self.columns and key in ("system", "user", "assistant")
            is_pair = self.format == "classification" and key == "text" and len(value) == 2
            if isinstance(value, list) and not (may_be_list or is_pair):
                raise _error_at(
                    ("columns", key),
                    value,
                    "must be one name, got a list; only system, user and assistant may have lists, and only if the key "
                    "messages is not set; text may have two names with 'format: classification'",
                )
            if not value:
                raise _error_at(("columns", key), value, "must name a column, got an empty list or text")
        if "messages" not in self.columns and ("user" in self.columns) != ("assistant" in self.columns):
            raise _error_at(
                ("columns",),
                self.columns,
                "got only one of user and assistant: give both to name columns, or add messages to name roles",
            )
        self._refuse_a_name_twice()
        if self.format != "chat" and self.train_on not in ("assistant", "all" if self.format == "completion" else ""):
            formats = "'format: chat' or 'format: completion'" if self.train_on == "all" else "'format: chat'"
            raise ValueError(f"train_on: {self.train_on} needs {formats}, got 'format: {self.format}'")
        if self.chat_template is not None and self.format not in ("chat", "completion"):
            raise ValueError(
                "chat_template needs 'format: chat', or 'format: completion' with lists of messages, got 'format: "
                f"{self.format}'"
            )
        return self

    def _refuse_a_name_twice(self) -> None:
        """Raise an error if two parts of an example have the same name: the model would read what it has to predict."""
        for parts in self._apart():
            owners: dict[str, str] = {}
            for part in parts:
                given = self.columns.get(part, part)
                for name in [given] if isinstance(given, str) else given:
                    if name in owners:
                        key = part if part in self.columns else owners[name]
                        both = f"{owners[name]} and {part}" if owners[name] != part else f"{part}, twice"
                        text = f"the name {name!r} stands for {both}: each needs its own name"
                        raise _error_at(("columns", key), self.columns[key], text)
                    owners[name] = part

    def _apart(self) -> list[list[str]]:
        """Return the parts whose names must differ, in groups."""
        given = [part for part in PARTS["chat"] if part in self.columns]
        if self.format != "chat":
            return [list(PARTS[self.format])]
        roles = [part for part in given if part in ("system", "user", "assistant", "tool")]
        if "messages" not in self.columns and "assistant" in self.columns:
            return [[part for part in given if part in (*roles, "tools")]]
        return [["messages", "tools"], ["role", "content"], roles]

    @model_validator(mode="after")
    def _test_is_apart(self) -> Self:
        if self.test_split is not None and self.test_fraction is not None:
            raise ValueError(
                f"give only one of test_split and test_fraction, got both ({self.test_split} and "
                f"{self.test_fraction:g})"
            )
        if self.test_split is not None and self.test_split in (self.split, self.eval_split):
            used = "split" if self.test_split == self.split else "eval_split"
            raise ValueError(f"test_split and {used} must be different splits, got {self.test_split} for both")
        return self


class PolicyEntry(BaseModel):
    """A policy by name, and its options as further keys."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="allow")
    name: str = Field(description="Name of a policy that `sparsebp policies` lists.")

    @property
    def options(self) -> dict[str, Any]:
        """The policy's own options."""
        return dict(self.__pydantic_extra__ or {})


def _refuse_float16(value: object) -> object:
    if value == "fp16":
        raise ValueError(
            "got 'fp16', allowed: no, bf16; recipes have no loss scaler, which float16 needs; for float16, write your "
            "own loop (see library.md of the guide)"
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

    max_steps: PositiveInt = Field(200, description="Number of optimizer steps.")
    num_train_epochs: Annotated[float, Field(gt=0.0)] | None = Field(
        None,
        description="Instead of max_steps: number of passes over the training examples. SparseBP computes max_steps "
        "before the run starts, so the data must be on this machine.",
    )
    early_stopping_patience: PositiveInt | None = Field(
        None,
        description="Finish the run after this many evaluations in a row without a new best value of "
        "checkpoint.keep_best. The learning rate keeps the schedule for max_steps. null: no early stop.",
    )
    max_flops: Annotated[float, Field(gt=0.0)] | None = Field(
        None,
        description="Finish the run when forward, backward and update of all steps together cost this many FLOPs, at "
        "the latest after max_steps. The learning rate keeps the schedule for max_steps. A study sets this key to its "
        "budget. null: no limit.",
    )
    learning_rate: Annotated[float, Field(gt=0.0)] = Field(
        3e-4, description="Largest learning rate, which the schedule reaches after the warm-up."
    )
    per_device_train_batch_size: PositiveInt = Field(
        8, description="Number of examples in a forward pass of a process."
    )
    gradient_accumulation_steps: PositiveInt = Field(
        1, description="Number of forward and backward passes in an optimizer step."
    )
    max_grad_norm: Annotated[float, Field(gt=0.0)] | None = Field(
        1.0,
        description="Largest norm of the gradient. A larger gradient is scaled down to this norm. null: do not clip.",
    )
    optim: str = Field(
        "adamw",
        description="Optimizer: a class of torch.optim in lower case, such as adamw, or a name in the entry-point "
        "group sparsebp.optimizers, such as apollo.",
    )
    weight_decay: Annotated[float, Field(ge=0.0)] | None = Field(
        None, description="Weight decay; null: the optimizer's default."
    )
    weight_decay_of: Literal["all", "matrices"] | None = Field(
        None,
        description="Which trained parameters get weight decay. matrices: all except norms and biases, as in "
        "transformers.Trainer. all or null: all.",
    )
    optim_args: dict[str, object] = Field(
        default_factory=dict, description="Further arguments of the optimizer, such as betas, eps or momentum."
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
    ] = Field("linear", description="Schedule of the learning rate, by its name in transformers.")
    lr_scheduler_kwargs: dict[str, float] | None = Field(
        None,
        description="Arguments of the schedule, by their names in transformers. Examples: num_cycles for cosine, "
        "min_lr for cosine_with_min_lr.",
    )
    warmup_steps: CountFromZero | Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0,
        description="Number of steps in which the learning rate rises from 0 to learning_rate. Below 1: a fraction of "
        "max_steps, rounded up to a whole step.",
    )
    mixed_precision: Annotated[Literal["no", "bf16"], BeforeValidator(_refuse_float16)] = Field(
        "no",
        description="bf16: run the forward under autocast to bfloat16; the weights keep their data type. no: no "
        "autocast. float16 is not supported.",
    )
    compile: bool = Field(
        False,
        description="true: compile the model with torch.compile for training steps. Needs a C++ compiler, or Triton "
        "on a GPU. Evaluations and probes run uncompiled. The peak memory of a step on a CPU is not measured.",
    )
    group_by: Literal["length", "prefix"] | None = Field(
        None,
        description="Put similar examples into one batch, which changes the order of the data. length: examples of "
        "similar length. prefix: examples with the same first 16 tokens. null: random order.",
    )
    seed: CountFromZero = Field(0, description="Seed of the data order, dropout, new adapters and random policies.")

    @property
    def num_warmup_steps(self) -> int:
        """The number of warm-up steps. Fractions are converted as transformers does."""
        return math.ceil(self.warmup_steps * self.max_steps) if self.warmup_steps < 1 else int(self.warmup_steps)

    @model_validator(mode="after")
    def _said_once(self) -> Self:
        if self.weight_decay is not None and "weight_decay" in self.optim_args:
            raise ValueError("give only one of weight_decay and optim_args.weight_decay, got both")
        if self.num_train_epochs is not None and "max_steps" in self.model_fields_set:
            raise ValueError(
                f"give only one of max_steps and num_train_epochs, got both ({self.max_steps} and "
                f"{self.num_train_epochs:g}); --set ~training.max_steps removes the recipe's max_steps"
            )
        return self

    @model_validator(mode="after")
    def _schedule_has_its_arguments(self) -> Self:
        kind, given = self.lr_scheduler_type, self.lr_scheduler_kwargs or {}
        known = SCHEDULE_ARGUMENTS.get(kind, ())
        for name, value in given.items():
            if name not in known:
                allowed = ", ".join(known) or "none"
                raise ValueError(
                    f"lr_scheduler_kwargs.{name}: not an argument of {kind}; allowed: "
                    f"{allowed}{did_you_mean(name, known)}"
                )
            most = {"lr_end": self.learning_rate, "min_lr": self.learning_rate, "min_lr_rate": 1.0}.get(name, math.inf)
            if not 0.0 <= value < most:
                limit = f" and below {most:g}" if most < math.inf else ""
                raise ValueError(f"lr_scheduler_kwargs.{name}: must be at least 0{limit}, got {value:g}")
        if kind == "polynomial" and self.num_train_epochs is None and self.num_warmup_steps == self.max_steps:
            raise ValueError(f"polynomial needs a step after the warm-up: lower warmup_steps ({self.warmup_steps:g})")
        if kind == "cosine_with_min_lr" and len({"min_lr", "min_lr_rate"} & set(given)) != 1:
            raise ValueError("cosine_with_min_lr needs exactly one of min_lr and min_lr_rate in lr_scheduler_kwargs")
        return self


class GenerateSection(Section):
    """Metrics of texts that the model generates greedily from held-out prompts."""

    every: PositiveInt | None = Field(
        None,
        description="Number of steps between two generations from validation prompts. null: generate only before the "
        "first step and after the last.",
    )
    examples: PositiveInt = Field(
        100,
        description="Largest number of validation prompts in a generation, from the start of the split. After the "
        "last step, the model answers all test prompts once.",
    )
    max_new_tokens: PositiveInt = Field(64, description="Largest number of tokens that are generated for each prompt.")
    metrics: Annotated[list[str], Field(min_length=1)] = Field(
        default_factory=lambda: ["exact_match"],
        description="Text metrics: exact_match, numeric_match (GSM8K's rule), bleu, rouge_l, cer, wer, or a name in "
        "the entry-point group sparsebp.metrics. Logged as eval/NAME and test/NAME.",
    )


class MeasureSection(Section):
    """Measurements during training, and how often they are taken. None of them changes the run."""

    eval_every: PositiveInt = Field(50, description="Number of steps between two evaluations of the validation data.")
    eval_examples: PositiveInt | None = Field(
        None,
        description="Largest number of validation examples in an evaluation, from the start of the split. null: all.",
    )
    test: bool = Field(
        True,
        description="true: evaluate the test split after the last step. false: do not evaluate it, as studies do "
        "while they tune.",
    )
    per_device_eval_batch_size: PositiveInt | None = Field(
        None, description="Number of examples in a forward pass of an evaluation; null: per_device_train_batch_size."
    )
    probe_every: PositiveInt | None = Field(
        50,
        description="Number of steps between two probes. A probe runs one batch with dense training and with the "
        "policy, and measures time and FLOPs of both. null: no probes.",
    )
    fidelity_every: PositiveInt | None = Field(
        50,
        description="Number of steps between two comparisons of the policy's gradient with the dense gradient. null: "
        "none.",
    )
    fidelity_draws: PositiveInt = Field(
        1,
        description="Number of gradients of a random policy that each comparison with the dense gradient averages. "
        "From 2 on, the comparison also measures bias and variance.",
    )
    metric: str | None = Field(
        None,
        description="Validation metric by which studies choose. compare shows this metric, on test data if there are "
        "any. null: the loss; for a classification, the accuracy.",
    )
    generate: GenerateSection | None = Field(
        None,
        description="Metrics of generated texts, for 'dataset.format: completion' or 'dataset.format: chat'. Each "
        "generation costs one forward pass for each token of the longest answer. null: none.",
    )
    warmup_steps: CountFromZero = Field(
        3, description="Number of first steps, after each start or resume of a run, that statistics of time leave out."
    )


class CheckpointSection(Section):
    """Checkpoints from which a run can be resumed."""

    every: PositiveInt = Field(50, description="Number of steps between two checkpoints.")
    keep_last: PositiveInt = Field(2, description="Number of newest checkpoints to keep.")
    keep_best: str | None = Field(
        None,
        description="Validation metric, such as eval/loss, whose best checkpoint is kept, too. At the end, best/ has "
        "the best weights, and model/ the last. null: keep only the newest checkpoints.",
    )
    stop_at: PositiveInt | None = Field(
        None,
        description="Write a checkpoint after this step and stop. `sparsebp resume` continues to the end. Studies "
        "with halving set this key. null: train to the end.",
    )


class TargetSection(Section):
    """The target that executes the plan. Further keys are the options of its kind."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    kind: Name = Field("local", description="Kind of target, or a name in targets.yaml. `sparsebp targets` lists both.")
    threads: PositiveInt | None = Field(
        None, description="Number of CPU threads of torch in each process. null: one for each physical core."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: train on CUDA if it is available, else on the CPU."
    )

    @property
    def options(self) -> dict[str, Any]:
        """The kind's own options."""
        return dict(self.__pydantic_extra__ or {})


class TargetOptions(Section):
    """Options that every kind of target has."""

    worker: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*$")] = Field(
        "sparsebp_cli.worker",
        description="Name of the Python module that trains. Another module must behave like the default worker.",
    )
    nodes: PositiveInt = Field(
        1,
        description="Number of machines. Each runs the same number of processes. 2 or more need the target slurm or "
        "kubernetes, and a folder of runs that all machines share.",
    )
    processes: PositiveInt = Field(
        1,
        description="Total number of processes on all nodes, which train one model. Each trains "
        "per_device_train_batch_size examples in a forward pass, on its own GPU if there are GPUs.",
    )
    sharding: Literal["none", "fsdp2"] = Field(
        "none",
        description="none: each process holds the whole model (DDP). fsdp2: each process holds a part of the model "
        "(FSDP2).",
    )
    peer_timeout_min: Annotated[float, Field(gt=0)] = Field(
        10.0,
        description="Minutes that a process waits for another, for example during a download or a checkpoint. Then "
        "the run ends.",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables for the training process, in addition to a fixed list. Do not write "
        "secrets here: other users of the machine can read them.",
    )
    # Whether the class's kind of target can start a run on several machines.
    spans_nodes: ClassVar[bool] = False

    @field_validator("env")
    @classmethod
    def _public_words(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not VARIABLE_NAME.fullmatch(name):
                raise ValueError(
                    "the name of an environment variable must consist of letters, digits and _, and must not begin "
                    f"with a digit, got {shorten(repr(name))}"
                )
            if "\0" in value:
                raise ValueError(f"the value of {name} must not contain a NUL character")
            if SECRET.search(name):
                raise ValueError(
                    f"{name} looks like a secret, but other users can read the environment of a container: mount a "
                    "file instead"
                )
        return env

    @model_validator(mode="after")
    def _even_nodes(self) -> Self:
        if self.processes % self.nodes:
            text = (
                f"must be a multiple of nodes ({self.nodes}), because it counts the processes of all nodes; got "
                f"{self.processes}"
            )
            raise _error_at(("processes",), self.processes, text)
        return self


SECRET_URI = "contains a user name or password: set MLFLOW_TRACKING_URI in the environment instead"


class TrackingSection(Section):
    """Tracking of metrics in MLflow."""

    uri: str | None = Field(
        None,
        description="Address of an MLflow store, without a password. null: the address in MLFLOW_TRACKING_URI; if "
        "that is not set, SparseBP's own database.",
    )
    experiment: str = Field("sparsebp", min_length=1, max_length=250, description="Name of the MLflow experiment.")
    tags: dict[str, str] = Field(
        default_factory=dict,
        description="Additional MLflow tags, such as {figure: one}, by which you can find the run.",
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
    name: Name = Field(
        description=(
            "Name of the run, from letters, digits, dots, dashes and underscores. Default: the name of the file."
        )
    )
    model: ModelSection = Field(
        description="The model to train: an existing model by its name, or a model with random weights from a config."
    )
    dataset: DatasetSection = Field(description="The data, and how they become training examples.")
    policy: list[PolicyEntry] = Field(
        default_factory=lambda: [PolicyEntry(name="dense")],
        description="Policies, applied in this order. Empty: dense, which computes every gradient.",
    )
    backward: BackwardOptions = Field(default_factory=BackwardOptions)
    training: TrainingSection = Field(default_factory=TrainingSection)
    measure: MeasureSection = Field(default_factory=MeasureSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    target: TargetSection = Field(
        default_factory=TargetSection,
        description="Where the run trains: the name of a target, or a section with kind and options.",
    )
    tracking: TrackingSection = Field(default_factory=TrackingSection)
