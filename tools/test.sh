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
# cuda.core, where installed, keeps its type stubs in a folder per CUDA version, where no type
# checker looks, and re-exports its memory classes in a way that none follows.
cuda=$(.venv/bin/python -c 'import importlib.util as u
print(next(iter(u.find_spec("cuda").submodule_search_locations)) if u.find_spec("cuda") else "")')
rm -rf build/types-cuda
if [ -d "$cuda/core/cu13" ]; then
  mkdir -p build/types-cuda/cuda/core
  ln -s "$cuda"/core/cu13/* build/types-cuda/cuda/core
  rm build/types-cuda/cuda/core/__init__.py
  { cat "$cuda/core/__init__.py"; printf 'from cuda.core._memory.%s import *\n' _buffer _legacy; } \
    > build/types-cuda/cuda/core/__init__.py
fi
MYPYPATH=build/types:build/types-cuda .venv/bin/mypy -p draftgraph.graphs -p draftgraph.export \
  -p draftgraph.runtime -p draftgraph.tools

say "pytest"
.venv/bin/python -m pytest "$@"
