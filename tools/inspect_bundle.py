"""What a bundle holds, as plain data and as text."""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import Any

from rich.console import Console

from ..graphs.contract import to_dict
from ..graphs.errors import DraftgraphError
from ..runtime.bundle import Bundle, TensorInfo
from .console import heading, size, table

_NUMBERED = re.compile(r"(.+)\.(\d+)")


def describe(bundle: Bundle) -> dict[str, Any]:
    """Everything `draftgraph inspect` prints; `--json` prints exactly this."""
    target, draft = bundle.kv_bytes
    capacities = sorted({c for c in (256, 1024) if c < bundle.max_seq_len} | {bundle.max_seq_len})
    return {
        "path": str(bundle.path),
        "bytes": sum(entry["bytes"] for entry in bundle.files.values()),
        "schema_version": bundle.manifest["schema_version"],
        "producer": bundle.manifest.get("producer", {}),
        "dtype": bundle.dtype,
        "float32_islands": bundle.manifest.get("float32_islands", []),
        "max_seq_len": bundle.max_seq_len,
        "markov_top_k": bundle.markov_top_k,
        "tokenizer": "tokenizer.json" in bundle.files,
        "chat_template": has_chat_template(bundle),
        "target": to_dict(bundle.target),
        "draft": to_dict(bundle.draft),
        "graphs": {
            name: {
                "file": graph.file,
                "cpu_file": graph.cpu_file,
                "bytes": bundle.files[graph.file]["bytes"],
                "nodes": graph.nodes,
                "parameters": graph.parameters,
                "inputs": [_tensor(t) for t in graph.inputs],
                "outputs": [_tensor(t) for t in graph.outputs],
            }
            for name, graph in bundle.graphs.items()
        },
        "axes": bundle.manifest.get("axes", {}),
        "kv_cache": {
            "bytes_per_token": {"target": target, "draft": draft},
            "bytes_by_capacity": {
                str(c): {"target": c * target, "draft": c * draft, "total": c * (target + draft)}
                for c in capacities
            },
        },
        "validation": _validation(bundle),
        "provenance": bundle.manifest.get("provenance", {}),
        "files": bundle.files,
    }


def has_chat_template(bundle: Bundle) -> bool:
    """Whether the bundle's tokenizer can format chat messages."""
    if "chat_template.jinja" in bundle.files:
        return True
    config = _json_file(bundle, "tokenizer_config.json")
    return isinstance(config.get("chat_template"), str)


def _validation(bundle: Bundle) -> dict[str, Any]:
    return _json_file(bundle, "validation.json")


def _json_file(bundle: Bundle, name: str) -> dict[str, Any]:
    text = bundle.text_file(name)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DraftgraphError(
            f"{bundle.path / name}: not valid JSON ({error}); export the bundle again"
        ) from None
    return value if isinstance(value, dict) else {}


def _tensor(tensor: TensorInfo) -> dict[str, Any]:
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)}


def render(facts: dict[str, Any], console: Console) -> None:
    """Print a description section by section."""
    _summary(facts, console)
    _contract("target contract", facts["target"], console)
    _contract("draft contract", facts["draft"], console)
    _graphs(facts, console)
    _tensors(facts, console)
    _cache(facts, console)
    render_validation(facts["validation"], console)
    _provenance(facts, console)


def _summary(facts: dict[str, Any], console: Console) -> None:
    producer = ", ".join(f"{name} {version}" for name, version in facts["producer"].items())
    rows = {
        "bundle": facts["path"],
        "size": f"{size(facts['bytes'])} in {len(facts['files'])} files",
        "schema": facts["schema_version"],
        "producer": producer,
        "dtype": facts["dtype"],
        "float32 islands": "; ".join(facts["float32_islands"]) or "none (everything is float32)",
        "max_seq_len": facts["max_seq_len"],
        "markov_top_k": facts["markov_top_k"] or "off (full vocabulary only)",
        "tokenizer": "yes" if facts["tokenizer"] else "no (token ids only)",
        "chat template": "yes" if facts["chat_template"] else "no",
    }
    _fields(None, rows, console)


def _contract(title: str, contract: dict[str, Any], console: Console) -> None:
    rows: dict[str, Any] = {}
    for name, value in contract.items():
        if name == "decoder":
            rope = {k: v for k, v in value["rope"].items() if v is not None}
            if rope["type"] != "yarn":
                del rope["truncate"]
            rows |= {f"decoder.{k}": v for k, v in value.items() if k != "rope"}
            rows["decoder.rope"] = _words(rope)
        elif value is not None:
            rows[name] = _words(value) if isinstance(value, dict) else value
    _fields(title, rows, console)


def _words(values: dict[str, Any]) -> str:
    return ", ".join(f"{k} {_word(v)}" for k, v in values.items()) or "none"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _fields(title: str | None, rows: dict[str, Any], console: Console) -> None:
    if title:
        heading(console, title)
    fields = table("", "", left=2)
    fields.show_header = False
    for name, value in rows.items():
        fields.add_row(name, _word(value))
    console.print(fields)


def _graphs(facts: dict[str, Any], console: Console) -> None:
    heading(console, "graphs")
    graphs = table("graph", "file", "size", "nodes", "parameters", left=2)
    for name, graph in facts["graphs"].items():
        graphs.add_row(
            name,
            graph["file"] + (f" (CPU: {graph['cpu_file']})" if graph["cpu_file"] else ""),
            size(graph["bytes"]),
            str(graph["nodes"]),
            f"{graph['parameters']:,}",
        )
    console.print(graphs)
    console.print("Parameters are stored once in weights.safetensors and shared between graphs.")


def _tensors(facts: dict[str, Any], console: Console) -> None:
    heading(console, "tensors")
    tensors = table("graph", "", "name", "dtype", "shape", left=5)
    for name, graph in facts["graphs"].items():
        label = name
        for way, key in (("in", "inputs"), ("out", "outputs")):
            for row in collapse(graph[key]):
                tensors.add_row(label, way, *row)
                label = way = ""
    console.print(tensors)
    for axis, meaning in facts["axes"].items():
        console.print(f"  {axis}  {meaning}")


def collapse(tensors: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """(names, dtype, shape) rows; the numbered tensors of all layers share one row."""

    def stem(tensor: dict[str, Any]) -> tuple[str, str, str]:
        match = _NUMBERED.fullmatch(tensor["name"])
        shape = "[" + ", ".join(map(str, tensor["shape"])) + "]"
        return (match[1] if match else tensor["name"], tensor["dtype"], shape)

    order = {key: i for i, key in reversed(list(enumerate(map(stem, tensors))))}
    rows = []
    for key, members in groupby(sorted(tensors, key=lambda t: order[stem(t)]), key=stem):
        names = [t["name"] for t in members]
        last = names[-1].rsplit(".", 1)[-1]
        label = f"{names[0]} … {last}" if len(names) > 1 else names[0]
        rows.append((label, key[1], key[2]))
    return rows


def _cache(facts: dict[str, Any], console: Console) -> None:
    heading(console, "KV cache of one request")
    per_token = facts["kv_cache"]["bytes_per_token"]
    cache = table("capacity (rows)", "target", "draft", "total")
    both = per_token["target"] + per_token["draft"]
    cache.add_row("1", *(size(n) for n in (per_token["target"], per_token["draft"], both)))
    for capacity, entry in facts["kv_cache"]["bytes_by_capacity"].items():
        cache.add_row(capacity, *(size(entry[k]) for k in ("target", "draft", "total")))
    console.print(cache)


def render_validation(validation: dict[str, Any], console: Console) -> None:
    """The figures of validation.json: every graph against torch."""
    if not validation:
        heading(console, "no validation figures")
        return
    heading(
        console,
        f"validation against torch ({validation.get('dtype')}: errors up to "
        f"{validation.get('tolerance')}, picks from {validation.get('minimum_agreement')})",
    )
    checks = table("check", "max relative error", "picks agree", "mean KL")
    for name, figures in validation.get("checks", {}).items():
        picks = "–"
        if figures.get("picks_compared"):
            picks = f"{figures['picks_agree']} of {figures['picks_compared']}"
        kl = figures.get("mean_kl")
        checks.add_row(
            name, f"{figures['max_relative_error']:.0e}", picks, "–" if kl is None else f"{kl:.0e}"
        )
    console.print(checks)


def _provenance(facts: dict[str, Any], console: Console) -> None:
    heading(console, "made from")
    hashes = table("checkpoint", "file", "sha256", left=3)
    for checkpoint, files in facts["provenance"].items():
        for file, digest in files.items():
            hashes.add_row(checkpoint, file, digest[:12])
            checkpoint = ""
    console.print(hashes)
