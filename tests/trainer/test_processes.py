"""Two processes under DDP, as ``torchrun`` starts them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.xfail(version("transformers") == "5.17.0", reason="it saves generators as cpu:0, which torch cannot load")
def test_two_processes_train_as_trainer_does_and_resume(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "tests.trainer.two", str(tmp_path)]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | together | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    for one in found:
        assert one["wrapped"] == "DistributedDataParallel"
        assert one["dense"] == one["resumed"] == []
        assert one["changed"] > 0
        assert one["packed"] < 1e-5
        assert "gradient compared" in one["packing"]
        assert " 0 in a shared prefix" not in one["packing"]
        assert one["state"] == ["sparsebp-0.safetensors", "sparsebp-1.safetensors"]
        assert all(flops for flops in one["flops"][:-1])
    assert found[0]["sums"] == found[1]["sums"]  # the same weights on both
