"""`draftgraph doctor`: what is installed, which providers can run here, and whether they do.

A provider that can run decodes a tiny random pair, or the given bundle, end to end: its speculative
tokens must equal its plain ones, and those the CPU's. Returns plain data: what `--json` writes and
`render` prints.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from ..graphs.contract import DType
from ..graphs.errors import DraftgraphError
from ..runtime import Bundle, load_bundle
from ..runtime.backends import NATIVE, PROVIDERS, available
from ..runtime.costs import CostTable
from ..runtime.engine import COSTS
from ..runtime.machine import (
    available_cores,
    driver_versions,
    gpu,
    processor_name,
    vector_instructions,
)
from .console import heading, size, table
from .gpu.opening import takes
from .gpu.smoke import decode, decode_apart, judge, open_for, prompts_of

SCHEMA_VERSION = 1
Report = Callable[[str], None]

# Distributions by what they are for; those of CUDA exist for several of its versions.
_PACKAGES = {
    "runtime": ("draftgraph", "numpy", "tokenizers"),
    "ONNX Runtime": (
        "onnxruntime",
        "onnxruntime-gpu",
        "onnxruntime-ep-nv-tensorrt-rtx-cu13",
        "onnxruntime-ep-nv-tensorrt-rtx-cu12",
    ),
    "export": ("onnx", "onnxscript", "onnx-ir", "torch", "transformers", "safetensors"),
    "CUDA": (
        "cuda-core",
        "cuda-bindings",
        "nvidia-cuda-runtime",
        "nvidia-cuda-runtime-cu12",
        "nvidia-cudnn-cu12",
        "nvidia-cudnn-cu13",
    ),
    "TensorRT": (
        "tensorrt",
        "tensorrt-cu12",
        "tensorrt-cu13",
        "tensorrt-rtx",
        "tensorrt-rtx-cu12-bindings",
        "tensorrt-rtx-cu13-bindings",
    ),
}
_NO_PAIR = (
    "no bundle to try: give one (draftgraph doctor BUNDLE), or pip install "
    '"draftgraph[export]" so that a tiny random one can be made'
)


def doctor(path: Path | None, report: Report = lambda message: None) -> dict[str, Any]:
    """Everything; `ok` is False where a provider that can run failed, or the bundle is broken."""
    found: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **facts()}
    if path is None:
        with _tiny_pair() as make:
            found["bundle"] = None
            found["backends"] = _backends(make, report)
    else:
        found["bundle"], found["backends"] = _with_bundle(path, report)
    failed = [b for b in found["backends"] if b["status"] == "failed"]
    broken = found["bundle"] is not None and found["bundle"]["problem"] is not None
    found["ok"] = not failed and not broken
    return found


# What is here


def facts() -> dict[str, Any]:
    """Versions, wheels, devices."""
    driver, cuda = driver_versions()
    return {
        "system": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "processor": processor_name(),
            "cores": os.cpu_count(),
            "cores_available": available_cores(),
            "vector_instructions": vector_instructions(),
        },
        "packages": {
            group: {name: _version(name) for name in names} for group, names in _PACKAGES.items()
        },
        "onnxruntime": _onnxruntime(),
        "driver": {"version": driver, "cuda": cuda},
        "gpus": [
            {
                "number": i,
                "name": g.name,
                "compute_capability": g.compute_capability,
                "memory": g.memory,
            }
            for i, g in enumerate(iter(_Gpus(), None))
        ],
    }


class _Gpus:
    """The next GPU at every call, None after the last."""

    def __init__(self) -> None:
        self.index = -1

    def __call__(self) -> Any:
        self.index += 1
        return gpu(self.index)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _onnxruntime() -> dict[str, Any]:
    import onnxruntime as ort

    wheels = [n for n in ("onnxruntime", "onnxruntime-gpu") if _version(n) is not None]
    problem = None
    if len(wheels) > 1:
        problem = (
            "both wheels of ONNX Runtime are installed and share one folder: pip uninstall "
            "onnxruntime onnxruntime-gpu, then pip install the one you want"
        )
    return {
        "version": ort.__version__,
        "wheels": wheels,
        "built_for_cuda": getattr(ort, "cuda_version", "") or None,
        "providers": ort.get_available_providers(),
        "problem": problem,
    }


# What runs


@contextmanager
def _tiny_pair() -> Iterator[Callable[[DType], Path]]:
    """Makes bundles of a tiny random pair in a temporary folder, one for each dtype."""
    with tempfile.TemporaryDirectory(prefix="draftgraph-doctor-") as folder:

        def make(dtype: DType) -> Path:
            try:
                from ..export.bundle import export_bundle
                from ..export.random_pair import random_pair, tiny_contracts
            except ImportError:
                raise DraftgraphError(_NO_PAIR) from None
            out = Path(folder) / dtype
            if not out.is_dir():
                pair = random_pair(*tiny_contracts(), "fp32")
                export_bundle(*pair, out, dtype=dtype, markov_top_k=8, validate=False)
            return out

        yield make


def _with_bundle(path: Path, report: Report) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    facts: dict[str, Any] = {"path": str(path), "problem": None, "dtype": None, "costs": []}
    try:
        report(f"reading {path}")
        bundle = load_bundle(path)
    except DraftgraphError as error:
        facts["problem"] = str(error)
        return facts, _backends(None, report)
    facts["dtype"] = bundle.dtype
    tested = _backends(path, report)
    facts["costs"] = _costs(bundle, tested)
    return facts, tested


def _costs(bundle: Bundle, tested: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cost tables of a bundle: which provider uses each here, or why none does."""
    prints = {b["provider"]: b["fingerprint"] for b in tested if b["fingerprint"] is not None}
    found = []
    for file in sorted((bundle.path / COSTS).glob("*.json")):
        used = None
        try:
            table = CostTable.load(file)
            backend = table.fingerprint.get("backend")
            problem: str | None = f"measured with {backend}, which did not run here"
            for provider, current in prints.items():
                if current["backend"] == backend:
                    table.check_fingerprint(current)
                    used, problem = provider, None
        except DraftgraphError as error:
            problem = str(error)
        found.append({"file": file.name, "used_by": used, "problem": problem})
    return found


def _backends(
    source: Path | Callable[[DType], Path] | None, report: Report
) -> list[dict[str, Any]]:
    """One entry for each provider. source: a bundle, what makes tiny ones, or None."""
    references: dict[Path, _Reference] = {}
    return [_backend(provider, source, references, report) for provider in PROVIDERS]


class _Reference:
    """The CPU's tokens of a bundle, and its logits for judging differences."""

    def __init__(self, path: Path) -> None:
        self.prompts = prompts_of(load_bundle(path, verify=False))
        self.engine = open_for(path, "cpu", self.prompts)
        self.decoded = decode(self.engine, self.prompts)


def _backend(
    provider: str,
    source: Path | Callable[[DType], Path] | None,
    references: dict[Path, _Reference],
    report: Report,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "provider": provider,
        "status": "unavailable",
        "problem": available(provider),
        "dtype": None,
        "differences": [],
        "verified": None,
        "accepted": None,
        "decode_seconds": None,
        "fingerprint": None,
    }
    if found["problem"] is not None:
        return found
    try:
        path = _bundle_for(provider, source)
    except DraftgraphError as error:
        return found | {"status": "not tested", "problem": str(error)}
    report(f"{provider}: decoding")
    try:
        if path not in references:
            references[path] = _Reference(path)
        reference = references[path]
        with tempfile.TemporaryDirectory(prefix="draftgraph-doctor-") as cache:
            decoded = reference.decoded
            if provider != "cpu":
                own = isinstance(source, Path)  # nothing is built into a bundle of the user's
                decoded = decode_apart(
                    path, provider, reference.prompts, build=not own, cache=Path(cache)
                )
        differences = judge(reference.engine, reference.prompts, reference.decoded, decoded)
    except Exception as error:  # whatever a provider raises is its failure, not the doctor's
        kind = "" if isinstance(error, DraftgraphError) else f"{type(error).__name__}: "
        return found | {"status": "failed", "problem": f"{kind}{error}"}
    dtype = reference.engine.bundle.dtype
    copied = ("verified", "accepted", "decode_seconds", "fingerprint")
    found |= {"dtype": dtype, "differences": differences} | {k: decoded[k] for k in copied}
    wrong = [d for d in differences if not d["near_tie"]]
    if wrong:
        first = wrong[0]
        return found | {
            "status": "failed",
            "problem": f"its tokens are wrong: {first['what']} differs at token "
            f"{first['position']} of prompt {first['prompt']} (ids {first.get('ids')}, "
            f"{first['behind']} behind the best logit); do not use this provider with these "
            "versions",
        }
    return found | {"status": "passed"}


def _bundle_for(provider: str, source: Path | Callable[[DType], Path] | None) -> Path:
    """The bundle that a provider is tried with. Raises `DraftgraphError` where there is none."""
    if source is None:
        raise DraftgraphError("the bundle cannot be read")
    if not isinstance(source, Path):
        return source("fp32" if takes(provider, "fp32") else "fp16")
    bundle = load_bundle(source, verify=False)
    if not takes(provider, bundle.dtype):
        raise DraftgraphError(
            f"{source} is {bundle.dtype}, which this provider does not run; give an fp16 or bf16 "
            "bundle, or none"
        )
    if provider in NATIVE and not any((source / "engines").glob(f"{provider[:-7]}-[0-9]*")):
        raise DraftgraphError(
            f"no engines in {source}; build them with: draftgraph build {source} --backend "
            f"{provider[:-7]} --capacity 2048"
        )
    return source


# What is printed


def render(found: dict[str, Any], console: Console) -> None:
    """The facts, then one line for each provider with what to do."""
    system, driver, runtime = found["system"], found["driver"], found["onnxruntime"]
    rows = {
        "Python": f"{system['python']}, {system['platform']}",
        "processor": f"{system['processor']}, {system['cores_available']} of {system['cores']} "
        "cores available",
        "vector instructions": ", ".join(system["vector_instructions"]) or "none known",
        "NVIDIA driver": "none"
        if driver["cuda"] is None and driver["version"] is None
        else f"{driver['version'] or 'unknown'}, serves CUDA {driver['cuda'] or 'unknown'}",
        "GPUs": "none" if not found["gpus"] else "",
    }
    for g in found["gpus"]:
        rows[f"GPU {g['number']}"] = (
            f"{g['name']}, compute capability {g['compute_capability']}, {size(g['memory'])}"
        )
    if found["gpus"]:
        del rows["GPUs"]
    for group, packages in found["packages"].items():
        listed = [f"{name} {version}" for name, version in packages.items() if version is not None]
        rows[group] = ", ".join(listed) or "not installed"
    rows["providers in ONNX Runtime"] = ", ".join(runtime["providers"])
    shown = table("", "", left=2)
    shown.show_header = False
    for name, text in rows.items():
        shown.add_row(name, text)
    console.print(shown)
    if runtime["problem"]:
        console.print(f"warning: {runtime['problem']}")
    heading(console, "providers")
    for backend in found["backends"]:
        console.print(f"{backend['provider']}: {_line(backend)}", soft_wrap=True)
    _render_bundle(found["bundle"], console)
    heading(console, "every provider that can run here works" if found["ok"] else "NOT WELL")


def _line(backend: dict[str, Any]) -> str:
    if backend["status"] != "passed":
        return f"{backend['status']}: {backend['problem']}"
    ties = len(backend["differences"])
    return (
        f"passed ({backend['dtype']}): speculative equals plain decoding and the CPU's; "
        f"{backend['accepted']} of {backend['verified']} drafted tokens accepted, "
        f"{backend['decode_seconds']:.1f} s"
        + (f"; {ties} differences at near ties" if ties else "")
    )


def _render_bundle(bundle: dict[str, Any] | None, console: Console) -> None:
    if bundle is None:
        return
    heading(console, f"bundle {bundle['path']}")
    if bundle["problem"]:
        console.print(f"broken: {bundle['problem']}", soft_wrap=True)
        return
    console.print(f"{bundle['dtype']}, every file as the manifest says")
    if not bundle["costs"]:
        console.print(
            f"no cost tables: draftgraph profile {bundle['path']} measures this machine, and the "
            "schedulers use it",
            soft_wrap=True,
        )
    for cost in bundle["costs"]:
        text = f"used by provider {cost['used_by']}" if cost["used_by"] else cost["problem"]
        console.print(f"cost table {cost['file']}: {text}", soft_wrap=True)
