"""How many drafted tokens each request verifies.

A policy is a pure function of arrays, decided before the target runs. It may look at the
confidence of slot k only through tokens before k (c_k depends on x_{<k}), and it may cut a block
only by a rule in which whether slot k is verified depends on c_1 .. c_k alone: then the decision
never looks at the token it drops, and the output distribution stays exactly the target's (DSpark,
arXiv 2607.05147, appendix A shows what goes wrong otherwise).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# (confidence [R, γ] or None without a confidence head, limits [R], threshold [R]) -> lengths [R]
Policy = Callable[[np.ndarray | None, np.ndarray, np.ndarray], np.ndarray]


def full(confidence: np.ndarray | None, limits: np.ndarray, threshold: np.ndarray) -> np.ndarray:
    """Verify every drafted token. Exact: the length does not depend on the draft at all."""
    return limits


def by_threshold(
    confidence: np.ndarray | None, limits: np.ndarray, threshold: np.ndarray
) -> np.ndarray:
    """Cut before the first slot whose confidence is below the threshold (DeepSpec's rule).

    Exact: slot k is dropped because of c_1 .. c_k, which are functions of x_{<k} only. Without a
    confidence head nothing is cut.
    """
    if confidence is None:
        return limits
    below = confidence < threshold[:, None]
    first = np.where(below.any(axis=1), below.argmax(axis=1), confidence.shape[1])
    return np.minimum(first, limits)


POLICIES: dict[str, Policy] = {"full": full, "threshold": by_threshold}
