#!/usr/bin/env bash
# Builds the wheel, installs it into an environment of its own, and runs the quickstart with a few steps from a folder
# outside of the checkout. No network is used: the build backend and what SparseBP requires are those of .venv.
#
# Isolated: SparseBP's own code, data, metadata and entry points, which come from the wheel alone. Not isolated: its
# requirements. The new environment finds them in .venv's site-packages, whose .pth files, the checkout's among them, are
# not read there. So this finds files that the wheel lacks, not a requirement that pyproject.toml lacks.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
python=$checkout/.venv/bin/python
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$python" -m pip wheel --quiet --no-index --no-deps --no-build-isolation --wheel-dir "$folder/dist" "$checkout"
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-index --no-deps "$folder"/dist/sparsebp-*.whl
site=$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/requirements_of_the_checkout.pth"

cp "$checkout"/recipes/quickstart.yaml "$checkout"/recipes/quickstart-dense.yaml "$folder"
cd "$folder"
unset PYTHONPATH VIRTUAL_ENV
export HOME=$folder SPARSEBP_HOME=$folder/home PATH=$folder/venv/bin:$PATH HF_HUB_OFFLINE=1 MLFLOW_DISABLE_TELEMETRY=true
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$checkout/pyproject.toml")
python - "$site" "$version" <<'PYTHON'
import sys
from pathlib import Path

import sparsebp_cli
from sparsebp_cli.policy import find_policies

site, version = sys.argv[1:]
assert Path(sparsebp_cli.__file__).is_relative_to(site), sparsebp_cli.__file__
assert sparsebp_cli.__version__ == version, sparsebp_cli.__version__
assert (Path(sparsebp_cli.__file__).parent / "py.typed").exists()
assert find_policies()["lossless"].problem == ""
PYTHON
few=(--set training.max_steps=4 --set training.warmup_steps=1 --set measure.eval_every=2 --set measure.probe_every=2
  --set measure.warmup_steps=1 --set checkpoint.every=2)
sparsebp run quickstart-dense.yaml quickstart.yaml "${few[@]}" --ids ids
sparsebp compare $(cat ids)
