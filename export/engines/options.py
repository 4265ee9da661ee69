"""What an engine is built for: cache capacity, batch, prompt length and devices."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ...graphs.errors import DraftgraphError
from ...runtime.bundle import Bundle
from ...runtime.profiles import Limits, check_limits, check_precision

BACKENDS = ("tensorrt", "tensorrt-rtx")
# TensorRT-RTX builds for named devices; these three are what ONNX Runtime's provider accepts too.
DEFAULT_CAPABILITIES = ("8.6", "8.9", "12.0")


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

    @property
    def limits(self) -> Limits:
        return Limits(self.capacity, self.max_batch, self.prefill_len)


def check_options(bundle: Bundle, options: EngineOptions) -> EngineOptions:
    """The options with defaults filled in; refuses those that no engine can be built for."""
    if options.backend not in BACKENDS:
        raise DraftgraphError(f"backend is {options.backend!r}, expected one of {list(BACKENDS)}")
    check_precision(bundle)
    check_limits(bundle, options.limits)
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
