#!/usr/bin/env bash
# Sets up .venv and runs every check. Usage: bash tools/test.sh [pytest arguments]
# DRAFTGRAPH_TEST_EXTRAS=tensorrt-rtx also installs TensorRT-RTX (300 MB) and builds engines with it.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/setup_venv.sh
setup_venv "cpu,test${DRAFTGRAPH_TEST_EXTRAS:+,$DRAFTGRAPH_TEST_EXTRAS}"

say "ruff"
.venv/bin/ruff check .
.venv/bin/ruff format --check .

say "mypy"
# The packages live in top-level folders; the type checker sees them under their import names.
mkdir -p build/types/draftgraph
for package in graphs export runtime tools; do
  ln -sfn "../../../$package" "build/types/draftgraph/$package"
done
MYPYPATH=build/types .venv/bin/mypy -p draftgraph.graphs -p draftgraph.export \
  -p draftgraph.runtime -p draftgraph.tools

say "pytest"
.venv/bin/python -m pytest "$@"
