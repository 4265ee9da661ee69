"""What running a bundle costs to import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

EXPORT_ONLY = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "ml_dtypes")


def imported(code: str) -> set[str]:
    """Top-level modules in sys.modules after `code` in a fresh interpreter."""
    code += "\nimport sys; print(*{name.split('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_the_runtime_imports_no_export_tools() -> None:
    modules = imported("import draftgraph.runtime")
    assert {"numpy", "tokenizers"} <= modules
    assert modules.isdisjoint(EXPORT_ONLY)


def test_generating_imports_no_export_tools(bundle: Callable[..., Path]) -> None:
    path = bundle("qwen3-vanilla")
    modules = imported(
        "from draftgraph.runtime import Engine, SamplingParams\n"
        f"engine = Engine.load({str(path)!r})\n"
        "engine.generate([1, 2, 3], SamplingParams(max_new_tokens=12, temperature=1.0, top_k=5))"
    )
    assert "onnxruntime" in modules
    assert modules.isdisjoint(EXPORT_ONLY)


def test_contracts_need_the_standard_library_only() -> None:
    modules = imported("import draftgraph.graphs.contract")
    assert modules.isdisjoint({*EXPORT_ONLY, "numpy", "onnxruntime"})
