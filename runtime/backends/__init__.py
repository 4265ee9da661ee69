"""One file per backend; `open_backend` picks one by provider name."""

from __future__ import annotations

from typing import Any

from ...graphs.errors import DraftgraphError
from ..bundle import Bundle
from .base import Backend

PROVIDERS = ("cpu",)


def open_backend(bundle: Bundle, provider: str, **options: Any) -> Backend:
    """The backend of a provider; an unknown one is an error that names those there are."""
    if provider == "cpu":
        from .onnxruntime_cpu import OnnxRuntimeCpu

        return OnnxRuntimeCpu(bundle, **options)
    raise DraftgraphError(f"provider is {provider!r}, expected one of {list(PROVIDERS)}")
