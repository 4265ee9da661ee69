"""Finding TensorRT: the Python bindings and the shared libraries that they need.

The bindings of TensorRT-RTX come without libraries. They are taken from a regular install on the
loader's path, else from the wheel of ONNX Runtime's TensorRT-RTX provider, which carries them.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....graphs.errors import DraftgraphError

PROVIDER_WHEEL = "onnxruntime_ep_nv_tensorrt_rtx"
_RTX_LIBRARIES = ("libtensorrt_rtx", "libtensorrt_onnxparser_rtx")
_SONAME = "{}.so.1"


def load_tensorrt(backend: str) -> Any:
    """The Python module of a backend, "tensorrt" or "tensorrt-rtx", ready to parse and build."""
    if backend == "tensorrt":
        return _import_module(("tensorrt",), backend, "TensorRT", "11.4")
    if sys.platform == "linux" and importlib.util.find_spec("tensorrt_rtx_libs") is None:
        preload_rtx()
    module = _import_module(
        ("tensorrt_rtx", "tensorrt_rtx_bindings"), backend, "TensorRT-RTX", "1.7.1"
    )
    if sys.platform == "linux":
        _check_library_version(module)
    return module


def preload_rtx() -> None:
    """Load the TensorRT-RTX libraries into the process, so that the bindings find them."""
    for name in _RTX_LIBRARIES:
        problems = []
        for candidate in _candidates(name):
            try:
                ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
                break
            except OSError as error:
                problems.append(str(error))
        else:
            raise DraftgraphError(
                f"{name}.so of TensorRT-RTX was not found ({'; '.join(problems)}); install it with "
                'pip install "draftgraph[tensorrt-rtx]", or put the lib folder of a TensorRT-RTX '
                "1.7 install on LD_LIBRARY_PATH"
            )


def _candidates(name: str) -> Iterator[str]:
    yield _SONAME.format(name)
    spec = importlib.util.find_spec(PROVIDER_WHEEL)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from (str(file) for file in sorted(Path(folder).glob(f"{name}.so.*.*"), reverse=True))


def _import_module(names: tuple[str, ...], backend: str, product: str, version: str) -> Any:
    problem: ImportError | None = None
    for name in names:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            return importlib.import_module(name)
        except ImportError as error:  # the bindings are there, a library of theirs is not
            problem = error
    raise DraftgraphError(
        f"{product} cannot be imported ({problem or 'not installed'}); install {version} or later "
        f'with pip install "draftgraph[{backend}]"'
    )


def _check_library_version(module: Any) -> None:
    """Parser, library and bindings share one ABI only within a version (1.5 broke it)."""
    number = ctypes.CDLL(_SONAME.format(_RTX_LIBRARIES[0])).getInferLibVersion()
    library = [number // 10000, number // 100 % 100, number % 100]
    bindings = [int(n) for n in re.findall(r"\d+", module.__version__)[:3]]
    if library != bindings:
        raise DraftgraphError(
            f"TensorRT-RTX: the library is version {'.'.join(map(str, library))}, the Python "
            f"bindings are {module.__version__}; install both in one version"
        )


class LogKeeper:
    """TensorRT's messages: errors are kept for our own error, the rest is dropped."""

    def __init__(self, trt: Any) -> None:
        keeper = self
        self.errors: list[str] = []

        class Logger(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                    keeper.errors.append(message)

        self.logger = Logger()

    def take(self) -> str:
        """The errors since the last call."""
        text, self.errors = "; ".join(self.errors), []
        return text or "no message"
