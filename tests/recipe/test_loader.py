"""Files, bases and names."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsebp_cli.errors import RecipeError
from sparsebp_cli.recipe import Recipe, load_recipe
from tests.recipe.conftest import SMALL

Refuse = Callable[..., str]
Read = Callable[..., Recipe]


def refuse_file(file: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_mappings_are_merged_and_lists_replaced(read: Read) -> None:
    Path("b.yaml").write_text(
        SMALL
        + "training: {max_steps: 7, seed: 3}\nbackward: {exclude: [a, b]}\n"
        + "policy: {name: topk, keep: 0.5}\ntarget: {threads: 2}\n"
    )
    recipe = read(
        "base: b.yaml\ntraining: {seed: 4}\nbackward: {exclude: [c]}\npolicy: {name: random, keep: 1}\ntarget: local\n"
    )
    assert (recipe.training.max_steps, recipe.training.seed) == (7, 4)
    assert recipe.backward.exclude == ["c"]
    assert [entry.name for entry in recipe.policy] == ["random"]
    assert recipe.policy[0].options["keep"] == 1.0
    assert recipe.target.threads == 2


def test_a_base_lies_beside_the_recipe_not_in_the_working_directory(tmp_path: Path, read: Read) -> None:
    folder = tmp_path / "elsewhere"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()  # in a repository a base may lie above, too
    (folder / "b.yaml").write_text(SMALL)
    (folder / "deep" / "top.yaml").write_text("base: ../b.yaml\n")
    assert load_recipe(folder / "deep" / "top.yaml").model.name == "austen-llama"


def test_a_name_is_that_of_the_file_and_never_that_of_the_base(read: Read) -> None:
    Path("b.yaml").write_text(SMALL)
    assert read("base: b.yaml").name == "r"
    assert read("base: b.yaml\nname: mine").name == "mine"
    Path("two words.yaml").write_text("base: b.yaml")
    assert refuse_file(Path("two words.yaml")).startswith("two words.yaml:1:1: name: missing (Name of the run")


def test_an_error_in_the_base_names_the_base(refuse: Refuse) -> None:
    Path("b.yaml").write_text(SMALL + "training: {max_steps: x}\n")
    assert refuse("base: b.yaml\n").startswith("b.yaml:5:23: training.max_steps: ")
    assert refuse("base: b.yaml\ntraining: {seed: x}\n").startswith("r.yaml:2:18: training.seed: ")
    Path("b.yaml").write_text("a: *x\n")
    assert refuse("base: b.yaml\n").startswith("b.yaml:1:4: a: an alias")
    Path("b.yaml").write_text("")
    assert refuse("base: b.yaml\n").startswith("b.yaml:1:1: the file is empty")


def test_a_base_has_no_base_and_no_recipe_is_its_own(refuse: Refuse) -> None:
    Path("b.yaml").write_text("base: c.yaml\n")
    expected = "b.yaml:1:1: base: a base recipe must not have a base of its own: remove this key"
    assert refuse("base: b.yaml\n") == expected
    assert refuse("base: r.yaml\n") == expected.replace("b.yaml", "r.yaml")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("3", "must be the path of a recipe, got 3 (a number)"),
        ("", "must be the path of a recipe, got nothing"),
        ("''", "must be the path of a recipe, got '' (text)"),
        ("[a]", "must be the path of a recipe, got a list"),
        ("quikstart.yaml", "quikstart.yaml: no such file; did you mean quickstart.yaml?"),
        ("..", "must be the path of a recipe that ends in .yaml or .yml, got '..'"),
        ("/dev/zero", "must be the path of a recipe that ends in .yaml or .yml, got '/dev/zero'"),
        ("b.yaml/c.yaml", "b.yaml/c.yaml: cannot be read: not a directory"),
        ("../b.yaml", "must be in the folder of r.yaml or below it, got '../b.yaml'"),
        ("/etc/b.yaml", "must be in the folder of r.yaml or below it, got '/etc/b.yaml'"),
        ("link.yaml", "must be in the folder of r.yaml or below it, got 'link.yaml'"),
        ("loop.yaml", "must be in the folder of r.yaml or below it, got 'loop.yaml'"),
        ("fifo.yaml", "fifo.yaml: cannot be read: is not a regular file"),
    ],
)
def test_a_base_that_cannot_be_read_is_named_where_it_is_given(refuse: Refuse, value: str, expected: str) -> None:
    Path("b.yaml").write_text(SMALL)
    Path("quickstart.yaml").write_text(SMALL)
    Path("link.yaml").symlink_to("/etc/passwd")
    Path("loop.yaml").symlink_to("loop.yaml")
    os.mkfifo("fifo.yaml")
    line = refuse(f"base: {value}")
    assert line.startswith("r.yaml:1:")
    assert line.endswith(f": base: {expected}")


SECRET = "hf_CANARYabcdefghijklmnop123456"


@pytest.mark.promise("R33")
@pytest.mark.parametrize("text", [SECRET, f"[{SECRET}]", f"- {SECRET}", f"'{SECRET}'", f"machine x\npassword {SECRET}"])
@pytest.mark.parametrize("name", ["token", "token.yaml", "token.json"])
def test_the_content_of_what_is_no_recipe_is_never_quoted(refuse: Refuse, name: str, text: str) -> None:
    Path(name).write_text(text)
    assert SECRET not in refuse(f"base: {name}\n")
    assert SECRET not in refuse_file(Path(name))


# Texts that are no mapping: of tokens, keys, logins, and what YAML makes of them.
SHAPES = (
    "{}", "- {}", "'{}", "machine host login me password {}", "[{}, {{", "-----BEGIN KEY-----\n{}\n-----END KEY-----",
    "\t{}", "%{}", "&{} x", "*{}", "!!python/{} x", "[!{} x]", "- &{} x", "|\n  {}", "@{}", "{}\n---\n- x",
)  # fmt: skip


@pytest.mark.chaos
@pytest.mark.promise("R33")
def test_no_file_of_secrets_is_quoted_however_a_recipe_names_it(
    refuse: Refuse, tmp_path_factory: pytest.TempPathFactory, record_property
) -> None:
    chance, outside, num_trials = random.Random(33), tmp_path_factory.mktemp("outside"), 1000
    Path("below").mkdir()
    for trial in range(num_trials):
        secret = f"hf_CANARY{chance.getrandbits(96):024x}"
        text = chance.choice(SHAPES).format(secret)
        folder = chance.choice((Path(), Path("below"), outside))
        file = folder / chance.choice(("token", "token.yaml", ".netrc", "id_rsa", "secret.yml", "a b.yaml"))
        file.write_text(text)
        link = Path("below", f"link{trial}.yaml")
        link.symlink_to(file.absolute())
        named = chance.choice((str(file), f"./{file}", str(file.absolute()), str(link), f"below/../{file}"))
        told = refuse(f"base: {json.dumps(named)}\n")
        assert secret not in told
        assert secret not in refuse_file(file)
        file.unlink()
        link.unlink()
    record_property("trials", num_trials)


def test_a_section_emptied_over_a_base_is_an_error(refuse: Refuse) -> None:
    Path("b.yaml").write_text(SMALL + "training: {max_steps: 7}\n")
    assert refuse("base: b.yaml\ntraining:\n") == "r.yaml:2:10: training: must be a mapping, got nothing"


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "quick.yaml").write_text(SMALL)
    assert refuse_file(tmp_path) == f"{tmp_path}: cannot be read: is a folder, not a file"
    assert refuse_file(pipe) == f"{pipe}: cannot be read: is not a regular file"
    assert refuse_file(tmp_path / "quik.yml").endswith(
        f"quik.yml: no such file; did you mean {tmp_path / 'quick.yaml'}?"
    )
    assert refuse_file(tmp_path / "absent" / "x.yaml").endswith("x.yaml: no such file")
    assert refuse_file(Path("a\0b")) == "a\\x00b: cannot be read: embedded null byte"
    assert refuse_file(Path("x" * 300)).endswith(": cannot be read: file name too long")
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    assert refuse_file(loop).startswith(f"{loop}: cannot be read: ")


def test_a_resolved_recipe_survives_json(read: Read) -> None:
    recipe = read(SMALL + "policy: [{name: topk, keep: 0.1}]\nmeasure: {probe_every: null}\n")
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_a_password_in_the_tracking_uri_is_refused_and_not_repeated(refuse: Refuse) -> None:
    text = refuse(SMALL + 'tracking: {uri: "https://me:canary@host.invalid"}\n')
    assert "tracking.uri: contains a user name or password" in text
    assert "canary" not in text
