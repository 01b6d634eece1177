"""Trainings of two steps with what acts on a whole step, and the same by hand, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward.kind.parameter.extension import find_parameters
from sparsebp_cli.backward.linear.function import weight_of
from sparsebp_cli.backward.linear.site import find_linears
from sparsebp_cli.policy import (
    Observation,
    Parameter,
    ParameterSelector,
    Policy,
    ReferenceReader,
    Site,
    Stateful,
    Step,
    TokenSelector,
)
from sparsebp_shelf.block import BlockDropper
from sparsebp_shelf.block.layout import find_blocks
from sparsebp_shelf.example import Examples, ExampleSelector
from sparsebp_shelf.part import PartSelector
from sparsebp_shelf.part.extension import find_divisible, show_weights
from sparsebp_shelf.saver import InputSaver
from tests.saver import saving_by_hand

from .training import batch, compile_parts
from .training import build as build_model
from .way import Way

Weights = dict[str, Tensor]
NUM_STEPS, SEED, MAX_NORM = 4, 3, 0.05


def build(composition: str) -> nn.Module:
    """Return the model; its adapters without dropout, which would draw anew for rows that are left out."""
    model = build_model(composition)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            for dropout in module.lora_dropout.values():
                dropout.p = 0.0
    return model


def policies_of(ways: Sequence[Way]) -> list[Policy]:
    """Return the policies of some ways."""
    return [
        sbp.make_policy(way.policy["name"], **{k: v for k, v in way.policy.items() if k != "name"})
        for way in ways
        if way.policy
    ]


def train(composition: str, ways: Sequence[Way], *, tokens_by_reference: bool = False) -> Weights:
    """Train for two steps with an engine.

    Args:
        composition: One of :data:`COMPOSITIONS`.
        ways: Ways that act on the step.
        tokens_by_reference: Compute all positions, and nothing eagerly or in segments.

    Returns:
        The weights afterwards.
    """
    model, policies = build(composition), policies_of(ways)
    options: dict[str, Any] = {key: value for way in ways for key, value in way.options.items()}
    if tokens_by_reference:
        options = {"execution": "reference"} | {k: v for k, v in options.items() if k == "reference"}
    elif "update" in options and composition == "clipping":
        options |= {"max_grad_norm": MAX_NORM, "eager_clip": "exact"}
    is_eager, optimizer = "update" in options, _optimizer(model)

    def attach() -> Any:
        return sbp.attach(model, policies, optimizer=optimizer, seed=SEED, num_steps=NUM_STEPS, **options)

    engine = attach()
    if composition == "compile":
        compile_parts(model)
    for number in range(2):
        micro_batches = _micro_batches(composition, number)
        for left, (ids, share) in zip(reversed(range(len(micro_batches))), micro_batches, strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=composition == "autocast"):
                loss = model(input_ids=ids, labels=ids, **columns_for(policies, number)).loss * share
            engine.backward(loss, **({"is_last": left == 0} if is_eager else {}))
        if composition == "clipping" and "max_grad_norm" not in options:
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if composition == "resume" and number == 0:
            state = model.state_dict(), optimizer.state_dict(), engine.state_dict()
            engine.detach()
            model = build(composition)
            model.load_state_dict(state[0])
            optimizer = _optimizer(model)
            optimizer.load_state_dict(state[1])
            engine = attach()
            engine.load_state_dict(state[2])
    engine.detach()
    return _weights(model)


def train_by_hand(composition: str, ways: Sequence[Way]) -> Weights:
    """Train for two steps without an engine: what the policies of the ways say, in the obvious way.

    Args:
        composition: One of :data:`COMPOSITIONS`.
        ways: Ways that act on the step; none of them chooses tokens.

    Returns:
        The weights afterwards.
    """
    model, policies = build(composition), policies_of(ways)
    optimizer, (shown, _) = _optimizer(model), find_parameters(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    states = _init_states(model, policies, shown)
    masks = _find_masks(model, policies)
    for number in range(2):
        means: dict[str, Tensor] = {}  # of the rows of inputs, in the step's first forward
        for micro_batch, (all_ids, share) in enumerate(_micro_batches(composition, number)):
            ids, weights, hooks, saving = all_ids, None, [], ExitStack()
            for policy in sorted(policies, key=lambda policy: not isinstance(policy, ParameterSelector)):
                state = states.get(id(policy), {})
                step = Step(number, micro_batch, seed=SEED, num_steps=NUM_STEPS, state=state)
                assert not isinstance(policy, TokenSelector)
                if isinstance(policy, ParameterSelector):
                    chosen = set(policy.select(shown, replace(step, micro_batch=0)))  # one set for the whole step
                    for name, parameter in trained.items():
                        parameter.requires_grad_(name in chosen)
                elif isinstance(policy, ExampleSelector):
                    examples = _examples(model, policy, all_ids, step)
                    ids, weights = _choose(policy, examples, all_ids, step)
                elif isinstance(policy, BlockDropper):
                    blocks, _ = find_blocks(model, "the reference")
                    first = Step(number, seed=SEED, num_steps=NUM_STEPS)
                    dropped = policy.drop(blocks, first)
                    times = dict.fromkeys(dropped, _zero if policy.skips_forward else _detach)
                    hooks = [model.get_submodule(name).register_forward_hook(hook) for name, hook in times.items()]
                elif isinstance(policy, InputSaver):
                    saving.enter_context(saving_by_hand(model, policy, step, None if micro_batch else means))
            with torch.autocast("cpu", torch.bfloat16, enabled=composition == "autocast"):
                loss = _loss(model, ids, weights, len(all_ids)) * share
            loss.backward()
            saving.close()
            for hook in hooks:
                hook.remove()
        _mask_gradients(trained, masks)
        if composition == "clipping":
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        before = _weights(model)
        optimizer.step()
        _put_back(trained, masks, before)
        _observe(policies, states, model, trained, number, means)
        optimizer.zero_grad()
    return _weights(model)


def _find_masks(model: nn.Module, policies: Sequence[Policy]) -> dict[str, Tensor | None]:
    """Return which entries of each trained parameter a part selector trains, None for none; empty without one."""
    linears, masks = find_divisible(model), dict[str, Tensor | None]()
    for policy in policies:
        if isinstance(policy, PartSelector):
            masks = {name: None for name, p in model.named_parameters() if p.requires_grad}
            for name, part in policy.parts(show_weights(model, linears), Step(0, seed=SEED)).items():
                module, form = linears[name]
                mask = torch.zeros_like(weight_of(module), dtype=torch.bool)
                matrix_OD = form.by_output(mask)
                part.write(matrix_OD, torch.ones_like(part.restrict(matrix_OD)))
                masks[f"{name}.weight"] = mask
    return masks


def _mask_gradients(trained: dict[str, nn.Parameter], masks: dict[str, Tensor | None]) -> None:
    for name, mask in masks.items():
        gradient = trained[name].grad
        trained[name].grad = None if mask is None or gradient is None else mask * gradient


@torch.no_grad()
def _put_back(trained: dict[str, nn.Parameter], masks: dict[str, Tensor | None], before: Weights) -> None:
    """Undo what weight decay and momentum did outside of the parts."""
    for name, mask in masks.items():
        if mask is not None:
            trained[name].copy_(torch.where(mask, trained[name], before[name]))


def _init_states(model: nn.Module, policies: Sequence[Policy], shown: Sequence[Parameter]) -> dict[int, Any]:
    weights: Any = show_weights(model, find_divisible(model))

    def places(policy: Policy) -> Sequence[Any]:
        if isinstance(policy, ExampleSelector):
            return ()
        if isinstance(policy, InputSaver):
            return [Site(name, len(module.weight), ()) for name, module, _ in find_linears(model).covered]
        return weights if isinstance(policy, PartSelector) else shown

    return {id(policy): policy.init(places(policy)) for policy in policies if isinstance(policy, Stateful)}


def _observe(
    policies: Sequence[Policy],
    states: dict[int, Any],
    model: nn.Module,
    trained: dict[str, nn.Parameter],
    number: int,
    means: dict[str, Tensor],
) -> None:
    sizes = {name: p.grad.abs().sum() for name, p in trained.items() if p.grad is not None}
    is_run = {name: model.get_parameter(f"{name}.weight").grad is not None for name in means}  # no dropped block is
    means = {name: mean_D for name, mean_D in means.items() if is_run[name]}
    end = Step(number, seed=SEED, num_steps=NUM_STEPS)
    observation = Observation(size=sizes, mean=means)
    for policy in policies:
        if isinstance(policy, Stateful):
            states[id(policy)] = policy.observe(states[id(policy)], observation, end)


def _detach(module: nn.Module, args: object, output: Any) -> Any:
    return (output[0].detach(), *output[1:]) if isinstance(output, tuple) else output.detach()


def _zero(module: nn.Module, args: object, output: Any) -> Any:
    if isinstance(output, tuple):
        return torch.zeros_like(output[0]), *output[1:]
    return torch.zeros_like(output)


def difference(ours: Weights, theirs: Weights, before: Weights) -> float:
    """Return the largest difference of a weight's change, by the largest change of any weight."""
    assert ours.keys() == theirs.keys() == before.keys()
    moved = max(float((theirs[name] - before[name]).abs().max()) for name in theirs)
    assert moved > 0.0
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) / moved


def _weights(model: nn.Module) -> Weights:
    """Return the parameters, without quantised ones and those that stand for them."""
    some = ((n, p) for n, p in model.named_parameters() if p.is_floating_point() and not hasattr(p, "is_restored"))
    return {name: parameter.detach().clone() for name, parameter in some}


def untrained(composition: str) -> Weights:
    """Return the weights that every training begins with."""
    return _weights(build(composition))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, 0.5, momentum=0.9, weight_decay=0.1)


def _micro_batches(composition: str, number: int) -> list[tuple[Tensor, float]]:
    count = 2 if composition == "accumulation" else 1
    return [(torch.cat([batch(10 * number + i), batch(5 + 10 * number + i)]), 1 / count) for i in range(count)]


def columns_for(policies: Sequence[Policy], number: int) -> dict[str, Tensor]:
    """Return the column that example selectors read: the losses of a reference."""
    columns: dict[str, Tensor] = {}
    for policy in policies:
        if isinstance(policy, ReferenceReader) and policy.reads_reference:
            columns["reference_loss"] = 3 * torch.rand(4, 6, generator=torch.Generator().manual_seed(number))
    return columns


def _examples(model: nn.Module, policy: ExampleSelector, ids_BT: Tensor, step: Step) -> Examples:
    """Return the batch with what the policy reads, by the plain model."""
    model.eval()  # and so without checkpointing
    with torch.no_grad():
        logits = model(input_ids=ids_BT).logits.float()
        loss_BT = _token_losses(logits, ids_BT)
        share_BTV = logits[:, :-1].softmax(-1) - nn.functional.one_hot(ids_BT[:, 1:], logits.shape[-1])
    norm_B = share_BTV.flatten(1).norm(dim=1) if policy.reads_gradient_norm else None
    columns = columns_for([policy], step.index)
    reference_B = columns["reference_loss"][:, :-1].mean(1) if "reference_loss" in columns else None
    model.train()
    return Examples(len(ids_BT), loss_BT.mean(1), norm_B, reference_B)


def _choose(policy: ExampleSelector, examples: Examples, ids_BT: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
    """Return the chosen examples, and their weights if there are any."""
    choice = policy.choose(examples, step)
    if choice is None:
        return ids_BT, None
    if isinstance(choice, Tensor):
        return ids_BT[choice], None
    return ids_BT[choice.index_K], choice.weight_K


def _loss(model: nn.Module, ids_KT: Tensor, weight_K: Tensor | None, num_examples: int) -> Tensor:
    """Return the mean loss of the chosen examples, or their weighted sum over the number of all."""
    if weight_K is None:
        loss: Tensor = model(input_ids=ids_KT, labels=ids_KT).loss
        return loss
    loss_KT = _token_losses(model(input_ids=ids_KT).logits.float(), ids_KT)
    return (weight_K * loss_KT.mean(1)).sum() / num_examples


def _token_losses(logits: Tensor, ids_BT: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids_BT[:, 1:], reduction="none")
