"""``sparsebp audit --apply``: less work in a script that was not changed, or the plain step and the reason."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from sparsebp_audit.auditor import Audit as Watcher
from sparsebp_audit.auditor.application import Application
from sparsebp_audit.auditor.script_packing import ScriptPacking, refusal_of
from sparsebp_audit.report import AuditReport, StepTimes, render_page
from sparsebp_audit.verb.audit_table import print_audit
from sparsebp_cli.cli.app import app

pytestmark = pytest.mark.xdist_group("applied")  # fixtures of this file take long: one process makes them

Audit = Callable[..., subprocess.CompletedProcess[str]]
STEPS, CODE = 14, 5
# Of each batch of the script: see its lengths and labels.
PADDING, UNREAD, SHARED = 140, 14, 7 * 24
SCRIPT = f"""
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

def train(mode):
    torch.manual_seed(0)
    dropout = 0.1 if mode == "dropout" else 0.0
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    model = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, attention_dropout=dropout)).train()
    held = [p for name, p in model.named_parameters() if mode == "dropout" or name != "model.embed_tokens.weight"]
    optimizer = torch.optim.AdamW(held, lr=1e-3)
    lengths = torch.tensor([64, 40, 50, 44, 36, 60, 30, 48])
    prompt = torch.randint(3, 64, (24,))
    for step in range({STEPS}):
        ids = torch.randint(3, 64, (8, 64))
        ids[:, :24], ids[:, 24] = prompt, torch.arange(8) + 3
        real = torch.arange(64) < lengths[:, None]
        labels = ids.masked_fill(~real, -100)
        labels[:, :24] = labels[4:, -10:] = -100
        batch = dict(input_ids=ids.masked_fill(~real, 0), attention_mask=real.long())
        if mode == "padding":
            logits = model(**batch).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())
        else:
            loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        model.zero_grad()
        print(mode, "loss", loss.item(), flush=True)


for mode in sys.argv[1:]:
    train(mode)
sys.exit({CODE})
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A loop with padding, masked prompts that all examples share, and an embedding that its optimizer forgot."""
    file = tmp_path_factory.mktemp("apply") / "train.py"
    file.write_text(SCRIPT, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def plain(script: Path) -> str:
    """What the script prints on its own, in every mode."""
    command = [sys.executable, str(script), "packed", "dropout", "padding"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300).stdout


def _losses(text: str, mode: str) -> list[float]:
    return [float(found) for found in re.findall(rf"^{mode} loss (\S+)$", text, re.MULTILINE)]


def _report(done: subprocess.CompletedProcess[str]) -> AuditReport:
    assert done.returncode == CODE, done.stderr[-2000:]
    return AuditReport.from_dict(json.loads(done.stdout))


def test_a_script_trains_to_the_same_losses_with_less_work(
    script: Path, plain: str, run_audit: Audit, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_audit("--apply", "-o", "json", "--", sys.executable, script, "packed")
    report = _report(done)
    expected = _losses(plain, "packed")
    assert len(expected) == STEPS
    assert _losses(done.stderr, "packed") == pytest.approx(expected, rel=1e-5)
    applied = report.applied
    assert applied is not None
    assert (applied.refusal, applied.model) == ("", "LlamaForCausalLM")
    assert applied.packed_steps == applied.batches == applied.packed_batches == 6  # of 14: 3 watched, 1 observed
    assert applied.positions == 6 * 8 * 64
    assert (applied.padding, applied.unread, applied.shared) == (6 * PADDING, 6 * UNREAD, 6 * SHARED)
    assert applied.checks >= 1
    assert applied.error < 1e-5
    assert applied.switched_off == ("model.embed_tokens.weight",)
    assert applied.plain is not None
    assert applied.lossless is not None
    assert (applied.plain.steps, applied.lossless.steps) == (4, 5)  # without the one that is compared
    shared = report.finding("shared-prefix")
    assert shared is not None
    assert f"{3 * SHARED:,} of {3 * (512 - PADDING):,} positions" in shared.detail
    for kind in ("shared-prefix", "padding", "ignored-logits"):
        found = report.finding(kind)
        assert found is not None
        assert "the policy lossless does this for you" in found.advice
    assert report.wasted_flops_share < 1.0
    print_audit(report)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "lossless applied to LlamaForCausalLM in 6 steps" in lines
    page = unescape(render_page(report))
    for line in applied.lines():
        assert line in page


def test_a_script_with_dropout_is_refused_by_name_and_trains_as_without(
    script: Path, plain: str, run_audit: Audit
) -> None:
    done = run_audit("--apply", "--", sys.executable, script, "dropout")
    assert done.returncode == CODE, done.stderr[-2000:]
    assert _losses(done.stdout, "dropout") == pytest.approx(_losses(plain, "dropout"), rel=1e-5)
    refusal = "not applied: lossless does not support 'model.layers.0.self_attn', which has dropout 0.1"
    assert f"sparsebp audit: {refusal}" in done.stderr
    assert f"lossless {refusal}" in done.stdout
    assert "the policy lossless does this for you" not in " ".join(done.stdout.split())


def test_a_script_whose_loss_reads_padding_keeps_the_plain_step(script: Path, plain: str, run_audit: Audit) -> None:
    done = run_audit("--apply", "-o", "json", "--", sys.executable, script, "padding")
    applied = _report(done).applied
    assert applied is not None
    assert applied.headline == "not applied: the script's loss reads padding positions, which lossless skips"
    assert (applied.packed_steps, applied.refused_at) == (0, 0)
    assert _losses(done.stderr, "padding") == pytest.approx(_losses(plain, "padding"), rel=1e-5)


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)).train()


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 32, (2, 12), generator=torch.Generator().manual_seed(1))
    real = torch.arange(12) < torch.tensor([12, 5])[:, None]
    return {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~real, -100)}


@pytest.mark.parametrize(
    "read",
    [
        lambda output: output.logits,
        lambda output: output["logits"],
        lambda output: output[1],
        lambda output: output.to_tuple()[1],
        lambda output: dict(output.items())["logits"],
    ],
)
def test_logits_beside_a_loss_are_the_plain_ones_and_end_packing(read: Callable[[Any], torch.Tensor]) -> None:
    model = _model()
    expected = model(**_batch())
    packing = ScriptPacking(model)
    packing.install()
    packing.enabled = True
    output = model(**_batch())
    assert output["loss"] is output.loss is output[0]
    assert packing.counts.packed == 1
    assert packing.failure == ""
    logits = read(output)
    torch.testing.assert_close(logits, expected.logits)
    assert logits.requires_grad
    assert "reads logits besides the loss" in packing.failure
    assert model(**_batch()).loss.item() == expected.loss.item()  # plain again, to the bit
    packing.remove()
    assert "forward" not in model.__dict__


def test_an_error_inside_of_packing_leaves_the_script_its_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    expected = model(**_batch()).loss.item()
    packing = ScriptPacking(model)
    packing.install()
    packing.enabled = True

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr("sparsebp_cli.backward.kind.packing.forward.compare_passes", fail)
    assert model(**_batch()).loss.item() == expected
    assert packing.failure == "RuntimeError: no luck"
    packing.remove()


def test_a_copy_of_a_packed_model_runs_the_plain_forward() -> None:
    model = _model()
    packing = ScriptPacking(model)
    packing.install()
    packing.enabled = True
    twin = copy.deepcopy(model)
    twin(**_batch())
    assert packing.counts.batches == 0
    packing.remove()


def test_a_hook_of_the_script_that_would_see_rows_is_named() -> None:
    model = _model()
    assert refusal_of(model) == ""
    model.lm_head.register_forward_hook(lambda *_: None)
    assert "a hook of the script" in refusal_of(model)
    assert "'lm_head'" in refusal_of(model)


def _watch(
    *, clip: bool = False, late: bool = False, hooked: bool = False
) -> tuple[nn.Sequential, Application, list[Any]]:
    """Watch three steps of a model whose optimizer forgot the first layer, and apply."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizers: list[Any] = [torch.optim.SGD(model[1].parameters(), lr=0.1)]
    if hooked:
        for parameter in model[0].parameters():
            parameter.register_hook(lambda _: None)
    if late:
        optimizers.append(torch.optim.SGD(model[0].parameters(), lr=0.1))
    with Watcher(steps=3) as watcher:
        for _ in range(3):
            model(torch.randn(3, 4)).square().sum().backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizers[0].step()
            model.zero_grad()
    application = Application(watcher.session, lambda _: None, lambda: None)
    application.start()
    for _ in range(2):
        application.after_step(optimizers[0])
    return model, application, optimizers


def test_a_forgotten_parameter_is_switched_off_until_an_optimizer_gets_it() -> None:
    model, application, optimizers = _watch()
    assert application.result().switched_off == ("0.weight", "0.bias")
    assert not model[0].weight.requires_grad
    optimizers[0].add_param_group({"params": [model[0].weight]})
    assert model[0].weight.requires_grad
    assert not model[0].bias.requires_grad
    application.stop()
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"clip": True}, "gradient clipping"),
        ({"hooked": True}, "hooks of the script"),
        ({"late": True}, "an optimizer that has not stepped yet holds some"),
    ],
)
def test_a_gradient_that_may_be_read_stays_on(options: dict[str, bool], why: str) -> None:
    model, application, _ = _watch(**options)
    result = application.result()
    assert result.switched_off == ()
    assert why in result.left_on
    assert model[0].weight.requires_grad
    assert "lossless needs a transformers model, got Sequential" in result.headline
    application.stop()


def test_times_are_quartiles_and_need_two_steps() -> None:
    assert StepTimes.of([1.0]) is None
    assert StepTimes.of([0.001, 0.002, 0.003, 0.004, 0.005]) == StepTimes(5, 0.002, 0.003, 0.004)


def test_a_recipe_is_told_how_it_says_the_same() -> None:
    result = CliRunner().invoke(app, ["audit", "--apply", "recipe.yaml"])
    assert "in a recipe, write 'policy: lossless' instead" in str(result.exception)
