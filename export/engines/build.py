"""Building the engines of a bundle, one per graph, and keeping those that still fit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...graphs.errors import DraftgraphError
from ...runtime.backends.tensorrt.library import LogKeeper, load_tensorrt
from ...runtime.bundle import Bundle, load_bundle
from ...runtime.engine_cache import (
    ENGINES,
    EngineKey,
    Sidecar,
    check_engine,
    graph_hashes,
    sidecars,
)
from ...runtime.machine import gpu
from ...runtime.profiles import HOLD_ROWS, Profile, check_profiles, profiles
from .network import parse_graph
from .options import EngineOptions, check_options

Report = Callable[[str], None]


@dataclass(frozen=True)
class BuiltEngine:
    """One engine of the bundle; `hit` when it was there already, else `reason` says why not."""

    sidecar: Sidecar
    hit: bool
    reason: str = ""


@dataclass
class _Session:
    """What the builds of one call share."""

    trt: Any
    bundle: Bundle
    options: EngineOptions
    report: Report
    log: LogKeeper = field(init=False)
    builder: Any = field(init=False)

    def __post_init__(self) -> None:
        self.log = LogKeeper(self.trt)
        self.builder = self.trt.Builder(self.log.logger)
        if self.builder is None:
            raise DraftgraphError(f"TensorRT cannot start here: {self.log.take()}")


def build_engines(
    path: str | Path,
    options: EngineOptions,
    *,
    graphs: Sequence[str] | None = None,
    rebuild: bool = False,
    report: Report = lambda message: None,
) -> list[BuiltEngine]:
    """Build every graph of the bundle at `path` (or those named) and store it in the bundle.

    An engine whose key has not changed is kept unless `rebuild`. `report` gets progress lines.
    Raises `DraftgraphError`; engines built before an error stay.
    """
    bundle = load_bundle(path, verify=False)
    options = check_options(bundle, options)
    names = list(bundle.graphs) if graphs is None else list(graphs)
    for name in names:
        bundle.graph_path(name)  # refuses a name that the bundle does not have
        check_profiles(bundle, name, options.limits, profiles(bundle, name, options.limits))
    trt = load_tensorrt(options.backend)
    if options.backend == "tensorrt":
        options = _for_this_device(options)
    session: _Session | None = None
    built = []
    for name in names:
        made = profiles(bundle, name, options.limits)
        key = engine_key(bundle, name, options, made, trt.__version__)
        kept, reason = _lookup(bundle, name, key)
        if kept is not None and not rebuild:
            report(f"{name}: cache hit, {kept.file.parent.name}")
            built.append(BuiltEngine(kept, hit=True))
            continue
        reason = "rebuild asked for" if kept is not None else reason
        report(f"{name}: building ({reason})")
        if session is None:
            load_bundle(path)  # a cache hit trusts the manifest, a build reads the files
            session = _Session(trt, bundle, options, report)
        built.append(BuiltEngine(_build(session, name, key, made), hit=False, reason=reason))
    return built


def engine_key(
    bundle: Bundle, graph: str, options: EngineOptions, made: list[Profile], version: str
) -> EngineKey:
    """The key of one engine."""
    graph_hash, weights_hash = graph_hashes(bundle, graph)
    return EngineKey(
        backend=options.backend,
        version=version,
        compute_capabilities=options.compute_capabilities,
        precision=bundle.dtype,
        graph_sha256=graph_hash,
        weights_sha256=weights_hash,
        profiles={
            p.name: {t.name: [list(s) for s in p.shape(t)] for t in bundle.graphs[graph].inputs}
            for p in made
        },
        settings={
            "capacity": options.capacity,
            "max_batch": options.max_batch,
            "prefill_len": options.prefill_len,
            "workspace_mib": options.workspace_mib,
            "hold_rows": HOLD_ROWS,
        },
    )


def _lookup(bundle: Bundle, graph: str, key: EngineKey) -> tuple[Sidecar | None, str]:
    """The engine of exactly this key, or why there is none: what differs from the closest one."""
    found = sidecars(bundle, graph)
    if not found:
        return None, "no engine yet"
    closest = min(found, key=lambda s: len(key.changed(s.key)))
    changed = key.changed(closest.key)
    if changed:
        return None, f"changed: {', '.join(changed)}"
    try:
        check_engine(bundle, closest, version=key.version, compute_capability=None)
    except DraftgraphError as error:
        return None, str(error)
    return closest, ""


def _build(session: _Session, name: str, key: EngineKey, made: list[Profile]) -> Sidecar:
    trt, bundle, options = session.trt, session.bundle, session.options
    assert options.capacity is not None
    start = time.perf_counter()
    parsed = parse_graph(trt, session.builder, session.log, bundle, name, options.capacity)
    folder = bundle.path / ENGINES / key.fingerprint
    folder.mkdir(parents=True, exist_ok=True)
    config = session.builder.create_builder_config()
    for profile in made:
        _add_profile(session, config, name, profile)
    if options.backend == "tensorrt-rtx":
        # No allocation while it runs, so that a CUDA graph can capture it.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        config.num_compute_capabilities = len(options.compute_capabilities)
        for index, capability in enumerate(options.compute_capabilities):
            config.set_compute_capability(_device(trt, capability), index)
    if options.workspace_mib is not None:
        limit = options.workspace_mib << 20
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, limit)
    timing = _timing_cache(config, folder) if options.backend == "tensorrt" else None
    monitor = _progress_monitor(trt, name, session.report)
    config.progress_monitor = monitor
    plan = session.builder.build_serialized_network(parsed.network, config)
    if plan is None:
        raise DraftgraphError(
            f"{bundle.graph_path(name)}: TensorRT's builder refuses it: {session.log.take()}"
        )
    seconds = time.perf_counter() - start
    file = folder / f"{name}.engine"
    # The old sidecar goes first: an interrupted build leaves no engine that seems to fit.
    file.with_suffix(".json").unlink(missing_ok=True)
    _write(file, memoryview(plan))
    if timing is not None:
        _write(folder / "timing.cache", memoryview(timing.serialize()))
    sidecar = Sidecar(name, key, round(seconds, 3), file.stat().st_size, parsed.layers, file)
    sidecar.save()
    return sidecar


def _add_profile(session: _Session, config: Any, graph: str, profile: Profile) -> None:
    made = session.builder.create_optimization_profile()
    for tensor in session.bundle.graphs[graph].inputs:
        made.set_shape(tensor.name, *profile.shape(tensor))
    if config.add_optimization_profile(made) < 0:
        raise DraftgraphError(
            f"{graph}: TensorRT refuses the profile {profile.name}: {session.log.take()}"
        )


def _device(trt: Any, capability: str) -> Any:
    known = {
        n: f"{n[2:-1]}.{n[-1]}" for n in trt.ComputeCapability.__members__ if n.startswith("SM")
    }
    for name, version in known.items():
        if version == capability:
            return getattr(trt.ComputeCapability, name)
    raise DraftgraphError(
        f"TensorRT-RTX {trt.__version__} builds for compute capabilities "
        f"{', '.join(known.values())}, not {capability}; use --backend tensorrt on a device of "
        "that kind"
    )


def _for_this_device(options: EngineOptions) -> EngineOptions:
    """TensorRT builds for the GPU of this machine; its capability becomes part of the key."""
    found = device_capability()
    if found is None:
        raise DraftgraphError(
            "TensorRT builds for the GPU of this machine and there is none; build where the "
            "engines will run, or use --backend tensorrt-rtx, which needs no GPU"
        )
    if options.compute_capabilities not in ((), (found,)):
        raise DraftgraphError(
            f"TensorRT builds for the GPU of this machine, which has compute capability {found}; "
            "leave --compute-capability out, or use --backend tensorrt-rtx"
        )
    return replace(options, compute_capabilities=(found,))


def device_capability() -> str | None:
    """Compute capability of the first GPU, None without a driver or device."""
    found = gpu()
    return None if found is None else found.compute_capability


def _timing_cache(config: Any, folder: Path) -> Any:
    """Timings of earlier builds in this folder; TensorRT-RTX times nothing and needs none."""
    file = folder / "timing.cache"
    cache = config.create_timing_cache(file.read_bytes() if file.is_file() else b"")
    config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def _progress_monitor(trt: Any, graph: str, report: Report) -> Any:
    """Reports where the builder is, at most once a second."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.last = time.monotonic()

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = steps

        def step_complete(self, phase: str, step: int) -> bool:
            now = time.monotonic()
            if now - self.last >= 1:
                self.last = now
                report(f"{graph}: {phase}, {step + 1} of {self.steps.get(phase, 0)}")
            return True

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

    return Monitor()


def _write(file: Path, content: memoryview) -> None:
    temporary = file.with_name(f".{file.name}.partial")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
