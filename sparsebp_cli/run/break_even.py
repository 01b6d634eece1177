"""The break-even of a form: the share kept below which multiplying only what was selected takes less time.

What was timed is stored with a run: it decides in which form each product is computed, and with that the last bits of
every number. One rule serves ``sparsebp bench``, which times whole passes, and a run, which times single linears.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, Self

FACT = "forms"  # the journal's fact with what was timed, and what follows from it
Kind = Literal["at", "always", "never", "unclear"]
Points = Sequence[tuple[float, float]]  # share kept, and time over that of the other computation


def find_crossing(points: Points) -> tuple[Kind, float]:
    """Return the share below which a form is faster, among the shares measured: 1.0 if it always is, 0.0 if it never
    is. It lies on a straight line in time between two shares. Where a form is faster at a larger share than one at
    which it is slower, the smaller one counts, and the kind is ``unclear``. No share may occur twice."""
    if not points:
        raise ValueError("there is nothing to interpolate")
    ordered = sorted(points)
    num_faster = next((number for number, (_, ratio) in enumerate(ordered) if ratio >= 1.0), len(ordered))
    if num_faster == len(ordered):
        return "always", 1.0
    kind: Kind = "at" if num_faster else "never"
    if any(ratio < 1.0 for _, ratio in ordered[num_faster:]):
        kind = "unclear"
    if not num_faster:
        return kind, 0.0
    (low, below), (high, above) = ordered[num_faster - 1], ordered[num_faster]
    return kind, low + (high - low) * (1.0 - below) / (above - below)


@dataclass(frozen=True)
class FormTime:
    """What was timed of one form, at the shape of some linears."""

    kind: str  # of selection, such as Rows
    num_outputs: int
    num_inputs: int
    num_rows: int
    dtype: str
    device: str
    points: tuple[tuple[float, float], ...]  # share kept, time over that of masking and multiplying all

    @property
    def limit(self) -> float:
        """The share below which the form is used, in [0, 1]."""
        return find_crossing(self.points)[1]

    @property
    def words(self) -> str:
        """What was timed, as a short text."""
        times = ", ".join(f"{ratio:.2f} at {share:g}" for share, ratio in self.points)
        return f"{self.kind.lower()} of {self.num_inputs} x {self.num_outputs}: {times}"


@dataclass(frozen=True)
class FormTimes:
    """All that was timed. A form that is not listed is used wherever it is selected."""

    timed: tuple[FormTime, ...] = ()

    def find(self, kind: str, num_outputs: int, num_inputs: int) -> FormTime | None:
        """Return what was timed of a form at this shape; None if it was not."""
        wanted = (kind, num_outputs, num_inputs)
        return next((t for t in self.timed if (t.kind, t.num_outputs, t.num_inputs) == wanted), None)

    def to_json(self) -> list[dict[str, object]]:
        """Return the content as JSON."""
        return [asdict(one) | {"points": [list(point) for point in one.points]} for one in self.timed]

    @classmethod
    def from_json(cls, content: object) -> Self:
        """Return stored times. Raise ValueError if the content is none."""
        try:
            assert isinstance(content, list)
            found = [
                FormTime(**one | {"points": tuple((float(s), float(r)) for s, r in one["points"])}) for one in content
            ]
            assert all(one.points for one in found)
        except (AssertionError, TypeError, KeyError, ValueError):
            raise ValueError(f"no times of forms: {content!r:.80}") from None
        return cls(tuple(found))


class FormUse(NamedTuple):
    """A form at one linear."""

    site: str
    kind: str  # of selection
    num_outputs: int
    num_inputs: int
    budget: float | None  # share that is kept; None if it changes over the training


def describe_use(times: FormTimes, uses: Iterable[FormUse]) -> dict[str, object]:
    """Return the fact of a journal: the times, which forms they leave in use, and a sentence about both."""
    used, masked, untimed = dict[str, None](), dict[FormTime, int](), 0
    sites, dense = set[str](), set[str]()
    for use in uses:
        sites.add(use.site)
        found = times.find(use.kind, use.num_outputs, use.num_inputs)
        if found is None:
            untimed += 1
            continue
        where = f"below {found.limit:.4g}" if use.budget is None else "masked" if use.budget >= found.limit else "used"
        used[f"{use.kind} {use.num_inputs}x{use.num_outputs} {where}"] = None
        if where == "masked":
            dense.add(use.site)
            masked[found] = masked.get(found, 0) + 1
    parts = [f"{len(dense)} of {len(sites)} linears mask what is selected and multiply densely, which was faster"]
    parts += [f"{count} with {one.words} times as long" for one, count in masked.items()]
    parts += [f"{untimed} not timed"] if untimed else []
    return {"text": "; ".join(parts), "used": sorted(used), "times": times.to_json()}


def read_use(facts: Mapping[str, object]) -> tuple[str, list[str]]:
    """Return the sentence of a journal's facts, and which forms are in use; both empty in a run that timed nothing."""
    fact = facts.get(FACT)
    if not isinstance(fact, dict):
        return "", []
    return str(fact.get("text", "")), [str(one) for one in fact.get("used", [])]


def read_times(facts: Mapping[str, object]) -> FormTimes | None:
    """Return the times of a journal's facts; None in a run that timed nothing."""
    fact = facts.get(FACT)
    return FormTimes.from_json(fact.get("times")) if isinstance(fact, dict) else None
