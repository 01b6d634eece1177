from sparsebp_depth import DEPTH_SELECTOR, RandomDepth

from sparsebp_cli.testing import check_kind


def test_the_kind_keeps_what_every_kind_promises() -> None:
    check_kind(DEPTH_SELECTOR, [RandomDepth(full=1.0), RandomDepth()])
