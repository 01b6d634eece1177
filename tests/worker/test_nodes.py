"""Several nodes: launchers that meet, lose each other and say why; and ranks that train on two nodes as on one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from sparsebp_cli.errors import DataError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe, TargetOptions
from sparsebp_cli.recipe.target import check_target
from sparsebp_cli.run import History, RunFolder, State
from sparsebp_cli.worker import process
from sparsebp_cli.worker.launcher import RankGuard
from sparsebp_cli.worker.node import LOST_CODE, NodeGroup
from sparsebp_cli.worker.process import FIRST_NODE, NODE, NodePlace, Ranks, find_number, read_place
from sparsebp_cli.worker.rank import Reason
from tests.worker.conftest import FORKS, _entry

pytestmark = [pytest.mark.promise("R26"), pytest.mark.xdist_group("two processes")]
SECONDS = 3.0  # after which a node counts as lost in these tests
TWO = TargetOptions(nodes=2, processes=4, peer_timeout_min=SECONDS / 60)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def fail(rank: int, text: str, at: float, *, is_echo: bool = False) -> Reason:
    return Reason(rank, text, 1, at, is_echo=is_echo)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[NodeGroup, NodeGroup]]:
    """The launchers of two nodes, in one process."""
    port = free_port()
    with (
        NodeGroup(NodePlace(0, "localhost", port), TWO, tmp_path) as first,
        NodeGroup(NodePlace(1, "localhost", port), TWO, tmp_path) as second,
    ):
        yield first, second


def in_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """Start a function; return a function that waits for its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()

    def wait() -> Any:
        thread.join()
        return found[0]

    return wait


def test_the_first_cause_on_any_node_is_the_end_of_the_run_on_all(pair) -> None:
    first, second = pair
    assert not first.is_over()
    reported = in_thread(lambda: second.report(fail(2, "rank 2 of 4 ended", 1.0)))
    cause = first.find_cause(fail(0, "connection closed by peer", 0.0, is_echo=True))
    assert cause == fail(2, "rank 2 of 4 ended", 1.0)
    assert first.is_over()
    first.finish(cause.code)
    assert reported() == 1


def test_a_node_that_gives_no_sign_is_lost_and_named(pair) -> None:
    first, second = pair
    while not first._seen:
        time.sleep(0.05)
    second.__exit__()  # it counts no more, as if its machine had lost its power
    assert first.find_cause(fail(0, "connection closed by peer", 0.0, is_echo=True)).code == LOST_CODE
    assert first.find_cause(None).text == f"node 1 of 2 ({socket.gethostname()}) is lost: it sent nothing for 3 seconds"


def test_a_node_that_never_came_is_named(tmp_path) -> None:
    with NodeGroup(NodePlace(0, "localhost", free_port()), TWO, tmp_path) as first:
        time.sleep(SECONDS)
        cause = first.find_cause(fail(0, "wait timeout in the diststore", 0.0, is_echo=True))
    assert cause.text == "node 1 of 2 did not start within 0.05 minutes (target.peer_timeout_min)"


def test_a_first_node_that_does_not_answer_is_one_line(tmp_path) -> None:
    port = free_port()
    with pytest.raises(DataError, match=rf"node 1: the first node does not answer at localhost:{port} within 0.05 min"):
        NodeGroup(NodePlace(1, "localhost", port), TWO, tmp_path)


def test_a_port_that_is_taken_is_one_line(tmp_path) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(DataError, match=f"port {port} of the first node cannot be used"):
            NodeGroup(NodePlace(0, "localhost", port), TWO, tmp_path)


def test_nodes_that_share_no_file_system_are_refused(tmp_path) -> None:
    port, folders = free_port(), [tmp_path / name for name in ("here", "there")]
    for folder in folders:
        folder.mkdir()
    first, second = (NodeGroup(NodePlace(n, "localhost", port), TWO, folders[n]) for n in (0, 1))
    first.check_folder()
    with pytest.raises(DataError, match=r"^node 1 \(.*\) does not see the first node's files .*there: target.nodes"):
        second.check_folder()
    for group in (first, second):
        group.__exit__()
    assert list(folders[0].iterdir()) == []


def test_a_rank_that_outlives_the_others_is_killed() -> None:
    other = subprocess.Popen(["sleep", "600"])  # started before: no rank
    guard = RankGuard(1.0, lambda: False)
    ranks = [subprocess.Popen(["sleep", str(seconds)]) for seconds in (1.5, 600)]
    guard.start()
    assert ranks[0].wait() == 0
    assert ranks[1].wait(30) == -signal.SIGKILL
    guard.stop()
    assert guard.killed == {ranks[1].pid}
    assert other.poll() is None
    other.kill()
    other.wait()


def test_ranks_are_killed_once_the_run_is_over_elsewhere() -> None:
    over = threading.Event()
    guard = RankGuard(0.5, over.is_set)
    rank = subprocess.Popen(["sleep", "600"])
    guard.start()
    time.sleep(2.0)
    assert rank.poll() is None
    over.set()
    assert rank.wait(30) == -signal.SIGKILL
    guard.stop()


def test_ranks_are_counted_over_all_nodes(monkeypatch) -> None:
    for name, value in {NODE: "1", FIRST_NODE: "n1:20001", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert find_number(TWO) == 3
    assert find_number(TargetOptions(processes=2)) == 1


@pytest.mark.parametrize(
    ("environment", "text"),
    [({}, "got no number"), ({NODE: "2", FIRST_NODE: "n1:1"}, "got 2"), ({NODE: "1"}, "HOST:PORT")],
)
def test_a_worker_that_was_started_on_too_few_nodes_is_refused(monkeypatch, environment, text) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match=text):
        read_place(TWO)


@pytest.mark.parametrize(
    ("section", "key", "text"),
    [
        (
            {"kind": "local", "nodes": 2, "processes": 2},
            "nodes",
            "target local runs on one machine, got 2; ",
        ),
        ({"kind": "docker", "host": "ssh://gpu1", "nodes": 2, "processes": 2}, "nodes", "docker runs on one machine"),
        (
            {"kind": "slurm", "nodes": 2, "processes": 3},
            "processes",
            "must be a multiple of nodes (2), because it counts the processes of all nodes; got 3",
        ),
        ({"kind": "slurm", "nodes": 2, "processes": 8, "gpus": 8}, "", "need 4 on each, got 8"),
        (
            {"kind": "slurm", "nodes": 2, "processes": 8, "gpus": "a100:4", "peer_timeout_min": 0},
            "peer_timeout_min",
            "",
        ),
    ],
)
def test_nodes_that_a_target_cannot_have_are_refused_by_name(section, key, text) -> None:
    made, (error,) = check_target(section)
    assert made is None
    assert error.key == key
    assert text in error.text


def test_nccl_gets_its_device_before_the_group_and_is_closed_at_the_end(monkeypatch, tiny_recipe) -> None:
    # A double: no CUDA device is here.
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    distributed = torch.distributed
    monkeypatch.setattr(
        distributed, "init_process_group", lambda backend, **options: calls.append((backend, options)) or None
    )
    monkeypatch.setattr(distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(distributed, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(NodePlace, "connect", lambda self, timeout: distributed.HashStore())
    for name, value in {NODE: "1", FIRST_NODE: "n1:20001", "LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    target = {"device": "auto", "processes": 4, "nodes": 2, "peer_timeout_min": 7}
    ranks = Ranks.join(tiny_recipe(target=target))
    ranks.leave()
    process._LEFT.clear()
    chosen, (backend, options), destroyed = calls
    assert chosen == ("set_device", 1)
    assert backend == "cpu:gloo,cuda:nccl"
    assert options["device_id"] == torch.device("cuda", 1)
    assert options["timeout"] == timedelta(minutes=7)
    assert (options["rank"], options["world_size"]) == (3, 4)
    assert destroyed == "destroy"
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("3", "4")


def start_nodes(run: RunFolder) -> list[Any]:
    """Start the worker on two nodes, each a process here."""
    port = free_port()
    nodes = [FORKS.Process(target=_enter_node, args=(run.plan_file, node, port)) for node in (0, 1)]
    for node in nodes:
        node.start()
    return nodes


def _enter_node(plan_file: Path, node: int, port: int) -> None:
    os.environ.update({NODE: str(node), FIRST_NODE: f"localhost:{port}"})
    _entry(plan_file)


def on_nodes(tiny_recipe: Callable[..., Recipe], nodes: int, **sections: Any) -> Recipe:
    training = {"max_steps": 4, "per_device_train_batch_size": 4}
    target = {"threads": 1, "device": "cpu", "processes": 2, "nodes": nodes, "peer_timeout_min": 0.25}
    return tiny_recipe(**{"training": training, "target": target} | sections)


def test_two_nodes_train_as_one_node_does_to_the_same_bits(tiny_recipe, prepared) -> None:
    from tests.worker.conftest import work

    one, two = (prepared(on_nodes(tiny_recipe, nodes)) for nodes in (1, 2))
    assert work(one) == 0
    nodes = start_nodes(two)
    for node in nodes:
        node.join()
    assert [node.exitcode for node in nodes] == [0, 0], (two.path / "worker.log").read_text()
    assert (two.path / "worker.log").read_text() == ""
    expected, found = History.load(one.path), History.load(two.path)
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        assert found.series(metric) == expected.series(metric)
    assert len(found.series("train/loss")) == 4
    assert Plan.load(one.plan_file).group == Plan.load(two.plan_file).group
    assert {file.name for file in two.path.iterdir()} == {file.name for file in one.path.iterdir()}


def test_a_node_whose_launcher_is_killed_ends_the_run_within_a_minute(tiny_recipe, prepared) -> None:
    training = {"max_steps": 100_000, "per_device_train_batch_size": 4}
    run = prepared(on_nodes(tiny_recipe, 2, training=training))
    first, second = start_nodes(run)
    while len(History.load(run.path).series("train/loss")) < 2:
        assert first.is_alive(), (run.path / "worker.log").read_text()
        time.sleep(0.05)
    ranks = [rank for node in (first, second) for rank in psutil.Process(node.pid).children()]
    second.kill()
    first.join(60)
    assert first.exitcode == LOST_CODE
    assert run.state() is State.FAILED
    text = f"node 1 of 2 ({socket.gethostname()}) is lost: it sent nothing for 15 seconds"
    assert History.load(run.path).ends[-1]["text"] == text
    assert len(ranks) == 2
    assert not any(rank.is_running() for rank in ranks)
