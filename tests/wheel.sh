#!/usr/bin/env bash
# Builds the source distribution and from it the wheel, installs the wheel into an environment of its own, and runs the
# quickstart with a few steps from a folder outside of the checkout. No network is used: the build backend and what
# SparseBP requires are those of .venv.
#
# Isolated: SparseBP's own code, data, metadata and entry points, which come from the wheel alone. Not isolated: its
# requirements. The new environment finds them in .venv's site-packages, whose .pth files, the checkout's among them, are
# not read there. So this finds files that the wheel lacks, not a requirement that pyproject.toml lacks.
#
# With BARE=1 the requirements are installed as well, from the package index: then nothing comes from .venv but the
# build backend. It takes minutes and a network, and says how long each step took.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
python=$checkout/.venv/bin/python
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

offline=(--quiet --no-index --no-deps --no-build-isolation)
timed() {
  local start=$SECONDS
  "$@"
  echo "$((SECONDS - start)) s: ${*:1:6}"
}

install() {
  if [ "${BARE:-}" ]; then python -m pip install --quiet "$@"; else python -m pip install "${offline[@]}" "$@"; fi
}

(cd "$checkout" && "$python" -m hatchling build --target sdist --directory "$folder/dist")
"$python" -m pip wheel "${offline[@]}" --wheel-dir "$folder/dist" "$folder"/dist/sparsebp-*.tar.gz
"$python" -m venv "$folder/venv"
site=$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [ "${BARE:-}" ]; then
  timed "$folder/venv/bin/python" -m pip install --quiet ${PIP_OPTIONS:-} "$folder"/dist/sparsebp-*.whl pytest
else
  "$folder/venv/bin/python" -m pip install --quiet --no-index --no-deps "$folder"/dist/sparsebp-*.whl
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/requirements_of_the_checkout.pth"
fi

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
if [ "${BARE:-}" ]; then
  timed sparsebp quickstart
  timed sparsebp init first --task completion
fi
few=(--set training.max_steps=4 --set training.warmup_steps=1 --set measure.eval_every=2 --set measure.probe_every=2
  --set measure.warmup_steps=1 --set checkpoint.every=2)
sparsebp quickstart "${few[@]}" --ids ids
sparsebp compare $(cat ids) --html report.html
diff -r "$site/sparsebp_cli/cli/starter/recipes" "$checkout/recipes"
sparsebp recipes
sparsebp recipes copy topk-rows copied
sparsebp validate copied/*.yaml

sparsebp new policy peak-rows
install ./sparsebp-peak-rows
python -m pytest -q sparsebp-peak-rows

sparsebp init study --task completion
cd study
sparsebp validate dense.yaml lossless.yaml
sparsebp run dense.yaml lossless.yaml "${few[@]}" --ids ids
sparsebp compare $(cat ids) --html report.html
install ./policy
python -m pytest -q policy
sparsebp run dense.yaml --name study-rows --set "policy=[{name: study-rows, keep: 0.25}]" "${few[@]}" --ids rows
# Nothing but transformers reads the model.
python -c 'import sys, transformers as t; t.AutoModelForCausalLM.from_pretrained(sys.argv[1])' "$SPARSEBP_HOME/runs/$(cat rows)/model"
