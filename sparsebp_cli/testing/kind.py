"""Conformance suite for kinds of policies. Each broken promise is an ``AssertionError`` of one sentence.

Everything runs on the CPU with fixed seeds, in double precision. Each kind's own suite checks its further promises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from sparsebp_cli.backward import Engine, PassCount, Proof, attach, count_flops, saved_bytes
from sparsebp_cli.backward.observe.flops import DensePass
from sparsebp_cli.backward.observe.module_trace import ModuleTrace
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import Kind, Policy, PolicyLike, make_policies
from sparsebp_cli.policy.composition import PolicyFacts, Setup, find_refusals
from sparsebp_cli.policy.kind import load
from sparsebp_cli.policy.known_kind import find_kind, find_kinds
from sparsebp_cli.policy.rule import Match, Rule
from sparsebp_cli.testing.policy import check_policy
from sparsebp_cli.testing.promise import Network, enough, equal, name_of, random_states, require, through_json

NUM_STEPS, STOP = 6, 3
EXACT = 1e-9  # fraction of the largest change of a weight, for the order of sums in double precision
OFTEN = 20  # a policy that is not exact must leave something out in one of so many steps on average
OVER = 1e-9  # tolerance, as a fraction of the dense backward's FLOPs

Loss = Callable[[nn.Module, int], Tensor]


def check_kind(
    kind: Kind,
    policies: Sequence[PolicyLike],
    *,
    make_model: Callable[[], nn.Module] | None = None,
    loss: Loss | None = None,
    **given: Any,
) -> None:
    """Check a kind of policy, and some of its policies, against what every kind promises; a broken promise is an
    ``AssertionError``.

    The installation must register the kind by an entry point in the group ``sparsebp.kinds``.

    Args:
        kind: The record that the package's entry point names.
        policies: Policies of the kind: at least one that is exact with its options and one that is not, if the kind has
            both.
        make_model: Makes a model, the same at each call; None: three linears with tanh between them. The suite converts
            the model to double precision.
        loss: Runs the model on the batch of a given number, from 0, and returns the loss.
        **given: Further arguments of ``attach``, such as ``reference``.

    Raises:
        UsageError: ``policies`` is empty, or only one of ``make_model`` and ``loss`` is given.
    """
    if not policies or (make_model is None) != (loss is None):
        raise UsageError("check_kind needs at least one policy, and make_model and loss either both or not at all")
    _check_record(kind)
    trial = _Trial(make_model or Network, loss or _loss_of_network, given)
    dense = trial.train(None)
    for policy in make_policies(policies):
        require(find_kind(policy) is kind, f"{name_of(policy)}: is not of the kind {kind.name}")
        check_policy(policy)
        _check_refusals(kind, policy)
        before = random_states()
        _check_training(policy, trial, dense)
        _check_detached(policy, trial)
        _check_pair(kind, policy, trial)
        _check_claim(policy, trial)
        require(before == random_states(), f"{name_of(policy)}: uses a global random generator")


class _Trial:
    """Short trainings of one model."""

    def __init__(self, make_model: Callable[[], nn.Module], loss: Loss, given: Mapping[str, Any]) -> None:
        self._make_model, self._given, self.loss = make_model, given, loss

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a new model, with the same weights at every call, and its optimizer."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self._make_model().double().train()
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *policies: Policy, seed: int | None = None
    ) -> Engine:
        """Attach policies; ``seed`` replaces the seed among the suite's arguments."""
        given = self._given if seed is None else {**self._given, "seed": seed}
        return attach(model, policies, optimizer=optimizer, num_steps=NUM_STEPS, **given)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine | None, number: int) -> None:
        """Make one step of two micro-batches."""
        if engine is not None and engine.trials_are_due():
            first, *others = [
                lambda batch=batch: self.loss(model, 2 * number + batch)
                for batch in range(max(1, engine.count_trial_batches()))
            ]
            engine.run_trials(first, others=others)
        for batch in (2 * number, 2 * number + 1):
            self._differentiate(model, engine, batch)
        optimizer.step()
        optimizer.zero_grad()

    def _differentiate(self, model: nn.Module, engine: Engine | None, batch: int) -> None:
        if engine is not None:
            engine.backward(self.loss(model, batch))
        else:
            self.loss(model, batch).backward()

    def train(self, policy: Policy | None, *, resumes: bool = False, seed: int | None = None) -> list[Tensor]:
        """Train, and return the weights. With ``resumes``, load the state after ``STOP`` steps into new objects."""
        model, optimizer = self.make()
        engine = None if policy is None else self.attach(model, optimizer, policy, seed=seed)
        for number in range(NUM_STEPS):
            if resumes and number == STOP and policy is not None and engine is not None:
                saved = model.state_dict(), optimizer.state_dict(), engine.state_dict()
                engine.detach()  # also undoes changes of a kind to the whole process
                model, optimizer = self.make()
                model.load_state_dict(saved[0])
                engine = self.attach(model, optimizer, through_json(policy))
                optimizer.load_state_dict(saved[1])
                engine.load_state_dict(saved[2])
            self.step(model, optimizer, engine, number)
        if engine is not None:
            engine.detach()
        return [parameter.detach().clone() for parameter in model.parameters()]


def _loss_of_network(model: nn.Module, batch: int) -> Tensor:
    x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(batch), dtype=torch.float64)
    output: Tensor = model(x)
    return output.square().mean()


def _check_record(kind: Kind) -> None:
    require(inspect.isabstract(kind.policy), f"{kind.name}: must be abstract: only policies derived from it decide")
    require(issubclass(kind.policy, Policy), f"{kind.name}: does not derive from Policy")
    require(bool(kind.suite), f"{kind.name}: has no test suite")
    text = f"{kind.name}: no code applies its policies: set extensions or at_sites"
    require(bool(kind.extensions) or kind.at_sites, text)
    names = [name for _, name in kind.extensions]
    for name in (*names, kind.suite, kind.places, kind.adapter):
        if name:
            try:
                found = load(name)
            except Exception as error:
                text = f"{kind.name}: {name} cannot be imported: {type(error).__name__}: {error}"
                raise AssertionError(text) from None
            require(callable(found), f"{kind.name}: {name} cannot be called")
    above = [base for base in kind.policy.__mro__[1:] if base is not object]
    hidden = [name for name in kind.policy.model_fields if name in Policy.model_fields]
    require(not hidden and Policy in above, f"{kind.name}: redefines options of every policy: {', '.join(hidden)}")


def _check_refusals(kind: Kind, policy: Policy) -> None:
    """Check that the error of every limit is one line, which names the policy and everything else that it concerns."""
    label = type(policy).__name__
    names = [known.name for known in find_kinds().kinds]
    for rule in (limit.resolve(names) for limit in kind.rules):
        facts = {name: _pick(wanted) for name, wanted in rule.policy.items()} | {"kind": kind.name}
        of_other = {name: kind.name if wanted is Match.SAME else _pick(wanted) for name, wanted in rule.other.items()}
        others = [PolicyFacts("Other", of_other)] if rule.other else []
        setup = Setup(
            [*others, PolicyFacts(label, {**PolicyFacts.of(policy).facts, **facts})],
            {name: _pick(wanted) for name, wanted in rule.options.items()},
        )
        texts = [refusal.text for refusal in find_refusals(setup) if _is_same(refusal.rule, rule)]
        require(bool(texts), f"{kind.name}: this limit refuses no policy and no option: {rule.text!r}")
        named = label in texts[0] and "\n" not in texts[0] and (not others or "Other" in texts[0])
        require(named, f"{kind.name}: the error of a limit does not name the policies that it refuses: {texts[0]!r}")


def _is_same(one: Rule, other: Rule) -> bool:
    return (one.text, one.why, one.options) == (other.text, other.why, other.options)


def _pick(wanted: object) -> object:
    """Return a value that meets a condition."""
    if isinstance(wanted, tuple):
        return wanted[0]
    return {Match.GIVEN: "given", Match.SEVERAL: 2}.get(wanted) if isinstance(wanted, Match) else None


def _check_training(policy: Policy, trial: _Trial, dense: list[Tensor]) -> None:
    name = name_of(policy)
    first = trial.train(policy)
    require(equal(first, trial.train(through_json(policy))), f"{name}: a second training ends with different weights")
    require(equal(first, trial.train(policy, resumes=True)), f"{name}: a resumed training ends with different weights")
    apart = _measure_distance(first, dense, trial)
    if policy.exact:
        text = f"{name}: declares exact, but differs from dense by {apart:.1e} of the change in dense training"
        require(apart <= EXACT, text)
    elif apart <= EXACT:
        # Each step may be dense by chance. Try so many steps that a policy with one sparse step in OFTEN shows one.
        num_seeds = ceil(enough(1 / OFTEN) / NUM_STEPS)
        others = (_measure_distance(trial.train(policy, seed=seed), dense, trial) for seed in range(1, num_seeds))
        text = f"{name}: declares not exact, but trains the same as dense in {num_seeds * NUM_STEPS} steps"
        require(any(other > EXACT for other in others), f"{text}: no code applies its decisions")


def _measure_distance(found: list[Tensor], dense: list[Tensor], trial: _Trial) -> float:
    """Return the largest difference from the weights of dense training, over the largest change in dense training."""
    start = [parameter.detach() for parameter in trial.make()[0].parameters()]
    moved = max(float((weight - before).abs().max()) for weight, before in zip(dense, start, strict=True))
    return max(float((ours - theirs).abs().max()) for ours, theirs in zip(found, dense, strict=True)) / moved


def _describe(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return everything that an engine could leave changed in a model or its optimizer."""
    hooks = [name for name in vars(model) if name.endswith("_hooks")]
    of_modules = {
        name: (*sorted(set(vars(module)) - set(hooks)), *(len(getattr(module, hook)) for hook in hooks))
        for name, module in model.named_modules()
    }
    of_parameters = {
        name: (id(parameter), parameter.requires_grad, len(parameter._backward_hooks or ()))  # noqa: SLF001 - no other way
        for name, parameter in model.named_parameters()
    }
    groups = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    of_optimizer = [len(getattr(optimizer, name)) for name in sorted(vars(optimizer)) if name.endswith("_hooks")]
    return {
        "modules": of_modules,
        "parameters": of_parameters,
        "state_dict": list(model.state_dict()),
        "groups of the optimizer": groups,
        "hooks of the optimizer": of_optimizer,
    }


def _check_detached(policy: Policy, trial: _Trial) -> None:
    model, optimizer = trial.make()
    before, keys = _describe(model, optimizer), list(model.state_dict())
    plain = trial.loss(model, 0).detach()
    engine = trial.attach(model, optimizer, policy)
    require(list(model.state_dict()) == keys, f"{name_of(policy)}: changes the keys of the model's state_dict")
    with engine.disabled():
        same = torch.equal(trial.loss(model, 0).detach(), plain)
    require(same, f"{name_of(policy)}: a disabled engine computes a different loss than the model alone")
    trial.step(model, optimizer, engine, 0)
    trial.loss(model, 1)  # a forward without a backward
    engine.detach()
    after = _describe(model, optimizer)
    left = [what for what, found in before.items() if after[what] != found]
    require(not left, f"{name_of(policy)}: after detach, these remain changed: {', '.join(left)}")


def _check_pair(kind: Kind, policy: Policy, trial: _Trial) -> None:
    if kind.may_repeat:
        return
    model, optimizer = trial.make()
    name = type(policy).__name__
    try:
        trial.attach(model, optimizer, policy, through_json(policy)).detach()
    except UnsupportedError as error:
        require(name in str(error), f"{name}: the error for two policies of its kind names neither: {error}")
    else:
        raise AssertionError(f"{name}: attach must refuse two policies of this kind in one model, but accepts them")


def _check_claim(policy: Policy, trial: _Trial) -> None:
    """Check that the estimated FLOPs of each step equal the counted ones. As in a probe, the estimate follows a forward
    of the same draw; -1 is the draw of the coming step.
    """
    model, optimizer = trial.make()
    engine = trial.attach(model, optimizer, policy)
    claiming = [part for part in engine.extensions if "claim" in part.hooks]
    for number, draw in product(range(NUM_STEPS), (1, -1)) if claiming else ():
        with engine.probing(draw):
            engine.backward(trial.loss(model, number))
        with engine.disabled(), _counting(model) as (trace, flops, saved):
            dense_loss = trial.loss(model, number)
            dense_loss.backward()
            claims = [part.claim(DensePass(dense_loss, trace, flops)) for part in claiming]
        dense = PassCount(flops, saved)
        with engine.probing(draw), _counting(model) as (_, flops, saved):
            engine.backward(trial.loss(model, number))
            proof = Proof.of(model, dense, PassCount(flops, saved), engine.report(), claims)
        executed, claimed = proof.policy.backward_flops.total(), proof.claimed_flops or 0.0
        text = f"{name_of(policy)}: estimates {claimed:g} FLOPs of a backward, but {executed:g} were counted"
        require(abs(executed - claimed) <= OVER * dense.backward_flops.total(), f"{text}, in step {number}")
        model.zero_grad()
        if draw == -1:
            trial.step(model, optimizer, engine, number)
    engine.detach()


@contextmanager
def _counting(model: nn.Module) -> Iterator[tuple[ModuleTrace, Any, Any]]:
    with (
        ModuleTrace(model) as trace,
        count_flops(trace) as flops,
        saved_bytes(model.parameters(), trace) as saved,
    ):
        yield trace, flops, saved
