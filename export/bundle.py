"""Writing a bundle: fuse and convert the weights, build the graphs, write the manifest, validate.

Everything is written into a temporary directory beside the destination and renamed at the end, so a
failed or interrupted export leaves nothing that looks like a bundle. Two exports of the same pair
are byte-identical: no timestamps, fixed names and order.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from ..graphs import build
from ..graphs.contract import DraftContract, DType, TargetContract, to_dict
from ..graphs.emulate import EmulateHalf, has_half
from ..graphs.errors import DraftgraphError
from ..runtime.bundle import (
    DRAFT_IDS,
    FLOAT32_ISLANDS,
    MANIFEST,
    SCHEMA_VERSION,
    WEIGHTS,
    load_bundle,
    sha256,
)
from .checkpoints import DraftCheckpoint, TargetCheckpoint, check_finite
from .checkpoints.weights import Weights

NUMPY_DTYPE: dict[str, Any] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "int64": np.int64,
}
_SAFETENSORS_CODE = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "int64": "I64"}
# Tensor data starts at multiples of this, so mapped weights can be used without a copy.
_ALIGNMENT = 64

DEFAULT_MAX_SEQ_LEN = 4096
DEFAULT_MARKOV_TOP_K = 128

Report = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """One tensor of the weights file: where it comes from and how it is stored."""

    dtype: DType
    parts: tuple[tuple[Weights, str], ...]  # concatenated along the output axis
    rows: np.ndarray | None = None  # of that axis, None: all

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0][0].shape(self.parts[0][1])
        count = sum(w.shape(n)[0] for w, n in self.parts)
        return (count if self.rows is None else len(self.rows), *first[1:])

    def read(self) -> np.ndarray:
        """The tensor, fused and converted; overflow to infinity is an error naming the tensor."""
        arrays = [w[name] for w, name in self.parts]
        with np.errstate(over="ignore"):
            fused = np.concatenate(arrays)
            if self.rows is not None:
                fused = fused[self.rows]
            fused = fused.astype(NUMPY_DTYPE[self.dtype], copy=False)
        if self.dtype == "fp16" and not np.isfinite(fused).all():
            raise DraftgraphError(
                f"{self.parts[0][1]}: values beyond the fp16 range (65504); export with "
                "--dtype bf16 or --dtype fp32"
            )
        return np.ascontiguousarray(fused)


@dataclass(frozen=True)
class Ids:
    """Token ids [n] in the weights file."""

    ids: np.ndarray
    dtype: ClassVar[str] = "int64"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ids.shape

    def read(self) -> np.ndarray:
        return self.ids.astype(np.int64)


def recipes(
    target: TargetCheckpoint, draft: DraftCheckpoint, dtype: DType
) -> dict[str, Recipe | Ids]:
    """Every tensor of the weights file by the name that the graphs use."""
    table: dict[str, Recipe | Ids] = {}

    def add(name: str, kind: DType, weights: Weights, *sources: str) -> None:
        table[name] = Recipe(kind, tuple((weights, s) for s in sources))

    def layer(prefix: str, weights: Weights, source: str, projections: dict[str, str]) -> None:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"{prefix}{norm}.weight", "fp32", weights, f"{source}{norm}.weight")
        for norm in ("q_norm", "k_norm"):
            if f"{source}self_attn.{norm}.weight" in weights:
                name = f"self_attn.{norm}.weight"
                add(prefix + name, "fp32", weights, source + name)
        for fused, members in projections.items():
            block = "self_attn" if "_proj" in fused and fused[0] in "qko" else "mlp"
            for kind in ("weight", "bias"):
                names = [f"{source}{block}.{m}_proj.{kind}" for m in members.split()]
                if names[0] in weights:
                    add(f"{prefix}{block}.{fused}.{kind}", dtype, weights, *names)

    t, d = target.contract, draft.contract
    add(build.EMBEDDING, dtype, target.weights, build.EMBEDDING)
    if not t.tied_head:
        add(build.HEAD, dtype, target.weights, build.HEAD)
    common = {"o_proj": "o", "gate_up_proj": "gate up", "down_proj": "down"}
    for i in range(t.decoder.num_layers):
        layer(
            f"target.layers.{i}.", target.weights, f"layers.{i}.", {"qkv_proj": "q k v", **common}
        )
    add("target.norm.weight", "fp32", target.weights, "norm.weight")

    w = draft.weights
    embedding, head = build.draft_embedding_names(d, t)
    if not d.shares_embedding:
        add(embedding, dtype, w, build.EMBEDDING)
    if draft.draft_ids is not None:
        own = target.weights, build.EMBEDDING if t.tied_head else build.HEAD
        source = own if d.shares_head else (w, build.HEAD)
        table[head] = Recipe(dtype, (source,), draft.draft_ids)
        table[DRAFT_IDS] = Ids(draft.draft_ids)
    elif not d.shares_head:
        add(head, dtype, w, build.HEAD)
    for i in range(d.decoder.num_layers):
        split = {"q_proj": "q", "kv_proj": "k v", **common}
        layer(f"backbone.layers.{i}.", w, f"layers.{i}.", split)
    for name in ("fc", "hidden_norm", "norm"):
        add(f"backbone.{name}.weight", "fp32", w, f"{name}.weight")
    if d.markov_type != "none":
        for name, rows in (("w1", None), ("w2", draft.draft_ids)):
            source = w, f"markov_head.markov_{name}.weight"
            table[f"markov.{name}.weight"] = Recipe(dtype, (source,), rows)
    projection = {"gated": "gate_proj", "rnn": "joint_proj"}.get(d.markov_type)
    for kind in ("weight", "bias"):
        if projection:
            add(f"markov.{projection}.{kind}", "fp32", w, f"markov_head.{projection}.{kind}")
        if d.has_confidence:
            add(f"confidence.proj.{kind}", "fp32", w, f"confidence_head.proj.{kind}")
    return table


def build_graphs(
    target: TargetContract,
    draft: DraftContract,
    dtype: DType,
    markov_top_k: int | None,
) -> Iterator[ir.Model]:
    """All graphs of a bundle, one at a time."""
    yield build.build_target(target, draft.tap_ids, dtype)
    yield build.build_backbone(draft, target, dtype)
    for k in (None, markov_top_k):
        if k is None or k < draft.head_size:
            for greedy in (False, True):
                yield build.build_markov(draft, dtype, k, greedy)
        if markov_top_k is None:
            break
    if draft.has_confidence:
        yield build.build_confidence(draft)
    for kind in ("greedy", "sample", "filtered"):
        yield build.build_accept(draft, kind)


def write_weights(table: dict[str, Recipe | Ids], file: Path) -> dict[str, tuple[int, int]]:
    """One safetensors file; returns (offset, length) of every tensor from the start of the file.

    The ONNX graphs reference these ranges as external data, so the same file serves the graphs
    and any safetensors reader. The header is padded and the tensors are ordered so that data is
    aligned without holes (the format forbids them): sizes that keep the alignment come first.
    """
    sizes = {
        name: int(np.prod(r.shape)) * np.dtype(NUMPY_DTYPE[r.dtype]).itemsize
        for name, r in table.items()
    }
    order = sorted(table, key=lambda name: (sizes[name] % _ALIGNMENT != 0, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in order:
        end = position + sizes[name]
        header[name] = {
            "dtype": _SAFETENSORS_CODE[table[name].dtype],
            "shape": list(table[name].shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    start = 8 + len(text)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for name in order:
            stream.write(table[name].read().reshape(-1).view(np.uint8).data)
    return {name: (start + header[name]["data_offsets"][0], sizes[name]) for name in order}


def attach_weights(
    model: ir.Model,
    table: dict[str, Recipe | Ids],
    ranges: dict[str, tuple[int, int]],
    folder: Path,
) -> int:
    """Point the model's initializers at the weights file; returns the number of parameters."""
    parameters = 0
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            continue
        recipe = table[name]
        shape = tuple(n for n in value.shape or () if isinstance(n, int))
        if shape != recipe.shape:
            raise DraftgraphError(
                f"{model.graph.name}: {name} has shape {list(recipe.shape)} in the checkpoint, "
                f"the graph expects {list(shape)}"
            )
        offset, length = ranges[name]
        value.const_value = ir.ExternalTensor(
            location=WEIGHTS,
            offset=offset,
            length=length,
            dtype=value.dtype or ir.DataType.FLOAT,
            shape=ir.Shape(shape),
            name=name,
            base_dir=folder,
        )
        parameters += int(np.prod(shape))
    return parameters


def _tensor_infos(values: Any) -> list[dict[str, Any]]:
    names = {
        ir.DataType.FLOAT: "fp32",
        ir.DataType.FLOAT16: "fp16",
        ir.DataType.BFLOAT16: "bf16",
        ir.DataType.INT64: "int64",
    }
    return [
        {
            "name": v.name,
            "dtype": names[v.dtype],
            "shape": [n if isinstance(n, int) else n.value for n in v.shape],
        }
        for v in values
    ]


def export_bundle(
    target: TargetCheckpoint,
    draft: DraftCheckpoint,
    out: str | Path,
    *,
    dtype: DType = "fp32",
    max_seq_len: int | None = None,
    markov_top_k: int | None = DEFAULT_MARKOV_TOP_K,
    overwrite: bool = False,
    validate: bool = True,
    report: Report = lambda message: None,
) -> Path:
    """Write the bundle of a target and its drafter to the directory `out` and validate it.

    max_seq_len: largest number of tokens of a request, prompt and generated (default: the model's
    own limit, at most 4096). markov_top_k: also write Markov graphs that look only at the k largest
    base logits of every slot (None: full vocabulary only). validate: compare with torch; False is
    for pairs that are compared otherwise, or that no checkpoint holds (`random_pair`), and leaves
    validation.json out. `report` receives progress messages.
    Raises `DraftgraphError`; nothing is left at `out` unless every check passed.
    """
    out = Path(out)
    limit = target.contract.max_position_embeddings
    if max_seq_len is None:
        max_seq_len = min(limit, DEFAULT_MAX_SEQ_LEN)
    smallest = 2 * (draft.contract.block_size + 1)
    if not smallest <= max_seq_len <= limit:
        raise DraftgraphError(
            f"max-seq-len is {max_seq_len}, expected {smallest} (two blocks) to {limit} (the "
            "target's max_position_embeddings)"
        )
    if markov_top_k is not None and markov_top_k < 1:
        raise DraftgraphError(f"markov-top-k is {markov_top_k}, expected at least 1")
    if out.exists():
        if not overwrite:
            raise DraftgraphError(
                f"{out}: already exists; choose another directory or pass --overwrite"
            )
        if not (out / MANIFEST).is_file():
            raise DraftgraphError(
                f"{out}: exists and is not a bundle, so it is not overwritten; choose another "
                "directory"
            )
    if draft.contract.markov_type == "none" or (
        markov_top_k is not None and markov_top_k >= draft.contract.head_size
    ):
        markov_top_k = None
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        folder.chmod(0o755)
        if validate:
            report("checking the weights")
            check_finite(target.weights)
            check_finite(draft.weights)
        _write(target, draft, folder, dtype, max_seq_len, markov_top_k, report)
        if validate:
            from .validate import validate_bundle

            report("validating every graph against torch")
            validation = validate_bundle(load_bundle(folder, verify=False), target, draft, report)
            _write_json(folder / "validation.json", validation)
            seal(folder)
        _replace(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    report(f"wrote {out}")
    return out


def _write(
    target: TargetCheckpoint,
    draft: DraftCheckpoint,
    folder: Path,
    dtype: DType,
    max_seq_len: int,
    markov_top_k: int | None,
    report: Report,
) -> None:
    table = recipes(target, draft, dtype)
    report(f"writing {WEIGHTS}")
    ranges = write_weights(table, folder / WEIGHTS)
    graphs: dict[str, Any] = {}
    for model in build_graphs(target.contract, draft.contract, dtype, markov_top_k):
        name = model.graph.name or ""
        report(f"building {name}.onnx")
        parameters = attach_weights(model, table, ranges, folder)
        graphs[name] = {
            "file": _save(model, folder / f"{name}.onnx"),
            "cpu_file": None,
            "nodes": len(model.graph),
            "parameters": parameters,
            "inputs": _tensor_infos(model.graph.inputs),
            "outputs": _tensor_infos(model.graph.outputs),
        }
        if has_half(model):
            emulated = EmulateHalf()(model).model
            graphs[name]["cpu_file"] = _save(emulated, folder / f"{name}.cpu.onnx")
    for name, content in target.tokenizer_files.items():
        (folder / name).write_bytes(content)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "producer": {
            "opset": build.OPSET,
            **{
                package: importlib.metadata.version(package)
                for package in ("draftgraph", "onnx", "onnx-ir", "onnxscript")
            },
        },
        "dtype": dtype,
        "max_seq_len": max_seq_len,
        "markov_top_k": markov_top_k,
        "float32_islands": list(FLOAT32_ISLANDS) if dtype != "fp32" else [],
        "axes": build.AXES,
        "target": to_dict(target.contract),
        "draft": to_dict(draft.contract),
        "graphs": graphs,
        "provenance": {"target": target.provenance, "draft": draft.provenance},
        "files": {},
    }
    _write_json(folder / MANIFEST, manifest)
    seal(folder)


def _save(model: ir.Model, file: Path) -> str:
    """Write one graph, check it with full shape inference, return its file name."""
    ir.save(model, file)
    onnx.checker.check_model(str(file), full_check=True)
    return file.name


_NOT_SEALED = (MANIFEST, "calibration.json", "calibration.svg")


def seal(folder: Path) -> None:
    """Record size and hash of every file in the manifest, but for what is made later."""
    manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    names = [f.name for f in folder.iterdir() if f.is_file() and f.name not in _NOT_SEALED]
    manifest["files"] = {
        name: {"sha256": sha256(folder / name), "bytes": (folder / name).stat().st_size}
        for name in sorted(names)
    }
    _write_json(folder / MANIFEST, manifest)


def _write_json(file: Path, value: Any) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    temporary = file.with_name(file.name + ".partial")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, file)


def _replace(folder: Path, out: Path) -> None:
    """Rename the finished directory into place; an old bundle is removed only afterwards."""
    if out.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent))
        os.replace(out, old / out.name)
        try:
            os.replace(folder, out)
        except BaseException:
            os.replace(old / out.name, out)
            raise
        finally:
            shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(folder, out)
