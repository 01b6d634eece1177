"""The recipes that ship, starter folders, and packages of policies: they are written, checked, and work."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from sparsebp_cli.cli import init as verb
from sparsebp_cli.cli.starter import collect_files, list_shipped, shipped, write_files
from sparsebp_cli.cli.starter.folder import describe_environment
from sparsebp_cli.cli.starter.package import make_package
from sparsebp_cli.errors import UsageError

from .conftest import Cli

ROOT = Path(__file__).parents[2]
TASKS = ("completion", "chat", "text", "classification", "glue")
LINE = 100


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file that every task can read."""
    file = tmp_path / "rows.jsonl"
    row: dict[str, object] = {"text": "a kind word", "label": "good", "prompt": "a kind", "completion": " word"}
    row |= {"sentence1": "a kind", "sentence2": "word"}
    row["messages"] = [{"role": "user", "content": "a kind"}, {"role": "assistant", "content": "word"}]
    file.write_text("".join(f"{json.dumps(row | {'text': f'a kind word {n} ' * 8})}\n" for n in range(400)))
    return file


def test_every_recipe_of_the_checkout_ships_and_says_in_one_line_what_it_shows(call: Cli) -> None:
    lines = [line.rstrip() for line in call("recipes").stdout.splitlines()]
    files = {file.relative_to(ROOT / "recipes").with_suffix("").as_posix() for file in ROOT.glob("recipes/**/*.yaml")}
    listed = [line.split()[0] for line in lines[3:-2] if line.split()]
    assert listed == [recipe.short_name for recipe in list_shipped()]
    assert files == {recipe["name"] for recipe in json.loads(call("recipes", "-o", "json").stdout)["recipes"]}
    assert listed[:4] == ["python-docs", "quickstart", "quickstart-dense", "topk-rows"], "those to begin with"
    assert max(map(len, lines)) <= LINE


@pytest.mark.parametrize("name", [recipe.name for recipe in list_shipped()])
def test_a_copied_recipe_brings_its_base_and_is_valid(call: Cli, tmp_path: Path, name: str) -> None:
    assert call("recipes", "copy", name, "here").returncode == 0
    for file in (tmp_path / "here").glob("*.yaml"):
        done = call("validate", file)
        fetched = "sparsebp fetch" in file.read_text(encoding="utf-8")
        assert "get it: `sparsebp fetch" in done.stderr if fetched else done.returncode == 0, file


def test_a_recipe_that_is_in_the_way_is_not_overwritten(call: Cli, tmp_path: Path) -> None:
    assert call("recipes", "copy", "topk-rows").returncode == 0
    assert call("recipes", "copy", "random-rows").returncode == 0  # the base is there already, unchanged
    (tmp_path / "python-docs.yaml").write_text("version: 1\n")
    done = call("recipes", "copy", "lora", ".")
    assert (done.returncode, done.stdout) == (2, "")
    assert "python-docs.yaml exists with other content; nothing was written" in done.stderr
    assert not (tmp_path / "lora.yaml").exists()


@pytest.mark.parametrize("typed", ["lora", "training/lora", "recipes/lora.yaml", "recipes/training/lora.yaml"])
def test_a_recipe_that_ships_is_named_as_in_the_list_or_as_it_lay_before(call: Cli, typed: str) -> None:
    done = call("run", typed, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "name: lora\n" in done.stdout


def test_a_file_of_ones_own_comes_before_a_recipe_that_ships(call: Cli, tmp_path: Path) -> None:
    (tmp_path / "lora").write_text(
        "version: 1\nname: mine\nmodel: {name: austen-llama}\ndataset: {name: python-docs}\n"
    )
    assert ": mine: model" in call("validate", "lora").stdout


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "lorra",
            "there is no file 'lorra', and SparseBP contains no recipe of this name; `sparsebp recipes` lists its "
            "recipes; did you mean lora?",
        ),
        ("lora.yaml", "lora.yaml: no such file"),
        ("mine/lora.yaml", "mine/lora.yaml: no such file"),
        ("recipes/lorra.yaml", "recipes/lorra.yaml: no such file"),
    ],
)
def test_a_name_that_is_neither_file_nor_recipe_is_refused(call: Cli, typed: str, said: str) -> None:
    done = call("run", typed, "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip() == f"error: {said}"


def test_names_without_a_folder_are_there_once() -> None:
    short = [recipe.short_name for recipe in list_shipped()]
    assert len(short) == len(set(short))


def test_a_package_without_recipes_says_where_it_looked(call: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "PLACES", (Path("/nowhere/recipes"),))
    assert "has no recipes; looked for /nowhere/recipes" in call("recipes").stderr


def test_recipes_of_the_wheel_come_before_those_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first.yaml").write_text("# One.\nversion: 1\nbase: second.yaml\n")
    (tmp_path / "second.yaml").write_text("# Two.\nversion: 1\n")
    monkeypatch.setattr(shipped, "PLACES", (tmp_path, ROOT / "recipes"))
    first = list_shipped()[0]
    assert (first.summary, list(collect_files(first))) == ("One.", ["first.yaml", "second.yaml"])


def test_a_copied_recipe_brings_its_chat_template_and_that_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("base: more/second.yaml\ndataset:\n  chat_template: own.jinja  # a remark\n")
    (tmp_path / "own.jinja").write_text("own")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "second.yaml").write_text("dataset:\n  chat_template: other.jinja\n")
    (tmp_path / "more" / "other.jinja").write_text("other")
    files = collect_files(shipped.ShippedRecipe("first", tmp_path / "first.yaml"))
    assert files["first.yaml"].startswith("base: second.yaml\n")
    assert (set(files), files["own.jinja"], files["other.jinja"]) == (
        {"first.yaml", "own.jinja", "second.yaml", "other.jinja"},
        "own",
        "other",
    )


@pytest.mark.parametrize("task", TASKS)
def test_every_recipe_of_a_starter_folder_is_valid(call: Cli, tmp_path: Path, rows: Path, task: str) -> None:
    data = "rows.jsonl"
    if task == "glue":  # which has its own splits
        data = "glue"
        (tmp_path / data).mkdir()
        for split in ("train", "validation"):
            shutil.copy(rows, tmp_path / data / f"{split}.jsonl")
    assert call("init", "mine", "--task", task, "--model", "austen-llama", "--data", data).returncode == 0
    recipes = sorted((tmp_path / "mine").glob("[!t]*.yaml"))
    assert len(recipes) == 2
    assert call("validate", *recipes).returncode == 0
    policies = [yaml.safe_load(file.read_text()).get("policy", "dense") for file in recipes]
    assert policies[0] == "dense" != policies[1]


@pytest.mark.parametrize(
    ("task", "rows", "given", "keys"),
    [
        (
            "chat",
            [{"conversations": [{"from": "human", "value": "a kind"}, {"from": "gpt", "value": "word"}]}],
            "",
            {
                "columns": {
                    "messages": "conversations",
                    "role": "from",
                    "content": "value",
                    "user": "human",
                    "assistant": "gpt",
                }
            },
        ),
        (
            "chat",
            [{"instruction": "say", "input": "a", "output": "word"}],
            "",
            {"columns": {"user": ["instruction", "input"], "assistant": "output"}},
        ),
        ("chat", [{"q": "say", "a": "word"}], "q,a", {"columns": {"user": "q", "assistant": "a"}}),
        ("chat", [{"q": "say", "a": "word"}], "q, a", {"columns": {"user": "q", "assistant": "a"}}),
        ("chat", [{"q": "say", " a": "word"}], "q, a", {"columns": {"user": "q", "assistant": " a"}}),
        (
            "completion",
            [{"question": "say", "reply": " word"}],
            "",
            {"columns": {"prompt": "question", "completion": "reply"}},
        ),
        (
            "classification",
            [{"body": "word", "kind": 1}, {"body": "a", "kind": 2}],
            "body,kind",
            {"columns": {"text": "body", "label": "kind"}},
        ),
    ],
)
def test_columns_of_usual_names_are_found_and_others_given(
    call: Cli, tmp_path: Path, task: str, rows: list[dict[str, object]], given: str, keys: dict[str, object]
) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(rows * 40))
    done = call("init", "mine", "--task", task, "--data", "rows.json", *(["--columns", given] if given else []))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "mine" / "dense.yaml").read_text()
    assert keys.items() <= yaml.safe_load(text)["dataset"].items()
    assert ("# found in the data" in text) == (not given)


def test_rows_with_images_are_refused_before_a_folder_is_written(call: Cli, tmp_path: Path) -> None:
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what is it?"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "a cat"}]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 40)
    said = call("init", "mine", "--task", "chat", "--data", "rows.jsonl").stderr
    assert "line 1: column 'messages', message 0: has a part of type 'image'; recipes train only on text" in said
    assert not (tmp_path / "mine").exists()


def test_the_folder_names_the_data_of_the_package_where_none_are_given(call: Cli, tmp_path: Path) -> None:
    for task, data in (("completion", "cmudict"), ("chat", "cmudict"), ("text", "python-docs")):
        assert call("init", task, "--task", task).returncode == 0
        recipe = yaml.safe_load((tmp_path / task / "dense.yaml").read_text())
        assert (recipe["dataset"]["name"], recipe["dataset"]["eval_split"]) == (data, "test")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "init needs --task if there is no terminal; allowed: completion, chat, text, classification, glue"),
        (["--task", "classification"], "needs --data"),
        (
            ["--task", "completion", "--columns", "a"],
            "columns prompt and completion: only the completion is trained; got",
        ),
        (
            ["--task", "completion", "--data", "python-docs"],
            "python-docs has the columns text; for these columns, give --task text",
        ),
        (["--task", "text", "--model", "./none"], "model.name: no file or folder ./none"),
    ],
)
def test_a_wrong_request_is_one_line_and_leaves_nothing(
    call: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], text: str
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    before = sorted(tmp_path.iterdir())
    done = call("init", "mine", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr)
    assert text in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_files_of_a_starter_folder_are_valid_and_targets_passed_over(call: Cli, tmp_path: Path) -> None:
    call("init", "sums", "--task", "completion")
    done = call("validate", *sorted((tmp_path / "sums").glob("*.yaml")))
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr, len(lines)) == (0, "", 3)
    assert lines[0].endswith("targets.yaml: it defines targets and is not a recipe")


def test_a_folder_with_something_in_it_is_refused(call: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for words in (["init", "mine", "--task", "text"], ["new", "policy", "peak-rows", "mine"]):
        done = call(*words)
        assert (done.returncode, "is not empty" in done.stderr) == (2, True)
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_closed_standard_input_is_no_terminal(call: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    done = call("init", "mine")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: init needs --task if there is no terminal")


def test_a_terminal_is_asked_for_what_is_missing(
    call: Cli, tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    asked: list[str] = []
    answers = iter(["classification", "austen-llama", "rows.jsonl"])

    def answer(question: str, **_: object) -> str:
        asked.append(question.split(maxsplit=1)[0])
        return next(answers)

    monkeypatch.setattr(verb.typer, "prompt", answer)
    assert call("init", "mine").returncode == 0
    assert asked == ["Task", "Model", "Data"]
    dataset = yaml.safe_load((tmp_path / "mine" / "dense.yaml").read_text())["dataset"]
    assert (dataset["format"], dataset["name"]) == ("classification", str(rows))


def test_the_commands_of_a_starter_folder_exist_and_name_its_files(
    call: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("init", "mine", "--task", "completion").returncode == 0
    text = (tmp_path / "mine" / "README.md").read_text()
    commands = [shlex.split(line) for line in re.findall(r"^\$ (sparsebp .*)$", text, re.MULTILINE)]
    assert {words[1] for words in commands} == {"validate", "run", "compare", "targets"}
    for words in commands:
        named = [word for word in words if word.endswith(".yaml")]
        assert all((tmp_path / "mine" / word).is_file() for word in named)
    assert "policy=[{name: mine-rows, keep: 0.25}]" in text
    project = tomllib.loads((tmp_path / "mine" / "policy" / "pyproject.toml").read_text())["project"]
    assert '"policy[test]"' in text
    assert project["optional-dependencies"]["test"] == ["pytest"]
    monkeypatch.setenv("SPARSEBP_TARGETS", str(tmp_path / "mine" / "targets.yaml"))
    assert "here" in call("targets").stdout


def test_a_folder_names_the_environment_that_its_commands_are_of(tmp_path: Path) -> None:
    (tmp_path / "my env" / "bin").mkdir(parents=True)
    prefix = tmp_path / "my env"
    assert describe_environment(prefix, is_virtual=True) == "", "conda's have no such script"
    (prefix / "bin" / "activate").touch()
    assert f"$ . '{prefix}/bin/activate'\n" in describe_environment(prefix, is_virtual=True)
    assert describe_environment(prefix, is_virtual=False) == ""


def test_a_new_package_installs_and_its_policy_keeps_the_contract(call: Cli, cli: Cli, tmp_path: Path) -> None:
    done = call("new", "policy", "peak-rows")
    assert done.returncode == 0, done.stderr
    folder, site = tmp_path / "sparsebp-peak-rows", tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", site, folder], check=True)
    listed = cli("policies", "peak-rows", real=True, PYTHONPATH=str(site))
    assert "peak-rows (GradientSelector, sparsebp-peak-rows 0.1.0): Keep the token rows" in listed.stdout
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tested = subprocess.run(pytest_command, capture_output=True, text=True, check=False, cwd=folder)
    assert "3 passed" in tested.stdout, tested.stdout


def test_a_new_package_asks_for_the_release_that_the_plugins_ask_for() -> None:
    """It imports the names that theirs do, which are tested together; nobody tests it with an older release."""
    files = [make_package("peak-rows")["pyproject.toml"]]
    files += [file.read_text(encoding="utf-8") for file in (ROOT / "plugins").glob("*/pyproject.toml")]
    asked = [tomllib.loads(text)["project"]["dependencies"][0] for text in files]
    assert len(asked) > 5
    assert len(set(asked)) == 1, asked


@pytest.mark.parametrize(("name", "text"), [("Peak", "lower-case words"), ("topk", "a policy 'topk' of sparsebp")])
def test_a_name_that_cannot_be_a_new_policy_is_refused(call: Cli, tmp_path: Path, name: str, text: str) -> None:
    done = call("new", "policy", name)
    assert (done.returncode, text in done.stderr) == (2, True)
    assert not (tmp_path / f"sparsebp-{name}").exists()


@pytest.mark.parametrize(
    ("task", "row", "said"),
    [
        ("completion", {"query": "a", "reply_text": "b"}, "name the columns by --columns PROMPT,COMPLETION"),
        ("completion", {"instruction": "a", "input": "b", "output": "c"}, "for these columns, give --task chat"),
        ("completion", {"prompt": "a", "chosen": "b", "rejected": "c"}, "recipes do not train on preferences: use trl"),
        ("chat", {"query": "a", "reply_text": "b"}, "name the columns by --columns USER,ASSISTANT"),
    ],
)
def test_of_columns_with_other_names_the_option_is_told(
    call: Cli, tmp_path: Path, task: str, row: dict[str, str], said: str
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(f"{json.dumps(row)}\n" * 20)
    done = call("init", tmp_path / "new", "--task", task, "--data", data)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_column_that_the_first_rows_lack_is_found(call: Cli, tmp_path: Path) -> None:
    rows: list[dict[str, str]] = [{"instruction": f"Say {number}.", "output": "it"} for number in range(60)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, rows[0] | {"input": "now"}]))
    done = call("init", tmp_path / "new", "--task", "chat", "--data", data)
    assert done.returncode == 0, done.stderr
    recipe = (tmp_path / "new" / "dense.yaml").read_text()
    assert "columns: {user: [instruction, input], assistant: output}" in recipe


def test_a_pipe_with_the_name_of_a_file_is_told_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.yaml")
    with pytest.raises(UsageError, match=r"recipe\.yaml is not a regular file"):
        write_files(tmp_path, {"recipe.yaml": "name: x\n"})
