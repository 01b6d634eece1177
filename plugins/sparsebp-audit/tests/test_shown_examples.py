"""``audit --examples``: is each example's gradient that of the example alone, in trainings as people write them?"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import ways
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import sparsebp_audit
from sparsebp_audit.report import AuditReport, IsolationReport

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.filterwarnings("ignore")  # trl warns of its own defaults, and transformers of trl's
PACKED = """
import torch
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes)).train()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(2):
    batch = DataCollatorWithFlattening()([{"input_ids": torch.randint(3, 60, (n,)).tolist()} for n in (13, 11, 7)])
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("end", float(model.lm_head.weight.sum()))
"""


def kinds(report: IsolationReport) -> list[str]:
    return [loss.kind for loss in report.losses]


CASES = {
    "flattened": ("Trainer, DataCollatorWithFlattening", "llama", False),
    "flattened, opt": ("Trainer, DataCollatorWithFlattening", "opt", True),
    "loop": ("own loop, DataCollatorWithFlattening", "llama", True),
    "classification": ("Trainer, DataCollatorWithPadding (classification)", "llama", False),
    "left, gpt2": ("Trainer, the same, padding on the left", "gpt2", True),
    "SFT": ("TRL SFT", "llama", False),
    "SFT free, gpt_oss": ("TRL SFT, padding_free", "gpt_oss", True),
    "SFT packed": ("TRL SFT, packing", "llama", False),
    "DPO": ("TRL DPO", "llama", False),
    "GRPO": ("TRL GRPO", "llama", False),
}


@pytest.mark.always("flattened, opt", "left, gpt2", "SFT free, gpt_oss", "DPO")
@pytest.mark.parametrize("case", CASES)
def test_trainers_and_collators_are_judged(case: str, tmp_path: Path) -> None:
    name, kind, is_mixed = CASES[case]
    report = ways.WAYS[name](kind, tmp_path)
    assert report.unread_losses == ""
    assert {batch.verdict for batch in report.batches} == {"mixed" if is_mixed else "alone"}
    # A preference loss compares examples, and TRL has a mixture balance its experts, both on purpose.
    assert kinds(report) == (["purpose"] if name == "TRL DPO" or kind == "gpt_oss" else [])
    if is_mixed:
        assert all(batch.module and batch.cause and batch.mend for batch in report.batches)


def test_accumulated_means_weigh_tokens_unevenly_and_num_items_in_batch_does_not(tmp_path: Path) -> None:
    uneven = ways.accumulated_loop("llama", tmp_path)
    assert kinds(uneven) == ["uneven"]
    assert uneven.is_mixed
    lengths = [len(example["input_ids"]) - 1 for example in ways.examples()[: ways.SEVERAL]]
    assert f"weighs {max(lengths) / min(lengths):.2f} times" in uneven.losses[0].detail
    even = ways.accumulated("llama", tmp_path)
    assert kinds(even) == []
    assert len(even.batches) == 2
    assert not even.is_mixed


def test_a_label_that_crosses_into_the_next_example_is_counted(tmp_path: Path) -> None:
    batch = ways.DataCollatorWithFlattening()(ways.examples()[:3])
    for labels, crossing in ((batch["labels"], 0), (batch["input_ids"], 2)):
        model = ways.make_model("llama")
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)

        def train(model: nn.Module = model, optimizer: Any = optimizer, labels: Tensor = labels) -> None:
            model(**(batch | {"labels": labels}), use_cache=False).loss.backward()
            optimizer.step()

        report = ways.judge(train)
        assert {found.verdict for found in report.batches} == {"alone"}
        assert kinds(report) == ["crossing"] * bool(crossing)
        assert all(loss.detail.startswith(f"{crossing} of ") for loss in report.losses)


class Encoder(nn.Module):
    """Sentences as means of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(64, 16), nn.Linear(16, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        result: Tensor = self.out(self.table(input_ids).mean(1))
        return result


def test_in_batch_negatives_and_balanced_experts_are_named_as_on_purpose() -> None:
    encoder, ids = Encoder().train(), torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(0))

    def contrast() -> None:
        scores_BB = encoder(ids) @ encoder(ids.flip(1)).T
        nn.functional.cross_entropy(scores_BB, torch.arange(4)).backward()
        torch.optim.SGD(encoder.parameters(), 1e-3).step()

    report = ways.judge(contrast)
    assert [loss.kind for loss in report.losses] == ["purpose"]
    assert "in-batch negatives" in report.losses[0].detail
    assert not report.is_mixed

    def apart() -> None:
        nn.functional.mse_loss(encoder(ids), torch.zeros(4, 8)).backward()
        torch.optim.SGD(encoder.parameters(), 1e-3).step()

    assert ways.judge(apart).losses == ()

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    config.output_router_logits = True
    experts = MixtralForCausalLM(config).train()

    def balance() -> None:
        experts(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.optim.SGD(experts.parameters(), 1e-3).step()

    report = ways.judge(balance)
    assert ["balances experts" in loss.detail for loss in report.losses] == [True]
    assert not report.is_mixed


def test_the_script_trains_as_without_the_referee_and_the_report_follows_the_schema(
    tmp_path: Path, run_audit: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    file = tmp_path / "train.py"
    file.write_text(PACKED, encoding="utf-8")
    alone = subprocess.run([sys.executable, file], capture_output=True, text=True, check=True).stdout
    table = run_audit("--examples", "--fail-if-mixed", "--steps", "2", "--", sys.executable, file)
    assert table.returncode == 1, table.stderr
    assert "failed: examples are mixed in 1 of 1 batch" in table.stderr
    assert alone.splitlines()[-1] in table.stdout  # the same weights
    assert "first at: model.layers.0.self_attn (LlamaAttention)" in table.stdout
    assert max(map(len, table.stdout.splitlines())) <= 100
    done = run_audit("--examples", "-o", "json", "--steps", "2", "--", sys.executable, file)
    content = json.loads(done.stdout)
    jsonschema.validate(content, json.loads((ROOT / "docs" / "audit.schema.json").read_text(encoding="utf-8")))
    report = AuditReport.from_dict(content)
    assert report.examples is not None
    assert report.examples.is_mixed
    assert AuditReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_the_audit_counts_nothing_of_what_the_referee_computes() -> None:
    def watch(*, examples: bool) -> AuditReport:
        model = ways.make_model("llama")
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)

        def train() -> None:
            for _ in range(2):
                model(**ways.DataCollatorWithFlattening()(ways.examples()[:3])).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        return sparsebp_audit.audit(train, examples=examples)

    plain, judged = watch(examples=False), watch(examples=True)
    for name in ("forward_flops", "backward_flops", "ungraded_flops", "saved_bytes", "backwards", "gradient_bytes"):
        assert getattr(plain, name) == getattr(judged, name), name
    assert plain.examples is None
