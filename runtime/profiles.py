"""The ranges of every symbolic axis that TensorRT builds a graph for.

Shared by `draftgraph build` and by the providers of ONNX Runtime that build engines themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..graphs.errors import DraftgraphError
from .bundle import Bundle, TensorInfo

Range = tuple[int, int, int]  # smallest, optimised for, largest
# Feature rows kept for a request that skips drafting, before they go into the drafter's cache.
HOLD_ROWS = 64


@dataclass(frozen=True)
class Limits:
    """capacity: cache rows per request. prefill_len: most packed tokens of one prefill call."""

    capacity: int | None
    max_batch: int = 8
    prefill_len: int = 1024

    def longest(self, gamma: int) -> int:
        """Most tokens of a request, prompt and output: the last round needs room for two blocks."""
        assert self.capacity is not None
        return self.capacity - 2 * gamma


@dataclass(frozen=True)
class Profile:
    """The range of each symbolic axis that one optimisation profile covers."""

    name: str
    axes: Mapping[str, Range]

    def shape(self, tensor: TensorInfo) -> tuple[tuple[int, ...], ...]:
        """Smallest, optimal and largest shape of an input."""
        ranges = [(n, n, n) if isinstance(n, int) else self.axes[n] for n in tensor.shape]
        return tuple(tuple(r[i] for r in ranges) for i in range(3))


def check_precision(bundle: Bundle) -> None:
    """Refuses a bundle whose attention TensorRT has no kernel for."""
    if bundle.dtype == "fp32":
        raise DraftgraphError(
            f"{bundle.path}: an fp32 bundle; TensorRT has no dedicated fp32 kernel for attention "
            "and its builder refuses the graph, so export the pair again with --dtype fp16 or "
            "--dtype bf16"
        )


def check_limits(bundle: Bundle, limits: Limits) -> None:
    """Refuses limits that leave no room for a round."""
    gamma = bundle.draft.block_size
    if limits.max_batch < 1 or limits.prefill_len < 1:
        raise DraftgraphError(
            f"max-batch is {limits.max_batch} and prefill-len {limits.prefill_len}, expected at "
            "least 1 each"
        )
    if limits.capacity is None:
        raise DraftgraphError(
            "no capacity given; TensorRT needs a fixed cache length, so pass --capacity, the most "
            "rows (prompt, output and two blocks) that a request may use"
        )
    smallest = max(limits.prefill_len, gamma + 1) + 2 * gamma + 1
    if limits.capacity < smallest:
        raise DraftgraphError(
            f"capacity is {limits.capacity}, but a prompt of {limits.prefill_len} tokens, a "
            f"verified block and a drafted one (γ is {gamma}) take {smallest} rows; raise "
            "--capacity or lower --prefill-len"
        )


def profiles(bundle: Bundle, graph: str, limits: Limits) -> list[Profile]:
    """The profiles of a graph: "verify", and "prefill" where a call's width makes a difference.

    verify: up to max_batch requests of 1 .. γ+1 tokens each (plain decoding is width 1).
    prefill: one call of at most prefill_len packed tokens, logits of each request's last one.
    The drafter's context has the widths of the target's calls. It is gathered from the target's
    features and from rows that were held for requests that skipped drafting, HOLD_ROWS each.
    """
    gamma, r = bundle.draft.block_size, limits.max_batch
    assert limits.capacity is not None
    n, width = r * (gamma + 1), gamma + 1
    most = max(limits.prefill_len, r)
    features = max(most, n) + r * HOLD_ROWS
    requests: Range = (1, r, r)
    capacity: Range = (limits.capacity,) * 3
    verify = Profile(
        "verify",
        {
            "R": requests,
            "B": requests,
            "N": (1, n, features if graph == "backbone" else n),
            "M": (1, n, n),
            "P": (1, n, n),
            "S": (1, width, width),
            "X": (1, width, width),
            "C": capacity,
        },
    )
    if graph not in ("target", "backbone"):
        return [verify]
    tokens: Range = (1, limits.prefill_len, most)
    wide: Range = (1, limits.prefill_len, limits.prefill_len)
    one: Range = (1, 1, r)
    prefill = Profile(
        "prefill",
        {
            "R": one,
            "B": one,
            "N": (1, limits.prefill_len, features) if graph == "backbone" else tokens,
            "M": one,
            "P": tokens,
            "S": wide,
            "X": wide,
            "C": capacity,
        },
    )
    return [verify, prefill]


def check_profiles(bundle: Bundle, graph: str, limits: Limits, made: list[Profile]) -> None:
    """Every width that a round can have fits one profile: 1 .. γ+1 tokens of 1 .. R requests.

    A call outside of all profiles fails only at run time, in the middle of a request.
    """
    gamma = bundle.draft.block_size
    tensors = bundle.graphs[graph].inputs
    used = {axis for t in tensors for axis in t.shape if isinstance(axis, str)}
    for profile in made:
        missing = sorted(used - set(profile.axes))
        if missing:
            raise DraftgraphError(f"{graph}: profile {profile.name} has no range for {missing}")
        for axis in sorted(used):
            low, best, high = profile.axes[axis]
            if not 0 < low <= best <= high:
                raise DraftgraphError(
                    f"{graph}: profile {profile.name} has the range {low}, {best}, {high} for "
                    f"{axis}; expected smallest ≤ optimal ≤ largest, all above 0"
                )
    for requests in (1, limits.max_batch):
        for width in range(1, gamma + 2):
            tokens = requests * width
            call = {"R": requests, "B": requests, "S": width, "X": width}
            call |= dict.fromkeys("NMP", tokens)
            call = {axis: n for axis, n in call.items() if axis in used}
            if not any(
                all(p.axes[a][0] <= n <= p.axes[a][2] for a, n in call.items()) for p in made
            ):
                sizes = ", ".join(f"{a} = {n}" for a, n in call.items())
                raise DraftgraphError(
                    f"{graph}: no profile covers {requests} requests of {width} tokens ({sizes}); "
                    f"verification needs every width from 1 to γ + 1 = {gamma + 1}"
                )
