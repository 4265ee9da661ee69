"""Reading DeepSpec drafters: what is understood, and what is refused with which message."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from draftgraph.export.checkpoints import TargetCheckpoint, check_finite, read_draft, read_target
from draftgraph.graphs.contract import RopeSpec
from draftgraph.graphs.errors import DraftgraphError

Edited = Callable[..., Path]
VANILLA, DFLASH = "qwen3-vanilla/draft", "qwen3-dflash/draft"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def target(goldens: Path) -> TargetCheckpoint:
    return read_target(goldens / "qwen3-vanilla" / "target")


@pytest.fixture(scope="module")
def tied_target(goldens: Path) -> TargetCheckpoint:
    return read_target(goldens / "llama-vanilla-threshold" / "target")


def refused(
    path: str | Path, target: TargetCheckpoint, *parts: str, layout: str | None = None
) -> None:
    """Reading fails with one paragraph that contains all parts."""
    with pytest.raises(DraftgraphError) as caught:
        read_draft(path, target, layout=layout)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


# --- what is understood


@pytest.mark.parametrize(
    ("golden", "markov", "rank", "confidence"),
    [
        ("qwen3-vanilla", "vanilla", 16, True),
        ("qwen3-gated", "gated", 16, True),
        ("qwen3-rnn", "rnn", 16, True),
        ("qwen3-dflash", "none", 0, False),
        ("llama-vanilla-threshold", "vanilla", 16, True),
    ],
)
def test_goldens(goldens: Path, golden: str, markov: str, rank: int, confidence: bool) -> None:
    target = read_target(goldens / golden / "target")
    draft = read_draft(goldens / golden / "draft", target)
    contract = draft.contract
    assert (contract.family, contract.layout) == ("deepspec", "anchor-first")
    assert (contract.block_size, contract.mask_token_id) == (7, 99)
    assert (contract.tap_ids, contract.vocab_size) == ((0, 1, 2), 100)
    assert (contract.markov_type, contract.markov_rank) == (markov, rank)
    assert (contract.has_confidence, contract.confidence_with_markov) == (confidence, confidence)
    assert contract.shares_embedding and contract.shares_head
    assert contract.decoder.qk_norm and contract.decoder.num_layers == 2
    theta = 10000.0 if golden.startswith("llama") else 1000000.0
    assert contract.decoder.rope == RopeSpec("default", theta)

    stored = load_file(goldens / golden / "draft" / "model.safetensors")
    assert set(draft.weights.names()) == set(stored) - {EMBEDDING, HEAD}
    for name in draft.weights.names():
        np.testing.assert_array_equal(draft.weights[name], stored[name])
    check_finite(draft.weights)
    assert set(draft.provenance) == {"config.json", "model.safetensors"}


def test_published_fp16_drafter(goldens: Path) -> None:
    """The drafter of the repository, against a target with the dimensions its config names."""
    assets = goldens.parents[1] / "assets" / "smollm2-dspark"
    config = json.loads((assets / "config.json").read_text())
    assert config["num_target_layers"] == 30  # read_draft with its target: the slow GGUF test
    refused(assets, read_target(goldens / "qwen3-vanilla" / "target"), "hidden_size is 576")


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_own_tensors_are_kept(edited: Edited, target: TargetCheckpoint, dtype: Any) -> None:
    """Only a difference that survives the upcast to float32 counts as one."""

    def own_head(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {n: (a * 1.5 if n == HEAD else a).astype(dtype) for n, a in arrays.items()}

    draft = read_draft(edited(VANILLA, change=own_head), target)
    rounded = dtype == np.float16  # fp16 copies of an fp32 embedding are other numbers
    assert (draft.contract.shares_embedding, draft.contract.shares_head) == (not rounded, False)
    assert (EMBEDDING in draft.weights, HEAD in draft.weights) == (rounded, True)
    assert draft.weights.dtype(HEAD) == dtype


@pytest.mark.parametrize("left_out", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)])
@pytest.mark.parametrize("flag", [False, True])
def test_absent_tensors_are_shared(
    edited: Edited, target: TargetCheckpoint, left_out: tuple[str, ...], flag: bool
) -> None:
    directory = edited(
        VANILLA,
        config={"tie_word_embeddings": flag},
        tensors=dict.fromkeys(left_out, "REMOVE"),
    )
    if flag and left_out == (HEAD,):
        refused(directory, target, "no lm_head.weight", "store lm_head.weight in the drafter")
        return
    contract = read_draft(directory, target).contract
    assert contract.shares_embedding and contract.shares_head


def test_tied_target(edited: Edited, tied_target: TargetCheckpoint) -> None:
    """The head of a tied target is its embedding, and that is what the drafter's is compared to."""
    source = "llama-vanilla-threshold/draft"
    directory = edited(source, config={"tie_word_embeddings": True}, tensors={HEAD: "REMOVE"})
    contract = read_draft(directory, tied_target).contract
    assert contract.shares_embedding and contract.shares_head
    own = np.full((100, 64), 0.5, np.float32)
    (directory / "config.json").unlink()
    (directory / "model.safetensors").unlink()
    directory.rmdir()
    contract = read_draft(edited(source, tensors={HEAD: own}), tied_target).contract
    assert (contract.shares_embedding, contract.shares_head) == (True, False)


def test_block_size_inside_dflash_config(edited: Edited, target: TargetCheckpoint) -> None:
    config = {
        "block_size": "REMOVE",
        "mask_token_id": "REMOVE",
        "dflash_config": {"block_size": 5, "mask_token_id": 98},
    }
    contract = read_draft(edited(VANILLA, config=config), target).contract
    assert (contract.block_size, contract.mask_token_id) == (5, 98)


def test_embedding_tap_and_bias(edited: Edited, target: TargetCheckpoint) -> None:
    bias = {f"layers.{i}.self_attn.o_proj.bias": np.ones(64, np.float32) for i in range(2)}
    for name, rows in (("q", 128), ("k", 64), ("v", 64)):
        for i in range(2):
            bias[f"layers.{i}.self_attn.{name}_proj.bias"] = np.ones(rows, np.float32)
    config = {"target_layer_ids": [-1, 0, 2], "attention_bias": True}
    draft = read_draft(edited(VANILLA, config=config, tensors=bias), target)
    assert draft.contract.tap_ids == (-1, 0, 2)
    assert draft.contract.decoder.attention_bias and draft.contract.decoder.attention_out_bias
    assert "layers.1.self_attn.o_proj.bias" in draft.weights


def test_confidence_without_markov(edited: Edited, target: TargetCheckpoint) -> None:
    directory = edited(
        VANILLA,
        config={"confidence_head_with_markov": False},
        tensors={"confidence_head.proj.weight": np.ones((1, 64), np.float32)},
    )
    contract = read_draft(directory, target).contract
    assert (contract.has_confidence, contract.confidence_with_markov) == (True, False)


@pytest.mark.parametrize("flag", ["dspark_bonus_anchor", "sample_from_anchor"])
def test_layout_flags(
    edited: Edited, target: TargetCheckpoint, flag: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = edited(VANILLA, config={flag: False})
    refused(directory, target, f"{flag} is false", "mask-first")
    with caplog.at_level(logging.WARNING):
        draft = read_draft(directory, target, layout="anchor-first")
    assert draft.contract.layout == "anchor-first" and "overridden" in caplog.text


def test_anchor_first_flag(edited: Edited, target: TargetCheckpoint) -> None:
    directory = edited(
        VANILLA, config={"dspark_bonus_anchor": True, "auto_map": {"AutoModel": "x"}}
    )
    assert read_draft(directory, target).contract.layout == "anchor-first"
    read_draft(directory, target, layout="anchor-first")
    refused(directory, target, "mask-first is not supported yet", "z-lab", layout="mask-first")
    refused(directory, target, "layout 'sideways' is unknown", layout="sideways")


# --- what is refused

RECURRENT = "cannot be rolled back by a length"


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"architectures": ["Gemma4DSparkModel"]}, ("not supported yet", "Qwen3DSparkModel")),
        ({"architectures": ["DFlashDraftModel"]}, ("DFlashDraftModel", "not supported yet")),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, ("EAGLE-3", "not supported yet")),
        ({"speculators_model_type": "dspark"}, ("speculators drafters (dspark)",)),
        ({"model_type": "medusa"}, ("Medusa", "not supported yet")),
        ({"architectures": ["LlamaForCausalLM"]}, ("not a known drafter", "not the target")),
        ({"architectures": None}, ("architectures is None",)),
        ({"hidden_size": 32}, ("hidden_size is 32", "the target has 64")),
        ({"vocab_size": 99}, ("vocab_size is 99", "the target has 100")),
        ({"num_target_layers": 5}, ("num_target_layers is 5", "the target has 4")),
        ({"num_target_layers": "REMOVE"}, ("num_target_layers is missing",)),
        ({"block_size": "REMOVE"}, ("block_size is missing",)),
        ({"block_size": 0}, ("block_size is 0",)),
        ({"block_size": True}, ("block_size is True",)),
        ({"dflash_config": {"block_size": 8}}, ("block_size is 7 at the top level but 8",)),
        ({"dflash_config": {"causal": True}}, ("dflash_config", "unknown fields causal")),
        ({"dflash_config": [1]}, ("dflash_config is [1]",)),
        ({"target_layer_ids": "REMOVE"}, ("target_layer_ids is missing", "guessed taps")),
        ({"target_layer_ids": []}, ("target_layer_ids is []",)),
        ({"target_layer_ids": [0, 1, "2"]}, ("target_layer_ids is [0, 1, '2']",)),
        ({"target_layer_ids": [0, 1, 3]}, ("contains 3, the last target layer",)),
        ({"target_layer_ids": [0, 1, 4]}, ("contains 4", "-1 (the embedding) to 2")),
        ({"target_layer_ids": [-2, 0, 1]}, ("contains -2",)),
        ({"target_layer_ids": [0, 1, 1]}, ("contains a duplicated id",)),
        ({"target_layer_ids": [1, 0, 2]}, ("are not increasing",)),
        ({"target_layer_ids": [0, 1]}, ("fc.weight has shape [64, 192]", "implies [64, 128]")),
        ({"mask_token_id": 100}, ("mask_token_id is 100", "0 to 99")),
        ({"mask_token_id": -1}, ("mask_token_id is -1",)),
        ({"mask_token_id": None}, ("mask_token_id is missing",)),
        ({"markov_rank": "REMOVE"}, ("markov_rank is missing",)),
        ({"markov_head_type": "REMOVE"}, ("markov_rank is 16 but markov_head_type is missing",)),
        ({"markov_head_type": "transformer"}, ("'transformer'", "vanilla, gated, rnn")),
        ({"markov_head_type": "gated"}, ("tensors missing", "markov_head.gate_proj.bias")),
        ({"markov_rank": 8}, ("has shape [100, 16]", "implies [100, 8]")),
        (
            {"markov_rank": 0, "confidence_head_with_markov": False},
            ("markov_rank says that the drafter has no markov_head", "there are such tensors"),
        ),
        ({"markov_rank": 0}, ("confidence_head_with_markov is true but markov_rank is 0",)),
        ({"enable_confidence_head": "REMOVE"}, ("enable_confidence_head is missing",)),
        (
            {"enable_confidence_head": False},
            ("enable_confidence_head says that the drafter has no confidence_head",),
        ),
        ({"confidence_head_with_markov": "REMOVE"}, ("confidence_head_with_markov is missing",)),
        (
            {"confidence_head_with_markov": False},
            ("confidence_head.proj.weight has shape [1, 80]", "implies [1, 64]"),
        ),
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1.0}}, ("'mrope'", "llama3")),
        ({"rope_parameters": "REMOVE"}, ("rope_theta is missing",)),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ("'sliding_attention'",)),
        ({"layer_types": 2 * ["linear_attention"]}, (RECURRENT,)),
        ({"use_sliding_window": True, "sliding_window": 64}, ("sliding-window attention",)),
        ({"final_logit_softcapping": 30.0}, ("unknown fields final_logit_softcapping",)),
        ({"dspark_bonus_anchor": 1}, ("dspark_bonus_anchor is 1",)),
        ({"dspark_bonus_anchor": True, "sample_from_anchor": False}, ("contradict each other",)),
        ({"num_hidden_layers": 3, "layer_types": None}, ("tensors missing", "layers.2.")),
        ({"quantization_config": {"bits": 8}}, ("quantised checkpoints",)),
    ],
)
def test_refused_config(
    edited: Edited, target: TargetCheckpoint, config: dict[str, Any], parts: tuple[str, ...]
) -> None:
    refused(edited(VANILLA, config=config), target, *parts)


def test_refused_dflash_flags(edited: Edited, target: TargetCheckpoint) -> None:
    config = {"markov_rank": 4, "markov_head_type": "vanilla"}
    refused(edited(DFLASH, config=config), target, "has a markov_head", "there are no such tensors")


def test_missing_confidence_tensors(edited: Edited, target: TargetCheckpoint) -> None:
    tensors = {"confidence_head.proj.weight": "REMOVE", "confidence_head.proj.bias": "REMOVE"}
    refused(edited(VANILLA, tensors=tensors), target, "has a confidence_head", "no such tensors")


@pytest.mark.parametrize(
    ("tensors", "parts"),
    [
        ({"d2t": np.ones(100, np.float32)}, ("without a place", "d2t")),
        ({"hidden_norm.weight": "REMOVE"}, ("tensors missing: hidden_norm.weight",)),
        ({"fc.bias": np.ones(64, np.float32)}, ("without a place", "fc.bias")),
        ({"confidence_head.proj.bias": "REMOVE"}, ("missing: confidence_head.proj.bias",)),
        ({EMBEDDING: np.ones((99, 64), np.float32)}, ("[99, 64]", "implies [100, 64]")),
        ({"fc.weight": np.ones((64, 192), np.int8)}, ("fc.weight has dtype I8",)),
    ],
)
def test_refused_tensors(
    edited: Edited, target: TargetCheckpoint, tensors: dict[str, Any], parts: tuple[str, ...]
) -> None:
    refused(edited(VANILLA, tensors=tensors), target, *parts)


def test_paths(tmp_path: Path, edited: Edited, target: TargetCheckpoint) -> None:
    refused(tmp_path / "absent", target, "no such file or directory")
    refused(tmp_path, target, "no config.json")
    directory = edited(VANILLA)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    refused(directory, target, "pytorch_model.bin", "never reads")


def test_wrong_pair(goldens: Path, tied_target: TargetCheckpoint, edited: Edited) -> None:
    """Same sizes, another target: nothing can tell but the tensors, which are then not shared."""
    contract = read_draft(goldens / VANILLA, tied_target).contract
    assert not contract.shares_embedding and not contract.shares_head
