"""``sparsebp resume``: go on where a run was left."""

from __future__ import annotations

import typer

from sparsebp_cli.cli.follow import follow_all
from sparsebp_cli.cli.interrupt import Interrupts
from sparsebp_cli.cli.option import Detach, ManyRuns
from sparsebp_cli.cli.screen import print_line
from sparsebp_cli.cli.stored import find_all
from sparsebp_cli.cli.submitted import submit_all
from sparsebp_cli.run import State


def resume(runs: ManyRuns, detach: Detach = False) -> None:
    """Go on with runs from their last good checkpoints, under the same ids."""
    folders = find_all(runs)
    for folder in folders:
        if folder.state() is State.FINISHED:
            print_line(f"{folder.run_id} is finished already")
    folders = [folder for folder in folders if folder.state() is not State.FINISHED]
    if not folders:
        return
    seen = [journal.stat().st_size if (journal := f.path / "journal.jsonl").exists() else 0 for f in folders]
    with Interrupts() as interrupts:
        jobs = submit_all(folders)
        if detach:
            for job in jobs:
                print_line(job.run.run_id)
            return
        code = follow_all(jobs, interrupts, seen=seen)
    raise typer.Exit(code)
