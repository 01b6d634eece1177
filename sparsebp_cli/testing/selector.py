"""Conformance suite of gradient selectors. Each broken promise is an ``AssertionError`` of one sentence."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sparsebp_cli.backward import attach, count_flops
from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import (
    Blocks,
    Budget,
    Columns,
    Elements,
    GradientSelector,
    Groups,
    InformedSelector,
    Policy,
    Reading,
    Rows,
    Seen,
    Selection,
    Site,
    Split,
    Stateful,
    Step,
    TwoToFour,
    choice,
    returned,
)
from sparsebp_cli.testing.promise import equal, name_of, require, through_json, train_network
from sparsebp_cli.testing.state import check_state
from sparsebp_cli.testing.suite import check_draws, check_repeatable

_NUM_DRAWS = 2000
_NUM_MEANS = 50  # number of draws for a policy whose budget is a mean
_NUM_LAYERS, _NUM_STEPS = 4, 8
_NUM_SIGMAS = 6.0  # an unbiased policy fails for one in 500 million entries, and the seeds are fixed


def check_selector(policy: GradientSelector) -> None:
    """Check a gradient selector against every promise of the contract."""
    check_state(policy, _sites(next(_gradients())))
    _check_selection(policy)
    _check_repeatable(policy)
    _check_budget(policy)
    _check_draws(policy)
    _check_exact(policy)
    _check_unbiased(policy)
    _check_kernels(policy)
    _check_claim(policy)
    _check_resume(policy)


def _check_repeatable(policy: GradientSelector) -> None:
    for grad_NO in _gradients():
        check_repeatable(policy, _apply, grad_NO, Step(3, seed=1))


def _check_draws(policy: GradientSelector) -> None:
    grad_NO, parts = next(_gradients()), ("index", "micro_batch", "call", "seed", "rank")
    check_draws(policy, [(lambda step: _apply(policy, grad_NO, step), Step(0))], parts)


def _check_selection(policy: GradientSelector) -> None:
    for grad_NO in _gradients():
        chosen = ask(policy, grad_NO, _site(grad_NO), Step(0))
        split = policy.split if isinstance(policy, InformedSelector) else None
        declared = (policy.selection,) if split is None else tuple(split)
        require(
            isinstance(chosen, Split) == (split is not None) or chosen is None,
            f"{name_of(policy)}: returns {type(chosen).__name__}, but declares split: {split}",
        )
        for part, kind in zip(parts_of(chosen, len(declared)), declared, strict=True):
            _check_part(name_of(policy), part, kind, grad_NO)


def _check_part(name: str, selection: Selection | None, declared: type[Selection] | None, grad_NO: Tensor) -> None:
    kind = type(selection) if selection is not None else None
    says = "None" if declared is None else declared.__name__
    require(kind in (None, declared), f"{name}: returns {type(selection).__name__}, but declares {says}")
    if selection is None:
        return
    try:
        returned.check_selection(name, selection, grad_NO)
    except PolicyError as error:
        raise AssertionError(str(error)) from None
    numbers = [value for field, value in vars(selection).items() if field.startswith(("weight", "value"))]
    good = all(bool(torch.as_tensor(value).isfinite().all()) for value in numbers if value is not None)
    require(good, f"{name}: weights and values of {type(selection).__name__} must be finite")
    if isinstance(selection, TwoToFour):
        _check_two_to_four(name, selection)
    elif isinstance(selection, Groups):
        _check_groups(name, selection)
    elif isinstance(selection, Rows):
        _check_examples(name, selection, grad_NO)


def _check_two_to_four(name: str, selection: TwoToFour) -> None:
    mask = selection.mask_NO
    whole = mask.shape[1] // 4 * 4
    groups = mask[:, :whole].reshape(-1, 4).sum(1)
    pattern = mask.dtype == torch.bool and bool((groups == 2).all()) and bool(mask[:, whole:].all())
    require(pattern, f"{name}: mask_NO must keep two of every four features, and all of a smaller last group")


def _check_groups(name: str, selection: Groups) -> None:
    kept, group = selection.num_of
    weight = selection.weight_NO.t() if selection.along_rows else selection.weight_NO
    whole = weight.shape[1] // group * group
    counts = weight[:, :whole].reshape(-1, group).count_nonzero(1)
    rest = weight[:, whole:]
    pattern = bool((counts == kept).all()) and bool((rest.count_nonzero(1) == min(kept, rest.shape[1])).all())
    require(pattern, f"{name}: weight_NO must keep {kept} of every {group} neighbours, or all of a smaller last group")


def _check_examples(name: str, rows: Rows, grad_NO: Tensor) -> None:
    examples = _site(grad_NO).num_examples if rows.num_examples != 1 else 1
    good = rows.num_examples == examples and rows.index_K.numel() % examples == 0
    if good and examples > 1:
        example_BK = rows.index_K.view(examples, -1) // (grad_NO.shape[0] // examples)
        good = bool((example_BK == torch.arange(examples)[:, None]).all())
    require(good, f"{name}: num_examples must be 1, or B with equally many rows per example, in order of examples")


def _check_budget(policy: GradientSelector) -> None:
    whole = Budget.of(policy.budget)
    for share in (whole.dgrad, whole.wgrad):
        require(0.0 < share <= 1.0, f"{name_of(policy)}: budget must be in (0, 1], got {share}")
    for grad_NO in _gradients():
        for layer, index in itertools.product(range(_NUM_LAYERS), (0, 1, 7)):
            site, step = _site(grad_NO, layer), Step(index, num_steps=_NUM_STEPS)
            budget = Budget.of(policy.budget_at(site, step))
            good = 0.0 < budget.dgrad <= whole.dgrad + 1e-9 and 0.0 < budget.wgrad <= whole.wgrad + 1e-9
            require(good, f"{name_of(policy)}: budget_at in layer {layer} is {budget}, more than its budget {whole}")
            if budget.is_mean and (index or 0 < layer < _NUM_LAYERS - 1):
                continue  # the first and the last layer at one step are enough for many draws
            draws = range(_NUM_MEANS if budget.is_mean else 1)
            chosen = [ask(policy, grad_NO, site, replace(step, draw=draw)) for draw in draws]
            for number, share in enumerate((budget.dgrad, budget.wgrad)):
                _check_share(policy, [parts_of(one, 2)[number] for one in chosen], share, grad_NO, layer)


def _check_share(
    policy: GradientSelector, draws: Sequence[Selection | None], share: float, grad_NO: Tensor, layer: int
) -> None:
    """Check the entries kept for one product, in one draw or in the mean of many, against the budget."""
    kept = torch.tensor(
        [grad_NO.numel() if one is None else int(one.num_kept(grad_NO)) for one in draws], dtype=torch.float64
    )
    unit, number = _budget_unit(draws[0], grad_NO)
    # Rounding may put the product slightly above a whole number.
    allowed = unit * max(1, math.ceil(share * number - 1e-9))
    bound = _NUM_SIGMAS * float(kept.std()) / math.sqrt(len(draws)) if len(draws) > 1 else 0.0
    text = (
        f"{name_of(policy)}: keeps {float(kept.mean()):g} of {grad_NO.numel()} entries in layer {layer}, "
        f"but its budget {share} allows {allowed}"
    )
    require(float(kept.mean()) <= allowed + bound, text)


def _budget_unit(selection: Selection | None, grad_NO: Tensor) -> tuple[int, int]:
    """Return the number of entries of a unit, which are kept or cut only together, and the number of units. A fraction
    of the units is rounded up."""
    num_rows, num_columns = grad_NO.shape
    if isinstance(selection, Rows):
        return num_columns * selection.num_examples, num_rows // selection.num_examples
    if isinstance(selection, Blocks):
        return math.prod(selection.block_shape), math.prod(selection.grid(grad_NO))
    if isinstance(selection, TwoToFour):
        return num_rows * 4, -(-num_columns // 4)
    if isinstance(selection, Groups):
        length, others = grad_NO.shape if selection.along_rows else grad_NO.shape[::-1]
        return others * selection.num_of[1], -(-length // selection.num_of[1])
    if isinstance(selection, Elements | Columns):
        return num_rows, num_columns  # a policy may round up the number of entries in each row
    return 1, grad_NO.numel()


def _check_exact(policy: GradientSelector) -> None:
    dense = not policy.exact or _trains_densely(policy)
    require(dense, f"{name_of(policy)}: declares exact, but trains differently from dense")


def _check_unbiased(policy: GradientSelector) -> None:
    if not policy.unbiased:
        return
    for grad_NO in (torch.ones(7, 5, dtype=torch.float64), next(_gradients(torch.float64))):
        draws = torch.stack([_apply(policy, grad_NO, Step(0, draw=draw)) for draw in range(1, _NUM_DRAWS + 1)])
        along = (draws * grad_NO).sum(dim=(-2, -1), keepdim=True) / grad_NO.square().sum()
        for value, truth in ((draws, grad_NO), (along, torch.ones(1, 1, dtype=torch.float64))):
            error = (value.mean(0) - truth).abs()
            bound = _NUM_SIGMAS * value.std(0) / math.sqrt(_NUM_DRAWS) + 1e-6 * truth.abs()
            worst = float((error - bound).max())
            require(worst <= 0, f"{name_of(policy)}: declares unbiased, but the mean of its draws is not dense")


def _check_kernels(policy: GradientSelector) -> None:
    fast, reference = (
        train_network(policy, dtype=torch.float64),
        train_network(policy, dtype=torch.float64, execution="reference"),
    )
    close = all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(fast, reference, strict=True))
    require(close, f"{name_of(policy)}: fast execution trains differently from reference execution")


def _check_claim(policy: GradientSelector) -> None:
    num_rows, num_inputs, num_outputs = 256, 16, 128
    torch_generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(num_inputs, num_outputs)
    x = torch.randn(num_rows, num_inputs, generator=torch_generator).requires_grad_()
    executed = []
    for seed in range(_NUM_MEANS if Budget.of(policy.budget).is_mean else 1):
        with attach(nn.ModuleList([linear]), [policy], seed=seed) as engine:  # layer 0
            loss = linear(x).square().sum()
            with count_flops() as count:
                engine.backward(loss)
            claim = engine.claim()
        executed.append(count.total)
    # Rounding up to whole rows or columns adds at most one of them.
    rounding = claim.dense_flops / min(num_rows, num_outputs)
    bound = _NUM_SIGMAS * statistics.stdev(executed) / math.sqrt(len(executed)) if len(executed) > 1 else 0.0
    mean = statistics.fmean(executed)
    claimed = f"{claim.claimed_flops / claim.dense_flops:.3f}"
    text = (
        f"{name_of(policy)}: estimates that {claimed} of the dense backward's FLOPs remain, but the count is "
        f"{mean / claim.dense_flops:.3f}"
    )
    require(mean <= claim.claimed_flops + rounding + bound, text)


def _check_resume(policy: GradientSelector) -> None:
    one, two, three = (through_json(policy) for _ in range(3))
    straight, resumed = train_network(one, num_steps=6), train_network(two, num_steps=6, stop=3, resume_with=three)
    same = equal(straight, resumed)
    require(same, f"{name_of(policy)}: decides differently in a resumed run: it keeps hidden state")


def check_keep_all(policy: Policy) -> None:
    """Check that a policy with ``keep`` 1.0 is dense."""
    assert isinstance(policy, GradientSelector)
    require(policy.exact, f"{name_of(policy)}: keep=1.0 must be exact")
    budget = Budget.of(policy.budget)
    require(
        budget.dgrad == budget.wgrad == 1.0,
        f"{name_of(policy)}: keep=1.0 must have the budget 1.0, got {policy.budget}",
    )
    require(
        equal(train_network(policy), train_network(None)), f"{name_of(policy)}: keep=1.0 trains differently from dense"
    )


def _gradients(*dtypes: torch.dtype) -> Iterator[Tensor]:
    for dtype in dtypes or (torch.float32, torch.float64, torch.bfloat16):
        # These include an odd number of rows, widths that 4 does not divide, a single row, and a single column.
        for number, shape in enumerate(((8, 6), (7, 5), (1, 9), (9, 1), (64, 32))):
            generator = torch.Generator().manual_seed(number)
            yield torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _site(grad_NO: Tensor, layer: int = 0) -> Site:
    num_rows, name = grad_NO.shape[0], f"layers.{layer}.mlp"
    return Site(name, grad_NO.shape[1], (2, num_rows // 2) if num_rows % 2 == 0 else (1, num_rows), layer)


def _sites(grad_NO: Tensor) -> list[Site]:
    return [_site(grad_NO, layer) for layer in range(_NUM_LAYERS)]


def ask(policy: GradientSelector, grad_NO: Tensor, site: Site, step: Step) -> Selection | Split | None:
    """Return a policy's selection at a linear with random input, output and weight."""
    if isinstance(policy, Stateful):
        step = replace(step, state=policy.init(_sites(grad_NO)))
    if not isinstance(policy, InformedSelector):
        return policy.select(grad_NO, site, step)
    generator = torch.Generator().manual_seed(len(grad_NO))
    x = torch.randn(len(grad_NO), 4, generator=generator).to(grad_NO.dtype)
    weight = torch.randn(grad_NO.shape[1], 4, generator=generator).to(grad_NO.dtype)
    known: dict[Reading, Tensor] = {
        "input": x,
        "input_norm": choice.norm(x, 1),
        "weight_norm": choice.norm(weight, 1),
    }
    readings = {name: known[name] for name in policy.reads}
    return policy.choose(Seen(grad_NO, readings=readings), site, step)


def parts_of(selection: Selection | Split | None, number: int) -> tuple[Selection | None, ...]:
    """Return the selections for dgrad and wgrad, or ``number`` times a selection that serves both."""
    return (selection.dgrad, selection.wgrad) if isinstance(selection, Split) else (selection,) * number


def _apply(policy: GradientSelector, grad_NO: Tensor, step: Step) -> Tensor:
    """Return the masked gradient for each product, (2, N, O)."""
    parts = parts_of(ask(policy, grad_NO, _site(grad_NO), step), 2)
    return torch.stack([grad_NO if part is None else part.apply(grad_NO) for part in parts])


def _trains_densely(policy: GradientSelector) -> bool:
    return equal(train_network(policy), train_network(None))
