"""ONNX Runtime on the CPU."""

from __future__ import annotations

from typing import Any

from ..bundle import Bundle
from .onnxruntime.backend import OnnxRuntime
from .onnxruntime.providers import PROVIDERS


class OnnxRuntimeCpu(OnnxRuntime):
    """Implements `Backend` on the CPU; options as in `OnnxRuntime`."""

    def __init__(self, bundle: Bundle, **options: Any) -> None:
        super().__init__(bundle, PROVIDERS["cpu"], **options)
