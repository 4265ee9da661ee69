"""Bundles whose drafter drafts some tokens only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import GOLDENS_ROOT, load_golden, run_cli, run_cli_ok
from safetensors.numpy import load_file

from draftgraph.export.bundle import export_bundle
from draftgraph.export.checkpoints import read_draft, read_target
from draftgraph.export.draft_vocab import FILE, restrict, write_draft_vocab
from draftgraph.graphs.contract import DType
from draftgraph.graphs.errors import DraftgraphError
from draftgraph.runtime import Engine, SamplingParams, load_bundle

V, KEPT = 100, 30
ORDER = np.random.default_rng(0).permutation(V)[:40]


@pytest.fixture
def drafter(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A golden drafter with a draft vocabulary beside it."""
    path = tmp_path / "drafter"
    shutil.copytree(GOLDENS_ROOT / request.param / "draft", path)
    write_draft_vocab(path, ORDER)
    return path


@pytest.mark.parametrize(
    ("drafter", "dtype"),
    [
        ("qwen3-vanilla", "fp32"),
        ("qwen3-dflash", "fp32"),
        ("llama-vanilla-threshold", "fp32"),
        ("qwen3-gated", "fp16"),
        ("qwen3-rnn", "bf16"),
    ],
    indirect=["drafter"],
)
def test_only_these_are_drafted(
    drafter: Path, dtype: DType, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The export validates itself against torch; what is put out stays the target's."""
    name = request.node.callspec.params["drafter"]
    target = read_target(GOLDENS_ROOT / name / "target")
    draft = restrict(read_draft(drafter, target), KEPT)
    path = export_bundle(target, draft, tmp_path / "out", dtype=dtype, markov_top_k=8)
    bundle = load_bundle(path)
    assert bundle.draft.draft_vocab_size == KEPT
    allowed = np.sort(ORDER[:KEPT])
    base = next(t for t in bundle.graphs["backbone"].outputs if t.name == "base_logits")
    assert base.shape == ("B", draft.contract.block_size, KEPT)
    np.testing.assert_array_equal(bundle.draft_ids(), allowed)
    if dtype == "fp32":
        tensors = load_file(path / "weights.safetensors")
        head = tensors["backbone.lm_head.weight"]
        assert head.shape == (KEPT, bundle.draft.decoder.hidden_size)
        if draft.contract.shares_head:
            table = "embed_tokens.weight" if target.contract.tied_head else "lm_head.weight"
            np.testing.assert_array_equal(head, tensors[table][allowed])
    for markov in ("full", "topk") if bundle.markov_top_k else ("full",):
        engine = Engine.load(path, markov=markov)
        prompts = [p["prompt"] for p in load_golden(name).prompts]
        plain = engine.generate_batch(prompts, SamplingParams(max_new_tokens=24), speculative=False)
        drafted: set[int] = set()
        for params in (
            SamplingParams(max_new_tokens=24),
            SamplingParams(max_new_tokens=24, temperature=1.5, seed=1),
        ):
            outputs = engine.generate_batch(prompts, params)
            if not params.temperature:
                assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
            drafted |= {i for o in outputs for r in o.rounds for i in r.draft_ids}
        assert drafted <= set(allowed.tolist()) and len(drafted) > 5


@pytest.mark.parametrize("drafter", ["qwen3-vanilla"], indirect=True)
def test_the_command(drafter: Path, tmp_path: Path) -> None:
    target = GOLDENS_ROOT / "qwen3-vanilla" / "target"
    arguments = ("export", "--target", target, "--drafter", drafter, "--out", tmp_path / "out")
    run_cli_ok(*arguments, "--draft-vocab", KEPT)
    described = run_cli_ok("inspect", tmp_path / "out").stdout
    assert f"draft_vocab_size {KEPT}" in " ".join(described.split())
    # Fewer tokens than the truncated head looks at: it is left out.
    run_cli_ok(*arguments, "--draft-vocab", 20, "--markov-top-k", 20, "--overwrite")
    assert "markov_topk" not in load_bundle(tmp_path / "out").graphs
    refused = run_cli(*arguments, "--draft-vocab", 41, "--overwrite")
    assert refused.exit_code == 2 and "expected 1 to 40" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (None, "no such draft vocabulary"),
        ([1, 2], "JSON object"),
        ({"schema_version": 2, "ids": [1]}, "schema_version is 2"),
        ({"schema_version": 1, "ids": []}, "key ids"),
        ({"schema_version": 1, "ids": [1, 2.5]}, "key ids"),
        ({"schema_version": 1, "ids": [1, 1]}, "1 of them twice"),
        ({"schema_version": 1, "ids": [1, 100]}, "from 0 to 99, found 1 to 100"),
    ],
)
@pytest.mark.parametrize("drafter", ["qwen3-vanilla"], indirect=True)
def test_files_that_are_refused(payload: Any, message: str, drafter: Path) -> None:
    target = read_target(GOLDENS_ROOT / "qwen3-vanilla" / "target")
    draft = read_draft(drafter, target)
    if payload is None:
        (drafter / FILE).unlink()
    else:
        (drafter / FILE).write_text(json.dumps(payload))
    with pytest.raises(DraftgraphError, match=message):
        restrict(draft, 1)
