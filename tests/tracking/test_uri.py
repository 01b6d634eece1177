"""Which store is meant, and that its password is never shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp_cli.errors import RecipeError, TrackingError
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.run.visible import mask
from sparsebp_cli.tracking import describe_pages, resolve_uri
from sparsebp_cli.tracking.store import artifact_root, one_line


def test_the_recipe_comes_before_the_environment_and_that_before_the_default(
    monkeypatch: pytest.MonkeyPatch, home_folder: Path
) -> None:
    assert resolve_uri(None) == f"sqlite:///{home_folder}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert resolve_uri(None) == "http://tracking:5000"
    assert resolve_uri("postgresql+psycopg://host/db") == "postgresql+psycopg://host/db"


@pytest.mark.parametrize(
    "uri", ["./mlruns", "/abs/mlruns", "file:///abs/mlruns", "ftp://host/x", "mlruns", "://", "sqlite:/x", "C:\\runs"]
)
def test_folders_and_unknown_schemes_are_refused_in_one_line(uri: str) -> None:
    with pytest.raises(TrackingError) as caught:
        resolve_uri(uri)
    assert str(caught.value).startswith("tracking.uri must be a server (http, https) or a database (sqlite")
    assert repr(uri) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("uri", ["sqlite:///mlflow.db", "sqlite://", "sqlite:///"])
def test_a_sqlite_file_that_depends_on_the_working_folder_is_refused(uri: str) -> None:
    with pytest.raises(TrackingError, match="must name an absolute file"):
        resolve_uri(uri)


WORDS = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=6, max_size=20).map(lambda x: "Zq" + x)


@given(WORDS, WORDS)
def test_no_password_survives_masking(user: str, password: str) -> None:
    for uri in (
        f"https://{user}:{password}@host:5000/path",
        f"postgresql://{user}:{password}@host/db?sslmode=require",
        f"postgresql://host/db?user=x&password={password}&sslpassword={password}",
        f"mysql+pymysql://{user}:p@{password}@host/db",
        f"https://host/?api_key={password}&token={password}",
    ):
        shown = mask(f"cannot reach {uri} now")
        assert password not in shown
        assert "host" in shown
        assert shown.startswith("cannot reach ")


def test_a_store_without_a_password_is_shown_as_it_is() -> None:
    for uri in (
        "sqlite:////a/b@c/mlflow.db",
        "http://127.0.0.1:5000",
        "https://host/a@b",
        "postgresql://host:5432/db?sslmode=require&connect_timeout=5",
        "num_tokens=128 and eos_token: </s>",
    ):
        assert mask(uri) == uri


HIDDEN = [
    "http://bob:Zq1/w@h", "http://bob:a/Zq1@h", "http://bob:a@Zq1/b@h", "http://bob:80/Zq1@h", "http://bob:?Zq1@h:5000/x",
    "http://Zq1@h", "http://:Zq1@h", "HTTP://BOB:Zq1@H", "postgresql://h/d?user=a&password=Zq1",
    "postgresql://h/d?PASSWORD=Zq1", "postgresql://h/d?sslpassword=Zq1&x=1", "postgresql://h/d?pass%77ord=Zq1",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BPWD%3DZq1", "mssql://h/d?x=1;PWD=Zq1;y=2", "https://h/?token=Zq1",
    "https://h/?access_token=Zq1", "https://h/?api_key=Zq1", "https://h/?sig=Zq1", "https://h/?X-Amz-Signature=Zq1",
    "postgresql://h/d?options=a&passphrase=Zq1", "host=h password='Zq1 x' dbname=d", "host=h password = Zq1",
    "Authorization: Bearer Zq1aaaaaaaaa", "MLFLOW_TRACKING_TOKEN=Zq1",
]  # fmt: skip


@pytest.mark.parametrize("text", HIDDEN)
def test_one_function_hides_every_form_of_password(text: str) -> None:
    for said in (text, f"error: {text} is away", f"({text})\n{text}"):
        assert "Zq1" not in mask(said)
        assert mask(mask(said)) == mask(said)


def test_masking_takes_time_in_proportion_to_the_text() -> None:
    import time

    start = time.process_time()
    for hostile in ("://" * 100_000, "://" + ":" * 300_000, "a=" * 150_000, "token" * 60_000, "Bearer " * 50_000):
        mask(hostile)
    assert time.process_time() - start < 20  # CPU seconds; quadratic would be hours


@pytest.mark.parametrize("uri", [text for text in HIDDEN if "://" in text and not text.startswith("error")])
def test_a_recipe_with_a_password_in_its_address_is_refused_without_repeating_it(uri: str, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(
        f"version: 1\nmodel: {{name: austen-llama}}\ndataset: {{name: austen}}\ntracking:\n  uri: {uri!r}\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert "tracking.uri: contains a user name or password" in str(caught.value)
    assert "Zq1" not in str(caught.value)


def test_an_error_of_the_store_becomes_one_masked_line() -> None:
    assert one_line(ValueError("\n  no route to http://me:secret@host/x \nmore")) == "no route to http://***@host/x"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 9999))) == 300


def test_artifacts_lie_beside_a_sqlite_file_and_never_in_the_working_folder(home_folder: Path) -> None:
    assert artifact_root("sqlite:////data/x/mlflow.db") == Path("/data/x/mlartifacts")
    assert artifact_root("postgresql://host/db") == home_folder / "mlartifacts"


def test_the_pages_of_a_store_are_named_without_its_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mlflow.db"
    for uri, line in {
        "http://me:secret@host": "MLflow's pages: http://***@host",
        "postgresql://me:secret@host/db": (
            "MLflow's pages: mlflow server --port 5000 --allowed-hosts 127.0.0.1:5000,localhost:5000 --workers 1 "
            "--backend-store-uri 'postgresql://***@host/db'"
        ),
        f"sqlite:///{file}": "",
        "file:./mlruns": "",
    }.items():
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert describe_pages() == line
    file.touch()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{file}")
    assert describe_pages().endswith(f" --backend-store-uri sqlite:///{file}")
