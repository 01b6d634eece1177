"""Accelerators are found by name or by size, and others are refused with the nearest name."""

from __future__ import annotations

import pytest

from sparsebp_cli.errors import UsageError
from sparsebp_tools.forecast.accelerator import KNOWN, find_accelerator


def test_every_name_says_its_own_memory() -> None:
    for device in KNOWN:
        assert device.name.endswith(f"-{device.memory_bytes // 10**9}gb")
        assert find_accelerator(device.name.upper()) == device


def test_a_size_is_a_device_of_unknown_rate() -> None:
    found = find_accelerator("48GB")
    assert (found.memory_bytes, found.flops_of("bfloat16")) == (48 * 10**9, None)


@pytest.mark.parametrize("word", ["h100", "0gb", "80", "h100-80gbs"])
def test_another_word_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match=r"--gpu: '.*' is neither a size, such as 48gb, nor one of .*h100-80gb"):
        find_accelerator(word)
