"""A repository with a script, and a store of its numbers that takes no seconds, for questions about a user's script."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import sparsebp_lab.judge.script_arms
from sparsebp_cli.run import home

# Its gain and how it ends are in a file of the commit. It leaves a line where it ran and with which seed.
SCRIPT = """\
import json, os, random, sys, time
from pathlib import Path

seed, log = int(sys.argv[1]), Path(sys.argv[2])
what = json.loads(Path("what.json").read_text())
with log.open("a") as file:
    file.write(json.dumps([what["gain"], seed, os.getcwd(), os.getpid()]) + chr(10))
hold = log.with_name("hold")
while hold.exists():
    time.sleep(0.02)
luck = random.Random(seed).gauss(0, 1) + random.Random(f"{seed} {what['gain']}").gauss(0, 0.2)
value = float(what["value"]) if "value" in what else 3 - what["gain"] + 0.1 * luck
Path(os.environ["NUMBERS"]).write_text(json.dumps({what.get("metric", "val_loss"): value}))
Path("made").write_text("an output of the script")
sys.exit(what.get("code", 0))
"""
COMMAND = "python train.py {seed} {repository}/../log"
METRIC = "val_loss:lower"


@dataclass(frozen=True)
class FileRun:
    """A run whose numbers are in a file."""

    run_id: str

    @classmethod
    def create(cls, experiment: str, name: str, tags: Mapping[str, str]) -> FileRun:
        return cls(tags["sparsebp.judge.run"])

    @property
    def environment(self) -> dict[str, str]:
        return {"NUMBERS": str(home() / f"{self.run_id}.json")}

    def finish(self, *, failed: bool) -> dict[str, float]:
        file = home() / f"{self.run_id}.json"
        return json.loads(file.read_text()) if file.exists() else {}


def use_file_runs() -> None:
    sparsebp_lab.judge.script_arms.ScriptRun = FileRun  # type: ignore[attr-defined, assignment]


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always")
    done = subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def make_repository(folder: Path, **branches: Mapping[str, object]) -> Path:
    """Make a repository with a branch for each keyword, whose value is what the script does there."""
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch", "start")
    (folder / "train.py").write_text(SCRIPT)
    git(folder, "add", "train.py")
    git(folder, "commit", "--quiet", "-m", "start")
    for name, what in branches.items():
        git(folder, "checkout", "--quiet", "-b", name, "start")
        (folder / "what.json").write_text(json.dumps({"gain": 0.0, **what}))
        git(folder, "add", "what.json")
        git(folder, "commit", "--quiet", "-m", name)
    return folder


def read_log(folder: Path) -> list[tuple[float, int, str, int]]:
    """Return gain, seed, folder and process of each run of the script."""
    file = folder / "log"
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
