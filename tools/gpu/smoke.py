"""Greedy decoding of a few prompts on one provider, and the judgement of its tokens.

`python -m draftgraph.tools.gpu.smoke` runs `decode` in a process of its own, where a crash of a
native library ends that process only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ...export.tolerances import TIE
from ...graphs.errors import DraftgraphError
from ...runtime import Bundle, Engine, SamplingParams, load_bundle
from ...runtime.tokenizer import Tokenizer
from ..bench_steps import prefill_target
from .opening import Room, open_engine

NEW_TOKENS = 48
# A provider that takes longer is stuck; compiling large engines may take minutes.
SECONDS = 900.0
_MARK = "draftgraph-result:"
_TEXTS = ("The capital of France is", "def add(a, b):\n    return")


def prompts_of(bundle: Bundle) -> list[list[int]]:
    """Two short prompts; ids where the bundle has no tokenizer."""
    tokenizer = Tokenizer(bundle)
    if tokenizer.available:
        return [tokenizer.encode(text) for text in _TEXTS]
    ids = ([1, 2, 3], [7, 8, 9, 10, 11])
    return [[i % bundle.target.vocab_size for i in part] for part in ids]


def open_for(
    path: Path,
    provider: str,
    prompts: list[list[int]],
    *,
    build: bool = True,
    cache: Path | None = None,
) -> Engine:
    """An engine for these prompts, one at a time; options as in `open_engine`."""
    gamma = load_bundle(path, verify=False).draft.block_size
    rows = max(len(p) for p in prompts) + NEW_TOKENS + 4 * gamma
    return open_engine(path, provider, Room(-(-rows // 64) * 64), build=build, cache=cache)


def decode(engine: Engine, prompts: list[list[int]]) -> dict[str, Any]:
    """Speculative and plain greedy ids of every prompt, and what ran where. No stop ids."""
    start = time.perf_counter()
    params = SamplingParams(max_new_tokens=NEW_TOKENS, stop_ids=())
    fast = [engine.generate(p, params) for p in prompts]
    plain = [engine.generate(p, params, speculative=False) for p in prompts]
    return {
        "speculative": [o.token_ids for o in fast],
        "plain": [o.token_ids for o in plain],
        "verified": sum(o.stats.verified for o in fast),
        "accepted": sum(o.stats.accepted for o in fast),
        "decode_seconds": round(time.perf_counter() - start, 3),
        "fingerprint": engine.backend.fingerprint(),
        "report": engine.backend.report(),
    }


def decode_apart(
    path: Path, provider: str, prompts: list[list[int]], *, build: bool, cache: Path
) -> dict[str, Any]:
    """`open_for` and `decode` in another process. Raises `DraftgraphError` with what ended it."""
    call = {
        "path": str(path),
        "provider": provider,
        "prompts": prompts,
        "build": build,
        "cache": str(cache),
    }
    command = [sys.executable, "-m", __name__, json.dumps(call)]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise DraftgraphError(f"not done after {SECONDS:.0f} s; its process was ended") from None
    marked = [line for line in ran.stdout.splitlines() if line.startswith(_MARK)]
    if not marked:
        last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
        raise DraftgraphError(f"its process {ending(ran.returncode)}: {last}")
    answer: dict[str, Any] = json.loads(marked[-1].removeprefix(_MARK))
    if "error" in answer:
        raise DraftgraphError(answer["error"])
    return answer


def ending(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode < 0:
        return f"was ended by signal {-returncode}"
    return f"ended with code {returncode}"


def judge(
    reference: Engine, prompts: list[list[int]], expected: dict[str, Any], found: dict[str, Any]
) -> list[dict[str, Any]]:
    """Where the tokens of a provider part: speculative from plain, plain from the CPU's.

    reference: an engine on the CPU with the same bundle. expected: its `decode`. A difference is a
    near tie, and no mistake, where the reference's logits of both tokens are within rounding of
    its best.
    """
    pairs = (
        ("speculative from plain decoding", found["speculative"], found["plain"]),
        ("plain decoding from the CPU's", found["plain"], expected["plain"]),
    )
    differences = []
    for what, mine, theirs in pairs:
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if a != b:
                differences.append(
                    {"what": what, "prompt": i} | parting(reference, prompts[i], a, b)
                )
    return differences


def parting(engine: Engine, prompt: list[int], a: list[int], b: list[int]) -> dict[str, Any]:
    """The first difference of two continuations, judged by the logits of `engine` there."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if at is None:  # one is the start of the other: no logits explain that
        return {"position": min(len(a), len(b)), "behind": None, "near_tie": False}
    engine.backend.reset(1)
    prefill_target(engine, prompt + a[:at])
    logits = engine.backend.read("logits")[-1].astype(np.float64)
    behind = float(logits.max() - min(logits[a[at]], logits[b[at]]))
    return {
        "position": at,
        "ids": [a[at], b[at]],
        "behind": behind,
        "near_tie": behind <= TIE[engine.bundle.dtype],
    }


def main() -> None:
    """The other process: one call as JSON in, its answer as JSON out."""
    call = json.loads(sys.argv[1])
    prompts = call["prompts"]
    try:
        engine = open_for(
            Path(call["path"]),
            call["provider"],
            prompts,
            build=call["build"],
            cache=Path(call["cache"]),
        )
        answer = decode(engine, prompts)
    except Exception as error:  # whatever a native library raises
        kind = "" if isinstance(error, DraftgraphError) else f"{type(error).__name__}: "
        answer = {"error": f"{kind}{error}"}
    print(_MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
