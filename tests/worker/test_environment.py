"""What a run says of the packages that it had."""

from __future__ import annotations

from importlib import metadata

from sparsebp_cli.entry_point import find_version
from sparsebp_cli.worker.environment import PACKAGES, describe_environment

GROUPS = {"sparsebp.policies", "sparsebp.models", "sparsebp.datasets"}


def test_packages_and_plugins_are_named_with_their_versions() -> None:
    found = describe_environment()
    installed = [each for each in metadata.distributions() if GROUPS & {entry.group for entry in each.entry_points}]
    assert found["plugins"] == {each.name: each.version for each in installed if each.name != "sparsebp"}
    assert {"sparsebp-shelf", "sparsebp-stride"} <= {each.name for each in installed}
    assert found["packages"] == {name: metadata.version(name) for name in PACKAGES}


def test_a_package_that_is_missing_has_no_version() -> None:
    assert find_version("nothing-of-this-name") == ""
