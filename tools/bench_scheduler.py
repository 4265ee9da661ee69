"""Time of one scheduling decision: `python -m draftgraph.tools.bench_scheduler`."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from ..runtime.costs import CostTable
from ..runtime.scheduler import POLICIES, ScheduleInput

REQUESTS, GAMMA = (64, 256), 7


def staircase(requests: int, gamma: int, step: int = 64) -> CostTable:
    """10 ms and 1 ms per started block of `step` tokens; padding costs a little. Made up."""
    tokens = range(requests, requests * (gamma + 1) + 1)
    cells = {(requests, n): 10.0 + -(-n // step) for n in tokens}
    return CostTable(cells, {requests: 2.0}, pad_ms={requests: 1e-3})


def measure(
    requests: int, gamma: int = GAMMA, repeats: int = 2000
) -> dict[str, tuple[float, float]]:
    """policy -> median and fastest µs of a decision on random confidences."""
    rng = np.random.default_rng(0)
    costs = staircase(requests, gamma)
    inputs = [
        ScheduleInput(
            limits=np.full(requests, gamma),
            confidence=rng.beta(4, 1, (requests, gamma)).astype(np.float32),
            threshold=np.full(requests, 0.5, np.float32),
            sampled=np.zeros(requests, bool),
            lagged=np.cumprod(rng.beta(4, 1, (requests, gamma)), axis=1),
            costs=costs,
        )
        for _ in range(50)
    ]
    times: dict[str, tuple[float, float]] = {}
    for name, policy in POLICIES.items():
        samples = []
        for i in range(repeats):
            start = time.perf_counter()
            policy(inputs[i % len(inputs)])
            samples.append(time.perf_counter() - start)
        times[name] = (1e6 * median(samples), 1e6 * min(samples))
    return times


def main() -> None:
    for requests in REQUESTS:
        print(f"R = {requests}, γ = {GAMMA}, µs per decision: median, fastest")
        for name, (typical, fastest) in measure(requests).items():
            print(f"  {name:12} {typical:7.1f} {fastest:7.1f}")


if __name__ == "__main__":
    main()
