"""The engine keeps the states of policies: over steps, resumes and probes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward.core.policy_state import PolicyStates
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import (
    Columns,
    InformedSelector,
    Measure,
    Observation,
    Observed,
    Seen,
    Selection,
    Site,
    SiteGradient,
    Stateful,
    Step,
    choice,
)
from sparsebp_cli.policy.composition import PolicyFacts, Setup, refuse
from sparsebp_cli.testing.promise import equal, train_network
from sparsebp_cli.testing.selector import check_selector
from sparsebp_shelf.part import WeightGradient
from tests.promise import Nothing

Values = dict[str, Tensor | float]


class Momentum(Nothing, Stateful, InformedSelector):
    """Keep the columns of largest momentum of past norms; count the steps."""

    decay: float = 0.5

    @property
    def budget(self) -> float:
        return 0.5

    @property
    def selection(self) -> type[Selection]:
        return Columns

    @property
    def observes(self) -> frozenset[type[Observed]]:
        return frozenset({SiteGradient})

    def measure(self, seen: Observed, step: Step) -> dict[str, Measure]:
        assert isinstance(seen, SiteGradient)
        norm_O = choice.norm(seen.shown.grad_NO, 0)
        rows = torch.tensor(float(len(seen.shown.grad_NO)))
        return {
            "columns": Measure(norm_O, "hypot"),
            "whole": Measure(choice.l2_norm(norm_O), "hypot"),
            "rows": Measure(rows, "sum"),
            "last": Measure(norm_O),
        }

    def init(self, sites: Sequence[Site]) -> Values:
        past: Values = {site.name: torch.zeros(site.num_features) for site in sites}
        return past | {"steps": 0}

    def observe(self, state: Any, observation: Observation, step: Step) -> Values:
        new: Values = {"steps": state["steps"] + 1}
        for name, past in state.items():
            if name != "steps":
                now = observation["columns"].get(name, past).to(past.dtype)
                new[name] = self.decay * past + (1 - self.decay) * now
        return new

    def choose(self, seen: Seen, site: Site, step: Step) -> Selection:
        past = step.state[site.name]
        assert isinstance(past, Tensor)
        return choice.choose_columns(past, 0.5)


def make(policy: Any, **options: Any) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, optimizer, sbp.attach(model, policy, optimizer=optimizer, **options)


def step_once(model: nn.Module, optimizer: Any, engine: Any, seed: int, micro_batches: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(micro_batches):
        engine.backward(model(torch.randn(5, 4, generator=generator)).square().sum())
    optimizer.step()
    optimizer.zero_grad()


class Watching(Momentum):
    """Note every observation."""

    saw: Any = None

    def observe(self, state: Any, observation: Observation, step: Step) -> Values:
        self.saw.append((step.index, observation))
        return super().observe(state, observation, step)


def test_an_observation_has_the_norms_of_the_whole_step_before_the_cut() -> None:
    saw: list[tuple[int, Observation]] = []
    model, optimizer, engine = make(Watching(saw=saw))
    grads: list[Tensor] = []
    model[2].register_full_backward_hook(lambda _m, _i, out: grads.append(out[0]))
    step_once(model, optimizer, engine, 0, micro_batches=3)
    ((index, observation),) = saw
    whole = torch.cat(grads)
    assert index == 0
    torch.testing.assert_close(observation["columns"]["2"], whole.norm(dim=0))
    torch.testing.assert_close(observation["whole"]["2"], whole.norm())
    assert float(observation["rows"]["2"]) == len(whole) == 15
    torch.testing.assert_close(observation["last"]["2"], grads[-1].norm(dim=0))
    step_once(model, optimizer, engine, 1)
    assert saw[1][1]["whole"]["2"] != observation["whole"]["2"]


def test_a_decision_gets_the_state_that_the_last_step_left() -> None:
    model, optimizer, engine = make(policy := Momentum())
    for seed in range(3):
        step_once(model, optimizer, engine, seed)
    state = engine.states.of(policy)
    assert state["steps"] == 3
    assert float(state["0"].sum()) > 0
    assert engine.report().kept_share == pytest.approx(0.5)


@pytest.mark.parametrize("execution", ["fast", "reference"])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_training_is_the_uninterrupted_one_bit_for_bit(execution: Any, stop: int) -> None:
    straight = train_network(Momentum(), num_steps=6, execution=execution)
    resumed = train_network(Momentum(), num_steps=6, stop=stop, resume_with=Momentum(), execution=execution)
    assert equal(straight, resumed)
    assert not equal(straight, train_network(Momentum(decay=0.9), num_steps=6, execution=execution))


def test_a_state_saved_between_micro_batches_continues_within_the_step() -> None:
    ends = []
    for stops in (False, True):
        policy = Momentum()
        model, optimizer, engine = make(policy)
        x = torch.arange(20.0).view(5, 4)
        engine.backward(model(x).sum())
        if stops:
            state = engine.state_dict()
            engine.detach()
            policy = Momentum()
            engine = sbp.attach(model, policy, optimizer=optimizer)
            engine.load_state_dict(state)
        engine.backward(model(-x).square().sum())
        optimizer.step()
        ends.append(engine.states.of(policy)["2"])
    assert torch.equal(*ends)


def test_a_probe_leaves_state_and_observation_alone() -> None:
    ends = []
    for probes in (False, True):
        model, optimizer, engine = make(policy := Momentum())
        for seed in range(3):
            if probes:
                with engine.probing(1):
                    engine.backward(model(torch.full((5, 4), 9.0)).square().sum())
                with engine.disabled():
                    model(torch.ones(5, 4)).sum().backward()
                optimizer.zero_grad()
            step_once(model, optimizer, engine, seed)
        ends.append(engine.states.of(policy))
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ("0", "2"))


def test_without_an_optimizer_a_probe_advances_no_state() -> None:
    model = nn.Linear(4, 4)
    with sbp.attach(model, policy := Momentum()) as engine:
        engine.backward(model(torch.ones(2, 4)).sum())
        with engine.probing(1):
            engine.backward(model(torch.ones(2, 4)).sum())
        assert engine.states.of(policy)["steps"] == 1


def test_only_sites_of_the_policy_are_in_its_state() -> None:
    policy = Momentum(where=["2"])
    _, _, engine = make(policy)
    assert sorted(engine.states.of(policy)) == ["2", "steps"]
    assert "policy_state" in engine.state_dict()
    assert "policy_state" not in make("dense")[2].state_dict()


def test_a_state_moves_with_the_model() -> None:
    states = PolicyStates([(policy := Momentum(), [Site("a", 3, ())])])
    states.move(torch.device("meta"))
    past = states.of(policy)["a"]
    assert isinstance(past, Tensor)
    assert past.device.type == "meta"
    assert states.of(policy)["steps"] == 0


class Grows(Momentum):
    def observe(self, state: Any, observation: Observation, step: Step) -> Values:
        return {**state, f"new {step.index}": 1}


class Texts(Momentum):
    def init(self, sites: Sequence[Site]) -> Any:
        return {"name": "a text"}


def test_a_state_that_no_checkpoint_could_hold_is_refused() -> None:
    with pytest.raises(UsageError, match="Texts: a state must map names to tensors and numbers, got 'name': 'a text'"):
        make(Texts())
    model, optimizer, engine = make(Grows())
    with pytest.raises(UsageError, match="Grows: observe must return the same entries, shapes and dtypes as the state"):
        step_once(model, optimizer, engine, 0)


def test_a_state_of_another_policy_is_refused() -> None:
    _, _, engine = make(Momentum())
    state = engine.state_dict()
    state["policy_state"] = {"0/steps": 1}
    with pytest.raises(UsageError, match="the loaded state does not fit Momentum"):
        engine.load_state_dict(state)
    with pytest.raises(UsageError, match="load_state_dict needs the result"):
        make("dense")[2].load_state_dict(engine.state_dict())


class Everywhere(Momentum):
    @property
    def is_identical(self) -> bool:
        return True


def test_several_processes_refuse_a_state_that_may_differ() -> None:
    def several(policy: Momentum) -> None:
        refuse(Setup([PolicyFacts.of(policy)], {"processes": 2}))

    with pytest.raises(UnsupportedError, match="Momentum keeps a state from what it observes: it works in one process"):
        several(Momentum())
    several(Everywhere())


class ChangesIt(Momentum):
    def observe(self, state: Any, observation: Observation, step: Step) -> Values:
        for name, value in state.items():
            if name != "steps":
                value.add_(1)
        return dict(state)


def test_the_suite_checks_state() -> None:
    check_selector(Momentum())
    with pytest.raises(AssertionError, match="observe changes the state that it receives"):
        check_selector(ChangesIt())


def test_entries_are_sorted_by_name_whatever_the_order_in_which_they_are_kept() -> None:
    _, _, engine = make(policy := Momentum())
    kept = engine.state_dict()
    kept["policy_state"] = dict(reversed(kept["policy_state"].items()))
    engine.load_state_dict(kept)
    assert list(engine.states.of(policy)) == ["0", "2", "steps"]


class Twice(Nothing, Stateful, InformedSelector):
    """Returns one tensor under two names, and one that the caller changes later."""

    @property
    def budget(self) -> float:
        return 1.0

    @property
    def selection(self) -> None:
        return None

    def init(self, sites: Sequence[Site]) -> Values:
        zero = torch.zeros(3)
        return {"one": zero, "two": zero}

    def observe(self, state: Any, observation: Observation, step: Step) -> Values:
        total = state["one"] + 1
        return {"one": total, "two": total}

    def choose(self, seen: Seen, site: Site, step: Step) -> Selection | None:
        return None


def test_the_engine_owns_the_tensors_of_a_state() -> None:
    states = PolicyStates([(Twice(), ())])
    for _ in range(2):
        kept = states.state_dict()["policy_state"]
        kept["0/one"].add_(5)
        assert float(kept["0/two"][0]) + 5 == float(kept["0/one"][0]), "one tensor under two names"
        states.end_step(Step(0))


def test_an_older_state_is_read_unless_it_was_saved_within_a_step() -> None:
    kept = {"0/0": torch.ones(6), "0/2": torch.ones(4), "0/steps": 3}  # as version 0.2 wrote it
    states = PolicyStates([(policy := Momentum(), [Site("0", 6, ()), Site("2", 4, ())])])
    states.load_state_dict({"policy_state": kept})
    assert states.of(policy)["steps"] == 3
    with pytest.raises(UsageError, match="saved between two micro-batches of a step by an older version"):
        states.load_state_dict({"policy_state": kept | {"observed/column_norm/0": torch.ones(6)}})


def test_each_policy_has_measures_of_its_own() -> None:
    one, other = Momentum(where=["0"]), Momentum(where=["2"], decay=0.9)
    model, optimizer, engine = make([one, other])
    generator = torch.Generator().manual_seed(0)
    engine.backward(model(torch.randn(5, 4, generator=generator)).square().sum())
    names = {name.rsplit("/", 2)[0] for name in engine.state_dict()["policy_state"] if name.startswith("observed/")}
    assert names == {"observed/0", "observed/1"}
    optimizer.step()
    assert sorted(engine.states.of(one)) == ["0", "steps"]
    assert all(
        float(torch.as_tensor(engine.states.of(policy)[name]).sum()) for policy, name in ((one, "0"), (other, "2"))
    )


class MeasuresByChance(Momentum):
    def measure(self, seen: Any, step: Step) -> Any:
        return {"columns": Measure(torch.rand(3))}


class MeasuresInPlace(Momentum):
    def measure(self, seen: Any, step: Step) -> Any:
        return {"columns": Measure(seen.shown.grad_NO.mul_(2.0).norm(dim=0))}


class MeasuresNothing(Momentum):
    def measure(self, seen: Any, step: Step) -> Any:
        return {}


class MeasuresElsewhere(Momentum):
    @property
    def observes(self) -> Any:
        return frozenset({WeightGradient})


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (MeasuresByChance(), "measure uses a global random generator"),
        (MeasuresInPlace(), "measure returns different values when called again"),
        (MeasuresNothing(), "observes SiteGradient, but measure returns nothing"),
        (MeasuresElsewhere(), "observes WeightGradient, which policies of its kind do not receive"),
    ],
)
def test_the_suite_finds_a_measure_that_breaks_a_promise(policy: Momentum, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_selector(policy)


@pytest.mark.parametrize("found", [{"columns": 1.0}, {"a/b": Measure(torch.ones(()))}, {"columns": Measure(1.0)}])  # type: ignore[arg-type]
def test_a_measure_that_no_checkpoint_could_hold_is_refused(found: Any) -> None:
    class Wrong(Momentum):
        def measure(self, seen: Any, step: Step) -> Any:
            return found

    model, optimizer, engine = make(Wrong())
    with pytest.raises(
        UsageError,
        match=r"Wrong: measure must return a dict of Measure\(tensor\) whose keys are names without '/', got",
    ):
        step_once(model, optimizer, engine, 0)
