import pytest
from conftest import Sky

from sparsebp_cli.testing import check_target


@pytest.mark.slow
def test_sky_keeps_the_contract(sky: Sky) -> None:
    sky.tell("noise", "✓ SkyPilot API server started.\n[33mA new version of SkyPilot is available[0m\n[notice] hello")
    check_target("sky", **sky.options)
    assert list(sky.bucket.glob("*/*")) == [], "nothing is left in the bucket"
    names = [job["job_name"] for job in sky.jobs()]
    assert len(names) == len(set(names)), "no job is launched twice"
    assert set(sky.statuses()) <= {"SUCCEEDED", "FAILED", "CANCELLED"}
