"""The first part of ``gpu.py``: whole updates by `lossless`, beside padding, packing and padding-free batches.

Each way gives the gradient of the same number: the losses of all labels of an update, divided by their count. *SFT* has
instructions of different lengths, *GRPO* several answers to each prompt, *LoRA 8B* the instructions again, with a rank
of 16 in each linear of a larger model. Weights do not change. Texts are random tokens.

Each way runs under every attention that the machine has; ``lossless`` uses PyTorch's own. A row has the error of its
gradient against one text at a time in float32, counted FLOPs, peak bytes, and the seconds of each round, in which the
rows take turns in another order. Every row is written to the file when it changes. A later call goes on from there.
"""

from __future__ import annotations

import copy
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measured import SIZES
from steps import Way as StepWay
from steps import prepare
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.policy import kernel

IGNORED = -100
Batch = dict[str, Any]
Run = Callable[[Any, Batch, int], Tensor]
LORA_RANK = 16
SIZES_OF_LORA = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
# The error may be twice that of the padded way in the same precision: sums are rounded in another order.
SLACK, ROUNDING = 2.0, {"float32": 1e-6, "bfloat16": 1e-3}


@dataclass(frozen=True)
class Text:
    """Tokens of which the first ``prompt``, at least one, are not trained."""

    tokens: tuple[int, ...]
    prompt: int

    @property
    def feature(self) -> dict[str, list[int]]:
        """The text as a dataset holds it."""
        labels = [IGNORED] * self.prompt + list(self.tokens[self.prompt :])
        return {"input_ids": list(self.tokens), "labels": labels}


@dataclass(frozen=True)
class Update:
    """The texts of one update, in the order in which they are cut into micro-batches."""

    name: str
    texts: tuple[Text, ...]
    batch_size: int
    has_groups: bool = False  # whether texts share prompts
    rank: int = 0  # of adapters; 0: all weights are trained

    @property
    def num_labels(self) -> int:
        """How many labels all texts have."""
        return sum(len(text.tokens) - text.prompt for text in self.texts)

    def cut(self, size: int) -> list[list[dict[str, list[int]]]]:
        """Return micro-batches of ``size`` texts."""
        features = [text.feature for text in self.texts]
        return [features[start : start + size] for start in range(0, len(features), size)]


def make_updates(vocabulary: int, scale: int = 1) -> list[Update]:
    """Return the updates; lengths and numbers are divided by ``scale``."""
    draw = random.Random(0)

    def write(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, vocabulary) for _ in range(max(2, length)))

    def lengths(number: int, median: int, spread: float, most: int) -> list[int]:
        drawn = [median * draw.lognormvariate(0.0, spread) for _ in range(number)]
        return [max(4, round(min(most, length) / scale)) for length in drawn]

    instructions = tuple(Text(write(length), max(1, length // 3)) for length in lengths(16, 512, 0.7, 2048))
    answers = []
    for length in lengths(4, 512, 0.3, 1024):
        prompt = write(length)
        answers += [Text(prompt + write(more), length) for more in lengths(8, 256, 0.5, 1024)]
    return [
        Update("SFT", instructions, 4),
        Update("GRPO", tuple(answers), 8, has_groups=True),
        Update("LoRA 8B", instructions, 4, rank=LORA_RANK),
    ]


def pad(features: list[dict[str, list[int]]]) -> Batch:
    """Return a batch with padding on the right."""
    longest = max(len(feature["input_ids"]) for feature in features)

    def fill(name: str, value: int) -> Tensor:
        return torch.tensor([one[name] + [value] * (longest - len(one[name])) for one in features])

    mask = torch.tensor([[1] * len(one["input_ids"]) + [0] * (longest - len(one["input_ids"])) for one in features])
    return {"input_ids": fill("input_ids", 0), "labels": fill("labels", IGNORED), "attention_mask": mask}


def pad_each(update: Update) -> list[Batch]:
    """Return the micro-batches with padding."""
    return [pad(features) for features in update.cut(update.batch_size)]


def pad_all(update: Update) -> list[Batch]:
    """Return one batch of all texts, with padding."""
    return [pad(update.cut(len(update.texts))[0])]


def flatten(features: list[dict[str, list[int]]]) -> Batch:
    """Return texts behind one another in one row; positions start anew."""
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return {name: value for name, value in collator(features).items() if value is not None}


def flatten_each(update: Update) -> list[Batch]:
    """Return the micro-batches without padding."""
    return [flatten(features) for features in update.cut(update.batch_size)]


def pack(update: Update) -> list[Batch]:
    """Return rows of whole texts, as long as ``batch_size`` longest texts, the longest texts first."""
    room = update.batch_size * max(len(text.tokens) for text in update.texts)
    rows: list[list[Text]] = []
    for text in sorted(update.texts, key=lambda text: -len(text.tokens)):
        for row in rows:
            if sum(len(one.tokens) for one in row) + len(text.tokens) <= room:
                row.append(text)
                break
        else:
            rows.append([text])
    return [flatten([text.feature for text in row]) for row in rows]


def group(update: Update) -> list[Batch]:
    """Return each prompt (1, P) with what follows it in each of its texts, padded on the right."""
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for text in update.texts:
        groups.setdefault(text.tokens[: text.prompt], []).append(torch.tensor(text.tokens[text.prompt :]))
    side_by_side = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return [
        {
            "prompt": torch.tensor(prompt)[None],
            "answers": side_by_side(answers),
            "mask": side_by_side([torch.ones_like(answer) for answer in answers]),
        }
        for prompt, answers in groups.items()
    ]


def run_labels(model: Any, batch: Batch, total: int) -> Tensor:
    """Give labels to the model."""
    loss: Tensor = model(**batch, num_items_in_batch=total).loss
    return loss


def run_kept(model: Any, batch: Batch, total: int) -> Tensor:
    """Run the head of a row of texts at its labels."""
    labels = batch["labels"][0, 1:]
    kept = (labels != IGNORED).nonzero().flatten()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, logits_to_keep=kept).logits[0]
    return cross_entropy(logits.float(), labels[kept], reduction="sum") / total


def run_cached(model: Any, batch: Batch, total: int) -> Tensor:
    """Run a prompt once, with a cache that has a graph, and its answers behind it."""
    prompt, answers, mask = batch["prompt"], batch["answers"], batch["mask"]
    first = model.model(input_ids=prompt, use_cache=True)
    cache = first.past_key_values
    cache.batch_repeat_interleave(len(answers))
    before = torch.ones(len(answers), prompt.shape[1], dtype=torch.long, device=mask.device)
    inputs = {"input_ids": answers, "attention_mask": torch.cat([before, mask], 1), "past_key_values": cache}
    hidden = model.model(**inputs, use_cache=True).last_hidden_state
    last = first.last_hidden_state[:, -1:].expand(len(answers), -1, -1)
    hidden = torch.cat([last, hidden[:, :-1]], 1)[mask.bool()]
    return cross_entropy(model.lm_head(hidden).float(), answers[mask.bool()], reduction="sum") / total


@dataclass(frozen=True)
class Way:
    """One way to the gradient."""

    name: str
    batches: Callable[[Update], list[Batch]]
    run: Run = run_labels
    has_engine: bool = False
    is_flat: bool = False  # whether its batches have no mask
    only_groups: bool = False
    has_kernels: bool = True  # whether the engine may call the flash kernel once for all groups of rows


WAYS = (
    Way("padded", pad_each),
    Way("padding-free", flatten_each, is_flat=True),
    Way("padding-free, head at labels", flatten_each, run_kept, is_flat=True),
    Way("packed, head at labels", pack, run_kept, is_flat=True),
    Way("prompt cached by hand", group, run_cached, only_groups=True),
    Way("lossless", pad_each, has_engine=True),
    Way("lossless, one batch", pad_all, has_engine=True),
    Way("lossless, one batch, SDPA by group", pad_all, has_engine=True, has_kernels=False),
)


def list_attentions(device: torch.device) -> list[str]:
    """Return the attention implementations of transformers that run here, PyTorch's own first."""
    found = ["sdpa"]
    if device.type == "cuda":
        found += ["flash_attention_2"] * (find_spec("flash_attn") is not None)
        found += ["flash_attention_3"] * (find_spec("flash_attn_interface") is not None)
        found += ["flex_attention"]
    return found


@dataclass(frozen=True)
class Case:
    """One row: an update by a way under an attention."""

    update: Update
    way: Way
    attention: str

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.update.name}: {self.way.name}, {self.attention}"


def list_cases(update: Update, device: torch.device) -> Iterator[Case]:
    """Yield the rows of an update, the padded way under PyTorch's attention first."""
    for way in WAYS:
        if way.only_groups and not update.has_groups:
            continue
        for attention in list_attentions(device):
            # The engine packs for PyTorch's attention; what a cache needs, flex_attention does not have.
            if attention == "sdpa" or not (way.has_engine or way.only_groups):
                yield Case(update, way, attention)


def make_model(size: str, update: Update, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the model of an update, with adapters if it has a rank."""
    torch.manual_seed(0)
    sizes = SIZES_OF_LORA if update.rank and size != "tiny" else SIZES[size]
    config = LlamaConfig(**sizes, max_position_embeddings=8192, use_cache=False)  # type: ignore[arg-type]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = LlamaForCausalLM(config).train()
            prepare(model, StepWay("", rank=update.rank))
    finally:
        torch.set_default_dtype(before)
    for parameter in model.parameters() if update.rank else ():
        if parameter.requires_grad:  # also those that adapters begin with as zeros
            nn.init.normal_(parameter, std=0.02)
    return model


def make_pass(model: Any, case: Case, stack: ExitStack) -> Callable[[], None]:
    """Return a function that runs forward and backward of a whole update; ``stack`` undoes what it needs."""
    model.set_attn_implementation(case.attention)
    device, total = model.device, case.update.num_labels
    batches = [
        {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        for batch in case.way.batches(case.update)
    ]
    if case.way.is_flat and case.attention == "sdpa":  # the others' arguments; they would have to be ignored
        batches = [{name: batch[name] for name in ("input_ids", "labels", "position_ids")} for batch in batches]
    engine = None
    if case.way.has_engine:  # the errors are measured here, so the engine's own comparison would be a part of the time
        engine = stack.enter_context(sbp.attach(model, {"name": "lossless", "verify": "never"}))
    if not case.way.has_kernels:
        stack.enter_context(kernel.disabled())

    def run() -> None:
        for batch in batches:
            loss = case.way.run(model, batch, total)
            loss.backward() if engine is None else engine.backward(loss)

    return run


def find_gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradient of each trained parameter."""
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def find_truth(model: Any, update: Update) -> dict[str, Tensor]:
    """Return the gradient in float32, of one text at a time."""
    wide = copy.deepcopy(model).float()
    wide.set_attn_implementation("sdpa")
    for features in update.cut(1):
        batch = {name: torch.tensor([value], device=model.device) for name, value in features[0].items()}
        run_labels(wide, batch, update.num_labels).backward()
    return find_gradients(wide)


def find_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Return the norm of the difference over the norm of the truth."""
    if found.keys() != truth.keys():
        return float("inf")
    square = sum(float((found[name].float() - value).double().square().sum()) for name, value in truth.items())
    return (square / sum(float(value.double().square().sum()) for value in truth.values())) ** 0.5


class Headline:
    """The rows, in a file that a later call goes on from.

    Args:
        out: The file.
        facts: Machine and versions.
        options: What else the numbers depend on. Rows of other facts or options are measured again.
    """

    def __init__(self, out: Path, facts: dict[str, Any], options: dict[str, Any]) -> None:
        self._out = out
        self._record: dict[str, Any] = {"format": 1, "machine": facts, "options": options, "rows": {}}
        if out.exists():
            before = json.loads(out.read_text(encoding="utf-8"))
            if all(before.get(key) == self._record[key] for key in ("format", "machine", "options")):
                self._record = before
        self.rows: dict[str, dict[str, Any]] = self._record["rows"]

    def save(self) -> None:
        """Write all rows; what is cut off leaves the file before."""
        self._out.parent.mkdir(parents=True, exist_ok=True)
        new = self._out.with_name(self._out.name + ".new")
        new.write_text(json.dumps(self._record, indent=1) + "\n", encoding="utf-8")
        new.replace(self._out)

    def measure(self, update: Update, size: str, device: torch.device, rounds: int, deadline: float) -> None:
        """Add what the rows of an update lack, until the deadline: first error, FLOPs and bytes, then rounds."""
        cases = [case for case in list_cases(update, device) if "note" not in self.rows.get(case.key, {})]
        if all(len(self.rows.get(case.key, {}).get("seconds", ())) >= rounds for case in cases):
            return
        dtype = torch.float32 if size == "tiny" else torch.bfloat16
        model, truth = make_model(size, update, device, dtype), dict[str, Tensor]()
        for case in cases:
            if "flops" in self.rows.get(case.key, {}) or time.monotonic() > deadline:
                continue
            # A gradient of 8B parameters in float32 would need another 32 GB: its errors are those of the tests.
            if not truth and (size == "tiny" or not update.rank):
                truth = find_truth(model, update)
            self.rows[case.key] = {"dtype": str(dtype).removeprefix("torch.")}
            self.rows[case.key] |= _try(partial(_count, model, case, truth))
            model.zero_grad(set_to_none=True)
            self.save()
        truth.clear()
        cases = [case for case in cases if "flops" in self.rows.get(case.key, {})]
        done = min((len(self.rows[case.key]["seconds"]) for case in cases), default=rounds)
        longest = 0.0
        for number in range(done, rounds):
            begin = time.monotonic()
            if begin + longest > deadline:
                break
            # Another order in each round, and the same one in a call that goes on.
            for case in random.Random(number).sample(cases, len(cases)):
                self.rows[case.key]["seconds"][number:] = [_time(model, case)]
            longest = max(longest, time.monotonic() - begin)
            self.save()

    def measure_all(self, size: str, device: torch.device, rounds: int, deadline: float) -> None:
        """Measure every update, each in an even share of the time that is left."""
        updates = make_updates(SIZES[size]["vocab_size"], 16 if size == "tiny" else 1)
        for number, update in enumerate(updates):
            now = time.monotonic()
            self.measure(update, size, device, rounds, now + (deadline - now) / (len(updates) - number))

    def find_wrong(self) -> list[str]:
        """Return a line for each way whose error is more than twice the padded way's."""
        found = []
        for key, row in self.rows.items():
            padded = self.rows[_find_padded(key)]
            if row.get("error") is None or padded.get("error") is None:
                continue
            if row["error"] > SLACK * padded["error"] + ROUNDING[row["dtype"]]:
                found.append(f"WRONG  {key}: gradient error {row['error']:.1e}, padded {padded['error']:.1e}")
        return found

    def print_table(self) -> None:
        """Print a line for each row, beside the padded way under PyTorch's attention."""
        print(
            f"\nwhole updates, forward and backward{'':<16}{'ms':>9}{'of padded':>11}{'GB':>7}{'TFLOP':>8}{'error':>9}"
        )
        for key, row in self.rows.items():
            if not row.get("seconds"):
                print(f"{key:<50} {row.get('note') or 'no time was left'}")
                continue
            padded = self.rows[_find_padded(key)]
            ratios = [mine / theirs for mine, theirs in zip(row["seconds"], padded.get("seconds", ()), strict=False)]
            of_padded = f"{statistics.median(ratios):.2f}" if ratios else ""
            error = "" if row["error"] is None else f"{row['error']:.0e}"
            print(
                f"{key:<50}{1000 * statistics.median(row['seconds']):>10.1f}{of_padded:>11}"
                f"{row['peak_bytes'] / 1e9:>7.1f}{row['flops'] / 1e12:>8.1f}{error:>9}"
            )


def _find_padded(key: str) -> str:
    """Return the row that another row of the same update is compared with."""
    return f"{key.partition(':')[0]}: padded, sdpa"


def _try(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a row, or why there is none on this machine."""
    try:
        return function()
    except Exception as error:  # out of memory, or not supported by this device or model
        return {"note": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"}


def _count(model: Any, case: Case, truth: dict[str, Tensor]) -> dict[str, Any]:
    """Return error, FLOPs and peak bytes of an update. The first pass is not counted: it compiles."""
    device = model.device
    with ExitStack() as stack:
        run = make_pass(model, case, stack)
        run()
        error = find_error(find_gradients(model), truth) if truth else None
        model.zero_grad(set_to_none=True)
        before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        run()
        peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
        model.zero_grad(set_to_none=True)
        with FlopCounterMode(display=False) as counter:
            run()
    return {"error": error, "flops": counter.get_total_flops(), "peak_bytes": peak, "seconds": []}


def _time(model: Any, case: Case) -> float:
    """Return the seconds of a pass, after one that is not counted, as attention and engine were changed."""
    with ExitStack() as stack:
        run = make_pass(model, case, stack)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            _wait(model.device)
            begin = time.perf_counter()
            run()
            _wait(model.device)
            seconds = time.perf_counter() - begin
        model.zero_grad(set_to_none=True)
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
