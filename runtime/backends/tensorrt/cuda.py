"""The `Device` of TensorRT and TensorRT-RTX: cuda.core for streams and graphs, engines, copies.

Not yet run on hardware. Everything here is a direct call; what can be decided beforehand is in
plan.py and backend.py. Sources: the docstrings of the TensorRT-RTX 1.7.1 bindings and the type
stubs of cuda.core 1.2.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.bindings import runtime as cudart
from cuda.core import Buffer, Device, Event, EventOptions, LegacyPinnedMemoryResource
from cuda.core.graph import Graph

from ....graphs.errors import DraftgraphError
from ...bundle import Bundle
from ...engine_cache import Sidecar
from ...machine import gpu
from .device import CaptureRefused, EngineCall, Tensor
from .engines import check_aliases, check_profiles
from .library import LogKeeper

RUNTIME_CACHE = "runtime.cache"


class CudaDevice:
    """Implements `device.Device` on the first GPU, with the engines of one build loaded.

    Work goes to one non-blocking stream. All execution contexts share one scratch block: they
    never run at the same time. There is one context for every profile of every engine.
    """

    def __init__(self, trt: Any, bundle: Bundle, engines: Mapping[str, Sidecar]) -> None:
        key = next(iter(engines.values())).key
        self.backend, self.version = key.backend, key.version
        self._trt, self._log = trt, LogKeeper(trt)
        self._device = Device(0)
        self._device.set_current()
        found = gpu()
        self.name = f"{found.name}, driver {found.driver}" if found else self._device.name
        self._stream = self._device.create_stream()
        self._handle = int(self._stream.handle)
        self._capturing = False
        self._pinned_memory = LegacyPinnedMemoryResource()
        self._buffers: dict[int, Buffer] = {}  # by address
        self._folder = next(iter(engines.values())).file.parent
        self._runtime = trt.Runtime(self._log.logger)
        self._runtime_cache: Any = None
        self._engines = {graph: self._load(bundle, s) for graph, s in engines.items()}
        size = max(engine.device_memory_size_v2 for engine in self._engines.values())
        scratch = self.allocate(max(1, size))
        self._contexts = {
            (graph, profile): self._context(engine, profile, scratch, size)
            for graph, engine in self._engines.items()
            for profile in range(engine.num_optimization_profiles)
        }
        self._bound: dict[tuple[str, int], dict[str, Tensor]] = {}  # what a context has now
        self.sync()

    # Engines

    def _load(self, bundle: Bundle, sidecar: Sidecar) -> Any:
        engine = self._runtime.deserialize_cuda_engine(sidecar.file.read_bytes())
        if engine is None:
            raise DraftgraphError(
                f"{sidecar.file}: {self.backend} {self.version} cannot load this engine on "
                f"{self.name}: {self._log.take()}"
            )
        info = bundle.graphs[sidecar.graph]
        outputs = [t.name for t in info.outputs]
        check_aliases(sidecar.graph, outputs, engine.get_aliased_input_tensor)
        check_profiles(sidecar, engine.get_tensor_profile_shape)
        for name in (*(t.name for t in info.inputs), *outputs):
            if engine.get_tensor_location(name) != self._trt.TensorLocation.DEVICE:
                raise DraftgraphError(
                    f"{sidecar.file}: {name} is read on the host, which no CUDA graph could "
                    "replay; report this with the version of TensorRT"
                )
        return engine

    def _context(self, engine: Any, profile: int, scratch: int, size: int) -> Any:
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self.backend == "tensorrt-rtx":
            config = self._runtime_config(engine, strategy, captured=profile == 0)
            context = engine.create_execution_context(config)
        else:
            context = engine.create_execution_context(strategy)
        if context is None:
            raise DraftgraphError(f"{engine.name}: no execution context: {self._log.take()}")
        context.set_device_memory(scratch, size)
        if not context.set_optimization_profile_async(profile, self._handle):
            raise DraftgraphError(f"{engine.name}: no profile {profile}: {self._log.take()}")
        return context

    def _runtime_config(self, engine: Any, strategy: Any, *, captured: bool) -> Any:
        """How TensorRT-RTX compiles kernels at run time.

        Where a graph captures them, at once, so that none is replaced later; for prompts, whose
        shapes are all different, beside the work.
        """
        trt = self._trt
        when = trt.DynamicShapesKernelSpecializationStrategy
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # captured here, not there
        config.dynamic_shapes_kernel_specialization_strategy = when.EAGER if captured else when.LAZY
        if self._runtime_cache is None:
            self._runtime_cache = config.create_runtime_cache()
            file = self._folder / RUNTIME_CACHE
            if file.is_file():  # refused where version, GPU or driver differ, then made anew
                self._runtime_cache.deserialize(file.read_bytes())
        config.set_runtime_cache(self._runtime_cache)
        return config

    def save_compiled(self) -> None:
        if self._runtime_cache is None:
            return
        file = self._folder / RUNTIME_CACHE
        temporary = file.with_name(f".{file.name}.{os.getpid()}.partial")
        try:
            temporary.write_bytes(memoryview(self._runtime_cache.serialize()))
            os.replace(temporary, file)
        except OSError:
            pass  # a bundle that cannot be written to works, only slower the next time
        finally:
            temporary.unlink(missing_ok=True)

    def enqueue(self, call: EngineCall) -> None:
        place = call.graph, call.profile
        context, bound = self._contexts[place], self._bound.setdefault(place, {})
        for tensors, are_inputs in ((call.inputs, True), (call.outputs, False)):
            for name, tensor in tensors.items():
                if bound.get(name) == tensor:
                    continue
                ok = not are_inputs or context.set_input_shape(name, tensor.shape)
                if not (ok and context.set_tensor_address(name, tensor.address)):
                    raise DraftgraphError(
                        f"{call.graph}: TensorRT refuses {name} {list(tensor.shape)}: "
                        f"{self._log.take()}"
                    )
                bound[name] = tensor
        if (
            self._capturing
            and self.backend == "tensorrt-rtx"
            and not context.is_stream_capturable(self._handle)
        ):
            raise CaptureRefused(f"{call.graph}: TensorRT-RTX cannot be captured here")
        if not context.execute_async_v3(self._handle):
            message = f"{call.graph}: TensorRT did not run: {self._log.take()}"
            raise CaptureRefused(message) if self._capturing else DraftgraphError(message)

    # Graphs

    def capture(self, work: Callable[[], None]) -> Graph:
        problem: Exception | None = None
        builder = self._stream.create_graph_builder()
        self._capturing = True
        try:
            builder.begin_building("thread_local")
            try:
                work()
            except Exception as error:  # it ran before, so it is the capture that fails
                problem = error
            builder.end_building()
            if problem is None:
                graph = builder.complete()
                graph.upload(self._stream)
                return graph
        except Exception as error:  # what may not be captured invalidates the capture
            problem = problem or error
        finally:
            self._capturing = False
            builder.close()
        cudart.cudaGetLastError()  # else the next call would report it again
        raise CaptureRefused(str(problem)) from problem

    def launch(self, graph: Graph) -> None:
        graph.launch(self._stream)

    # Memory and time

    def free_bytes(self) -> int:
        free, _ = _check(driver.cuMemGetInfo())
        return int(free)

    def allocate(self, size: int) -> int:
        buffer = self._device.allocate(size, stream=self._stream)
        address = int(buffer.handle)
        self._buffers[address] = buffer
        self.zero(address, size)
        return address

    def free(self, address: int) -> None:
        self._buffers.pop(address).close(self._stream)

    def pinned(self, size: int) -> np.ndarray:
        buffer = self._pinned_memory.allocate(size)
        self._buffers[int(buffer.handle)] = buffer
        memory = (ctypes.c_uint8 * size).from_address(int(buffer.handle))
        array = np.ctypeslib.as_array(memory)
        array[:] = 0
        return array

    def upload(self, address: int, source: np.ndarray) -> None:
        _check(driver.cuMemcpyAsync(address, source.ctypes.data, source.nbytes, self._handle))

    def download(self, target: np.ndarray, address: int) -> None:
        _check(driver.cuMemcpyAsync(target.ctypes.data, address, target.nbytes, self._handle))

    def copy(self, target: int, source: int, size: int) -> None:
        _check(driver.cuMemcpyAsync(target, source, size, self._handle))

    def zero(self, address: int, size: int) -> None:
        _check(driver.cuMemsetD8Async(address, 0, size, self._handle))

    def mark(self) -> Event:
        return self._stream.record(options=EventOptions(timing_enabled=True))

    def seconds(self, start: Event, end: Event) -> float:
        return (end - start) / 1e3  # an event difference is in ms

    def sync(self) -> None:
        self._stream.sync()


def _check(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values of a driver call; its error as ours."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(error)
        raise DraftgraphError(f"CUDA: {text.decode() if text else error}")
    return tuple(values)
