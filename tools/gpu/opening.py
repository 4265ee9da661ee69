"""An engine on any provider, with what it needs first: engines built, a capacity, a stand-in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runtime import Bundle, Engine, load_bundle
from ...runtime.backends import NATIVE, open_backend
from ...runtime.backends.base import Backend
from ...runtime.machine import gpu

# ONNX Runtime's CPU provider driven like a device: memory as OrtValues bound by address, staging
# copies, ids of CUDA graphs. Exercises all of a device's path but the device.
STAND_IN = "cpu-as-device"
# Most prompt tokens of one call in engines built here.
PREFILL_LEN = 256

Report = Callable[[str], None]


@dataclass(frozen=True)
class Room:
    """What an engine is opened for: cache rows per request, where they are fixed, and requests."""

    capacity: int = 0
    requests: int = 1


def takes(provider: str, dtype: str) -> bool:
    """Whether a provider runs bundles of a dtype: TensorRT has no fp32 attention kernel."""
    return dtype != "fp32" or provider in ("cpu", "cuda", STAND_IN)


def open_engine(
    path: Path,
    provider: str,
    room: Room,
    *,
    markov: str = "auto",
    cuda_graphs: bool = True,
    build: bool = True,
    cache: Path | None = None,
    report: Report = lambda message: None,
) -> Engine:
    """Open a bundle on a provider.

    cuda_graphs: False for none, True for the provider's default. build: compile missing engines
    into the bundle, for the native providers. cache: folder of what ONNX Runtime's TensorRT
    providers compile, default in the bundle. Raises `DraftgraphError` as `open_backend` does.
    """
    bundle = load_bundle(path, verify=False)
    options: dict[str, Any] = {"markov": markov, "max_requests": room.requests}
    if build and provider in NATIVE:
        backend = provider.removesuffix("-native")
        options["engines"] = _build(path, backend, room, report)
    if not cuda_graphs:
        options["cuda_graphs"] = False
    if provider in ("tensorrt", "nv-tensorrt-rtx"):
        options |= {"capacity": room.capacity, "engine_cache": cache}
    return Engine(bundle, _open(bundle, provider, options), max_requests=room.requests)


def _open(bundle: Bundle, provider: str, options: dict[str, Any]) -> Backend:
    if provider != STAND_IN:
        return open_backend(bundle, provider, **options)
    from ...runtime.backends.onnxruntime.backend import OnnxRuntime
    from ...runtime.backends.onnxruntime.providers import PROVIDERS

    device = dataclasses.replace(PROVIDERS["cpu"], host=False, graph_id="gpu_graph_id")
    return OnnxRuntime(bundle, device, **options)


def _build(path: Path, backend: str, room: Room, report: Report) -> str:
    """The folder of the engines; those that are there and fit are kept."""
    from ...export.engines import EngineOptions, build_engines

    found = gpu()
    devices = (found.compute_capability,) if found and backend == "tensorrt-rtx" else ()
    prefill = min(PREFILL_LEN, room.capacity // 2)
    options = EngineOptions(
        backend, room.capacity, devices, max_batch=room.requests, prefill_len=prefill
    )
    return build_engines(path, options, report=report)[0].sidecar.file.parent.name
