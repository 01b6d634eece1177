"""What ships inside the package: whole, small, and with its licences."""

import hashlib
from pathlib import Path

import sparsebp_cli.source
from sparsebp_cli.source import bundled

DATA = Path(sparsebp_cli.source.__file__).parent / "data"
PROJECT = Path(__file__).parents[2]


def test_every_shipped_file_is_in_the_manifest_with_its_sha256_and_no_other():
    listed = {}
    for line in (DATA / "SHA256SUMS").read_text(encoding="ascii").splitlines():
        digest, _, name = line.partition("  ")
        listed[name] = digest
    found = {
        file.relative_to(DATA).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in DATA.rglob("*")
        if file.is_file() and file.name != "SHA256SUMS"
    }
    assert found == listed


def test_the_weights_have_at_most_eight_megabytes_and_all_data_at_most_ten():
    assert (bundled.austen_llama() / "model.safetensors").stat().st_size <= 8_000_000
    assert sum(file.stat().st_size for file in DATA.rglob("*") if file.is_file()) <= 10_000_000


def test_only_safetensors_hold_weights_and_no_setting_of_the_model_runs_other_code():
    suffixes = {file.suffix for file in bundled.austen_llama().iterdir()}
    assert suffixes == {".json", ".md", ".safetensors"}
    for file in bundled.austen_llama().glob("*.json"):
        assert "auto_map" not in file.read_text(encoding="utf-8")


def test_the_dictionary_s_licence_stands_beside_it_and_in_the_notice():
    licence = (DATA / "cmudict" / "LICENSE").read_text(encoding="utf-8")
    notice = (PROJECT / "NOTICE").read_text(encoding="utf-8")
    assert "Carnegie Mellon University" in licence
    assert "must retain the above copyright" in licence
    assert licence.strip() in notice
    assert "Jane Austen" in notice
