"""What differs between ONNX Runtime's execution providers, as data and short functions.

Names and formats of options, read from the providers' sources:
CUDA `enable_cuda_graph`, `gpu_graph_id`; TensorRT `trt_*`; TensorRT-RTX plugin 0.5 `nv_*`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort

from ....graphs.errors import DraftgraphError
from ...bundle import Bundle
from ...machine import gpu
from ...profiles import Limits, Profile, Range, profiles

CPU_EP = "CPUExecutionProvider"
RTX_PACKAGE = "onnxruntime_ep_nv_tensorrt_rtx"
_NO_GPU = (
    "no NVIDIA GPU: its driver (libcuda) cannot be loaded or finds no device; run on a machine "
    "with a GPU, or use --provider cpu"
)
_GPU_WHEEL = (
    "pip uninstall onnxruntime, then pip install 'onnxruntime-gpu[cuda,cudnn]' (both wheels use "
    "one folder, so only one may be installed)"
)


@dataclass(frozen=True)
class Provider:
    """One execution provider.

    device: type of its memory in ONNX Runtime. host: that memory is ordinary memory.
    fixed_capacity: it builds engines, for which the cache length is fixed. fp32: it runs fp32
    bundles. prefix: of its options that name profile shapes. graph_option, graph_id: how CUDA
    graphs are switched on, and the run option that selects one. fallbacks: providers that may take
    nodes it refuses, before the CPU. problem: why it cannot run here, or None. plugin: it is
    registered at run time.
    """

    name: str
    ep: str
    device: str
    problem: Callable[[int], str | None]
    host: bool = False
    fixed_capacity: bool = False
    fp32: bool = True
    prefix: str = ""
    graph_option: str = ""
    graph_id: str = ""
    fallbacks: tuple[str, ...] = ()
    plugin: bool = False


def _cuda_problem(device_id: int, ep: str = "CUDAExecutionProvider") -> str | None:
    plugged = {device.ep_name for device in ort.get_ep_devices()}
    if ep not in {*ort.get_available_providers(), *plugged}:
        return f"this onnxruntime ({ort.__version__}) has no {ep}; {_GPU_WHEEL}"
    if gpu(device_id) is None:
        return _NO_GPU
    return _missing_library()


def _missing_library() -> str | None:
    """The first library of CUDA or cuDNN that cannot be loaded; without one the CPU takes over."""
    with contextlib.redirect_stdout(sys.stderr):  # it prints what it does not find
        ort.preload_dlls()
    major = str(getattr(ort, "cuda_version", "")).split(".")[0]
    if not major:  # not this wheel's business: a plugin brings its own
        return None
    for library in (f"libcudart.so.{major}", f"libcublasLt.so.{major}", "libcudnn.so.9"):
        try:
            ctypes.CDLL(library)
        except OSError as error:
            return (
                f"a library of CUDA {major} or cuDNN is missing ({error}); install them with "
                "pip install 'onnxruntime-gpu[cuda,cudnn]'"
            )
    return None


def _tensorrt_problem(device_id: int) -> str | None:
    problem = _cuda_problem(device_id, "TensorrtExecutionProvider")
    if problem is None and importlib.util.find_spec("tensorrt") is not None:
        try:
            importlib.import_module("tensorrt")  # loads the libraries of its wheel
        except (ImportError, OSError) as error:
            return f"TensorRT cannot be loaded: {error}"
    return problem


def _rtx_problem(device_id: int) -> str | None:
    """Registers the plugin on the way: only then does ONNX Runtime know its devices."""
    if importlib.util.find_spec(RTX_PACKAGE) is None:
        return (
            f"{RTX_PACKAGE.replace('_', '-')} is not installed; pip install "
            '"draftgraph[tensorrt-rtx]"'
        )
    try:
        importlib.metadata.version("onnxruntime-gpu")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        return (
            "the TensorRT-RTX plugin needs the plain onnxruntime wheel; pip uninstall "
            "onnxruntime-gpu onnxruntime, then pip install onnxruntime"
        )
    plugin = importlib.import_module(RTX_PACKAGE)
    if not _rtx_devices():
        try:
            ort.register_execution_provider_library(plugin.get_ep_name(), plugin.get_library_path())
        except Exception as error:  # the binding raises its own types, all of them unspecific
            if gpu(device_id) is None:
                return f"{_NO_GPU} (ONNX Runtime: {error})"
            return f"ONNX Runtime cannot register the TensorRT-RTX plugin: {error}"
    if device_id >= len(_rtx_devices()):
        found = gpu(device_id)
        what = f"{found.name}, compute capability {found.compute_capability}" if found else "none"
        return (
            f"the TensorRT-RTX plugin offers {len(_rtx_devices())} devices, none with number "
            f"{device_id} (GPU: {what}); it runs on compute capability 8.6, 8.9 and 12.0 or later, "
            "use --provider cuda or tensorrt on others"
        )
    return None


def _rtx_devices() -> list[Any]:
    return [d for d in ort.get_ep_devices() if d.ep_name == PROVIDERS["nv-tensorrt-rtx"].ep]


PROVIDERS = {
    p.name: p
    for p in (
        Provider("cpu", CPU_EP, "cpu", lambda device_id: None, host=True),
        Provider(
            "cuda",
            "CUDAExecutionProvider",
            "cuda",
            _cuda_problem,
            graph_option="enable_cuda_graph",
            graph_id="gpu_graph_id",
        ),
        Provider(
            "tensorrt",
            "TensorrtExecutionProvider",
            "cuda",
            _tensorrt_problem,
            fixed_capacity=True,
            fp32=False,
            prefix="trt_profile_",
            graph_option="trt_cuda_graph_enable",
            graph_id="gpu_graph_id",
            fallbacks=("CUDAExecutionProvider",),
        ),
        Provider(
            "nv-tensorrt-rtx",
            "NvTensorRTRTXExecutionProvider",
            "cuda",
            _rtx_problem,
            fixed_capacity=True,
            fp32=False,
            prefix="nv_profile_",
            graph_option="enable_cuda_graph",
            graph_id="cuda_graph_annotation_id",
            plugin=True,
        ),
    )
}


def version(p: Provider) -> str:
    """Of ONNX Runtime and of what the provider brings, as far as it is known."""
    module = sys.modules.get(RTX_PACKAGE if p.plugin else "tensorrt")
    if not p.fixed_capacity or module is None:
        return ort.__version__
    return f"{ort.__version__}, {module.__name__} {module.__version__}"


# Options


def provider_options(
    p: Provider,
    bundle: Bundle,
    graph: str,
    *,
    device_id: int,
    cuda_graphs: bool,
    limits: Limits | None,
    cache: Path | None,
) -> dict[str, str]:
    """The options of one session.

    limits: for providers that build engines. cache: folder for engines or compiled kernels.
    """
    if p.device == "cpu":
        return {}
    options = {} if p.plugin else {"device_id": str(device_id)}
    if cuda_graphs:
        options[p.graph_option] = "1"
    if p.name == "cuda":
        # TF32 would move logits of an fp32 bundle by more than rounding. The arena is shared with
        # our own blocks, of which each is as large as it will be.
        options |= {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}
    if limits is not None:
        options |= profile_options(p.prefix, bundle, graph, limits)
    if cache is not None and p.name == "tensorrt":
        options |= {
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": str(cache),
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": str(cache),
        }
    if cache is not None and p.name == "nv-tensorrt-rtx":
        options["nv_runtime_cache_path"] = str(cache)
    return options


def profile_options(prefix: str, bundle: Bundle, graph: str, limits: Limits) -> dict[str, str]:
    """Smallest, optimal and largest shapes of a graph: name:1x8,name2:… for every input."""
    profile = session_profile(bundle, graph, limits)
    shapes = {t.name: profile.shape(t) for t in bundle.graphs[graph].inputs}
    return {
        f"{prefix}{word}_shapes": ",".join(
            f"{name}:{'x'.join(str(n) for n in shape[i])}" for name, shape in shapes.items()
        )
        for i, word in enumerate(("min", "opt", "max"))
    }


def session_profile(bundle: Bundle, graph: str, limits: Limits) -> Profile:
    """One profile for all calls of a session, optimised for verification.

    The drafter's N is the rows of all features that are kept, not those of one target call.
    """
    verify, *rest = profiles(bundle, graph, limits)
    axes: dict[str, Range] = {}
    for axis, (_, best, _) in verify.axes.items():
        ranges = [p.axes[axis] for p in (verify, *rest)]
        axes[axis] = (min(r[0] for r in ranges), best, max(r[2] for r in ranges))
    if graph == "backbone":
        low, best, _ = axes["N"]
        axes["N"] = (low, best, most_feature_rows(limits))
    return Profile("session", axes)


def most_feature_rows(limits: Limits) -> int:
    """Rows of features: whole requests of all slots, those of one call, and as much for gaps."""
    assert limits.capacity is not None
    return 2 * (limits.max_batch + 1) * limits.capacity


def session_options(limits: Limits | None) -> ort.SessionOptions:
    """Options that do not belong to the provider. limits: of a graph with caches."""
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 3
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if limits is not None and limits.capacity is not None:
        options.add_free_dimension_override_by_name("C", limits.capacity)
    return options


def open_session(
    path: Path, p: Provider, session: ort.SessionOptions, options: dict[str, str], device_id: int
) -> ort.InferenceSession:
    """A session on a provider; an error where ONNX Runtime would fall back to another one."""
    providers: Any = None
    if p.plugin:
        session.add_provider_for_devices([_rtx_devices()[device_id]], options)
    else:
        own = {"device_id": str(device_id)}
        providers = [(p.ep, options), *((ep, own) for ep in p.fallbacks)]
        if p.ep != CPU_EP:
            providers.append((CPU_EP, {}))
    try:
        made = ort.InferenceSession(str(path), session, providers=providers, enable_fallback=0)
    except Exception as error:  # the binding raises its own types, all of them unspecific
        raise DraftgraphError(
            f"{path}: ONNX Runtime {ort.__version__} cannot load this graph on {p.ep}: {error}"
        ) from None
    if p.ep not in made.get_providers():
        raise DraftgraphError(
            f"{path}: ONNX Runtime could not start {p.ep} and fell back to {made.get_providers()}; "
            "its messages above say why"
        )
    return made
