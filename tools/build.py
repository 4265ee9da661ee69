"""`draftgraph build`: TensorRT engines of a bundle, and a table of what was built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from ..export.engines import BuiltEngine, EngineOptions, build_engines
from . import console


def build(
    bundle: Path,
    options: EngineOptions,
    *,
    graphs: list[str] | None = None,
    rebuild: bool = False,
    report: Callable[[str], None] = console.progress,
) -> list[BuiltEngine]:
    """Build the engines and print one line each."""
    built = build_engines(bundle, options, graphs=graphs, rebuild=rebuild, report=report)
    render(built, console.stdout())
    return built


def render(built: list[BuiltEngine], out: Console) -> None:
    """What each engine is, what it took, and where all of them are."""
    table = console.table(
        "graph", "engine", "attention", "cache updates", "size", "seconds", left=2
    )
    for engine in built:
        sidecar = engine.sidecar
        table.add_row(
            sidecar.graph,
            "cache hit" if engine.hit else "built",
            str(sidecar.layers.get("attention", 0) or "–"),
            str(sidecar.layers.get("kv_cache_update", 0) or "–"),
            console.size(sidecar.bytes),
            f"{sidecar.build_seconds:.1f}",
        )
    out.print(table)
    key = built[0].sidecar.key
    out.print(
        f"{key.backend} {key.version}, {key.precision}, compute capability "
        f"{', '.join(key.compute_capabilities)}"
    )
    for folder in sorted({str(engine.sidecar.file.parent) for engine in built}):
        out.print(folder, soft_wrap=True)
