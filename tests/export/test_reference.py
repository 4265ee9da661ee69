"""The reference against the official traces, and its sampling maths against exact enumeration."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftgraph.export.reference import (
    ReferenceDrafter,
    ReferenceTarget,
    inverse_frequencies,
    processed_probs,
    verify_reference,
)
from draftgraph.graphs.contract import DecoderSpec, DraftContract, RopeSpec
from draftgraph.graphs.errors import DraftgraphError

GOLDENS = Path(__file__).parents[1] / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/expected.json"))
TOLERANCE = 3e-5  # absolute, fp32; the largest error measured was 3.5e-6


@dataclass
class Golden:
    """One directory of traces with the reference built from its checkpoints."""

    drafter: ReferenceDrafter
    target: ReferenceTarget
    prompts: list[dict[str, Any]]
    tensors: dict[str, Tensor]

    def traced(self, prompt: int) -> list[tuple[str, dict[str, Any], Tensor]]:
        """(tensor prefix, round, all feature rows up to its anchor) of every traced round."""
        result, history = [], torch.zeros(0)
        for j, round_ in enumerate(self.prompts[prompt]["rounds"]):
            prefix = f"p{prompt}.r{j}."
            if prefix + "base_logits" not in self.tensors:
                break
            rows = self.tensors[prefix + "context_features"]
            history = torch.cat([history, rows]) if j else rows
            result.append((prefix, round_, history))
        assert result
        return result


def contract_of(config: dict[str, Any]) -> DraftContract:
    """A contract straight from the official configuration keys."""
    rank = config["markov_rank"]
    return DraftContract(
        family="deepspec",
        layout="anchor-first",
        block_size=config["block_size"],
        mask_token_id=config["mask_token_id"],
        tap_ids=tuple(config["target_layer_ids"]),
        decoder=DecoderSpec(
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            intermediate_size=config["intermediate_size"],
            rms_norm_eps=config["rms_norm_eps"],
            rope=RopeSpec("default", config["rope_parameters"]["rope_theta"]),
            qk_norm=True,
        ),
        vocab_size=config["vocab_size"],
        markov_type=config["markov_head_type"] if rank else "none",
        markov_rank=rank,
        has_confidence=config["enable_confidence_head"],
        confidence_with_markov=config.get("confidence_head_with_markov", False),
        shares_embedding=False,
        shares_head=False,
    )


@pytest.fixture(scope="module", params=NAMES)
def golden(request: pytest.FixtureRequest) -> Golden:
    root = GOLDENS / request.param
    contract = contract_of(json.loads((root / "draft/config.json").read_text()))
    weights = load_file(root / "draft/model.safetensors")
    return Golden(
        drafter=ReferenceDrafter(
            contract,
            weights,
            embed=weights["embed_tokens.weight"],
            lm_head=weights["lm_head.weight"],
        ),
        target=ReferenceTarget(root / "target", contract.tap_ids),
        prompts=json.loads((root / "expected.json").read_text())["prompts"],
        tensors=load_file(root / "expected.safetensors"),
    )


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def test_all_official_traces_are_covered() -> None:
    assert NAMES == [
        "llama-vanilla-threshold",
        "qwen3-dflash",
        "qwen3-gated",
        "qwen3-rnn",
        "qwen3-vanilla",
    ]


def test_target_matches_the_traces(golden: Golden) -> None:
    for i, prompt in enumerate(golden.prompts):
        logits, _ = golden.target(torch.tensor(prompt["prompt"]))
        assert_near(logits, golden.tensors[f"p{i}.prompt_logits"])

        # the features of all committed tokens, which the official loop collected with a cache
        _, last_round, history = golden.traced(i)[-1]
        committed = torch.tensor(prompt["speculative_greedy"][: last_round["start"]])
        assert history.shape[0] == last_round["start"]
        assert_near(golden.target(committed)[1], history)


def test_target_continues_the_plain_sequence(golden: Golden) -> None:
    for prompt in golden.prompts:
        plain, start = prompt["plain_greedy"], len(prompt["prompt"])
        logits, _ = golden.target(torch.tensor(plain[:-1]))
        assert logits.argmax(-1)[start - 1 :].tolist() == plain[start:]


def test_drafter_matches_the_traces(golden: Golden) -> None:
    contract = golden.drafter.contract
    for i in range(len(golden.prompts)):
        for prefix, round_, features in golden.traced(i):
            hidden, base = golden.drafter.backbone(features, round_["anchor"])
            assert_near(hidden, golden.tensors[prefix + "block_hidden"])
            assert_near(base, golden.tensors[prefix + "base_logits"])

            ids, logits, embeddings = golden.drafter.markov(base, hidden, round_["anchor"])
            assert ids.tolist() == round_["draft_tokens"]
            assert embeddings.shape == (contract.block_size, contract.markov_rank)
            assert_near(logits, golden.tensors[prefix + "corrected_logits"])

            confidence = golden.drafter.confidence(hidden, embeddings)
            assert (confidence is not None) == contract.has_confidence
            if confidence is not None:
                assert_near(confidence, golden.tensors[prefix + "confidence_logits"])
                assert_near(confidence.sigmoid(), torch.tensor(round_["confidence"]))


def test_verification_matches_the_traces(golden: Golden) -> None:
    """Greedy rounds: one-hot p and q give the official accepted count and next token."""
    for i, prompt in enumerate(golden.prompts):
        tokens = prompt["speculative_greedy"]
        for _, round_, _ in golden.traced(i):
            start, width = round_["start"], round_["proposed"]
            draft = round_["draft_tokens"][:width]
            logits, _ = golden.target(torch.tensor([*tokens[: start + 1], *draft]))
            p = processed_probs(logits[start:], 0.0)
            q = np.eye(p.shape[-1])[np.array(draft, dtype=np.int64)]
            result = verify_reference(p, draft, q, [0.5] * width, 0.5)
            assert result == (round_["accepted"], round_["next_token"])


def test_forced_ids_reproduce_the_free_run(golden: Golden) -> None:
    _, round_, features = golden.traced(0)[1]
    anchor = round_["anchor"]
    hidden, base = golden.drafter.backbone(features, anchor)
    free = golden.drafter.markov(base, hidden, anchor)
    forced = golden.drafter.markov(base, hidden, anchor, forced_ids=free[0].tolist())
    assert all(torch.equal(a, b) for a, b in zip(free, forced, strict=True))

    other = [(int(token) + 1) % base.shape[1] for token in free[0]]
    ids, logits, _ = golden.drafter.markov(base, hidden, anchor, forced_ids=other)
    assert ids.tolist() == other
    assert torch.equal(logits[0], free[1][0])  # slot 0 depends on the anchor only
    assert torch.equal(logits[1:], free[1][1:]) == (golden.drafter.contract.markov_type == "none")


def test_sampled_picks_follow_the_inverse_cdf(golden: Golden) -> None:
    _, round_, features = golden.traced(0)[0]
    hidden, base = golden.drafter.backbone(features, round_["anchor"])
    uniforms = torch.tensor([0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
    ids, logits, _ = golden.drafter.markov(
        base, hidden, round_["anchor"], temperature=0.8, uniforms=uniforms
    )
    probs = processed_probs(logits, 0.8)
    for slot, pick in enumerate(ids.tolist()):
        assert probs[slot, :pick].sum() <= uniforms[slot] < probs[slot, : pick + 1].sum()
    with pytest.raises(DraftgraphError, match="uniform"):
        golden.drafter.markov(base, hidden, round_["anchor"], temperature=0.8)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float16, 0.05), (torch.bfloat16, 0.5)])
def test_half_precision_stays_close(golden: Golden, dtype: torch.dtype, atol: float) -> None:
    full = golden.drafter
    half = ReferenceDrafter(
        full.contract, full.weights, embed=full.embed, lm_head=full.lm_head, dtype=dtype
    )
    prefix, round_, features = golden.traced(0)[1]
    hidden, base = half.backbone(features, round_["anchor"])
    _, logits, embeddings = half.markov(
        base, hidden, round_["anchor"], forced_ids=round_["draft_tokens"]
    )
    assert hidden.dtype == base.dtype == logits.dtype == dtype
    expected = golden.tensors[prefix + "corrected_logits"]
    torch.testing.assert_close(logits.float(), expected, rtol=0, atol=atol)
    confidence = half.confidence(hidden, embeddings)
    if confidence is not None:
        assert confidence.dtype == torch.float32
        expected = golden.tensors[prefix + "confidence_logits"]
        torch.testing.assert_close(confidence, expected, rtol=0, atol=atol)


def test_confidence_without_markov_input(golden: Golden) -> None:
    contract = golden.drafter.contract
    d = contract.decoder.hidden_size
    weight, bias = torch.randn(1, d, generator=torch.manual_seed(0)), torch.tensor([0.25])
    drafter = ReferenceDrafter(
        dataclasses.replace(contract, has_confidence=True, confidence_with_markov=False),
        {"confidence_head.proj.weight": weight, "confidence_head.proj.bias": bias},
        embed=golden.drafter.embed,
        lm_head=golden.drafter.lm_head,
    )
    hidden = torch.randn(7, d, generator=torch.manual_seed(1))
    logits = drafter.confidence(hidden, torch.zeros(7, 0))
    assert logits is not None
    assert_near(logits, torch.stack([(h * weight[0]).sum() + 0.25 for h in hidden]))


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2-layer Llama with biases everywhere and no q/k norms."""
    path = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=True,
        mlp_bias=True,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(path)
    return path


def test_biases_linear_rope_and_missing_qk_norm_match_a_llama(tiny_llama: Path) -> None:
    """With γ = 1, fc = identity and shared norms, the block is the first layer of a causal LM."""
    weights = load_file(tiny_llama / "model.safetensors")
    embed, lm_head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    rope = RopeSpec("linear", 5000.0, factor=4.0)
    contract = DraftContract(
        family="deepspec",
        layout="anchor-first",
        block_size=1,
        mask_token_id=31,
        tap_ids=(-1,),
        decoder=DecoderSpec(24, 1, 6, 2, 8, 40, 1e-6, rope, False, True, True, True),
        vocab_size=32,
        markov_type="none",
        markov_rank=0,
        has_confidence=False,
        confidence_with_markov=False,
        shares_embedding=True,
        shares_head=True,
    )
    tensors = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    tensors["fc.weight"] = torch.eye(24)
    tensors["hidden_norm.weight"] = tensors["layers.0.input_layernorm.weight"]
    drafter = ReferenceDrafter(contract, tensors, embed=embed, lm_head=lm_head)

    target = ReferenceTarget(tiny_llama, [0])
    ids = torch.tensor([3, 17, 4, 28, 9, 9, 1])
    with torch.no_grad():
        expected = target.model.lm_head(target.model.model.norm(target(ids)[1]))
    for position in (0, 3, 6):
        _, logits = drafter.backbone(embed[ids[:position]], int(ids[position]))
        assert_near(logits[0], expected[position])
    with pytest.raises(DraftgraphError, match="features have shape"):
        drafter.backbone(torch.zeros(3, 48), 0)
    with pytest.raises(DraftgraphError, match="embed has shape"):
        ReferenceDrafter(contract, tensors, embed=embed[:-1], lm_head=lm_head)


def test_tap_order_embedding_tap_and_refused_taps(tiny_llama: Path) -> None:
    ids = torch.tensor([5, 6, 7])
    embed = load_file(tiny_llama / "model.safetensors")["model.embed_tokens.weight"]
    features = ReferenceTarget(tiny_llama, [0, -1])(ids)[1]
    assert_near(features[:, 24:], embed[ids])
    assert_near(ReferenceTarget(tiny_llama, [-1, 0])(ids)[1], features.roll(24, dims=1))
    for tap in (1, -2):  # the last layer is only visible after the final norm
        with pytest.raises(DraftgraphError, match=f"tap id {tap}"):
            ReferenceTarget(tiny_llama, [tap])


def test_missing_target_tensors_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_llama / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    with pytest.raises(DraftgraphError, match=r"lm_head\.weight"):
        ReferenceTarget(tmp_path, [0])
    with pytest.raises(DraftgraphError, match="no such"):
        ReferenceTarget(tmp_path / "absent", [0])


def test_scaled_rope_frequencies() -> None:
    base, scale = inverse_frequencies(RopeSpec("default", 10000.0), 64)
    assert scale == 1.0 and base[0] == 1.0
    assert math.isclose(base[31].item(), 10000.0 ** (-62 / 64), rel_tol=1e-6)

    linear, _ = inverse_frequencies(RopeSpec("linear", 10000.0, factor=8.0), 64)
    torch.testing.assert_close(linear, base / 8)

    spec = RopeSpec("llama3", 10000.0, 8.0, 1024, low_freq_factor=1.0, high_freq_factor=4.0)
    llama3, _ = inverse_frequencies(spec, 64)
    assert llama3[0] == base[0]  # a short wavelength stays, a long one is stretched
    assert math.isclose(llama3[31].item(), base[31].item() / 8, rel_tol=1e-6)

    yarn, scale = inverse_frequencies(RopeSpec("yarn", 10000.0, 4.0, 1024), 64)
    assert math.isclose(scale, 0.1 * math.log(4.0) + 1.0)
    assert yarn[0] == base[0]
    assert math.isclose(yarn[31].item(), base[31].item() / 4, rel_tol=1e-6)
    with pytest.raises(DraftgraphError, match="original_max_position_embeddings"):
        inverse_frequencies(RopeSpec("yarn", 10000.0, factor=4.0), 64)


def test_processed_probs_order_and_ties() -> None:
    p = np.array([0.4, 0.3, 0.2, 0.1])
    logits = np.log(p)
    np.testing.assert_allclose(processed_probs(logits, 1.0), p)
    np.testing.assert_allclose(processed_probs(logits, 0.5), p**2 / (p**2).sum())
    np.testing.assert_allclose(processed_probs(logits, 1.0, top_k=2), [4 / 7, 3 / 7, 0, 0])
    np.testing.assert_allclose(processed_probs(logits, 1.0, top_k=9), p)
    # 0.65: two tokens of the full distribution; after top-k = 3 the first two hold 7/9
    np.testing.assert_allclose(processed_probs(logits, 1.0, top_p=0.65), [4 / 7, 3 / 7, 0, 0])
    np.testing.assert_allclose(processed_probs(logits, 1.0, 3, 0.75), [4 / 7, 3 / 7, 0, 0])
    np.testing.assert_allclose(
        processed_probs(logits, 1.0, top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0], atol=1e-15
    )
    # temperature comes first: p² = 16 9 4 1 (of 30), where two tokens reach 0.8
    np.testing.assert_allclose(processed_probs(logits, 0.5, 0, 0.8), [16 / 25, 9 / 25, 0, 0])
    np.testing.assert_array_equal(processed_probs(logits, 1.0, top_p=0.0), [1, 0, 0, 0])

    tied = np.log([0.2, 0.4, 0.2, 0.2])
    np.testing.assert_allclose(processed_probs(tied, 1.0, top_k=2), [0.2, 0.4, 0.2, 0.2])
    np.testing.assert_allclose(processed_probs(tied, 1.0, top_p=0.5), [0.2, 0.4, 0.2, 0.2])
    np.testing.assert_array_equal(processed_probs(tied, 1.0, top_k=1), [0, 1, 0, 0])


def test_processed_probs_greedy_shapes_and_bad_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, -math.inf, 0.0]])
    np.testing.assert_array_equal(processed_probs(logits, 0.0), [[0, 1, 0], [1, 0, 0]])
    np.testing.assert_array_equal(processed_probs(logits, 9e-6), [[0, 1, 0], [1, 0, 0]])
    sampled = processed_probs(logits.half(), 0.7, 2, 0.9)
    assert sampled.dtype == np.float64 and sampled.shape == (2, 3)
    np.testing.assert_allclose(sampled.sum(-1), 1.0)
    assert sampled[1, 1] == 0.0
    assert processed_probs(np.zeros((2, 3, 5)), 0.0).shape == (2, 3, 5)
    for bad in (math.nan, math.inf):
        with pytest.raises(DraftgraphError, match="not finite"):
            processed_probs(np.array([0.0, bad]), 1.0)


def test_verified_tokens_are_distributed_like_the_target() -> None:
    """Exact: every ratio p/q and residual below is a multiple of 1/12, so midpoints integrate it.

    Two drafts x0 ~ q0 and x1 ~ q1; the first emitted token must follow p0, and after each
    acceptance the next one must follow the target's row, whatever was drafted.
    """
    p = np.array([[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.5, 0.0], [0.5, 0.0, 0.25, 0.25]])
    q = np.array([[0.4, 0.3, 0.2, 0.1], [0.5, 0.25, 0.0, 0.25]])
    grid = (np.arange(12) + 0.5) / 12
    emitted = np.zeros((3, 4))
    for x0, x1 in itertools.product(range(4), repeat=2):
        weight = q[0, x0] * q[1, x1] / len(grid) ** 3
        if weight == 0:
            continue
        for u0, u1, u in itertools.product(grid, repeat=3):
            accepted, token = verify_reference(p, [x0, x1], q, [u0, u1], u)
            for row, value in enumerate([*[x0, x1][:accepted], token]):
                emitted[row, value] += weight
    np.testing.assert_allclose(emitted[0], p[0], atol=1e-12)
    first = np.minimum(p[0], q[0]).sum()  # the chance of a second row
    np.testing.assert_allclose(emitted[1], first * p[1], atol=1e-12)
    second = first * np.minimum(p[1], q[1]).sum()
    np.testing.assert_allclose(emitted[2], second * p[2], atol=1e-12)


def test_verify_corner_cases() -> None:
    p = np.array([[0.0, 1.0], [0.5, 0.5]])
    assert verify_reference(p[:1], [], np.zeros((0, 2)), [], 0.0) == (0, 1)
    # p(x) = 0 is never accepted, not even with u = 0
    assert verify_reference(p, [0], np.array([[1.0, 0.0]]), [0.0], 0.3) == (0, 1)
    # p = q is always accepted; the bonus token follows the last row
    near_one = float(np.nextafter(1.0, 0.0))
    assert verify_reference(p, [1], p[:1], [near_one], 0.49) == (1, 0)
    assert verify_reference(p, [1], p[:1], [near_one], 0.5) == (1, 1)
    # nothing left of max(p - q, 0) (q sums to more than 1 by rounding): the draw comes from p
    assert verify_reference(p[::-1], [0], np.array([[0.6, 0.5]]), [0.9], 0.75) == (0, 1)
    with pytest.raises(DraftgraphError, match=r"\[0, 1\)"):
        verify_reference(p, [0], np.array([[1.0, 0.0]]), [0.0], 1.0)
