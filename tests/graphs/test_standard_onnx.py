"""Every graph of a bundle is plain, portable ONNX over one weights file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers import GOLDENS
from safetensors.numpy import load_file

from draftgraph.runtime import Bundle, load_bundle

BundleFactory = Callable[..., Path]
KINDS = {1: "fp32", 7: "int64"}  # onnx.TensorProto codes

# A symbolic axis may appear in these graphs and no other name may.
AXES = {
    "target": {"N", "R", "S", "M", "C"},
    "backbone": {"N", "P", "R", "B", "X", "C"},
    "markov": {"B"},
    "confidence": {"B"},
    "accept": {"N", "R", "B"},
}


@pytest.fixture(scope="module", params=[*GOLDENS, "qwen3-vanilla with topk"])
def exported(request: pytest.FixtureRequest, bundle: BundleFactory) -> Bundle:
    name, _, topk = request.param.partition(" with ")
    return load_bundle(bundle(name, **({"markov_top_k": 20} if topk else {})))


def models(bundle: Bundle) -> Iterator[tuple[str, onnx.ModelProto]]:
    """The graphs without their weights."""
    for name in bundle.graphs:
        yield name, onnx.load(bundle.graph_path(name), load_external_data=False)


def attribute(node: onnx.NodeProto, name: str) -> Any:
    """The value of an attribute, None when it is absent."""
    for a in node.attribute:
        if a.name == name:
            return onnx.helper.get_attribute_value(a)
    return None


def signature(values: Any) -> list[tuple[str, str, tuple[int | str, ...]]]:
    """(name, dtype, shape) of graph inputs or outputs."""
    return [
        (
            v.name,
            KINDS[v.type.tensor_type.elem_type],
            tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim),
        )
        for v in values
    ]


def external(tensor: onnx.TensorProto) -> dict[str, str]:
    return {e.key: e.value for e in tensor.external_data}


def test_the_graphs_there_are(exported: Bundle) -> None:
    expected = {"target", "backbone", "markov", "markov_greedy"}
    expected |= {"accept_greedy", "accept_sample", "accept_filtered"}
    if exported.draft.has_confidence:
        expected.add("confidence")
    if exported.markov_top_k is not None:
        expected |= {"markov_topk", "markov_topk_greedy"}
    assert set(exported.graphs) == expected
    assert {p.name for p in exported.path.glob("*.onnx")} == {f"{n}.onnx" for n in expected}


def test_opset_and_domains(exported: Bundle) -> None:
    for name, model in models(exported):
        assert [(o.domain, o.version) for o in model.opset_import] == [("", 24)], name
        assert {n.domain for n in model.graph.node} <= {"", "ai.onnx"}, name
        assert not model.functions
        # Nothing is hidden in subgraphs either.
        kinds = {a.type for n in model.graph.node for a in n.attribute}
        assert not kinds & {onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS}, name


def test_checker(exported: Bundle) -> None:
    for name in exported.graphs:
        onnx.checker.check_model(str(exported.graph_path(name)), full_check=True)


def test_attention_relies_on_its_mask_alone(exported: Bundle) -> None:
    """TensorRT's parsers drop is_causal and nonpad_kv_seqlen silently (design rule)."""
    layers = {
        "target": exported.target.decoder.num_layers,
        "backbone": exported.draft.decoder.num_layers,
    }
    for name, model in models(exported):
        attention = [n for n in model.graph.node if n.op_type == "Attention"]
        assert len(attention) == layers.get(name, 0)
        for node in attention:
            assert not attribute(node, "is_causal")
            assert len(node.input) == 4, "q, k, v and a mask; neither past nor nonpad_kv_seqlen"
            assert all(node.input)
        # One mask per run, shared by all layers.
        assert len({n.input[3] for n in attention}) <= 1


def test_caches(exported: Bundle) -> None:
    """One TensorScatter, all that TensorRT allows, leads from each cache to its output."""
    for name in ("target", "backbone"):
        model = onnx.load(exported.graph_path(name), load_external_data=False)
        inputs = {n: (k, s) for n, k, s in signature(model.graph.input)}
        outputs = {n: (k, s) for n, k, s in signature(model.graph.output)}
        decoder = exported.target.decoder if name == "target" else exported.draft.decoder
        pasts = [f"past_{k}.{i}" for i in range(decoder.num_layers) for k in ("key", "value")]
        assert [n for n in inputs if n.startswith("past_") and n != "past_length"] == pasts
        producers = {o: n for n in model.graph.node for o in n.output}
        for past in pasts:
            present = past.replace("past", "present")
            assert inputs[past] == outputs[present]
            assert inputs[past] == (
                "fp32",
                ("R", decoder.num_kv_heads, "C", decoder.head_dim),
            )
            node = producers[present]
            assert node.op_type == "TensorScatter" and node.input[0] == past
            assert attribute(node, "axis") == -2
            assert attribute(node, "mode") in (None, b"linear")
        scatters = sum(n.op_type == "TensorScatter" for n in model.graph.node)
        assert scatters == len(pasts)


def test_manifest_signatures(exported: Bundle) -> None:
    for name, model in models(exported):
        info = exported.graphs[name]
        for found, listed in (
            (model.graph.input, info.inputs),
            (model.graph.output, info.outputs),
        ):
            assert signature(found) == [(t.name, t.dtype, t.shape) for t in listed], name
        assert info.nodes == len(model.graph.node)
        axes = {a for _, _, shape in signature(model.graph.input) for a in shape}
        axes |= {a for _, _, shape in signature(model.graph.output) for a in shape}
        assert {a for a in axes if isinstance(a, str)} == AXES[name.split("_")[0]], name


def test_target_and_backbone_ports(exported: Bundle) -> None:
    """The tensors a host program binds, spelled out once."""
    t, d = exported.target, exported.draft
    taps = len(d.tap_ids) * d.decoder.hidden_size

    def ports(tensors: Any) -> list[tuple[str, str, tuple[int | str, ...]]]:
        caches = ("past_key", "past_value", "present_")
        return [(x.name, x.dtype, x.shape) for x in tensors if not x.name.startswith(caches)]

    target, backbone = exported.graphs["target"], exported.graphs["backbone"]
    assert ports(target.inputs) == [
        ("input_ids", "int64", ("N",)),
        ("past_length", "int64", ("R",)),
        ("cell_token", "int64", ("R", "S")),
        ("token_cell", "int64", ("N",)),
        ("logits_index", "int64", ("M",)),
    ]
    assert ports(target.outputs)[:2] == [
        ("logits", "fp32", ("M", t.vocab_size)),
        ("features", "fp32", ("N", taps)),
    ]
    assert ports(backbone.inputs) == [
        ("features", "fp32", ("N", taps)),
        ("feature_index", "int64", ("P",)),
        ("context_cell", "int64", ("R", "X")),
        ("feature_count", "int64", ("R",)),
        ("past_length", "int64", ("R",)),
        ("anchor", "int64", ("B",)),
        ("request_block", "int64", ("R",)),
        ("block_request", "int64", ("B",)),
    ]
    assert ports(backbone.outputs)[:2] == [
        ("hidden", "fp32", ("B", d.block_size, d.decoder.hidden_size)),
        ("base_logits", "fp32", ("B", d.block_size, d.vocab_size)),
    ]


def test_weights_are_ranges_of_one_safetensors_file(exported: Bundle) -> None:
    """Read by offset from ONNX and by name with safetensors, a tensor is the same."""
    file = exported.path / "weights.safetensors"
    tensors = load_file(file)
    content = file.read_bytes()
    used: Counter[str] = Counter()
    for name, model in models(exported):
        for tensor in model.graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                assert np.prod(tensor.dims, initial=1) < 64, f"{name}: {tensor.name} is inline"
                continue
            where = external(tensor)
            assert where["location"] == "weights.safetensors"  # relative: a bundle can be moved
            start, length = int(where["offset"]), int(where["length"])
            stored = tensors[tensor.name]
            assert list(tensor.dims) == list(stored.shape)
            assert content[start : start + length] == stored.tobytes()
            used[tensor.name] += 1
    assert set(used) == set(tensors), "a tensor that no graph uses"
    # Large tensors are aligned, so that they can be mapped.
    big = [external(t) for _, m in models(exported) for t in m.graph.initializer if external(t)]
    assert all(int(e["offset"]) % 64 == 0 for e in big if int(e["length"]) % 64 == 0)


def test_embedding_and_head_are_stored_once(exported: Bundle) -> None:
    tensors = load_file(exported.path / "weights.safetensors")
    tables = [n for n in tensors if n.endswith(("embed_tokens.weight", "lm_head.weight"))]
    assert exported.draft.shares_embedding
    assert exported.draft.shares_head
    if exported.target.tied_head:
        assert tables == ["embed_tokens.weight"]
    else:
        assert sorted(tables) == ["embed_tokens.weight", "lm_head.weight"]
    # The graphs of target and drafter point at the same bytes.
    ranges = {
        name: {t.name: external(t) for t in model.graph.initializer}
        for name, model in models(exported)
        if name in ("target", "backbone")
    }
    for table in tables:
        assert ranges["target"][table] == ranges["backbone"][table]


def test_one_golden_is_tied(bundle: BundleFactory) -> None:
    """So that the case above is not vacuous."""
    tied = {n: load_bundle(bundle(n)).target.tied_head for n in GOLDENS}
    assert tied == {n: n.startswith("llama") for n in GOLDENS}
