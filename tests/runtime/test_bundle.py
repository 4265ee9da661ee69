"""Loading a bundle: what is checked, and that damage is named instead of run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import load_golden

from draftgraph.runtime import DraftgraphError, Engine, SamplingParams, load_bundle

NAME = "qwen3-vanilla"


@pytest.fixture
def copy(bundle: Callable[..., Path], tmp_path: Path) -> Path:
    """A bundle to damage."""
    return Path(shutil.copytree(bundle(NAME), tmp_path / "copy"))


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def refused(folder: Path, *parts: str) -> None:
    """Loading fails with one paragraph that contains all parts."""
    with pytest.raises(DraftgraphError) as caught:
        Engine.load(folder)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_a_bundle_loads(copy: Path) -> None:
    opened = load_bundle(copy)
    assert opened.path == copy
    assert opened.dtype == "fp32"
    assert opened.draft.block_size == 7
    # 2 · layers · kv heads · head_dim · bytes
    assert opened.kv_bytes == (2 * 4 * 2 * 32 * 4, 2 * 2 * 2 * 32 * 4)
    assert opened.text_file("tokenizer.json") is None


def test_a_moved_bundle_runs(copy: Path, tmp_path: Path) -> None:
    """The weights are found beside the graphs, wherever those are."""
    moved = tmp_path / "a b" / "moved"
    moved.parent.mkdir()
    copy.rename(moved)
    prompt = load_golden(NAME).prompts[0]
    output = Engine.load(moved).generate(prompt["prompt"], SamplingParams(max_new_tokens=64))
    assert output.prompt_ids + output.token_ids == prompt["plain_greedy"][:104]


FILES = ["weights.safetensors", "target.onnx", "accept_filtered.onnx", "validation.json"]


@pytest.mark.parametrize("file", FILES)
def test_missing_file(file: str, copy: Path) -> None:
    (copy / file).unlink()
    refused(copy, f"file {file} is missing", "copy it again")


@pytest.mark.parametrize("file", FILES)
def test_truncated_file(file: str, copy: Path) -> None:
    content = (copy / file).read_bytes()
    (copy / file).write_bytes(content[:-1])
    refused(copy, file, f"{len(content) - 1} bytes, the manifest says {len(content)}")
    with pytest.raises(DraftgraphError, match="the manifest says"):
        load_bundle(copy, verify=False)  # sizes are checked in any case


@pytest.mark.parametrize("file", FILES)
def test_changed_file(file: str, copy: Path) -> None:
    content = bytearray((copy / file).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / file).write_bytes(content)
    refused(copy, file, "SHA-256")


def test_symlinked_file(copy: Path, tmp_path: Path) -> None:
    """Even to the same content: a bundle contains its files."""
    outside = tmp_path / "outside"
    (copy / "weights.safetensors").rename(outside)
    (copy / "weights.safetensors").symlink_to(outside)
    refused(copy, "weights.safetensors is missing")


def test_not_a_bundle(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "no such bundle directory", "draftgraph export")
    refused(tmp_path, "no manifest.json", "draftgraph export")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b"null"])
def test_manifest_that_is_no_object(content: bytes, copy: Path) -> None:
    (copy / "manifest.json").write_bytes(content)
    refused(copy, "manifest.json", "again")


def test_newer_schema(copy: Path) -> None:
    edit(copy, lambda m: m.update(schema_version=2))
    refused(copy, "schema version 2", "reads up to 1", "upgrade draftgraph")


@pytest.mark.parametrize("version", [None, 0, "1", True, 1.0])
def test_schema_that_is_no_version(version: Any, copy: Path) -> None:
    edit(copy, lambda m: m.update(schema_version=version))
    refused(copy, "schema_version is", "export the bundle again")


@pytest.mark.parametrize(
    "name", ["../x", "/etc/hostname", "a/../../x", "..", "", "C:/x", "..\\x", None]
)
@pytest.mark.parametrize("place", ["files", "graphs"])
def test_names_that_leave_the_directory(name: Any, place: str, copy: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        if place == "graphs":
            manifest["graphs"]["target"]["file"] = name
        else:
            manifest["files"][name or ""] = {"sha256": "0", "bytes": 0}

    edit(copy, change)
    refused(copy, "leaves the bundle directory")


def test_graph_without_a_hash(copy: Path) -> None:
    edit(copy, lambda m: m["files"].pop("target.onnx"))
    refused(copy, "target.onnx", "no hash")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["draft"].update(shift_label=1), "unknown fields ['shift_label']"),
        (lambda m: m["draft"].pop("mask_token_id"), "missing fields ['mask_token_id']"),
        (lambda m: m["draft"].update(layout="mask-first"), "draft.layout: expected"),
        (lambda m: m["draft"].update(block_size="7"), "draft.block_size: expected"),
        (lambda m: m["target"]["decoder"].update(num_layers=None), "decoder.num_layers: expected"),
        (lambda m: m["target"]["decoder"]["rope"].update(type="ntk"), "rope.type: expected"),
        (lambda m: m["draft"].update(tap_ids=[0, "1"]), "tap_ids[1]: expected"),
        (lambda m: m.update(target=[]), "target: expected an object"),
        (lambda m: m.update(dtype="int4"), "unknown dtype 'int4'"),
        (lambda m: m.pop("graphs"), "damaged manifest"),
        (lambda m: m["graphs"]["target"].pop("inputs"), "damaged manifest"),
        (lambda m: m.update(files=[]), "damaged manifest"),
        (lambda m: m["files"]["target.onnx"].pop("sha256"), "damaged manifest"),
        (lambda m: m["files"].update({"target.onnx": 1}), "damaged manifest"),
        (lambda m: m.update(max_seq_len="many"), "max_seq_len is 'many'"),
    ],
)
def test_damaged_manifest(
    change: Callable[[dict[str, Any]], Any], message: str, copy: Path
) -> None:
    edit(copy, change)
    refused(copy, "manifest.json", message)


def test_missing_graph(copy: Path) -> None:
    edit(copy, lambda m: m["graphs"].pop("target"))
    refused(copy, "no graph 'target'")


def test_a_graph_that_onnxruntime_refuses(copy: Path) -> None:
    (copy / "target.onnx").write_bytes(b"not a model")
    edit(copy, lambda m: m["files"]["target.onnx"].update(bytes=11))
    with pytest.raises(DraftgraphError, match=r"target\.onnx: ONNX Runtime .* cannot load"):
        Engine.load(copy, verify=False)


# Options of the engine


def test_options(copy: Path) -> None:
    for options, message in (
        ({"provider": "tpu"}, "provider is 'tpu', expected one of"),
        ({"markov": "half"}, "markov is 'half'"),
        ({"markov": "topk"}, "no truncated Markov graph"),  # of a vocabulary of 100
    ):
        with pytest.raises(DraftgraphError, match=message):
            Engine.load(copy, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_truncated_markov_head(temperature: float, bundle: Callable[..., Path]) -> None:
    """Another q, and exact all the same: greedy output is the target's."""
    path = bundle(NAME, markov_top_k=5)
    prompt = load_golden(NAME).prompts[2]["prompt"]
    params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=1, stop_ids=())
    outputs = [Engine.load(path, markov=m).generate(prompt, params) for m in ("auto", "topk")]
    assert outputs[0].rounds == outputs[1].rounds
    full = Engine.load(path, markov="full").generate(prompt, params)
    if temperature:
        assert full.rounds[0].draft_ids != outputs[0].rounds[0].draft_ids
    else:
        assert full.token_ids == outputs[0].token_ids


def test_weights_without_a_hash(copy: Path) -> None:
    edit(copy, lambda manifest: manifest["files"].pop("weights.safetensors"))
    refused(copy, "weights.safetensors", "have no hash")
