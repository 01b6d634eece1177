"""Write and read checkpoints: atomic folders of safetensors and JSON, verified before they are read.

A checkpoint is written to a temporary folder with the sha256 of every file, synced to the disk, then renamed. Loading
tries the newest step first and takes the first folder whose files all match their checksums. Newest means the highest
step; modification times are ignored.

Other entries of the folder are left alone; they count neither as checkpoints nor in the rotation.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparsebp_cli.errors import CheckpointError
from sparsebp_cli.run import durable
from sparsebp_cli.run.budget import LARGEST_JOURNAL, LARGEST_PLAN, read_json
from sparsebp_cli.run.durable import PART
from sparsebp_cli.run.manifest import MANIFEST, find_damage, write_manifest
from sparsebp_cli.worker.ending import name_refusal

SEAL = "seal.json"
NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")


@dataclass(frozen=True)
class RankState:
    """Policy state tensors and random generator states of one process."""

    policy: dict[str, Tensor]
    rng: dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """Everything that a run needs to continue as if it had not stopped."""

    step: int  # optimizer steps done
    weights: dict[str, Tensor]  # trained parameters and buffers by name
    optimizer: dict[str, Any]  # the optimizer's state_dict()
    rest: dict[str, Any]  # JSON content: schedule, policy state, counters
    ranks: list[RankState]  # one entry for each process, by rank
    seal: dict[str, object] | None = None  # config fingerprint as JSON; None: written by an older version


class CheckpointFolder:
    """The checkpoints of one run."""

    folder: Path
    keep_last: int
    best: int | None = None  # step of a checkpoint that the rotation keeps

    def __init__(self, folder: Path, keep_last: int, *, writes: bool = True) -> None:
        """Open the folder and delete what a killed process left incomplete. The rotation keeps ``keep_last``
        checkpoints, at least 1. Without ``writes``, leave the folder unchanged."""
        self.folder, self.keep_last = folder, keep_last
        self._passed_over: set[int] = set()
        if not writes:
            return
        durable.make_folder(folder, exist_ok=True)
        for part in folder.glob(f"{PART}*"):
            durable.remove(part)

    def save(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint to the disk, delete the oldest ones and return the new folder. If writing fails, raise
        CheckpointError and leave the previous checkpoints unchanged."""
        place = self._place(snapshot.step)
        part = self.folder / f"{PART}{snapshot.step:08d}"
        try:
            part.mkdir()
            _write(part, snapshot)
            self._make_way(place)
            durable.put_folder(part, place)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(part, ignore_errors=True)
            if not self.folder.exists():
                reason, remedy = f"{self.folder} was moved or deleted", "correct SPARSEBP_HOME, then resume"
            else:
                reason, remedy = name_refusal(error) or (str(error), "fix this, then resume")
            raise CheckpointError(
                f"the checkpoint of step {snapshot.step} cannot be written: {reason}; earlier checkpoints are "
                f"unchanged; {remedy}"
            ) from None
        self._passed_over.discard(snapshot.step)
        # Rotation counts only checkpoints from which a resume could start: no later steps, none that this process found
        # damaged, and no folders without a manifest.
        older = [step for step in self.steps() if step <= snapshot.step and step not in self._passed_over]
        whole = [step for step in older if (self._place(step) / MANIFEST).is_file()]
        for step in whole[self.keep_last :]:
            if step != self.best:
                shutil.rmtree(self._place(step))
        return place

    def load_newest_good(self) -> tuple[Snapshot | None, list[str]]:
        """Load the newest undamaged checkpoint; None if there are no checkpoints. Also return one line for each damaged
        one that was skipped. If all are damaged, raise CheckpointError and delete nothing."""
        damaged = []
        for step in self.steps():
            place = self._place(step)
            if problem := find_damage(place):
                damaged.append(f"checkpoint {place.name} is damaged ({problem})")
                self._passed_over.add(step)
                continue
            # Another version may have written it although its checksums match.
            try:
                return _read(place), damaged
            except (
                SafetensorError,
                OSError,
                ValueError,
                LookupError,
                TypeError,
                AttributeError,
                RecursionError,
            ) as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                damaged.append(f"checkpoint {place.name} has an unknown format ({type(error).__name__}: {reason})")
                self._passed_over.add(step)
        if damaged:
            raise CheckpointError(f"no checkpoint can be loaded: {'; '.join(damaged)}; nothing was deleted")
        return None, []

    def load(self, step: int) -> Snapshot:
        """Load the checkpoint of a step that another process has verified."""
        return _read(self._place(step))

    def find_damage(self, step: int) -> str:
        """Return what is wrong with the checkpoint of a step, in one line; empty if it is intact."""
        return find_damage(self._place(step))

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, newest first."""
        found = [(NAME.fullmatch(place.name), place) for place in self.folder.glob("step-*")]
        ours = [int(name[1]) for name, place in found if name and place.is_dir() and not place.is_symlink()]
        return sorted(ours, reverse=True)

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _make_way(self, place: Path) -> None:
        """Rename a file or link that has the name of a checkpoint. A damaged checkpoint stays: it is replaced."""
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            names = (place.with_name(f"{place.name}.aside-{number}") for number in count(1))
            place.rename(next(name for name in names if not (name.exists() or name.is_symlink())))


def _write(part: Path, snapshot: Snapshot) -> None:
    tensors: dict[str, Tensor] = {}
    plain: dict[str, object] = {}
    for number, values in snapshot.optimizer["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{number}.{name}"] = value
            else:
                plain[f"{number}.{name}"] = value
    save_file(_contiguous(snapshot.weights), part / "weights.safetensors")
    save_file(_contiguous(tensors), part / "optimizer.safetensors")
    for rank, own in enumerate(snapshot.ranks):
        random_tensors = {"torch": own.rng["torch"]} | {f"cuda.{i}": s for i, s in enumerate(own.rng["cuda"])}
        save_file(random_tensors, part / f"{_of_rank('random', rank)}.safetensors")
        save_file(_contiguous(own.policy), part / f"{_of_rank('policy', rank)}.safetensors")
    state = {
        "step": snapshot.step,
        "optimizer_plain": dict(sorted(plain.items())),  # sorted: eager updates fill the state in any order
        "optimizer_groups": snapshot.optimizer["param_groups"],
        "rest": snapshot.rest,
    }
    for rank, own in enumerate(snapshot.ranks):
        state[_of_rank("random", rank)] = {"python": own.rng["python"], "numpy": own.rng["numpy"]}
    (part / "state.json").write_text(json.dumps(state), encoding="utf-8")
    if snapshot.seal is not None:
        (part / SEAL).write_text(json.dumps(snapshot.seal, indent=1), encoding="utf-8")
    write_manifest(part)


def _read(place: Path) -> Snapshot:
    state = read_json(place / "state.json", LARGEST_JOURNAL)
    by_number: dict[int, dict[str, object]] = {}
    for key, value in (load_file(place / "optimizer.safetensors") | state["optimizer_plain"]).items():
        number, _, name = key.partition(".")
        by_number.setdefault(int(number), {})[name] = value
    num_ranks = sum(_of_rank("random", rank) in state for rank in range(len(state)))
    seal = place / SEAL
    return Snapshot(
        step=state["step"],
        weights=load_file(place / "weights.safetensors"),
        optimizer={"state": by_number, "param_groups": state["optimizer_groups"]},
        rest=state["rest"],
        ranks=[_read_rank(place, rank, state[_of_rank("random", rank)]) for rank in range(num_ranks)],
        seal=read_json(seal, LARGEST_PLAN) if seal.exists() else None,
    )


def _read_rank(place: Path, rank: int, generators: dict[str, Any]) -> RankState:
    random_tensors = load_file(place / f"{_of_rank('random', rank)}.safetensors")
    cuda = [random_tensors[f"cuda.{i}"] for i in range(len(random_tensors) - 1)]
    policy = load_file(place / f"{_of_rank('policy', rank)}.safetensors")
    return RankState(policy, generators | {"torch": random_tensors["torch"], "cuda": cuda})


def _of_rank(what: str, rank: int) -> str:
    """Return the file stem for a rank. The first rank uses the names of a single-process run."""
    return f"{what}-{rank}" if rank else what


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # safetensors refuses views that are not contiguous.
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
