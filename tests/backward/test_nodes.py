"""Selectors at every node of the graph: the literal semantics, by hooks and by the walk."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward import FlopEstimate
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import GradientSelector, Selection, Site, Step
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from tests.graph import count_nodes
from tests.selector import Promises

from .conftest import tokens
from .families import DECODERS, every_way, tiny_decoder

TOP = sbp.make_policy("topk", keep=0.1, along="elements")
SEEN: list[Site] = []


class Watcher(Promises):
    """Notes where it is asked; keeps everything."""

    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection | None:
        assert grad_NO.shape == (torch.Size(site.batch_shape).numel(), site.num_features)
        SEEN.append(site)
        return None


@pytest.fixture(autouse=True)
def _forget() -> None:
    SEEN.clear()


def _gradients(
    model: nn.Module, policy: GradientSelector | None, engine: str | None, *, autocast: bool = False, **options: Any
) -> dict[str, Tensor | None]:
    ids = tokens(0)
    attached = engine and sbp.attach(model, [policy] if policy else [], sites="nodes", execution=engine, **options)
    torch.manual_seed(7)  # of dropout
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids).loss
    torch.manual_seed(8)  # of what a checkpointed layer draws again
    attached.backward(loss) if attached else loss.backward()
    if attached:
        attached.detach()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _same(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> bool:
    assert one.keys() == other.keys()
    return all(_equal(one[name], other[name]) for name in one)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("family", DECODERS)
def test_dense_through_nodes_is_plain_pytorch_by_hooks_and_by_walk(family: str) -> None:
    for make in every_way(family):
        plain = _gradients(make(), None, None)
        assert all(grad is not None for grad in plain.values())
        for engine in ("fast", "reference"):
            assert _same(plain, _gradients(make(), None, engine)), (make.keywords, engine)


@pytest.mark.parametrize("family", DECODERS)
def test_elements_cut_at_nodes_are_the_walks(family: str) -> None:
    for checkpointing in (False, True):
        hooks, walk = (
            _gradients(tiny_decoder(family, checkpointing=checkpointing), TOP, engine)
            for engine in ("fast", "reference")
        )
        assert _same(hooks, walk)
        for grad in hooks.values():
            assert grad is not None
            assert 0 < int(grad.count_nonzero()) <= max(1, round(0.1 * grad.numel()))


def test_every_gradient_is_cut_before_its_node_uses_it() -> None:
    """By hand: two layers and a tanh. Cutting parameters' gradients at the end is something else."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 5, bias=False))
    x = torch.randn(4, 6)
    first, second = model[0].weight.detach(), model[2].weight.detach()

    def cut(grad: Tensor) -> Tensor:
        kept = max(1, round(0.25 * grad.numel()))
        index = grad.abs().flatten().topk(kept).indices
        return torch.zeros(grad.numel()).index_copy_(0, index, grad.flatten()[index]).view(grad.shape)

    h = (x @ first.t()).tanh()
    y = h @ second.t()
    into_sum = cut(torch.ones(()).view(1)).view(())
    into_square = cut(into_sum.expand(y.shape))
    into_second = cut(into_square * (2.0 * y))
    into_tanh = cut(into_second @ second)
    into_first = cut(into_tanh * (1.0 - h * h))
    # Each weight's gradient enters the node of its transpose, and what comes of that the weight itself.
    second_grad, first_grad = (cut(cut(h.t() @ into_second).t()), cut(cut(x.t() @ into_first).t()))
    with sbp.attach(model, [sbp.make_policy("topk", keep=0.25, along="elements")], sites="nodes") as engine:
        engine.backward(model(x).square().sum())
    assert torch.allclose(model[2].weight.grad, second_grad, rtol=1e-6, atol=0)
    assert torch.allclose(model[0].weight.grad, first_grad, rtol=1e-5, atol=1e-7)
    model.zero_grad()
    model(x).square().sum().backward()
    masked = cut(model[0].weight.grad)
    assert not torch.allclose(masked, first_grad, rtol=0.1)


def test_every_gradient_is_shown_by_a_name_that_stays() -> None:
    model = tiny_decoder("llama")
    with sbp.attach(model, [Watcher()], sites="nodes") as engine:
        names: list[list[str]] = []
        for number in range(3):
            SEEN.clear()
            ids = tokens(number)
            engine.backward(model(input_ids=ids, labels=ids).loss)
            names.append([site.name for site in SEEN])
        assert names[0] == names[1] == names[2]
        assert len(set(names[0])) == len(names[0]) == count_nodes(model(input_ids=ids, labels=ids).loss)
        assert engine.report().kept_share == 1.0
        assert engine.claim() == FlopEstimate(0.0, 0.0)
    sites = {site.name: site for site in SEEN}
    assert {name for name, _ in model.named_parameters()} <= sites.keys()
    assert sites["model.layers.1.mlp.down_proj.MmBackward0.0"] == Site(
        "model.layers.1.mlp.down_proj.MmBackward0.0", 32, (32,), 1
    )
    assert sites["NllLossBackward0.0"] == Site("NllLossBackward0.0", 1, (1,), None)  # a number is shown as one row
    assert sites["model.layers.0.input_layernorm.weight"] == Site("model.layers.0.input_layernorm.weight", 32, (1,), 0)
    assert sites["model.layers.0.self_attn.q_proj.UnsafeViewBackward0.0"].batch_shape == (2, 16)
    assert sites["model.norm.MulBackward0.1"].layer is None


def test_losses_may_be_differentiated_in_any_order() -> None:
    model, names = tiny_decoder("llama"), []
    with sbp.attach(model, [Watcher()], sites="nodes") as engine:
        losses = [model(input_ids=tokens(number), labels=tokens(number)).loss for number in range(3)]
        for loss in reversed(losses):
            SEEN.clear()
            engine.backward(loss)
            names.append([site.name for site in SEEN])
    assert names[0] == names[1] == names[2]
    assert "model.layers.1.mlp.down_proj.MmBackward0.0" in names[2]


def test_outputs_of_one_node_are_gradients_of_their_own_and_none_stays_none() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(12.0).view(3, 4))

        def forward(self, used: list[int]) -> Tensor:
            parts = self.weight.unbind()
            return sum((parts[i].square().sum() for i in used), torch.zeros(()))

    model = Parts()
    with sbp.attach(model, [Watcher()], sites="nodes") as engine:
        engine.backward(model([0, 2]))
    names = [site.name for site in SEEN]
    assert [name for name in names if "Unbind" in name] == ["UnbindBackward0.0.0", "UnbindBackward0.0.2"]
    assert torch.equal(model.weight.grad[1], torch.zeros(4))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_elements_are_the_walks_under_autocast_and_checkpointing(
    family: str, autocast: bool, checkpointing: bool
) -> None:
    """qwen2 has tied embeddings, gpt2 dropout."""
    hooks, walk = (
        _gradients(tiny_decoder(family, checkpointing=checkpointing), TOP, engine, autocast=autocast)
        for engine in ("fast", "reference")
    )
    assert _same(hooks, walk)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
def test_lora_has_sites_where_gradients_are() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        adapted = get_peft_model(tiny_decoder("llama"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        return adapted

    hooks, walk = (_gradients(make(), TOP, engine) for engine in ("fast", "reference"))
    assert _same(hooks, walk)
    assert {name for name, grad in hooks.items() if grad is not None} == {name for name in hooks if "lora_" in name}


def _train(policy: GradientSelector | None, engine: str, *, stop: int | None = None) -> list[Tensor]:
    model = tiny_decoder("qwen2")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    made = sbp.attach(model, [policy] if policy else [], sites="nodes", optimizer=optimizer, execution=engine, seed=3)
    for step in range(4):
        if step == stop:
            state = copy.deepcopy(made.state_dict())
            made.detach()
            made = sbp.attach(model, [policy] if policy else [], sites="nodes", optimizer=optimizer, seed=3)
            made.load_state_dict(state)
        for micro_batch in range(2):
            ids = tokens(2 * step + micro_batch)
            made.backward(model(input_ids=ids, labels=ids).loss / 2)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    made.detach()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [{}, {"layers": [-1]}],
    ids=lambda o: next(iter(o), ""),
)
def test_training_with_accumulation_and_clipping_is_the_walks_and_resumes(options: dict[str, Any]) -> None:
    policy = sbp.make_policy("random", keep=0.25, along="elements", weighted=True, **options)
    straight = _train(policy, "fast")
    for other in (_train(policy, "reference"), _train(policy, "fast", stop=2)):
        assert all(torch.equal(a, b) for a, b in zip(straight, other, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(straight, _train(None, "fast"), strict=True))


def test_excluded_modules_keep_their_gradients_whole() -> None:
    model = tiny_decoder("llama")
    whole = _gradients(tiny_decoder("llama"), None, None)
    cut = _gradients(model, TOP, "fast", exclude=["*"])
    assert _same(whole, cut)
    with sbp.attach(model, [Watcher()], sites="nodes", exclude=["model.layers.*", "lm_head"]) as engine:
        engine.backward(model(input_ids=tokens(0), labels=tokens(0)).loss)
        assert "model.layers.0.mlp.down_proj" in engine.report().excluded
    assert not any(site.name.startswith(("model.layers", "lm_head")) for site in SEEN)
    assert {"model.norm.weight", "model.embed_tokens.weight"} <= {site.name for site in SEEN}


def test_a_backward_from_outside_is_refused_and_a_disabled_one_is_plain() -> None:
    model, ids = tiny_decoder("llama"), tokens(0)
    plain = _gradients(tiny_decoder("llama"), None, None)
    with sbp.attach(model, [TOP], sites="nodes") as engine:
        with pytest.raises(UsageError, match=r"call engine.backward\(loss\)"):
            model(input_ids=ids, labels=ids).loss.backward()
        with pytest.raises(UsageError, match=r"call engine.backward\(loss\)"):
            model(input_ids=ids).logits.square().mean().backward()
        model.zero_grad(set_to_none=True)
        with engine.disabled():
            model(input_ids=ids, labels=ids).loss.backward()
    assert _same(plain, {name: p.grad for name, p in model.named_parameters()})
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids).loss.backward()  # no hook is left
    assert _same(plain, {name: p.grad for name, p in model.named_parameters()})


def test_what_hides_nodes_is_refused_before_anything_is_computed() -> None:
    model, ids = tiny_decoder("llama"), tokens(0)
    checkpoint_activations(model, use_reentrant=True)
    model.enable_input_require_grads()
    with (
        sbp.attach(model, [TOP], sites="nodes") as engine,
        pytest.raises(UnsupportedError, match=r"CheckpointFunctionBackward: reentrant .* use_reentrant=False"),
    ):
        engine.backward(model(input_ids=ids, labels=ids).loss)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.compiles
def test_a_compiled_model_is_refused_by_name() -> None:
    class Model(nn.Linear):
        def forward(self, x_NI: torch.Tensor) -> torch.Tensor:  # its own code: dynamo remembers what it left out
            return super().forward(x_NI).tanh()

    model = Model(4, 4)
    compiled = torch.compile(model, backend="aot_eager")
    with (
        sbp.attach(model, [TOP], sites="nodes") as engine,
        pytest.raises(UnsupportedError, match=r"CompiledFunctionBackward: torch.compile"),
    ):
        engine.backward(compiled(torch.ones(2, 4)).sum())


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"exclude": ["lm_haed"]}, UsageError, r"'lm_haed' matches no module .*did you mean lm_head\?"),
        ({"policies": [TOP, sbp.make_policy("max-child")]}, UnsupportedError, "TopK and MaxChild in one backward"),
    ],
)
def test_what_is_not_built_is_refused_by_name(options: dict[str, Any], error: type[Exception], text: str) -> None:
    model = tiny_decoder("llama")
    with pytest.raises(error, match=text):
        sbp.attach(model, options.pop("policies", [TOP]), sites="nodes", **options)
    assert not any(module._forward_hooks for module in model.modules())


def test_an_attached_model_is_refused_and_cannot_be_copied() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    for one, other in (("nodes", "nodes"), ("nodes", "linears"), ("linears", "nodes")):
        with (
            sbp.attach(model, [TOP], sites=one),
            pytest.raises(UnsupportedError, match="the model is already attached"),
        ):
            sbp.attach(model, [TOP], sites=other)
    with sbp.attach(model, [TOP], sites="nodes"), pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
        copy.deepcopy(model)
    copy.deepcopy(model)


def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    with (
        sbp.attach(model, [TOP], sites="nodes") as engine,
        pytest.raises(UnsupportedError, match=r"needs gradients of layout strided, got torch.sparse_coo at 'weight'"),
    ):
        engine.backward(model(torch.tensor([1, 2])).sum())


def _run_rank(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = tiny_decoder("llama")
    engine = sbp.attach(model, [TOP], sites="nodes")
    parallel = nn.parallel.DistributedDataParallel(model)
    ids = tokens(rank)
    engine.backward(parallel(input_ids=ids, labels=ids).loss)
    torch.save({name: p.grad for name, p in model.named_parameters()}, Path(folder) / f"{rank}.pt")
    engine.detach()
    with pytest.raises(UnsupportedError, match="MaxChild works in one process, got several"):
        sbp.attach(model, [sbp.make_policy("max-child")], sites="nodes")
    with pytest.raises(UnsupportedError, match="execution='reference' at sites='nodes' works in one process"):
        sbp.attach(model, [TOP], sites="nodes", execution="reference")
    torch.distributed.barrier()
    os._exit(0)  # destroying a group of gloo may abort or hang (torch 2.13)


def test_two_processes_reduce_what_each_has_cut(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_run_rank, (str(tmp_path),), nprocs=2)
    alone = []
    for rank in range(2):
        model, ids = tiny_decoder("llama"), tokens(rank)
        with sbp.attach(model, [TOP], sites="nodes") as engine:
            engine.backward(model(input_ids=ids, labels=ids).loss)
        alone.append({name: p.grad for name, p in model.named_parameters()})
    both = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, grad in both[0].items():
        assert torch.equal(grad, both[1][name])
        assert torch.allclose(grad, (alone[0][name] + alone[1][name]) / 2, rtol=1e-4, atol=1e-7), name
