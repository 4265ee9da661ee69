"""Every exported golden pair against the official implementation's own traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import GOLDENS, Golden, run_backbone, run_target

from draftgraph.runtime import Engine, SamplingParams, load_bundle
from draftgraph.runtime.backends.base import DraftSampling
from draftgraph.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu

# Absolute, fp32. Largest errors measured: logits 5.3e-6, features 1.8e-6, hidden states 1.4e-6,
# base and corrected logits 2.0e-6, confidence logits 6.0e-7.
TENSORS = 2e-4
CONFIDENCE = 1e-4

GoldenLoader = Callable[[str], Golden]


def greedy(golden: Golden) -> SamplingParams:
    """Greedy decoding with the traces' own schedule."""
    return SamplingParams(
        max_new_tokens=golden.max_new_tokens,
        scheduler="threshold",
        threshold=golden.confidence_threshold,
    )


@pytest.mark.parametrize("name", GOLDENS)
def test_tokens_and_rounds(name: str, golden: GoldenLoader, engine: Callable[..., Engine]) -> None:
    traces, runner = golden(name), engine(name)
    for i, prompt in enumerate(traces.prompts):
        output = runner.generate(prompt["prompt"], greedy(traces))
        assert output.prompt_ids + output.token_ids == prompt["speculative_greedy"]

        expected = traces.comparable_rounds(i)
        assert len(expected) >= 5
        assert len(output.rounds) >= len(expected)
        for found, reference in zip(output.rounds, expected, strict=False):
            assert found.start == reference["start"]
            assert found.draft_ids == reference["draft_tokens"]
            assert found.verified == reference["proposed"]
            assert found.accepted == reference["accepted"]
            assert found.next_id == reference["next_token"]
            if reference["confidence"] is None:
                assert found.confidence is None
            else:  # largest error measured: 1.8e-7
                np.testing.assert_allclose(
                    found.confidence, reference["confidence"], rtol=0, atol=CONFIDENCE
                )


@pytest.mark.parametrize("name", GOLDENS)
def test_plain_decoding(name: str, golden: GoldenLoader, engine: Callable[..., Engine]) -> None:
    traces, runner = golden(name), engine(name)
    for prompt in traces.prompts:
        output = runner.generate(prompt["prompt"], greedy(traces), speculative=False)
        assert output.prompt_ids + output.token_ids == prompt["plain_greedy"]
        assert output.rounds == []


@pytest.mark.parametrize("name", GOLDENS)
def test_tensors(name: str, golden: GoldenLoader, bundle: Callable[..., Path]) -> None:
    """Follows the traced rounds through the backend and compares every intermediate tensor."""
    traces = golden(name)
    gamma = traces.block_size
    backend = OnnxRuntimeCpu(load_bundle(bundle(name)), markov="full")

    def close(tensor: str, key: str, rows: slice | int = slice(None)) -> None:
        found, expected = backend.read(tensor)[rows], traces.tensors[key]
        np.testing.assert_allclose(found, expected, rtol=0, atol=TENSORS, err_msg=key)

    for i, prompt in enumerate(traces.prompts):
        ids = prompt["speculative_greedy"]
        committed = len(prompt["prompt"])
        drafted = 0
        rows = list(range(committed))
        backend.reserve(1, len(ids) + gamma, len(ids) + 2 * gamma)
        run_target(backend, [ids[:committed]], [0])
        close("logits", f"p{i}.prompt_logits")

        for j in traces.traced_rounds(i):
            round_, key = prompt["rounds"][j], f"p{i}.r{j}."
            assert committed == round_["start"]
            close("features", key + "context_features", slice(len(rows)))
            anchor = np.array([round_["anchor"]])
            run_backbone(backend, [rows], [drafted], [round_["anchor"]])
            close("hidden", key + "block_hidden", 0)
            close("base_logits", key + "base_logits", 0)
            zeros = np.zeros((1, gamma), np.float32)
            picks = backend.markov(anchor, DraftSampling(zeros[:, 0], zeros))[0]
            assert picks.tolist() == round_["draft_tokens"]
            close("draft_logits", key + "corrected_logits", 0)
            logits = backend.confidence()
            assert (logits is None) == (round_["confidence"] is None)
            if logits is not None:
                close("confidence_logits", key + "confidence_logits", 0)

            drafted += len(rows)
            verified = round_["draft_tokens"][: round_["proposed"]]
            run_target(backend, [[round_["anchor"], *verified]], [committed])
            rows = list(range(round_["accepted"] + 1))
            committed += len(rows)
