"""The command line as it is, with the worker of these tests behind ``local``, and scripts' numbers in files."""

from __future__ import annotations

from script_material import use_file_runs  # found beside this file

import sparsebp_cli.target
from sparsebp_cli.cli.app import main
from sparsebp_cli.recipe.schema import TargetSection
from sparsebp_cli.target import Target, TargetOptions
from sparsebp_cli.target.local import LocalTarget


def make_fake(section: TargetSection) -> Target:
    return LocalTarget(TargetOptions(worker="judge_worker"))


if __name__ == "__main__":
    use_file_runs()
    sparsebp_cli.target.make_target = make_fake
    main()
