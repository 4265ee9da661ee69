"""One module or package per backend; `open_backend` picks one by provider name."""

from __future__ import annotations

from typing import Any

from ...graphs.errors import DraftgraphError
from ..bundle import Bundle
from .base import Backend

NATIVE = ("tensorrt-native", "tensorrt-rtx-native")
PROVIDERS = ("cpu", "cuda", "tensorrt", "nv-tensorrt-rtx", *NATIVE)


def open_backend(bundle: Bundle, provider: str, **options: Any) -> Backend:
    """The backend of a provider; an unknown one is an error that names those there are."""
    _check(provider)
    try:
        if provider == "cpu":
            from .onnxruntime_cpu import OnnxRuntimeCpu

            return OnnxRuntimeCpu(bundle, **options)
        if provider in NATIVE:
            from .tensorrt import open_tensorrt

            return open_tensorrt(bundle, provider.removesuffix("-native"), **options)
        from .onnxruntime import providers
        from .onnxruntime.backend import OnnxRuntime

        return OnnxRuntime(bundle, providers.PROVIDERS[provider], **options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise DraftgraphError(f"provider {provider}: unknown option ({error})") from None


def available(provider: str, device_id: int = 0) -> str | None:
    """Why a provider cannot run in this process and on this machine; None where it can."""
    _check(provider)
    if provider in NATIVE:
        from .tensorrt import problem

        return problem(provider.removesuffix("-native"))
    from .onnxruntime import providers

    return providers.PROVIDERS[provider].problem(device_id)


def _check(provider: str) -> None:
    if provider not in PROVIDERS:
        raise DraftgraphError(f"provider is {provider!r}, expected one of {list(PROVIDERS)}")
