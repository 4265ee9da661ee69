"""TensorRT and TensorRT-RTX without ONNX Runtime, in CUDA graphs; see docs/engines.md.

`plan.py` decides, `backend.py` orders, `device.py` says what a device does, `cuda.py` does it.
"""

from __future__ import annotations

import importlib.util

from ....graphs.errors import DraftgraphError
from ...bundle import Bundle
from ...machine import gpu
from .backend import GraphReport, TensorRt, engines_needed
from .engines import choose_engines
from .library import load_tensorrt
from .plan import EngineSpec

__all__ = ["GraphReport", "TensorRt", "open_tensorrt", "problem"]


def open_tensorrt(
    bundle: Bundle,
    backend: str,
    *,
    engines: str | None = None,
    max_requests: int | None = None,
    markov: str = "auto",
    cuda_graphs: bool = True,
    memory_budget: int | None = None,
) -> TensorRt:
    """The backend over engines that `draftgraph build` stored in the bundle.

    backend: "tensorrt" or "tensorrt-rtx". engines: the folder under `engines/`, default the latest
    that fits. max_requests is not needed: caches grow with the requests, up to what the engines
    take. The rest as in `TensorRt`. Raises `DraftgraphError` for a missing library, driver or
    device, and for engines that are missing or do not fit.
    """
    trt = load_tensorrt(backend)
    found = gpu()
    chosen = choose_engines(
        bundle,
        engines_needed(bundle, markov),
        backend,
        version=trt.__version__,
        compute_capability=found.compute_capability if found else None,
        folder=engines,
    )
    spec = EngineSpec.of(chosen)
    if missing := problem(backend):
        raise DraftgraphError(f"provider {backend}-native: {missing}")
    from .cuda import CudaDevice

    return TensorRt(
        bundle,
        CudaDevice(trt, bundle, chosen),
        spec,
        markov=markov,
        cuda_graphs=cuda_graphs,
        memory_budget=memory_budget,
    )


def problem(backend: str) -> str | None:
    """Why engines cannot run here, None where they can."""
    try:
        load_tensorrt(backend)
    except DraftgraphError as error:
        return str(error)
    if gpu() is None:
        return (
            "no NVIDIA GPU, or no driver for it: engines are built without one, but run only with "
            'one; use provider "cpu"'
        )
    if any(importlib.util.find_spec(name) is None for name in ("cuda", "cuda.core")):
        return f'cuda.core is not installed; install it with pip install "draftgraph[{backend}]"'
    return None
