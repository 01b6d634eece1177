"""Build the audit's report from the judged work: values per step, fractions and sentences."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable

from torch import nn

from sparsebp_audit.auditor.hook import HookCount
from sparsebp_audit.auditor.judge import Verdict, Waste, judge_leaves, judge_work
from sparsebp_audit.auditor.operation import AGAIN, DGRAD, OTHER, WGRAD
from sparsebp_audit.auditor.script_packing import refusal_of
from sparsebp_audit.auditor.session import Session
from sparsebp_audit.report import (
    BY_LOSSLESS,
    KINDS,
    LOSSLESS_ADVICE,
    LOSSLESS_REFUSED,
    AuditReport,
    Finding,
    ModuleWork,
)
from sparsebp_cli.backward.kind.packing.refusal import find_model
from sparsebp_cli.errors import UnsupportedError

FEWEST_VISITS = 4  # parameters per call: a hook that reads fewer does not scan
MANY_IGNORED = 0.05  # a note explains a larger fraction of ignored labels, or of rows needed in spite of it
MANY_ENDED = 0.05  # a note mentions a larger fraction of rows whose gradient a Function ends
MOST_NAMES = 3  # names in a sentence


def make_report(session: Session, threshold: float) -> AuditReport:
    """Return the report of a finished session with the findings above ``threshold``, a fraction of a step."""
    ledger, steps = session.ledger, max(1, session.num_steps)
    verdict = judge_leaves(session)
    waste = judge_work(session, verdict)
    passes = max(1, len(ledger.passes))
    saved = Counter[str]()
    for kept in session.saved_of_passes():
        saved[kept.module] += kept.num_bytes
    parameter_bytes, gradient_bytes = session.parameters.bytes()
    optimizer_bytes = session.parameters.state_bytes()
    work = {kind: _by_module(session, kind) for kind in (DGRAD, WGRAD, OTHER, AGAIN)}
    flops = (ledger.forward.total() + sum(count.total() for count in work.values())) / steps
    total_bytes = parameter_bytes + gradient_bytes + optimizer_bytes + saved.total() / passes
    refusal = find_refusal(session)
    found = [
        _finding(session, kind, waste, verdict, (steps, passes), (flops, total_bytes), refusal)
        for kind in KINDS
        if kind != "scanning-hooks"
    ]
    found += _find_scanning_hooks(session, steps)
    found = sorted((finding for finding in found if finding.share > 0), key=lambda finding: -finding.share)
    shown = tuple(finding for finding in found if finding.share > threshold)
    exact = [finding for finding in found if finding.exact]
    return AuditReport(
        steps=session.num_steps,
        wanted_steps=session.wanted or session.num_steps,
        backwards=len(ledger.passes),
        forward_flops=ledger.forward.total() / steps,
        backward_flops=sum(work[kind].total() for kind in (DGRAD, WGRAD, OTHER)) / steps,
        recomputed_flops=work[AGAIN].total() / steps,
        ungraded_flops=ledger.ungraded.total() / steps,
        saved_bytes=saved.total() / passes,
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        step_seconds=session.seconds / steps,
        threshold=threshold,
        wasted_flops_share=sum(finding.flops_share for finding in exact),
        wasted_bytes_share=sum(finding.bytes_share for finding in exact),
        num_below=len(found) - len(shown),
        findings=shown,
        notes=(*_notes(session, verdict, waste), *_note_refusal(shown, refusal)),
        modules=_modules(session, work, saved, waste, steps, passes),
        examples=None if session.referee is None else session.referee.report(),
    )


def find_refusal(session: Session) -> str | None:
    """Return why the policy ``lossless`` does not support the trained model; empty if it does, None without a
    transformers model."""
    # Looked up without importing: a plain torch script must not wait seconds for transformers.
    if "transformers.modeling_utils" not in sys.modules:
        return None
    refusals = [refusal_of(root) for root in session.trained if _holds_transformer(root)]
    return next((refusal for refusal in refusals if refusal), "") if refusals else None


def _holds_transformer(root: nn.Module) -> bool:
    try:
        find_model(root)
    except UnsupportedError:
        return False
    return True


def _note_refusal(shown: tuple[Finding, ...], refusal: str | None) -> Iterable[str]:
    if refusal and any(finding.kind in BY_LOSSLESS for finding in shown):
        yield f"{LOSSLESS_REFUSED}{refusal}"


def _by_module(session: Session, kind: str) -> Counter[str]:
    count: Counter[str] = Counter()
    for one in session.ledger.passes:
        for account, work in one.work.items():
            if account.kind == kind:
                count[account.module] += int(work.flops)  # a whole number: halves do not occur
    return count


def _finding(
    session: Session,
    kind: str,
    waste: Waste,
    verdict: Verdict,
    counts: tuple[int, int],
    totals: tuple[float, float],
    refusal: str | None,
) -> Finding:
    flops = {name: value / counts[0] for name, value in waste.flops[kind].items() if value}
    saved = {name: value / counts[1] for name, value in waste.saved[kind].items() if value}
    names = verdict.names.get(kind, [])
    held = [session.parameters.by_name[name] for name in names]
    if kind == "idle-state":
        more = sum(history.idle_bytes for history in held)
    else:
        more = session.parameters.state_bytes(set(names)) if names else 0
        more += sum(history.grad_bytes for history in held)
    num_bytes = sum(saved.values()) + more
    order = sorted({*flops, *saved}, key=lambda name: (-flops.get(name, 0.0), -saved.get(name, 0.0)))
    known = KINDS[kind]
    return Finding(
        kind=kind,
        title=known.title,
        detail=_detail(session, kind, waste, names, len(order)),
        advice=known.advice + (LOSSLESS_ADVICE if kind in BY_LOSSLESS and refusal == "" else ""),
        exact=known.exact,
        modules=tuple(order),
        flops=sum(flops.values()),
        flops_share=sum(flops.values()) / totals[0] if totals[0] else 0.0,
        saved_bytes=num_bytes,
        bytes_share=num_bytes / totals[1] if totals[1] else 0.0,
    )


def _detail(session: Session, kind: str, waste: Waste, names: list[str], num_modules: int) -> str:
    ledger = session.ledger
    where = f"in {num_modules} module{'s' * (num_modules != 1)}"
    if names:
        return f"{len(names)} parameter{'s' * (len(names) != 1)}: {_list(names)}"
    if kind == "ignored-logits" and ledger.labels:
        rows = ", ".join(f"{share:.1%} of the rows of {name or 'the head'}" for name, share in waste.head_share.items())
        ignored = (
            f"{ledger.ignored / ledger.labels:.1%} of the labels are ignored" if ledger.ignored else "a masked loss"
        )
        return f"{ignored}; {rows} have a gradient of zero"
    if kind == "padding" and ledger.positions:
        return f"{ledger.padded / ledger.positions:.1%} of the positions are padding, and their gradient is zero"
    if kind == "discarded":
        lost = sum(one.discarded != 0 for one in ledger.passes)
        return f"in {lost} of {len(ledger.passes)} backward passes; {where}"
    others = {
        "shared-prefix": f"{ledger.shared:,} of {ledger.real:,} positions repeat a prefix of an earlier example",
        "zero-rows": f"{waste.body_share:.1%} of the gradient rows below the head are zero, padding included; {where}",
    }
    return others.get(kind, where)


def _list(names: Iterable[str]) -> str:
    first, *rest = [", ".join(list(names)[:MOST_NAMES]), *list(names)[MOST_NAMES:]]
    return f"{first} and {len(rest)} more" if rest else first


def _find_scanning_hooks(session: Session, steps: int) -> list[Finding]:
    many = max(FEWEST_VISITS, len(session.parameters.histories) / 2)
    found = [
        count
        for count in session.hooks.counts.values()
        if count.calls >= FEWEST_VISITS * steps and count.visits >= many * count.calls
    ]
    if not found:
        return []
    kind, seconds = KINDS["scanning-hooks"], sum(count.seconds for count in found) / steps
    return [
        Finding(
            kind="scanning-hooks",
            title=kind.title,
            detail="; ".join(_describe_hook(count, steps) for count in found),
            advice=kind.advice,
            exact=kind.exact,
            modules=(),
            flops=0.0,
            flops_share=0.0,
            saved_bytes=0.0,
            bytes_share=0.0,
            seconds=seconds,
            seconds_share=min(1.0, seconds * steps / session.seconds) if session.seconds else 0.0,
        )
    ]


def _describe_hook(count: HookCount, steps: int) -> str:
    return (
        f"{count.name}: {count.hooks} hooks, {count.calls / steps:.0f} calls a step, "
        f"each call visits {count.visits / count.calls:.0f} parameters"
    )


def _notes(session: Session, verdict: Verdict, waste: Waste) -> Iterable[str]:
    ledger, steps = session.ledger, session.num_steps
    if session.wanted is not None and steps < session.wanted:
        yield f"the training ended after {steps} of the {session.wanted} steps that were asked for"
    ignored, body = ledger.ignored / max(1, ledger.labels), 1.0 - waste.body_share
    if min(ignored, body - (1.0 - ignored)) > MANY_IGNORED:
        yield (
            f"{ignored:.1%} of the labels are ignored, but {body:.1%} of the rows below the head get a gradient "
            "through attention, so the work for these rows is needed"
        )
    if not verdict.is_judged:
        yield "the audit saw fewer than two optimizer steps, so it did not judge whether parameters change"
    if session.modules.has_compiled:
        yield "the audit switched torch.compile off: compiled code may compute and save less than this report says"
    if ledger.passes and not ledger.visited:
        yield "the audit could not see into the backward passes: they ran in another thread than the watched one"
    if not session.saved.has_seen:
        yield "the audit measured no saved tensors, because other saved-tensor hooks replaced its hooks"
    if verdict.withheld:
        by = {ledger.withholding.get(session.parameters.by_name[name].bit, "") for name in verdict.withheld}
        functions = ", ".join(sorted(by - {""}))
        yield (
            f"not trained, although the loss depends on these parameters of an optimizer: {_list(verdict.withheld)}"
            + (f"; {functions} returned no gradient for them" if functions else "")
        )
    for name, rows in ledger.ended.items():
        if rows.ended > MANY_ENDED * rows.all:
            yield (
                f"{name} stops the gradient in {rows.ended / rows.all:.1%} of its rows: the gradient of its input is "
                "zero there, so the layers below learn nothing from these rows"
            )
    if verdict.without_gradient:
        names = verdict.without_gradient
        yield f"no gradient reached {len(names)} parameters of an optimizer: {_list(names)}"


def _modules(
    session: Session, work: dict[str, Counter[str]], saved: Counter[str], waste: Waste, steps: int, passes: int
) -> tuple[ModuleWork, ...]:
    wasted, wasted_bytes = _over_kinds(waste.flops), _over_kinds(waste.saved)
    forward = session.ledger.forward
    names = {name for count in (forward, saved, *work.values()) for name, value in count.items() if value}
    rows = [
        ModuleWork(
            module=name,
            forward_flops=forward[name] / steps,
            dgrad_flops=work[DGRAD][name] / steps,
            wgrad_flops=work[WGRAD][name] / steps,
            other_flops=work[OTHER][name] / steps,
            recomputed_flops=work[AGAIN][name] / steps,
            saved_bytes=saved[name] / passes,
            wasted_flops=wasted[name] / steps,
            wasted_bytes=wasted_bytes[name] / passes,
        )
        for name in names
    ]
    return tuple(sorted(rows, key=lambda row: (-_work_of(row), -row.saved_bytes, row.module)))


def _over_kinds(waste: dict[str, dict[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for by_module in waste.values():
        for name, value in by_module.items():
            sums[name] += value
    return sums


def _work_of(row: ModuleWork) -> float:
    return row.forward_flops + row.dgrad_flops + row.wgrad_flops + row.other_flops + row.recomputed_flops
