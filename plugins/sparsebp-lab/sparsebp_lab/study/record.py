"""The list of a study's trials, ``studies/NAME.json``.

    {"study": "NAME", "file": "/the/study.yaml", "generation": 0, "trials": [{"run_id": ..., "role": ..., "arm": ...,
     "combination": ..., "seed": ...}], "paper": {"title": ..., "link": ..., "claims": [...], "scaled": [...]},
     "options": [...]}

Each command rewrites the list; only the runs show what is finished.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebp_cli.errors import RunNotFoundError, UsageError, did_you_mean
from sparsebp_cli.run import RunFolder, durable, home
from sparsebp_cli.run.budget import LARGEST_ARTIFACT, LARGEST_JOURNAL, read_bounded, read_json
from sparsebp_cli.run.journal import FILE as JOURNAL
from sparsebp_lab.study.published import Paper
from sparsebp_lab.study.thin import thin_journal


@dataclass(frozen=True)
class Listed:
    """A trial in a study's list."""

    run_id: str
    role: str
    arm: str
    combination: str
    seed: int
    pruned: bool = False  # halving ended it before its last step


@dataclass(frozen=True)
class StudyRecord:
    """The list of a study's trials, by which other commands find them."""

    study: str
    file: str
    generation: int
    trials: tuple[Listed, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)  # digest of the event log by run id, in an archive
    paper: Paper | None = None  # the publication whose setting it has, with its numbers
    options: tuple[str, ...] = ()  # of the command that made it

    @property
    def words(self) -> str:
        """Words after `sparsebp study` that continue it."""
        return shlex.join([self.file, *self.options])

    @classmethod
    def load(cls, name: str, place: Path | None = None) -> StudyRecord | None:
        """Read the list of a study on this machine, or in an archive's folder; None if there is none."""
        try:
            content: dict[str, Any] = read_json((place or home()) / "studies" / f"{name}.json", LARGEST_ARTIFACT)
            trials = tuple(Listed(**entry) for entry in content["trials"])
            digests = {str(run): str(digest) for run, digest in content.get("digests", {}).items()}
            paper = None if content.get("paper") is None else Paper.from_json(content["paper"])
            study, options = str(content["study"]), content.get("options", ())
            return cls(
                study,
                str(content["file"]),
                int(content["generation"]),
                trials,
                digests,
                paper,
                tuple(map(str, options)),
            )
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def save(self) -> None:
        """Write the list, atomically."""
        file = _record_file(self.study)
        durable.make_folder(file.parent, exist_ok=True)
        durable.write_file(file, json.dumps(self._content, indent=1) + "\n")

    @property
    def _content(self) -> dict[str, object]:
        trials = [vars(trial) for trial in self.trials]
        content = {"study": self.study, "file": self.file, "generation": self.generation, "trials": trials}
        content |= {} if self.paper is None else {"paper": self.paper.to_json()}
        return content | ({"options": list(self.options)} if self.options else {})

    def find_thin(self) -> frozenset[str]:
        """Return the ids of runs whose single steps a thin archive leaves out: runs that only tuned."""
        kept = {trial.run_id for trial in self.trials if trial.role != "tune"}
        return frozenset(trial.run_id for trial in self.trials) - kept

    def pack(self, thin: Collection[str] = ()) -> tuple[str, bytes]:
        """Return the name and content of the list in an archive, which has thin event logs of the runs in ``thin``."""
        begun = [RunFolder(home() / "runs" / trial.run_id) for trial in self.trials]
        # The digests show that archive and list belong together; they are no signature. See decision 39. A run that was
        # stopped before its worker began has only a plan.
        begun = [run for run in begun if run.plan_file.is_file() and (run.path / JOURNAL).is_file()]
        digests = {run.run_id: digest_journal(run, is_thin=run.run_id in thin) for run in begun}
        content = self._content | {"file": Path(self.file).name, "digests": digests}
        return f"studies/{self.study}.json", (json.dumps(content, indent=1) + "\n").encode()


def digest_journal(run: RunFolder, *, is_thin: bool = False) -> str:
    """Return the digest of a run's event log, which holds all its results, or of its thin form."""
    journal = read_bounded(run.path / JOURNAL, LARGEST_JOURNAL)
    return hashlib.sha256(thin_journal(journal) if is_thin else journal).hexdigest()


def find_archived(name: str, archive: Path) -> StudyRecord:
    """Return the list of a study in the folder of an unpacked archive; raise UsageError if it has none."""
    record = StudyRecord.load(name, archive) if name == Path(name).name else None
    if record is None:
        raise UsageError(
            f"the archive does not contain the study {name}: `sparsebp archive @{name} --to FILE` writes an archive "
            "that does"
        )
    return record


def find_record(name: str) -> StudyRecord:
    """Return the list of a study; raise RunNotFoundError if this machine has no study of that name."""
    record = StudyRecord.load(name) if name == Path(name).name else None
    if record is None:
        known = list_studies()
        shown = f"; there are {', '.join(known)}" if known else "; `sparsebp study FILE` runs one"
        raise RunNotFoundError(f"no study {name!r} under {home()}{shown}{did_you_mean(name, known)}")
    return record


def list_studies() -> Sequence[str]:
    """Return the names of all studies of this machine."""
    return sorted(file.stem for file in (home() / "studies").glob("*.json"))


def _record_file(name: str) -> Path:
    return home() / "studies" / f"{name}.json"
