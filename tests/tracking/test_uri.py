"""Which store is meant, and that its password is never shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp_cli.errors import TrackingError
from sparsebp_cli.tracking import mask, resolve_uri, ui_command
from sparsebp_cli.tracking.uri import artifact_root, one_line


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
    for uri in ("sqlite:////a/b@c/mlflow.db", "http://127.0.0.1:5000", "https://host/a@b"):
        assert mask(uri) == uri


def test_an_error_of_the_store_becomes_one_masked_line() -> None:
    assert one_line(ValueError("\n  no route to http://me:secret@host/x \nmore")) == "no route to http://***@host/x"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 9999))) == 300


def test_artifacts_lie_beside_a_sqlite_file_and_never_in_the_working_folder(home_folder: Path) -> None:
    assert artifact_root("sqlite:////data/x/mlflow.db") == Path("/data/x/mlartifacts")
    assert artifact_root("postgresql://host/db") == home_folder / "mlartifacts"


def test_the_pages_of_a_server_are_its_own_and_a_password_is_not_put_on_a_command_line() -> None:
    with pytest.raises(TrackingError, match=r"open http://\*\*\*@host in a browser"):
        ui_command("http://me:secret@host")
    with pytest.raises(TrackingError) as caught:
        ui_command("postgresql://me:secret@host/db")
    assert "secret" not in str(caught.value)
