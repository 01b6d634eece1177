"""What every test starts from: a home of its own, one thread, no hub, no tracking server of somebody else."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests import tier, trials

os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    # On processors that are not Intel's, MKL's last bits depend on the layout of its arguments (seen with PyTorch 2.13
    # on an AMD EPYC), so that two right ways to the same product differ by rounding. Tests hold them to equal bits.
    MKL_CBWR="COMPATIBLE",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    MLFLOW_DISABLE_TELEMETRY="true",
    DO_NOT_TRACK="true",
    COLUMNS="100",
)
for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID", "NO_COLOR", "FORCE_COLOR"):
    os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh ``$SPARSEBP_HOME``."""
    folder = tmp_path / "home"
    monkeypatch.setenv("SPARSEBP_HOME", str(folder))
    return folder


@pytest.fixture(autouse=True)
def _keep_process() -> Iterator[None]:
    """Put back the umask, which verbs that write runs change for their process, and the environment: transformers'
    ``TrainingArguments(torch_compile=True)`` sets variables there by which every later ``Accelerator`` compiles. The
    state that accelerate shares among them remembers it as well."""
    umask, environ = os.umask(0o022), dict(os.environ)
    yield
    os.umask(umask)
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in environ.items() if os.environ.get(name) != value})
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None:
        accelerate.AcceleratorState._reset_state()
        accelerate.GradientState._reset_state()


@pytest.fixture(scope="session")
def fresh_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An initialised, empty store of MLflow, to be copied: making one takes seconds."""
    from sparsebp_cli.tracking.store import open_client

    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    open_client(f"sqlite:///{file}")
    return file


@pytest.fixture
def no_process_left(home_folder: Path) -> Iterator[None]:
    """Kill what runs of this test's home have started and not ended."""
    yield
    import psutil

    from sparsebp_cli.run import list_runs
    from sparsebp_cli.target.launch import Launch

    for run in list_runs():
        launch = Launch.load(run)
        for process in [launch.watcher(run), launch.worker(run)] if launch else []:
            if process is not None:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


# What dynamo warns of while it traces, about itself (torch 2.13); whether it does depends on the tests before.
DYNAMO_WARNS = (
    "The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "<class 'torch.autograd.function.Function'> should not be instantiated:DeprecationWarning",
    "`torch.jit.script_method` is deprecated:DeprecationWarning",  # by inductor, as it is imported
)


# What MLflow's libraries say about themselves when the first test of a process opens a store, whichever that is.
MLFLOW_WARNS = "ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--trials=FILE``, ``--fast``, ``--sample`` and ``--architectures``."""
    trials.add_option(parser)
    tier.add_option(parser)
    parser.addoption("--architectures", action="store_true", help="write docs/reference/architectures.json")


def pytest_configure(config: pytest.Config) -> None:
    """Count trials, and keep the fast tier from importing what is slow, where that was asked for."""
    from hypothesis import settings

    settings.register_profile("the same examples every time", derandomize=True)
    settings.load_profile("the same examples every time")
    trials.register(config)
    config.addinivalue_line("filterwarnings", MLFLOW_WARNS)
    if config.getoption("fast"):
        sys.meta_path.insert(0, tier.Barrier())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the other tiers' files alone with ``--fast``."""
    return True if config.getoption("fast") and tier.is_left_alone(collection_path, config) else None


@pytest.hookimpl(tryfirst=True)  # before ``-m`` is read
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Name the promises of tests, mark the cases that are long, and give those marked ``compiles`` an empty cache and
    dynamo's own warnings."""
    trials.name_promises(items)
    tier.mark_long(items)
    if config.getoption("fast"):
        tier.deselect(config, items)
    if config.getoption("sample"):
        tier.sample(config, items)
    for item in items:
        if item.get_closest_marker("compiles"):
            for text in DYNAMO_WARNS:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{text}"))
            item.fixturenames.append("_forget_compiled")  # a marker usefixtures comes too late here


def pytest_collection_finish() -> None:
    """Let no collection of garbage walk through what was imported: torch and transformers are millions of objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def _forget_compiled() -> Iterator[None]:
    """Nothing that another test compiled is used again, and no limit of recompiling is reached."""
    import torch
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
