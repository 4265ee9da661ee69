"""Whether a step's cost follows its tokens: `python -m draftgraph.tools.bench_ragged BUNDLE`.

The same number of tokens, spread over the requests evenly, at random and as unevenly as possible,
in turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict

import numpy as np

from ..runtime import Engine
from ..runtime.backends.base import TokenBatch
from .profile import split

CONTEXTS, RANDOM, PASSES, WARM_UP = (128, 256), 4, 15, 2


def shapes(requests: int, gamma: int) -> dict[int, list[np.ndarray]]:
    """N -> widths of splits: even, `RANDOM` random ones, the most uneven.

    In the most uneven one some requests verify γ + 1 tokens and the rest 1.
    """
    rng = np.random.default_rng(0)
    cells = np.repeat(np.arange(requests), gamma)
    splits = {}
    for drafted in range(gamma, requests * gamma, gamma):
        tokens = requests + drafted
        chosen = [rng.permutation(cells)[:drafted] for _ in range(RANDOM)]
        splits[tokens] = [
            split(requests, tokens, gamma, uneven=False),
            *(1 + np.bincount(c, minlength=requests) for c in chosen),
            split(requests, tokens, gamma, uneven=True),
        ]
    return splits


def measure(engine: Engine, requests: int, context: int) -> dict[int, list[float]]:
    """N -> median ms of the target steps of `shapes` over so many cached rows."""
    backend, gamma = engine.backend, engine.gamma
    cases = shapes(requests, gamma)
    backend.reset(requests)
    backend.reserve(requests, context + gamma + 1, 0)
    past = np.full(requests, context)
    rng = np.random.default_rng(0)
    words = rng.integers(0, engine.bundle.target.vocab_size, 999)
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    for i in range(WARM_UP + PASSES):
        for tokens, splits in cases.items():
            for kind in rng.permutation(len(splits)).tolist():
                batch = TokenBatch(words[:tokens], splits[kind], past)
                start = time.perf_counter()
                backend.target(batch)
                if i >= WARM_UP:
                    times[tokens, kind].append(1e3 * (time.perf_counter() - start))
    backend.reset(1)
    return {
        n: [statistics.median(times[n, kind]) for kind in range(len(splits))]
        for n, splits in cases.items()
    }


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m draftgraph.tools.bench_ragged BUNDLE")
    engine = Engine.load(sys.argv[1])
    print("rows  requests  tokens  even ms  random/even, mean and largest  most uneven/even")
    for context in CONTEXTS:
        for requests in (2, 4, 8):
            for tokens, (even, *random, uneven) in measure(engine, requests, context).items():
                ratios = [ms / even for ms in random]
                print(
                    f"{context:4} {requests:9} {tokens:7} {even:8.1f} "
                    f"{statistics.mean(ratios):21.2f} {max(ratios):8.2f} {uneven / even:17.2f}"
                )


if __name__ == "__main__":
    main()
