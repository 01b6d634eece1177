"""``sparsebp judge``: decide whether a candidate beats a baseline, within a budget, and log every question."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.completion import complete_recipe
from sparsebp_cli.cli.interrupt import Interrupts
from sparsebp_cli.cli.option import Changes, Format
from sparsebp_cli.cli.screen import Output, print_line
from sparsebp_cli.errors import UsageError
from sparsebp_lab.answer.judge_record import Judgement

if TYPE_CHECKING:
    from sparsebp_lab.judge.answer import JudgeAnswer
    from sparsebp_lab.judge.arms import Arms
    from sparsebp_lab.judge.question import Contender, Proposal
    from sparsebp_lab.judge.recipe_arms import RecipeArms
    from sparsebp_lab.judge.script_arms import ScriptArms
    from sparsebp_lab.judge.session import JudgeSession, Terms

POLL_SECONDS = 0.2
STOPPING = "stopping the running trials; run the same command again to continue; press Ctrl-C again to end them at once"
AGAINST = "The baseline: a recipe file (YAML) or the name of a recipe. With --script: a branch, tag or commit."
CANDIDATE = (
    "A recipe, or a policy to put into the baseline's recipe. Default: the baseline's recipe, with the "
    "changes of --set. With --script: a commit."
)
SCRIPT = (
    "Command that trains and logs to MLflow, such as 'python train.py --seed {seed}'. judge runs the command at two "
    "commits of your git repository: CANDIDATE and --against."
)
METRIC = "With --script: the metric that decides, and whether lower or higher is better, such as val_loss:lower."
BUDGET = "Budget for all runs of this question together: a time (30m, 2h), or a number of FLOPs (3e15)."
EFFECT = (
    "The smallest gain that judge should find, in the metric's unit. Default: one standard deviation of the metric "
    "between the baseline's runs."
)
MARGIN = (
    "Train further pairs of runs until the candidate is shown to be better, worse, or equal within this margin, such "
    "as eval/loss=0.01."
)
WORST = (
    "If the candidate is worse by this much with any seed, judge cannot call it better. In the metric's unit. "
    "Default: 20 standard deviations of the metric between the baseline's runs."
)
FINAL = (
    "After the answer better, train both again with fresh seeds, and evaluate them on the test split. Each test split "
    "can be used for one question only."
)


class Equal(StrEnum):
    """What both sides spend equally."""

    FLOPS = "flops"
    STEPS = "steps"


def judge(  # noqa: PLR0913, PLR0917 - one parameter an option
    against: Annotated[
        str,
        typer.Option("--against", metavar="RECIPE|COMMIT", help=AGAINST, autocompletion=complete_recipe),
    ],
    candidate: Annotated[
        str | None, typer.Argument(metavar="CANDIDATE", help=CANDIDATE, autocompletion=complete_recipe)
    ] = None,
    budget: Annotated[str | None, typer.Option(metavar="TIME|FLOPS", help=BUDGET)] = None,
    changes: Changes = None,
    script: Annotated[str | None, typer.Option(metavar="COMMAND", help=SCRIPT)] = None,
    metric: Annotated[str | None, typer.Option(metavar="NAME:lower|higher", help=METRIC)] = None,
    both: Annotated[
        list[str] | None,
        typer.Option("--both", metavar="KEY=VALUE", help="Change a key of both recipes. Can be repeated."),
    ] = None,
    effect: Annotated[float | None, typer.Option(metavar="NUMBER", help=EFFECT)] = None,
    margin: Annotated[str | None, typer.Option(metavar="METRIC=NUMBER", help=MARGIN)] = None,
    worst: Annotated[float | None, typer.Option(metavar="NUMBER", help=WORST)] = None,
    equal: Annotated[
        Equal | None,
        typer.Option(
            metavar="flops|steps",
            help="flops: both train for the same FLOPs (default). steps: each trains for the steps in its recipe.",
        ),
    ] = None,
    final: Annotated[bool, typer.Option("--final", help=FINAL)] = False,
    output: Format = Output.TABLE,
) -> None:
    """Train a candidate and a baseline, and decide which is better.

    Trains pairs of runs with fresh seeds until judge can decide or the budget is spent. Each call asks one
    question. Over all questions with the same SPARSEBP_HOME, the chance of even one wrong answer "better" is at most
    5 %. Exit codes: 0 better, 10 equal within the margin, 11 nothing shown, 12 worse.
    """
    arms: Arms[Any]
    if script is None:
        if metric is not None:
            raise UsageError("--metric works only with --script; for recipes, set measure.metric in the recipe")
        arms = _read(candidate, Path(against), changes or [], both or [], equal or Equal.FLOPS)
    else:
        refused = {"--set": changes, "--both": both, "--equal": equal, "--final": final}
        if given := [name for name, value in refused.items() if value]:
            raise UsageError(f"{given[0]} works only with recipes; with --script, commit your change of the script")
        arms = _read_script(candidate, against, script, metric)
    if final == (budget is not None):
        raise UsageError("give either --budget, or --final, which trains a fixed number of pairs of runs")
    terms = None
    if budget is not None:
        terms = _make_terms(budget, effect, _read_margin(margin, arms.proposal), worst)
        if script is not None and terms.budget.unit == "flops":
            raise UsageError(f"with --script, --budget must be a time (90s, 30m, 2h, 1d), got {budget!r}")
    answer = _judge(arms, terms)
    tell(Judgement.read(answer.to_facts()), output, lambda _: _print(answer))
    if answer.is_stopped:
        print_line(f"next: {shlex.join(['sparsebp', *sys.argv[1:]])}", stderr=True)
    raise typer.Exit(answer.exit_code)


def _print(answer: JudgeAnswer) -> None:
    """Print an answer for people."""
    for line in answer.lines():
        print_line(line)


def _make_terms(budget: str, effect: float | None, margin: float | None, worst: float | None) -> Terms:
    from sparsebp_lab.judge.budget import QuestionBudget
    from sparsebp_lab.judge.session import Terms

    for name, number in {"effect": effect, "worst": worst}.items():
        if number is not None and not 0.0 < number < float("inf"):
            raise UsageError(f"--{name} must be a number above 0, got {number:g}")
    return Terms(QuestionBudget.parse(budget), effect, margin, worst=worst)


def _read_margin(text: str | None, proposal: Proposal) -> float | None:
    from sparsebp_cli.compare import parse_margin

    if text is None:
        return None
    name, margin = parse_margin(text)
    if name not in {None, proposal.metric.name}:
        raise UsageError(f"--margin must name {proposal.metric.name}, the metric that decides, got {name}")
    return margin


def _read(
    candidate: str | None, against: Path, changes: Sequence[str], both: Sequence[str], equal: Equal
) -> RecipeArms:
    """Return two recipes as the arms of a question."""
    from sparsebp_cli.cli.starter import resolve_recipe
    from sparsebp_cli.plan import find_provenance
    from sparsebp_cli.policy import find_policies
    from sparsebp_lab.judge.question import RecipeProposal
    from sparsebp_lab.judge.recipe_arms import RecipeArms

    if candidate is None and not changes:
        raise UsageError("judge needs a candidate: a recipe, a policy, or --set KEY=VALUE")
    is_policy = candidate is not None and not Path(candidate).exists() and candidate in find_policies()
    against = resolve_recipe(against)
    own = [*both, *([f"policy={candidate}"] if is_policy else []), *changes]
    file = against if candidate is None or is_policy else resolve_recipe(Path(candidate))
    name = file.stem if candidate is None else candidate
    sides = _load(file, own, " ".join([name, *changes])), _load(against, both)
    return RecipeArms(RecipeProposal(*sides, equal.value), find_provenance(against))


def _read_script(candidate: str | None, against: str, command: str, metric: str | None) -> ScriptArms:
    """Return a script at two commits as the arms of a question."""
    from sparsebp_lab.judge.script import Script, ScriptProposal, ScriptRepository, parse_metric
    from sparsebp_lab.judge.script_arms import ScriptArms

    if candidate is None or metric is None:
        missing = "a candidate: a branch, tag or commit" if candidate is None else "--metric NAME:lower or NAME:higher"
        raise UsageError(f"judge with --script needs {missing}")
    script = Script(command, ScriptRepository.find(Path.cwd()))
    proposal = ScriptProposal(script, script.at(candidate), script.at(against), parse_metric(metric))
    if script.repository.has_changes:
        print_line("note: judge ignores uncommitted changes", stderr=True)
    return ScriptArms(proposal)


def _load(file: Path, changes: Sequence[str], name: str = "") -> Contender:
    from dataclasses import replace

    from sparsebp_cli.cli.validate import load_checked
    from sparsebp_lab.judge.question import Contender

    recipe, origin, _ = load_checked(file, changes)
    contender = Contender.of(recipe, origin)
    return replace(contender, name=name) if name else contender


def _judge(arms: Arms[Any], terms: Terms | None) -> JudgeAnswer:
    """Run the question to its answer, or to a signal."""
    from sparsebp_lab.judge.answer import JudgeAnswer
    from sparsebp_lab.judge.budget import QuestionBudget
    from sparsebp_lab.judge.ledger import Ledger
    from sparsebp_lab.judge.session import JudgeSession, Terms

    ledger, proposal = Ledger(), arms.proposal
    with ledger.hold(proposal.digest), Interrupts() as interrupts:
        unlimited = Terms(QuestionBudget(float("inf"), "flops"))  # the test split has a fixed number of pairs
        session = JudgeSession(arms, terms or unlimited, ledger, lambda: _wait(session, interrupts))
        question = session.run() if terms is not None else session.open_test()
    answer = JudgeAnswer(proposal, question, session.book, ledger, terms, interrupts.exit_code)
    answer.save()
    return answer


def _wait(session: JudgeSession, interrupts: Interrupts) -> None:
    """Wait a moment; the first signal stops running work in order, the second one at once."""
    interrupts.wait(POLL_SECONDS)
    if interrupts.received and not session.is_stopped:
        session.is_stopped = True
        print_line(STOPPING, stderr=True)
        session.arms.stop()
    elif len(interrupts.received) > 1:
        session.arms.kill()
