"""Compiled engines in a bundle: their sidecars, and whether one fits before it is deserialised.

Engines lie under `engines/<fingerprint>/` of the bundle, one `<graph>.engine` and `<graph>.json`
each. Deserialising a plan of another version or device fails late and vaguely, so everything is
compared from the sidecar. Standard library only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..graphs.errors import DraftgraphError
from .bundle import WEIGHTS, Bundle
from .jsonfile import check_version, read_json, write_json

ENGINES = "engines"
SCHEMA_VERSION = 1
KIND = "engine sidecar"

_WORDS = {
    "backend": "backend",
    "version": "TensorRT version",
    "compute_capabilities": "compute capabilities",
    "precision": "precision",
    "graph_sha256": "graph",
    "weights_sha256": "weights",
    "profiles": "profiles",
    "settings": "build settings",
}


@dataclass(frozen=True)
class EngineKey:
    """All that a compiled engine depends on."""

    backend: str
    version: str  # of TensorRT or TensorRT-RTX
    compute_capabilities: tuple[str, ...]
    precision: str
    graph_sha256: str
    weights_sha256: str
    profiles: dict[str, dict[str, list[list[int]]]]  # profile, input: smallest, optimal, largest
    settings: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """Name of the folder: readable parts first. Graphs of one build share it."""
        devices = "-".join(f"sm{c.replace('.', '')}" for c in self.compute_capabilities)
        shared = [self.precision, self.settings]
        digest = hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.backend}-{self.version}-{devices}-{digest}"

    def changed(self, other: EngineKey) -> list[str]:
        """The parts that differ, in words."""
        found = []
        for field, word in _WORDS.items():
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine == theirs:
                continue
            if field == "profiles":  # they follow from the settings, which say more
                if self.settings == other.settings:
                    found.append(word)
            elif field in ("graph_sha256", "weights_sha256"):
                found.append(word)
            elif field == "settings":
                names = [n for n in {**mine, **theirs} if mine.get(n) != theirs.get(n)]
                found += [f"{n} ({theirs.get(n)} → {mine.get(n)})" for n in names]
            else:
                old, new = (", ".join(v) if isinstance(v, tuple) else v for v in (theirs, mine))
                found.append(f"{word} ({old} → {new})")
        return found


@dataclass(frozen=True)
class Sidecar:
    """What is known of one engine file without opening it."""

    graph: str
    key: EngineKey
    build_seconds: float
    bytes: int
    layers: dict[str, int]  # attention and cache updates of the parsed network
    file: Path

    def save(self) -> None:
        """Write the JSON beside the engine file."""
        payload = dataclasses.asdict(self)
        del payload["file"]
        write_json(self.file.with_suffix(".json"), {"schema_version": SCHEMA_VERSION, **payload})

    @classmethod
    def load(cls, path: Path) -> Sidecar:
        """Read a sidecar; a damaged one, or one of a newer schema, is an error."""
        payload = read_json(path, KIND)
        check_version(payload, SCHEMA_VERSION, f"{path}: {KIND}")
        try:
            key = dict(payload["key"])
            key["compute_capabilities"] = tuple(key["compute_capabilities"])
            return cls(
                graph=payload["graph"],
                key=EngineKey(**key),
                build_seconds=float(payload["build_seconds"]),
                bytes=int(payload["bytes"]),
                layers=dict(payload["layers"]),
                file=path.with_suffix(".engine"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DraftgraphError(
                f"{path}: damaged {KIND} ({type(error).__name__}: {error}); delete its folder and "
                "run `draftgraph build` again"
            ) from None


def graph_hashes(bundle: Bundle, graph: str) -> tuple[str, str]:
    """SHA-256 of the graph's file and of the weights, "" for a graph without weights."""
    info = bundle.graphs[graph]
    weights = bundle.files[WEIGHTS]["sha256"] if info.parameters else ""
    return bundle.files[info.file]["sha256"], weights


def sidecars(bundle: Bundle, graph: str) -> list[Sidecar]:
    """Every readable sidecar of a graph, the latest first."""
    found = []
    paths = (bundle.path / ENGINES).glob(f"*/{graph}.json")
    for path in sorted(paths, key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            found.append(Sidecar.load(path))
        except DraftgraphError:
            continue  # a damaged one is rebuilt
    return found


def check_engine(
    bundle: Bundle, sidecar: Sidecar, *, version: str, compute_capability: str | None
) -> None:
    """Refuse an engine that cannot run here, or that was made from other graphs or weights.

    version: of the TensorRT in this process. compute_capability: of the device, None when there is
    none to compare with.
    """
    again = "run `draftgraph build` again"
    key = sidecar.key
    if (key.graph_sha256, key.weights_sha256) != graph_hashes(bundle, sidecar.graph):
        raise DraftgraphError(
            f"{sidecar.file}: stale, the bundle's {sidecar.graph} graph or its weights changed "
            f"since this engine was built; {again}"
        )
    if key.version != version:
        raise DraftgraphError(
            f"{sidecar.file}: built with {key.backend} {key.version}, but {version} is installed; "
            f"engines do not move between versions, {again}"
        )
    if compute_capability is not None and compute_capability not in key.compute_capabilities:
        raise DraftgraphError(
            f"{sidecar.file}: built for compute capability {', '.join(key.compute_capabilities)}, "
            f"this device has {compute_capability}; {again} with --compute-capability "
            f"{compute_capability}"
        )
    size = sidecar.file.stat().st_size if sidecar.file.is_file() else None
    if size != sidecar.bytes:
        found = "the file is missing" if size is None else f"{size} bytes"
        raise DraftgraphError(
            f"{sidecar.file}: {found}, its sidecar says {sidecar.bytes} bytes; {again}"
        )
