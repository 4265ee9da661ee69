"""Reading a bundle: the manifest, its checks, and where every file is.

The format is described in docs/bundle.md; `export/bundle.py` writes it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from ..graphs.contract import DraftContract, DType, TargetContract, from_dict
from ..graphs.errors import DraftgraphError

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
WEIGHTS = "weights.safetensors"
DRAFT_IDS = "markov.draft_ids"  # [U] int64, of bundles with a draft vocabulary

# Float32 islands of fp16 and bf16 bundles (rule in graphs/layers.py).
FLOAT32_ISLANDS = (
    "residual stream and target features",
    "RMS norms",
    "rope tables, rounded where they are applied",
    "target head and logits",
    "fc over target features",
    "markov gate and joint projections",
    "confidence head",
    "sampling and acceptance",
)


@dataclass(frozen=True)
class TensorInfo:
    """One input or output of a graph; symbolic axes are strings (docs/bundle.md lists them)."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class GraphInfo:
    """One graph of the bundle.

    cpu_file: the form to run on a CPU where it differs (half precision, see graphs/emulate.py).
    """

    file: str
    cpu_file: str | None
    nodes: int
    parameters: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


@dataclass(frozen=True)
class Bundle:
    """A bundle whose manifest has been read and checked."""

    path: Path
    dtype: DType
    max_seq_len: int
    markov_top_k: int | None
    target: TargetContract
    draft: DraftContract
    graphs: dict[str, GraphInfo]
    files: dict[str, dict[str, Any]]  # every file: sha256, bytes
    manifest: dict[str, Any]

    def graph_path(self, name: str, *, cpu: bool = False) -> Path:
        """The ONNX file of a graph (its CPU form with `cpu`); an error names those there are."""
        if name not in self.graphs:
            raise DraftgraphError(
                f"{self.path}: the bundle has no graph {name!r}, only {sorted(self.graphs)}; "
                "export it again"
            )
        graph = self.graphs[name]
        return self.path / ((graph.cpu_file if cpu else None) or graph.file)

    @property
    def kv_bytes(self) -> tuple[int, int]:
        """Cache bytes per token and request of the target and of the drafter."""
        size = 4 if self.dtype == "fp32" else 2
        return (
            self.target.decoder.kv_bytes_per_token(size),
            self.draft.decoder.kv_bytes_per_token(size),
        )

    def draft_ids(self) -> np.ndarray:
        """[U] int64: the tokens that may be drafted, increasing."""
        if self.draft.draft_vocab_size is None:
            return np.arange(self.draft.vocab_size)
        file = self.path / WEIGHTS
        with file.open("rb") as stream:
            start, header = weights_header(stream)
            if DRAFT_IDS not in header:
                raise DraftgraphError(f"{file}: no tensor {DRAFT_IDS}; export the bundle again")
            begin, end = header[DRAFT_IDS]["data_offsets"]
            stream.seek(start + begin)
            return np.frombuffer(stream.read(end - begin), "<i8")

    def text_file(self, name: str) -> str | None:
        """A UTF-8 file of the bundle, None when it has none of that name."""
        return (self.path / name).read_text("utf-8") if name in self.files else None


def weights_header(stream: BinaryIO) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file starts, and its header; read from the file's start."""
    size = int.from_bytes(stream.read(8), "little")
    return 8 + size, json.loads(stream.read(size))


def load_bundle(path: str | Path, *, verify: bool = True) -> Bundle:
    """Read and check a bundle directory.

    With `verify` every file's SHA-256 is compared with the manifest (about half a second per
    gigabyte). Raises `DraftgraphError` for a missing or changed file, a file name that
    leaves the directory, and a manifest of a newer schema.
    """
    root = Path(path)
    if not root.is_dir():
        raise DraftgraphError(
            f"{root}: no such bundle directory; write one with `draftgraph export`"
        )
    file = root / MANIFEST
    if not file.is_file():
        raise DraftgraphError(
            f"{root}: no {MANIFEST} here, so this is not a bundle; write one with "
            "`draftgraph export`"
        )
    try:
        manifest = json.loads(file.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DraftgraphError(f"{file}: not valid JSON ({error}); export it again") from None
    if not isinstance(manifest, dict):
        raise DraftgraphError(f"{file}: expected an object; export the bundle again")
    _check_schema(file, manifest)
    try:
        bundle = _parse(root, manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise DraftgraphError(
            f"{file}: damaged manifest ({type(error).__name__}: {error}); export the bundle again"
        ) from None
    _check_files(bundle, verify)
    return bundle


def _check_schema(file: Path, manifest: dict[str, Any]) -> None:
    version = manifest.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise DraftgraphError(f"{file}: schema_version is {version!r}; export the bundle again")
    if version > SCHEMA_VERSION:
        raise DraftgraphError(
            f"{file}: the bundle has schema version {version}, this draftgraph reads up to "
            f"{SCHEMA_VERSION}; upgrade draftgraph or export the bundle again with this version"
        )


def _parse(root: Path, manifest: dict[str, Any]) -> Bundle:
    where = str(root / MANIFEST)

    def tensors(entries: Any) -> tuple[TensorInfo, ...]:
        return tuple(TensorInfo(e["name"], e["dtype"], tuple(e["shape"])) for e in entries)

    if manifest["dtype"] not in ("fp32", "fp16", "bf16"):
        raise DraftgraphError(f"{where}: unknown dtype {manifest['dtype']!r}")
    files = {
        name: {"sha256": entry["sha256"], "bytes": entry["bytes"]}
        for name, entry in manifest["files"].items()
    }
    for name in files:
        _check_name(where, name)
    for entry in manifest["graphs"].values():
        _check_name(where, entry["file"])
        if entry["cpu_file"] is not None:
            _check_name(where, entry["cpu_file"])
    longest = manifest["max_seq_len"]
    if type(longest) is not int or longest < 1:
        raise DraftgraphError(f"{where}: max_seq_len is {longest!r}; export the bundle again")
    return Bundle(
        path=root,
        dtype=manifest["dtype"],
        max_seq_len=longest,
        markov_top_k=manifest["markov_top_k"],
        target=from_dict(TargetContract, manifest["target"], f"{where}: target"),
        draft=from_dict(DraftContract, manifest["draft"], f"{where}: draft"),
        graphs={
            name: GraphInfo(
                file=e["file"],
                cpu_file=e["cpu_file"],
                nodes=e["nodes"],
                parameters=e["parameters"],
                inputs=tensors(e["inputs"]),
                outputs=tensors(e["outputs"]),
            )
            for name, e in manifest["graphs"].items()
        },
        files=files,
        manifest=manifest,
    )


def _check_name(where: str, name: Any) -> None:
    """Refuse names that could make the runtime read outside the bundle."""
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or ":" in name:
        raise DraftgraphError(
            f"{where}: file name {name!r} leaves the bundle directory; do not use this bundle"
        )


def _check_files(bundle: Bundle, verify: bool) -> None:
    for name, entry in bundle.files.items():
        file = bundle.path / name
        if not file.is_file() or file.is_symlink():
            raise DraftgraphError(
                f"{bundle.path}: the bundle's file {name} is missing; a bundle is moved as a whole "
                "directory, copy it again or export it again"
            )
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise DraftgraphError(
                f"{file}: {size} bytes, the manifest says {entry['bytes']}; the file is damaged or "
                "from another export, copy the bundle again or export it again"
            )
        if verify and sha256(file) != entry["sha256"]:
            raise DraftgraphError(
                f"{file}: its content differs from the manifest's SHA-256; the file is damaged or "
                "from another export, copy the bundle again or export it again"
            )
    used = {WEIGHTS} | {f for g in bundle.graphs.values() for f in (g.file, g.cpu_file) if f}
    unlisted = used - set(bundle.files)
    if unlisted:
        raise DraftgraphError(
            f"{bundle.path / MANIFEST}: files {sorted(unlisted)} have no hash; "
            "export the bundle again"
        )


def sha256(file: Path) -> str:
    """Hex digest of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
