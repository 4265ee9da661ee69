"""Pairs with random weights: made of contracts alone, the same every time, never held in memory."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest

from draftgraph.export.bundle import export_bundle
from draftgraph.export.random_pair import qwen3_4b_contracts, random_pair, tiny_contracts
from draftgraph.graphs.contract import DType
from draftgraph.runtime import Engine, SamplingParams, load_bundle


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_tiny_pair_decodes_exactly_and_accepts_some(dtype: DType, tmp_path: Path) -> None:
    pair = random_pair(*tiny_contracts(), "fp32")
    path = export_bundle(*pair, tmp_path / "b", dtype=dtype, markov_top_k=8, validate=False)
    bundle = load_bundle(path)
    assert "validation.json" not in bundle.files
    assert {"markov", "markov_topk", "confidence", "accept_filtered"} <= set(bundle.graphs)
    engine = Engine.load(path)
    params = SamplingParams(max_new_tokens=60)
    fast, plain = (engine.generate([7, 8, 9], params, speculative=s) for s in (True, False))
    assert fast.token_ids == plain.token_ids
    assert 0 < fast.stats.accepted < fast.stats.verified
    assert len(set(plain.token_ids)) > 3  # not one token over and over


def test_the_shape_of_qwen3_4b() -> None:
    """Nothing is read: its tensors would take eight gigabytes."""
    contracts = qwen3_4b_contracts()
    target, draft = random_pair(*contracts, "bf16")
    count = sum(prod(target.weights.shape(n)) for n in target.weights.names())
    assert count == 4_022_468_096  # as the checkpoint has
    assert draft.contract.tap_ids == (1, 9, 17, 25, 33)
    assert draft.weights.shape("markov_head.markov_w1.weight") == (151936, 256)
    assert draft.contract.decoder.num_layers == 5 and draft.contract.block_size == 7
    norm = target.weights["layers.35.self_attn.q_norm.weight"]
    assert norm.shape == (128,) and abs(float(norm.astype(np.float32).mean()) - 1) < 0.1


@pytest.mark.parametrize("layers", [1, 2, 3, 12])
def test_taps_of_shorter_targets(layers: int) -> None:
    target, draft = qwen3_4b_contracts(layers=layers, scale=16)
    assert target.decoder.num_layers == layers
    assert draft.tap_ids == tuple(sorted(set(draft.tap_ids)))
    assert all(-1 <= tap < layers - 1 for tap in draft.tap_ids)


def test_tensors_differ_and_keep_their_scale() -> None:
    target, _ = random_pair(*qwen3_4b_contracts(layers=2, scale=16), "fp32")
    a, b = (target.weights[f"layers.{i}.mlp.gate_proj.weight"] for i in (0, 1))
    assert not np.array_equal(a, b)
    assert np.array_equal(a, target.weights["layers.0.mlp.gate_proj.weight"])  # read once more
    again, _ = random_pair(*qwen3_4b_contracts(layers=2, scale=16), "fp32")
    other, _ = random_pair(*qwen3_4b_contracts(layers=2, scale=16), "fp32", seed=1)
    assert np.array_equal(b, again.weights["layers.1.mlp.gate_proj.weight"])
    assert not np.array_equal(b, other.weights["layers.1.mlp.gate_proj.weight"])
    assert a.std() * np.sqrt(a.shape[1]) == pytest.approx(1, rel=0.02)
    assert target.weights["embed_tokens.weight"].std() == pytest.approx(1, rel=0.02)
