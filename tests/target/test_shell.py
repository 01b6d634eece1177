"""What a shell elsewhere prints besides the answer is never taken for data, and a failed line of setup is named."""

from __future__ import annotations

import io
import re
import subprocess
from pathlib import Path

import pytest

from sparsebp_cli.errors import RunFailedError, UnreachableError
from sparsebp_cli.run import RunFolder
from sparsebp_cli.target.archive import merge_into_run, pack, receive
from sparsebp_cli.target.batch import SlurmOptions, render_script
from sparsebp_cli.target.shell import SetupError, Shell
from sparsebp_cli.target.slurm import SlurmEngine
from tests.target.conftest import make_run

HOST = "ssh://login"
GREETING = "echo 'Welcome. Quota at 95 %'; echo 'disk: munge' >&2"
# A login shell that prints before, after, and without an end of line; the command is ssh's last word.
CHATTY = f"""#!/bin/bash
{GREETING}
printf 'no end of line'
bash -c "${{!#}}"
code=$?
echo logout; echo logout >&2
exit $code
"""


@pytest.fixture
def chatty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an ``ssh`` first whose login shell prints."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(CHATTY)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


@pytest.mark.promise("R29")
@pytest.mark.parametrize(
    "setup", [[], ["echo loading python"], ["set -e", "set -u", "trap 'echo bye' EXIT", "which sh"]]
)
def test_the_answer_is_what_the_lines_print_and_nothing_else(chatty: Path, setup: list[str]) -> None:
    for host in (None, HOST):
        shell = Shell(host, "here", setup)
        answer = shell.run("printf 'a\\0b\\n\\n'; echo problem >&2; false; exit 3")
        assert (answer.out, answer.err.strip(), answer.code) == (b"a\0b\n\n", "problem", 3)
        assert shell.run("cat", given=b"\n\xff given").out == b"\n\xff given"
        assert shell.run("true").out == b""
    assert shell.greeting.startswith("Welcome. Quota at 95 %")


@pytest.mark.slow
@pytest.mark.xdist_group("engines")
def test_what_a_configuration_of_ssh_has_for_logins_by_hand_stops_no_command(
    ssh_hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ssh,) = re.findall(r"-F (\S+)", (ssh_hosts / "bin" / "ssh").read_text())
    (tmp_path / "config").write_text(f"Host *\n  RequestTTY force\n  RemoteCommand tmux\nInclude {ssh}\n")
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {tmp_path}/config "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert Shell("ssh://hosta", "").run("printf 'a\\n'").out == b"a\n"


# A login shell that shows the command, markers and all, or that repeats what it printed: the answer is found.
SHOWING = {
    "the command": 'echo "running ${!#}"; echo "${!#}" >&2; bash -c "${!#}"; code=$?; echo "ran ${!#}"; exit $code',
    "with -x": 'bash -xc "${!#}"',
    "with -x, as output": 'export BASH_XTRACEFD=1; bash -xc "${!#}"',
    "with -v": 'bash -vc "${!#}"',
    "twice": 'out=$(mktemp); bash -c "${!#}" > $out; code=$?; cat $out $out; exit $code',
}
# A login shell of which no answer can be read says so, and what it printed is no answer.
SPOILING = {
    "errors in the output": ('bash -c "${!#}" 2>&1', "sends errors to standard output"),
    "ends of lines of a terminal": (
        "bash -c \"${!#}\" | sed 's/$/\\r/'; exit ${PIPESTATUS[0]}",
        "changes the ends of lines",
    ),
    "an answer that is cut": ('bash -c "${!#}" | head -c 60', "ended before its answer"),
    "no answer": ("exit 0", "ended before its answer"),
    "without end": ("exec cat /dev/zero", "answered with more than 64 MiB"),
    "errors without end": ("exec cat /dev/zero >&2", "answered with more than 64 MiB"),
}


@pytest.mark.promise("R29")
@pytest.mark.parametrize("setup", [[], ["echo loading"]])
@pytest.mark.parametrize("name", SHOWING)
def test_a_login_shell_that_shows_the_markers_gives_the_answer(chatty: Path, name: str, setup: list[str]) -> None:
    chatty.write_text(f"#!/bin/bash\n{SHOWING[name]}\n")
    answer = Shell(HOST, "", setup).run("echo answer; echo problem >&2; exit 3")
    assert (answer.out, answer.code) == (b"answer\n", 3)
    assert "problem" in answer.err.splitlines()


@pytest.mark.promise("R29")
@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("name", SPOILING)
def test_a_login_shell_that_spoils_the_answer_is_told_and_never_read(chatty: Path, name: str, code: int) -> None:
    program, text = SPOILING[name]
    chatty.write_text(f"#!/bin/bash\n{program}\n")
    with pytest.raises(UnreachableError, match=text):
        Shell(HOST, "").run(f"echo answer; echo problem >&2; exit {code}")


@pytest.mark.promise("R29")
def test_a_stream_from_a_login_shell_that_mixes_errors_in_is_refused(chatty: Path) -> None:
    chatty.write_text('#!/bin/bash\nbash -c "${!#}" 2>&1\n')
    shell = Shell(HOST, "")
    with (
        pytest.raises(UnreachableError, match="sends errors to standard output"),
        shell.read("cat /dev/null") as stream,
    ):
        stream.read()


def test_what_setup_exports_holds_for_the_lines(chatty: Path) -> None:
    assert Shell(HOST, "", ["export A=1", "B=2"]).run("echo $A$B").text == "12"


@pytest.mark.parametrize("host", [None, HOST])
@pytest.mark.parametrize(
    "line", ["source activate", "set -euo pipefail", "[[ -d /tmp ]] && true", "shopt -s extglob; declare -A names"]
)
def test_lines_of_setup_are_run_by_bash_as_in_the_job(
    chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str | None, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "activate").write_text("export A=1\n")
    assert Shell(host, "here", [line, "export B=2"]).run("false | true; echo $B").text == "2"


@pytest.mark.parametrize("setup", [[], ["export SBATCH_ACCOUNT=mine"]])
def test_variables_of_the_users_shell_do_not_change_a_submission(
    chatty: Path, monkeypatch: pytest.MonkeyPatch, setup: list[str]
) -> None:
    for name in ("SBATCH_TIMELIMIT", "SBATCH_ARRAY_INX", "SQUEUE_STATES", "SCANCEL_PARTITION"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_CONF", "kept")
    for host in (None, HOST):
        engine = SlurmEngine(SlurmOptions(host=host, folder="/tmp/x", setup=setup))
        found = engine._shell.run("env | grep -E '^(SBATCH|SQUEUE|SCANCEL|SLURM)_' | sort").text.splitlines()
        assert found == [*(["SBATCH_ACCOUNT=mine"] if setup else []), "SLURM_CONF=kept"]


@pytest.mark.promise("R29")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("module load python/9.9", "not found"),
        ("false", "exit code 1"),
        ("exit 0", "exit code 0"),
        ("if", "yntax error"),
        ("set -e; false", "exit code 1"),
    ],
)
def test_a_failed_line_of_setup_ends_the_command_and_is_named(chatty: Path, line: str, said: str) -> None:
    with pytest.raises(SetupError, match=f"login: target.setup: '{line}' failed there: .*{said}"):
        Shell(HOST, "", ["true", line, "echo never"]).run("echo done")


@pytest.mark.promise("R29")
@pytest.mark.parametrize("size", [0, 1, 1000, 200_000])
@pytest.mark.parametrize("chunk", [-1, 1, 100, 70_000])
def test_a_stream_holds_the_bytes_of_the_lines_alone(chatty: Path, tmp_path: Path, size: int, chunk: int) -> None:
    if chunk == 1 and size > 1000:
        return  # a byte at a time takes long
    content = (b"\x00\n\xffsparsebp- end 000\n" * (size // 20 + 1))[:size]
    (tmp_path / "file").write_bytes(content)
    with Shell(HOST, "").read(f"cat {tmp_path}/file") as stream:
        found = b"".join(iter(lambda: stream.read(chunk), b""))
    assert found == content


def test_a_stream_whose_lines_fail_is_broken_off(chatty: Path) -> None:
    with pytest.raises(UnreachableError, match="broke off"), Shell(HOST, "").read("echo a; exit 2") as stream:
        assert stream.read() == b"a\n"


def test_a_shell_that_ends_before_its_answer_is_unreachable(chatty: Path) -> None:
    chatty.write_text("#!/bin/sh\necho 'The system goes down'\n")
    with pytest.raises(UnreachableError, match="before its answer; it printed 'The system goes down'"):
        Shell(HOST, "").run("echo 7")


@pytest.mark.promise("R29")
def test_a_job_whose_number_is_not_one_is_unknown_and_never_followed(tmp_path: Path) -> None:
    run = make_run()
    engine = SlurmEngine(SlurmOptions())
    assert engine.find(run) is None
    (run.path / "slurm-job").write_text("/usr/bin/bash\n")
    with pytest.raises(UnreachableError, match="must contain a job id, got '/usr/bin/bash'"):
        engine.find(run)
    assert not engine.is_handle("/usr/bin/bash")
    assert engine.is_handle("12")
    assert engine.is_handle("12_3")


RECORD = '{"kind":"metrics","step":%d,"attempt":1,"time":1.0,"values":{"train/loss":2.0}}\n'


@pytest.mark.promise("R29")
def test_a_damaged_journal_is_replaced_by_the_whole_one(tmp_path: Path) -> None:
    there, here = make_run(), make_run()
    whole = "".join(RECORD % step for step in range(1, 9))
    (there.path / "journal.jsonl").write_text(whole)
    for damaged, right in (
        (whole[:100] + "Maintenance on Friday.\n" + whole[123:], whole),
        ("", whole),
        (whole[:200], whole),
        (RECORD % 99, RECORD % 99),  # two whole ones differ: this one stays
    ):
        (here.path / "journal.jsonl").write_text(damaged)
        stream = io.BytesIO()
        pack(stream, there, here.run_id)
        merge_into_run(receive(io.BytesIO(stream.getvalue()), here), here.run_id, here)
        assert (here.path / "journal.jsonl").read_text() == right


def run_script(run: Path, options: SlurmOptions, **environ: str) -> int:
    """Run a batch script without Slurm."""
    script = render_script(options, [str(run)])
    variables = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"} | environ
    return subprocess.run(["bash"], input=script, text=True, env=variables, timeout=25, check=False).returncode


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    """Return a worker that says what it was given, and is preempted."""
    program = tmp_path / "worker"
    program.write_text('#!/bin/sh\necho "worker $A"\ntrap "exit 143" TERM\nkill -USR1 $PPID\nsleep 5 & wait\n')
    program.chmod(0o755)
    (tmp_path / "run").mkdir()
    return program


@pytest.mark.promise("R29")
@pytest.mark.parametrize("line", ["module load python/9.9", "false", "if", "set -e; false"])
def test_a_job_ends_at_a_failed_line_of_setup_and_names_it(tmp_path: Path, worker: Path, line: str) -> None:
    options = SlurmOptions(python=str(worker), setup=["which sh", line])
    assert run_script(tmp_path / "run", options) == 1
    said = (tmp_path / "run" / "worker.log").read_text()
    assert f"target.setup: '{line}' failed: exit code" in said.splitlines()[-1]
    assert "worker" not in said


@pytest.fixture
def scontrol(tmp_path: Path) -> Path:
    """Return a folder with an ``scontrol`` that notes what it was asked, and refuses to put a job back."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    program = folder / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\nexit 1\n')
    program.chmod(0o755)
    return folder


@pytest.mark.promise("R29")
@pytest.mark.parametrize("setup", [[], ["export A=1", "set -e", "trap 'echo mine' EXIT"]])
def test_setup_changes_nothing_of_how_a_preempted_job_goes_back(
    tmp_path: Path, worker: Path, scontrol: Path, setup: list[str]
) -> None:
    path = f"{scontrol}:/usr/bin:/bin"
    assert run_script(tmp_path / "run", SlurmOptions(python=str(worker), setup=setup), PATH=path) == 143
    assert (scontrol / "asked").read_text() == "requeue 7\n"
    assert f"worker {'1' if setup else ''}" in (tmp_path / "run" / "worker.log").read_text().splitlines()


def test_a_setup_that_fails_refuses_the_run(tmp_path: Path) -> None:
    run: RunFolder = make_run()
    with pytest.raises((SetupError, RunFailedError), match="module load python"):
        SlurmEngine(SlurmOptions(setup=["module load python"])).start([run], 1)
