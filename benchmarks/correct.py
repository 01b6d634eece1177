"""Checks every form against its reference on this device.

The truth is the reference form in double precision. The error of the fast form, in float32 or bfloat16, may be twice
that of the reference form in the same precision: its sums are rounded in another order.

Two kinds of check. *model*: gradients of all parameters of a small llama, with the random policy, whose draws do not
depend on the last bits of the gradients; its choices carry weights. *kernel*: one linear layer, with the choices of
``topk``.

Shape letters: N rows, D input width, O output width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sparsebp_cli.backward.linear.function import LinearLayout, Needs, run_kernel
from sparsebp_cli.policy import GradientSelector, Site, Step
from sparsebp_tools.bench import BenchForm, find_forms
from sparsebp_tools.bench.subject import Subject
from sparsebp_tools.bench.variant import CSR_ALWAYS, CSR_NEVER, Variant

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROUNDING = {"float32": 1e-6, "bfloat16": 1e-3}  # smaller errors count as rounding
SLACK = 2.0
CSR_BELOW = {"csr": CSR_ALWAYS, "masked": CSR_NEVER}


@dataclass(frozen=True)
class Check:
    """The check of one form.

    Args:
        kind: ``model`` or ``kernel``.
        form: Policy, site, form and share kept.
        dtype: Dtype of weights and activations.
        error: Error of the fast form: norm of the difference to truth, over the norm of truth.
        reference_error: Error of the reference form.
        good: Whether the first is small enough.
        note: A remark; empty for none.
    """

    kind: str
    form: str
    dtype: str
    error: float
    reference_error: float
    good: bool
    note: str = ""


def check_all(device: torch.device) -> Iterator[Check]:
    """Check every form, share and precision on a device."""
    for dtype in DTYPES:
        yield from check_models(device, dtype)
        yield from check_kernels(device, dtype)


def check_models(device: torch.device, dtype: str) -> Iterator[Check]:
    """Check whole models: the engine without a policy, then every form of the random policy and of a router."""
    plain = Variant("plain PyTorch")
    mine, truth = make_subject(device, DTYPES[dtype]), make_subject(device, torch.float64)
    true, expected = _gradients(truth, plain), _gradients(mine, plain)
    for site in ("linears", "nodes"):
        found = _gradients(mine, Variant("dense", site))
        same = all(torch.equal(found[name], expected[name]) for name in expected)
        note = "bit for bit as loss.backward()" if same else "other bits than loss.backward()"
        yield _compare("model", f"dense, {site}", dtype, found, expected, true, note)
    for label, variant in list_variants():
        reference = replace(variant, execution="reference")
        try:
            found = [
                _gradients(subject, one) for subject, one in ((mine, variant), (mine, reference), (truth, reference))
            ]
        except RuntimeError as error:  # a form that the device refuses is reported, too
            yield _refused("model", label, dtype, error)
        else:
            yield _compare("model", label, dtype, *found)


def check_kernels(device: torch.device, dtype: str) -> Iterator[Check]:
    """Check one linear layer with the choices of topk."""
    generator = torch.Generator().manual_seed(1)
    shapes = (512, 384), (512, 256), (384, 256)
    grad_NO, x_ND, weight = (torch.randn(shape, generator=generator).to(device, DTYPES[dtype]) for shape in shapes)
    for form in find_forms("topk", sites=["linears"]):
        for keep in form.keeps:
            policy = form.make("topk", keep)
            assert isinstance(policy, GradientSelector)
            selection = policy.select(grad_NO, Site("layer", 384, (4, 128)), Step(0))
            assert selection is not None
            label = f"topk {_name(form, keep)}"
            try:
                with Variant("", csr_below=CSR_BELOW.get(form.execution)).on(torch.nn.Module()):
                    fast = run_kernel(LinearLayout(), grad_NO, x_ND, weight, selection, Needs(True, True, True))
            except RuntimeError as error:
                yield _refused("kernel", label, dtype, error)
                continue
            masked_NO = selection.apply(grad_NO)
            reference = _dense(masked_NO, x_ND, weight)
            true = _dense(masked_NO.double(), x_ND.double(), weight.double())
            note = "" if fast else "no kernel of its own: the reference form runs"
            parts = [dict(enumerate(part)) for part in (fast or reference, reference, true)]
            yield _compare("kernel", label, dtype, *parts, note)


def list_variants() -> Iterator[tuple[str, Variant]]:
    """Yield every form of the random policy, and two of a router, with their names."""
    variants: Iterable[dict[str, Any]] = ({"weighted": True}, {"weighted": True, "within": "example"})
    for options in variants:
        for form in find_forms("random", options=options):
            for keep in form.keeps if form.execution == "csr" else form.keeps[:1] + form.keeps[2:3]:
                variant = Variant(
                    _name(form, keep),
                    form.site,
                    form.make("random", keep),
                    csr_below=CSR_BELOW.get(form.execution),
                )
                within = ", by example" if "within" in options else ""
                yield f"random {variant.label}{within}", variant
    for form in find_forms("max-child")[:2]:
        yield f"{form.site}: {form.label}", Variant(form.label, "nodes", form.make("max-child", None))


def _name(form: BenchForm, keep: float | None) -> str:
    return f"{form.label}, {form.site}, {keep:g}"


def make_subject(device: torch.device, dtype: torch.dtype) -> Subject:
    """Return a small llama, with the same weights in every precision, and a batch; smaller where float64 is slow."""
    torch.manual_seed(0)
    width, length = (256, 128) if device.type == "cuda" else (64, 32)
    config = LlamaConfig(
        vocab_size=2 * width,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).to(device, dtype).train()
    ids = torch.randint(0, 2 * width, (4, length), generator=torch.Generator().manual_seed(0)).to(device)
    return Subject(model, {"input_ids": ids, "labels": ids})


def _gradients(subject: Subject, variant: Variant) -> dict[Any, Tensor]:
    with variant.on(subject.model) as engine:
        loss = subject.loss(variant)
        loss.backward() if engine is None else engine.backward(loss)
    found = {name: p.grad.clone() for name, p in subject.model.named_parameters() if p.grad is not None}
    subject.drop_gradients()
    return found


def _dense(grad_NO: Tensor, x_ND: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return grad_NO @ weight, grad_NO.t() @ x_ND, grad_NO.sum(0)


def _compare(
    kind: str,
    form: str,
    dtype: str,
    fast: dict[Any, Tensor],
    reference: dict[Any, Tensor],
    true: dict[Any, Tensor],
    note: str = "",
) -> Check:
    if not fast.keys() == reference.keys() == true.keys():
        return Check(kind, form, dtype, float("inf"), 0.0, False, "other parameters have a gradient")
    error, expected = _error(fast, true), _error(reference, true)
    return Check(kind, form, dtype, error, expected, error <= SLACK * expected + ROUNDING[dtype], note)


def _refused(kind: str, form: str, dtype: str, error: Exception) -> Check:
    text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    return Check(kind, form, dtype, float("inf"), 0.0, good=False, note=text)


def _error(found: dict[Any, Tensor], true: dict[Any, Tensor]) -> float:
    square = sum(float((found[name].double() - value.double()).square().sum()) for name, value in true.items())
    whole = sum(float(value.double().square().sum()) for value in true.values())
    error = (square / whole) ** 0.5
    return float("inf") if math.isnan(error) else error
