"""What an engine is built for: the cache capacity, and the ranges of every symbolic axis."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...graphs.errors import DraftgraphError
from ...runtime.bundle import Bundle, TensorInfo

BACKENDS = ("tensorrt", "tensorrt-rtx")
# TensorRT-RTX builds for named devices; these three are what ONNX Runtime's provider accepts too.
DEFAULT_CAPABILITIES = ("8.6", "8.9", "12.0")

Range = tuple[int, int, int]  # smallest, optimised for, largest


@dataclass(frozen=True)
class EngineOptions:
    """Everything besides the bundle that decides what is built.

    capacity: cache rows per request, fixed in the engine. prefill_len: most packed tokens of one
    prefill call. compute_capabilities: the devices, TensorRT-RTX only (empty: the default three).
    """

    backend: str
    capacity: int | None
    compute_capabilities: tuple[str, ...] = ()
    max_batch: int = 8
    prefill_len: int = 1024
    workspace_mib: int | None = None


@dataclass(frozen=True)
class Profile:
    """The range of each symbolic axis that one optimisation profile covers."""

    name: str
    axes: Mapping[str, Range]

    def shape(self, tensor: TensorInfo) -> tuple[tuple[int, ...], ...]:
        """Smallest, optimal and largest shape of an input."""
        ranges = [(n, n, n) if isinstance(n, int) else self.axes[n] for n in tensor.shape]
        return tuple(tuple(r[i] for r in ranges) for i in range(3))


def check_options(bundle: Bundle, options: EngineOptions) -> EngineOptions:
    """The options with defaults filled in; refuses those that no engine can be built for."""
    gamma = bundle.draft.block_size
    if options.backend not in BACKENDS:
        raise DraftgraphError(f"backend is {options.backend!r}, expected one of {list(BACKENDS)}")
    if bundle.dtype == "fp32":
        raise DraftgraphError(
            f"{bundle.path}: an fp32 bundle; TensorRT has no dedicated fp32 kernel for attention "
            "and its builder refuses the graph, so export the pair again with --dtype fp16 or "
            "--dtype bf16"
        )
    if options.max_batch < 1 or options.prefill_len < 1:
        raise DraftgraphError(
            f"max-batch is {options.max_batch} and prefill-len {options.prefill_len}, expected at "
            "least 1 each"
        )
    if options.capacity is None:
        raise DraftgraphError(
            "no capacity given; TensorRT needs a fixed cache length, so pass --capacity, the most "
            "rows (prompt, output and two blocks) that a request may use"
        )
    smallest = max(options.prefill_len, gamma + 1) + 2 * gamma + 1
    if options.capacity < smallest:
        raise DraftgraphError(
            f"capacity is {options.capacity}, but a prompt of {options.prefill_len} tokens, a "
            f"verified block and a drafted one (γ is {gamma}) take {smallest} rows; raise "
            "--capacity or lower --prefill-len"
        )
    capabilities = options.compute_capabilities
    for capability in capabilities:
        if not re.fullmatch(r"\d{1,2}\.\d", capability):
            raise DraftgraphError(
                f"compute capability is {capability!r}, expected for example 8.9 or 12.0"
            )
    if options.backend == "tensorrt-rtx" and not capabilities:
        capabilities = DEFAULT_CAPABILITIES
    ordered = sorted(set(capabilities), key=lambda c: [int(n) for n in c.split(".")])
    return replace(options, compute_capabilities=tuple(ordered))


def profiles(bundle: Bundle, graph: str, options: EngineOptions) -> list[Profile]:
    """The profiles of a graph: "verify", and "prefill" where a call's width makes a difference.

    verify: up to max_batch requests of 1 .. γ+1 tokens each (plain decoding is width 1).
    prefill: one call of at most prefill_len packed tokens, logits of each request's last one.
    The drafter's context has the widths of the target's calls.
    """
    gamma, r = bundle.draft.block_size, options.max_batch
    assert options.capacity is not None
    n, width = r * (gamma + 1), gamma + 1
    requests: Range = (1, r, r)
    capacity: Range = (options.capacity,) * 3
    verify = Profile(
        "verify",
        {
            "R": requests,
            "B": requests,
            "N": (1, n, n),
            "M": (1, n, n),
            "P": (1, n, n),
            "S": (1, width, width),
            "X": (1, width, width),
            "C": capacity,
        },
    )
    if graph not in ("target", "backbone"):
        return [verify]
    most = max(options.prefill_len, r)
    tokens: Range = (1, options.prefill_len, most)
    wide: Range = (1, options.prefill_len, options.prefill_len)
    one: Range = (1, 1, r)
    prefill = Profile(
        "prefill",
        {
            "R": one,
            "B": one,
            "N": tokens,
            "M": one,
            "P": tokens,
            "S": wide,
            "X": wide,
            "C": capacity,
        },
    )
    return [verify, prefill]


def check_profiles(bundle: Bundle, graph: str, options: EngineOptions, made: list[Profile]) -> None:
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
    for requests in (1, options.max_batch):
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
