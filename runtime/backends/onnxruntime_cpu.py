"""ONNX Runtime on the CPU."""

from __future__ import annotations

from copy import copy
from typing import Any

from ..bundle import Bundle
from .onnxruntime.backend import OnnxRuntime
from .onnxruntime.providers import PROVIDERS


class OnnxRuntimeCpu(OnnxRuntime):
    """Implements `Backend` on the CPU; options as in `OnnxRuntime`."""

    def __init__(self, bundle: Bundle, **options: Any) -> None:
        super().__init__(bundle, PROVIDERS["cpu"], **options)

    def twin(self) -> OnnxRuntimeCpu:
        """Another backend over the same sessions, with caches and tensors of its own."""
        assert type(self) is OnnxRuntimeCpu, "a subclass has state of its own"
        other = copy(self)
        other._begin()
        return other
