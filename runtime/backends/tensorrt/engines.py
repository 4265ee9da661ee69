"""Which engines of a bundle to load: all from one build, all fitting this bundle and device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ....graphs.errors import DraftgraphError
from ...bundle import Bundle
from ...engine_cache import ENGINES, Sidecar, check_engine


def choose_engines(
    bundle: Bundle,
    graphs: Iterable[str],
    backend: str,
    *,
    version: str,
    compute_capability: str | None,
    folder: str | None = None,
) -> dict[str, Sidecar]:
    """The sidecars of the latest build that has every graph and fits, by graph.

    folder: the name of a build under `engines/`, where not the latest one is meant. Nothing is
    deserialised. Raises `DraftgraphError` with what is wrong with each build there is.
    """
    graphs, root = list(graphs), bundle.path / ENGINES
    builds = sorted(
        (p for p in root.glob(f"{backend}-[0-9]*") if p.is_dir() and folder in (None, p.name)),
        key=lambda p: p.stat().st_mtime,
        reverse=True,
    )
    problems = []
    for build in builds:
        try:
            found = {graph: _load(build / f"{graph}.json", backend) for graph in graphs}
            for sidecar in found.values():
                check_engine(
                    bundle, sidecar, version=version, compute_capability=compute_capability
                )
            return found
        except DraftgraphError as error:
            problems.append(str(error))
    if problems:
        raise DraftgraphError("; ".join(problems))
    named = f"no engines {folder}" if folder else f"no {backend} engines"
    raise DraftgraphError(
        f"{root}: {named} here; build them with `draftgraph build {bundle.path} --backend "
        f"{backend} --capacity N`"
    )


def _load(file: Path, backend: str) -> Sidecar:
    if not file.is_file():
        raise DraftgraphError(
            f"{file}: no engine of this graph; run `draftgraph build` again without --graph"
        )
    sidecar = Sidecar.load(file)
    if sidecar.key.backend != backend:
        raise DraftgraphError(f"{file}: built with {sidecar.key.backend}, expected {backend}")
    return sidecar


def check_aliases(graph: str, outputs: Iterable[str], aliased: Callable[[str], str | None]) -> None:
    """Every cache output of an engine shares the memory of its input, or rows would go astray.

    aliased: the input whose memory an output shares, None for its own.
    """
    for name in outputs:
        expected = name.replace("present_", "past_") if name.startswith("present_") else None
        if (found := aliased(name)) != expected:
            raise DraftgraphError(
                f"{graph}: the engine's output {name} shares its memory with {found}, expected "
                f"{expected}; run `draftgraph build --rebuild`"
            )


def check_profiles(sidecar: Sidecar, shapes: Callable[[str, int], Iterable[Iterable[int]]]) -> None:
    """The profiles in an engine are those of its sidecar, in that order.

    shapes: smallest, optimal and largest shape of an input in a profile of the engine.
    """
    for index, (name, ranges) in enumerate(sidecar.key.profiles.items()):
        for tensor, expected in ranges.items():
            found = [list(shape) for shape in shapes(tensor, index)]
            if found != expected:
                raise DraftgraphError(
                    f"{sidecar.file}: {tensor} has the range {found} in profile {name}, its "
                    f"sidecar says {expected}; run `draftgraph build --rebuild`"
                )
