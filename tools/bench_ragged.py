"""Whether a step's cost follows its tokens: `python -m draftgraph.tools.bench_ragged BUNDLE`.

The same number of tokens, spread evenly over the requests and unevenly, in turns.
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

CONTEXT, PASSES, WARM_UP = 256, 15, 2


def shapes(requests: int, gamma: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """N -> widths of an even and of the most uneven split: some verify γ + 1 tokens, the rest 1."""
    totals = [requests + wide * gamma for wide in range(1, requests)]
    return {
        n: (split(requests, n, gamma, uneven=False), split(requests, n, gamma, uneven=True))
        for n in totals
    }


def measure(engine: Engine, requests: int) -> dict[int, tuple[float, float]]:
    """N -> median ms of the even and of the uneven target step."""
    backend, gamma = engine.backend, engine.gamma
    cases = shapes(requests, gamma)
    backend.reset(requests)
    backend.reserve(requests, CONTEXT + gamma + 1, 0)
    past = np.full(requests, CONTEXT)
    words = np.random.default_rng(0).integers(0, engine.bundle.target.vocab_size, 999)
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    for i in range(WARM_UP + PASSES):
        for tokens, splits in cases.items():
            for kind in ((0, 1), (1, 0))[i % 2]:
                batch = TokenBatch(words[:tokens], splits[kind], past)
                start = time.perf_counter()
                backend.target(batch)
                if i >= WARM_UP:
                    times[tokens, kind].append(1e3 * (time.perf_counter() - start))
    backend.reset(1)
    return {n: (statistics.median(times[n, 0]), statistics.median(times[n, 1])) for n in cases}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m draftgraph.tools.bench_ragged BUNDLE")
    engine = Engine.load(sys.argv[1])
    print("requests  tokens  even ms  uneven ms  ratio")
    for requests in (2, 4, 8):
        for tokens, (even, uneven) in measure(engine, requests).items():
            print(f"{requests:8} {tokens:7} {even:8.1f} {uneven:10.1f} {uneven / even:6.2f}")


if __name__ == "__main__":
    main()
