"""Check that an input saver keeps its contract; each violation raises an ``AssertionError`` of one sentence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from sparsebp_cli.backward import attach, count_flops, saved_bytes
from sparsebp_cli.policy import Observed, ParameterGradient, Saved, Site, Stateful, Step, TrialPass, choice
from sparsebp_cli.testing import (
    check_repeatable,
    check_state,
    enough,
    equal,
    find_share,
    name_of,
    require,
    through_json,
    train_network,
    vary,
)
from sparsebp_shelf.saver.kind import InputSaver
from sparsebp_shelf.saver.observed import LinearInput, ReaderGradients

_SITES = tuple(Site(f"layers.{number}.mlp", 3, (), number) for number in range(2))
_NUM_DRAWS = 2000
_NUM_SIGMAS = 6.0  # seeds are fixed; a correct policy fails for one in 500 million entries


def check_input_saver(policy: InputSaver) -> None:
    """Check an input saver against every promise of the contract."""
    check_state(policy, _SITES, _show)
    for check in _CHECKS:
        check(policy)
    if "keep" in type(policy).model_fields:
        whole = policy.model_copy(update={"keep": 1.0})
        same = equal(train_network(whole), train_network(None))
        require(whole.exact and same, f"{name_of(whole)}: keep=1.0 must be exact")


def _show(seed: int) -> list[Observed]:
    """Return what an input saver observes in a step, with random values."""
    generator, shown = torch.Generator().manual_seed(seed), list[Observed]()
    for site in _SITES:
        gradient_OD, x_ND = (torch.rand(rows, site.num_features, generator=generator) for rows in (3, 6))
        shown += [
            ParameterGradient(f"{site.name}.weight", gradient_OD),
            ReaderGradients(site.name, {site.name: gradient_OD}, 6),
            LinearInput(site.name, x_ND),
        ]
    return shown


def _inputs(*dtypes: torch.dtype) -> Iterator[Tensor]:
    for dtype in dtypes or (torch.float32, torch.float64, torch.bfloat16):
        for number, shape in enumerate(((8, 6), (7, 5), (1, 9), (9, 1), (64, 32))):
            generator = torch.Generator().manual_seed(number)
            yield torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _site(x_ND: Tensor) -> Site:
    return Site("layers.0.mlp", 3, (1, len(x_ND)), 0)


def _steps(policy: InputSaver) -> Iterator[Step]:
    """Yield a step without state, and one with each state of a trial pass."""
    yield Step(0)
    if isinstance(policy, Stateful):
        for wanted in policy.wants_trials(Step(0, num_steps=1, state=policy.init(_SITES))):
            assert isinstance(wanted, TrialPass)
            yield Step(0, state=wanted.state or {})


def _save(policy: InputSaver, x_ND: Tensor, step: Step) -> Saved | None:
    return policy.save(x_ND, _site(x_ND), step)


def _restore(policy: InputSaver, x_ND: Tensor, step: Step) -> Tensor:
    saved = _save(policy, x_ND, step)
    return x_ND if saved is None else saved.restore()


def _check_saved(policy: InputSaver) -> None:
    require(0.0 < policy.budget <= 1.0, f"{name_of(policy)}: budget must be in (0, 1], got {policy.budget}")
    for x_ND, step in itertools.product(_inputs(), _steps(policy)):
        saved = _save(policy, x_ND, step)
        claim = policy.count_bytes_at(_site(x_ND), step, x_ND.shape[0], x_ND.shape[1], x_ND.element_size())
        if saved is None:
            require(
                claim == x_ND.nbytes,
                f"{name_of(policy)}: keeps the whole input, but count_bytes_at claims {claim} bytes",
            )
            continue
        says = "None" if policy.form is None else policy.form.__name__
        require(type(saved) is policy.form, f"{name_of(policy)}: saves {type(saved).__name__}, but its form is {says}")
        restored = saved.restore()
        same = restored.shape == x_ND.shape and restored.dtype == x_ND.dtype
        require(same, f"{name_of(policy)}: restores another dtype or shape: {restored.dtype}, {tuple(restored.shape)}")
        text = f"{name_of(policy)}: keeps {saved.num_bytes} bytes, but count_bytes_at claims {claim}"
        require(saved.num_bytes == claim, text)
        kept, number = saved.units
        text = f"{name_of(policy)}: keeps {kept} of {number} units, but its budget {policy.budget:g} allows fewer"
        require(kept <= choice.count_kept(policy.budget, number), text)


def _check_repeatable(policy: InputSaver) -> None:
    for x_ND in _inputs():
        check_repeatable(policy, _restore, x_ND, Step(3, seed=1))


def _check_draws(policy: InputSaver) -> None:
    x_ND = next(_inputs())
    first = _restore(policy, x_ND, Step(0))

    def differing(what: str, values: Iterable[int]) -> Iterator[bool]:
        return (not torch.equal(first, _restore(policy, x_ND, other)) for other in vary(Step(0), what, values))

    share = find_share(differing("draw", range(1, 4097)))
    if share is None:
        return  # not a random policy
    held, most = policy.draws_for, enough(share) + 1
    for what in ("index", "micro_batch", "call", "seed", "rank"):
        if held is None or what == "seed":
            text = f"{name_of(policy)}: is random but draws the same for every {what} of the step"
            require(any(differing(what, range(1, most))), text)
        elif what != "index":
            text = f"{name_of(policy)}: keeps its draw for {held} steps, but another {what} changes the draw"
            require(not any(differing(what, range(1, 9))), text)
    if held is not None:
        same = not any(differing("index", range(1, held)))
        same = same and any(differing("index", range(held, most * held, held)))
        require(same, f"{name_of(policy)}: declares draws_for {held} steps, but its draws change after more or fewer")


def _check_exact(policy: InputSaver) -> None:
    same = all(torch.equal(_restore(policy, x_ND, Step(0)), x_ND) for x_ND in _inputs())
    require(same or not policy.exact, f"{name_of(policy)}: declares exact, but restores another input")


def _check_unbiased(policy: InputSaver) -> None:
    if not policy.unbiased or policy.exact:
        return
    for x_ND in (torch.ones(7, 5, dtype=torch.float64), next(_inputs(torch.float64))):
        draws = torch.stack([_restore(policy, x_ND, Step(0, draw=draw)) for draw in range(1, _NUM_DRAWS + 1)])
        along = (draws * x_ND).sum(dim=(-2, -1), keepdim=True) / x_ND.square().sum()
        for value, truth in ((draws, x_ND), (along, torch.ones(1, 1, dtype=torch.float64))):
            bound = _NUM_SIGMAS * value.std(0) / math.sqrt(_NUM_DRAWS) + 1e-6 * truth.abs()
            worst = float(((value.mean(0) - truth).abs() - bound).max())
            require(worst <= 0, f"{name_of(policy)}: declares unbiased, but the mean over draws is not the input")


def _check_kernels(policy: InputSaver) -> None:
    fast, reference = (
        train_network(policy, dtype=torch.float64),
        train_network(policy, dtype=torch.float64, execution="reference"),
    )
    close = all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(fast, reference, strict=True))
    require(close, f"{name_of(policy)}: the fast engine trains differently from the reference")


def _check_claim(policy: InputSaver) -> None:
    linear = nn.Linear(128, 64)
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    with attach(nn.ModuleList([linear]), [policy.model_copy(update={"layers": None, "where": None})]) as engine:
        engine.run_trials(lambda: linear(x).sum())
        with saved_bytes(linear.parameters()) as saved:
            output = linear(x)
        with count_flops() as count:
            engine.backward(output.sum())
        claim = engine.claim()
    text = f"{name_of(policy)}: claims {claim.claimed_flops:g} FLOPs of a backward, but {count.total} were executed"
    require(count.total == claim.claimed_flops, text)
    claimed = policy.count_bytes(256, 128, 4)
    require(saved.total == claimed, f"{name_of(policy)}: claims {claimed} bytes, but {saved.total} are stored")


def _check_resume(policy: InputSaver) -> None:
    one, two, three = (through_json(policy) for _ in range(3))
    straight, resumed = train_network(one, num_steps=6), train_network(two, num_steps=6, stop=3, resume_with=three)
    require(
        equal(straight, resumed),
        f"{name_of(policy)}: decides differently in a resumed run: it keeps hidden state",
    )


_CHECKS: tuple[Callable[[InputSaver], None], ...] = (
    _check_saved,
    _check_repeatable,
    _check_draws,
    _check_exact,
    _check_unbiased,
    _check_kernels,
    _check_claim,
    _check_resume,
)
