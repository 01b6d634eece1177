"""``sparsebp model`` as people type it: where it writes, what it refuses, a converter, a hub, and an early end."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from sparsebp_cli.cli.summary import summarise
from sparsebp_cli.run import History, JournalWriter, RunFolder, durable, manifest
from sparsebp_cli.source.bundled import austen_llama

from .conftest import REAL, Cli, Start, Write, environment, write_run

FILES = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def run(write_recipe: Write) -> RunFolder:
    """A finished run with the model of the package, and with files that no model's folder should have."""
    found = write_run(write_recipe(name="made"))
    model = found.path / "model"
    (model / "adapter").mkdir(parents=True)
    for file in austen_llama().iterdir():
        if file.is_file():
            (model / file.name).write_bytes(file.read_bytes())
    (model / "pytorch_model.bin").write_bytes(b"a pickle of a stranger")
    manifest.write_manifest(model)
    return found


def test_a_run_becomes_a_folder_here_and_a_second_time_is_refused(call: Cli, run: RunFolder, tmp_path: Path) -> None:
    done = call("model", run.run_id[:6])
    place = tmp_path / f"made-{run.run_id}"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"made-{run.run_id}: step 3 of run {run.run_id}, ")
    assert {file.name for file in place.iterdir()} >= FILES
    assert not {"manifest.json", "adapter", "pytorch_model.bin"} & {file.name for file in place.iterdir()}
    before = {file.name: file.read_bytes() for file in place.iterdir()}
    again = call("model", run.path)
    assert again.returncode == 2
    assert again.stderr == f"error: made-{run.run_id} exists and is not empty: name another folder with --to\n"
    assert {file.name: file.read_bytes() for file in place.iterdir()} == before
    (tmp_path / "empty").mkdir()
    assert call("model", "@last", "--to", "empty").returncode == 0
    assert (tmp_path / "empty" / "model.safetensors").read_bytes() == before["model.safetensors"]
    assert not [*tmp_path.glob(f"{durable.PART}*")]


def test_of_two_that_write_one_folder_at_once_one_does(cli: Cli, run: RunFolder, start: Start, tmp_path: Path) -> None:
    both = [start("model", run.run_id, "--to", "one", command=REAL) for _ in range(2)]
    ends = [(process.communicate()[1], process.returncode) for process in both]
    assert sorted(code for _, code in ends) in ([0, 2], [2, 0])
    assert manifest.digest(tmp_path / "one" / "model.safetensors") == manifest.digest(
        run.path / "model" / "model.safetensors"
    )
    assert not [*tmp_path.glob(f"{durable.PART}*")]


def test_the_last_line_of_a_summary_is_the_command(call: Cli, run: RunFolder) -> None:
    from rich.console import Console

    screen = StringIO()
    Console(width=100, file=screen).print(summarise(run, History.load(run.path), together=[run]))
    *_, before, last = [line for line in screen.getvalue().splitlines() if line.strip()]
    assert before.startswith("next: ")
    assert call(*last.partition(": sparsebp ")[2].split(), "--to", "mine").returncode == 0


def test_what_a_run_does_not_have_is_refused_in_one_line(
    call: Cli, run: RunFolder, write_recipe: Write, tmp_path: Path
) -> None:
    other = write_run(write_recipe(name="other"))
    with JournalWriter(other.path) as journal:
        journal.write("end", status="interrupted", step=2, text="")
    call("archive", run.run_id, "--to", "one.tar.gz")
    no_model = (
        f"run {other.run_id} is interrupted and has no model before it finishes; the run has no checkpoint either"
    )
    damaged = run.path / "model" / "config.json"
    for words, code, text in (
        (("model", other.run_id), 2, no_model),
        (
            ("model", other.run_id, "--checkpoint", "last"),
            2,
            f"run {other.run_id} has no last checkpoint: the run has no",
        ),
        (("model", run.run_id, "--checkpoint", "best"), 2, "its recipe does not set checkpoint.keep_best"),
        (("model", run.run_id, "--checkpoint", "soon"), 2, "--checkpoint must be last, best or a step, got 'soon'"),
        (("model", "one.tar.gz"), 2, "one.tar.gz is an archive, and archives contain no models"),
        (("model", run.run_id, "--public"), 2, "--public needs --push"),
        (("model", run.run_id, "--to", "fake.yaml"), 2, "fake.yaml exists and is not empty"),
        (("model", "mades"), 102, "did you mean made?"),
        (("model", run.path / "model"), 2, "model is already the folder of a model: name a run instead"),
    ):
        (tmp_path / "fake.yaml").touch()
        done = call(*words)
        assert (done.returncode, done.stdout) == (code, "")
        assert text in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
    damaged.write_text("{}")
    assert "its model cannot be verified (config.json does not match its checksum)" in call("model", run.run_id).stderr


def test_a_prefix_of_two_runs_is_refused(call: Cli, run: RunFolder) -> None:
    twin = run.path.with_name(run.run_id[:-1] + ("0" if run.run_id[-1] != "0" else "1"))
    twin.mkdir()
    (twin / "plan.json").write_bytes(run.plan_file.read_bytes())
    done = call("model", run.run_id[:8])
    assert done.returncode == 102
    assert "matches several runs" in done.stderr


def limit_files() -> None:
    """Let this process write files of at most a megabyte: as with a full disk, a write fails midway."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def test_a_disk_that_fills_up_leaves_nothing(run: RunFolder, tmp_path: Path) -> None:
    done = subprocess.run(
        [*REAL, "model", run.run_id, "--to", "out"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env=environment(), preexec_fn=limit_files,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (100, "")
    assert done.stderr == "error: out was not written: File too large\n"
    assert {path.name for path in tmp_path.iterdir()} == {"home", "made.yaml"}


CONVERTER = """\
#!/bin/sh
echo "$@" > {folder}/words
ls "$1" > {folder}/files
{then}
"""


def write_converter(folder: Path, then: str) -> None:
    """A stand-in for llama.cpp's script, which records its arguments."""
    folder.mkdir(exist_ok=True)
    file = folder / "convert_hf_to_gguf.py"
    file.write_text(CONVERTER.format(folder=folder, then=then))
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_a_converter_on_the_path_makes_the_file_in_the_type_of_the_weights(
    call: Cli, run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    done = call("model", run.run_id, "--to", "out", "--gguf")
    assert done.returncode == 2
    assert "convert_hf_to_gguf.py of llama.cpp is not on PATH: install" in done.stderr
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    write_converter(tmp_path / "bin", 'echo no; echo "cannot read this model" >&2; exit 3')
    done = call("model", run.run_id, "--to", "out", "--gguf")
    assert done.returncode == 100
    assert "ended with exit code 3, and nothing was written: cannot read this model" in done.stderr
    assert not (tmp_path / "out").exists()
    write_converter(tmp_path / "bin", 'printf GGUF > "$3"')
    assert call("model", run.run_id, "--to", "out", "--gguf").returncode == 0
    assert (tmp_path / "out" / "out.gguf").read_text() == "GGUF"
    assert set((tmp_path / "bin" / "files").read_text().split()) >= FILES
    assert (tmp_path / "bin" / "words").read_text().split()[3:] == ["--outtype", "f32", "--model-name", "out"]


def test_a_converter_in_the_folder_that_the_environment_names_runs_by_this_python(
    call: Cli, run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path / "llama.cpp"))
    assert "which has no convert_hf_to_gguf.py" in call("model", run.run_id, "--gguf").stderr
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "beside.py").touch()
    script = "import sys, beside\nopen(sys.argv[3], 'w').write(sys.executable)\n"
    (tmp_path / "llama.cpp" / "convert_hf_to_gguf.py").write_text(script)
    assert call("model", run.run_id, "--to", "out", "--gguf").returncode == 0
    assert (tmp_path / "out" / "out.gguf").read_text() == sys.executable


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing(
    start: Start, run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    # The converter is slow, so that the signal arrives while the folder is half written.
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    write_converter(tmp_path / "bin", f"cat {tmp_path / 'pipe'}")
    os.mkfifo(tmp_path / "pipe")
    process = start("model", run.run_id, "--to", "out", "--gguf", command=REAL)
    with (tmp_path / "pipe").open("w"):  # opens when the converter reads
        assert [*tmp_path.glob(f"{durable.PART}out.*")]
        os.kill(process.pid, number)
        process.communicate(timeout=300)
    assert process.returncode == code
    assert not [*tmp_path.glob(f"{durable.PART}*")]
    assert not (tmp_path / "out").exists()


class FakeHub(ThreadingHTTPServer):
    """The part of a hub's interface that an upload needs, with one repository in memory."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}
        self.fails = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, content: object, code: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        path = urlparse(self.path).path
        if path == "/api/whoami-v2":
            known = self.headers.get("Authorization") == "Bearer hf_known"
            self.reply({"name": "me", "type": "user"} if known else {"error": "Invalid token"}, 200 if known else 401)
        else:
            self.reply({"id": "me/mine", "sha": "0" * 40, "siblings": [], "private": True, "tags": []})

    def do_PUT(self) -> None:
        content = self.body()
        self.server.large[hashlib.sha256(content).hexdigest()] = content
        self.reply({})

    def do_POST(self) -> None:
        path, content = urlparse(self.path).path, self.body()
        if self.server.fails and path.endswith("/commit/main"):
            self.reply({"error": "the disk of the hub is full"}, 507)
        elif path == "/api/repos/create":
            self.server.created.append(json.loads(content))
            self.reply({"url": f"{self.server.address}/me/mine", "id": "1", "name": "me/mine"})
        elif path == "/api/validate-yaml":
            self.reply({"errors": [], "warnings": []})
        elif path.endswith("/preupload/main"):
            asked = json.loads(content)["files"]
            mode = {True: "lfs", False: "regular"}
            files = [
                {"path": one["path"], "uploadMode": mode[one["size"] > 1 << 20], "shouldIgnore": False} for one in asked
            ]
            self.reply({"files": files})
        elif path.endswith("/info/lfs/objects/batch"):
            upload = {"href": f"{self.server.address}/upload"}
            objects = [one | {"actions": {"upload": upload}} for one in json.loads(content)["objects"]]
            self.reply({"transfer": "basic", "objects": objects})
        elif path.endswith("/commit/main"):
            for line in map(json.loads, content.decode().splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.server.files[value["path"]] = self.server.large[value["oid"]]
            address = f"{self.server.address}/me/mine/commit/{'0' * 40}"
            self.reply({"success": True, "commitOid": "0" * 40, "commitUrl": address, "hookOutput": ""})
        else:
            self.reply({"error": path}, 404)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_model_is_sent_to_a_hub_as_it_is_and_privately(
    cli: Cli, run: RunFolder, hub: FakeHub, tmp_path: Path
) -> None:
    where = {
        "HF_ENDPOINT": hub.address,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
    }
    refused = cli("model", run.run_id, "--to", "out", "--push", "me/mine", real=True, **where, HF_TOKEN="hf_other")
    assert refused.returncode == 100
    assert "error: --push cannot use the Hugging Face hub, and nothing was written: " in refused.stderr
    assert not (tmp_path / "out").exists()
    done = cli("model", run.run_id, "--to", "out", "--push", "me/mine", real=True, **where, HF_TOKEN="hf_known")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{hub.address}/me/mine"
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == hub.files
    assert [(one["name"], one.get("private"), one.get("visibility")) for one in hub.created] in (
        [("mine", True, None)], [("mine", None, "private")],
    )  # fmt: skip
    assert b"# me/mine\n" in hub.files["README.md"]
    hub.fails = True
    failed = cli(
        "model", run.run_id, "--to", "two", "--push", "me/mine", "--public", real=True, **where, HF_TOKEN="hf_known"
    )
    assert failed.returncode == 100
    assert "error: the model is in two, but could not be uploaded: " in failed.stderr
    assert "; `hf upload me/mine two .` uploads it\n" in failed.stderr
    assert {file.name for file in (tmp_path / "two").iterdir()} >= FILES


def test_a_hub_that_is_not_there_and_no_token_are_one_line(cli: Cli, run: RunFolder, tmp_path: Path) -> None:
    where = {"HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": ""}
    for options, environ, code, text in (
        (
            ("me/mine",),
            {},
            2,
            "--push needs a token of the Hugging Face hub: log in with `hf auth login`, or set HF_TOKEN",
        ),
        (("me/../mine",), {}, 2, "--push: Repo id must"),
        (
            ("mine",),
            {"HF_TOKEN": "hf_known", "HF_HUB_OFFLINE": "1"},
            100,
            "--push cannot use the Hugging Face hub, and nothing was written: ",
        ),
    ):
        done = cli("model", run.run_id, "--to", "out", "--push", *options, real=True, **(where | environ))
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert text in done.stderr
        assert done.stderr.count("\n") == 1
        assert not (tmp_path / "out").exists()
