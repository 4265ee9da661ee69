"""Writing a bundle: deterministic, all or nothing, and validated by something that can say no."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import GOLDENS_ROOT, export_pair, load_golden, write_random_pair
from safetensors.numpy import load_file, save_file

from draftgraph.export import bundle as writer
from draftgraph.export import validate
from draftgraph.export.bundle import Recipe, export_bundle
from draftgraph.export.checkpoints import DraftCheckpoint, TargetCheckpoint, read_draft, read_target
from draftgraph.graphs import layers
from draftgraph.graphs import target as target_graph
from draftgraph.graphs.errors import DraftgraphError
from draftgraph.runtime import Engine, SamplingParams, load_bundle

NAME = "qwen3-vanilla"
Pair = tuple[TargetCheckpoint, DraftCheckpoint]


@pytest.fixture(scope="module")
def pair() -> Pair:
    target = read_target(GOLDENS_ROOT / NAME / "target")
    return target, read_draft(GOLDENS_ROOT / NAME / "draft", target)


@pytest.fixture
def unvalidated(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what comes before validation."""
    monkeypatch.setattr(validate, "validate_bundle", lambda *args: {})


# Determinism


@pytest.mark.parametrize("options", [{}, {"dtype": "fp16", "markov_top_k": 10}])
def test_two_exports_are_identical(options: dict[str, Any], pair: Pair, tmp_path: Path) -> None:
    first = export_bundle(*pair, tmp_path / "one", **options)
    second = export_bundle(*pair, tmp_path / "two" / "deeper", **options)
    names = sorted(p.name for p in first.iterdir())
    assert names == sorted(p.name for p in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    for name in ("manifest.json", "validation.json", "target.onnx"):
        assert str(tmp_path).encode() not in (first / name).read_bytes()


# All or nothing


class Interruption(Exception):
    pass


STAGES = [
    "validating every graph against torch",
    "checking the weights",
    "writing weights.safetensors",
    "building target.onnx",
    "building accept_filtered.onnx",
    "validating on a batch of 3",
]


@pytest.mark.parametrize(
    ("stage", "error"), [*((s, KeyboardInterrupt) for s in STAGES), (STAGES[-1], Interruption)]
)
def test_an_interrupted_export_leaves_nothing(
    stage: str, error: type[BaseException], pair: Pair, tmp_path: Path
) -> None:
    reached: list[str] = []

    def report(message: str) -> None:
        reached.append(message)
        if message == stage:
            raise error

    with pytest.raises(error):
        export_bundle(*pair, tmp_path / "out", report=report)
    assert reached[-1] == stage
    assert list(tmp_path.iterdir()) == []


def test_a_failed_overwrite_keeps_the_old_bundle(pair: Pair, tmp_path: Path) -> None:
    out = export_bundle(*pair, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    def report(message: str) -> None:
        if message.startswith("validating on"):
            raise Interruption

    with pytest.raises(Interruption):
        export_bundle(*pair, out, overwrite=True, max_seq_len=64, report=report)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


@pytest.mark.usefixtures("unvalidated")
def test_overwrite(pair: Pair, tmp_path: Path) -> None:
    out = export_bundle(*pair, tmp_path / "out", max_seq_len=64)
    (out / "stale.onnx").write_text("of the old bundle")
    with pytest.raises(DraftgraphError, match=r"already exists.*--overwrite"):
        export_bundle(*pair, out)
    export_bundle(*pair, out, overwrite=True, max_seq_len=128)
    assert load_bundle(out).max_seq_len == 128
    assert not (out / "stale.onnx").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_sealing_again_covers_the_same_files(pair: Pair, tmp_path: Path) -> None:
    """A drafter may be exchanged in a bundle that has a calibration and cost tables by now."""
    path = export_bundle(*pair, tmp_path / "bundle", max_seq_len=64)
    sealed = set(json.loads((path / "manifest.json").read_text())["files"])
    (path / "calibration.json").write_text("{}")
    (path / "costs").mkdir()
    writer.seal(path)
    assert set(json.loads((path / "manifest.json").read_text())["files"]) == sealed
    load_bundle(path)


def test_overwrite_spares_what_is_not_a_bundle(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    (tmp_path / "file").write_text("dear")
    for name in ("home", "file"):
        with pytest.raises(DraftgraphError, match="not a bundle, so it is not overwritten"):
            export_bundle(*pair, tmp_path / name, overwrite=True)
    assert (tmp_path / "home" / "letter").read_text() == "dear"
    assert (tmp_path / "file").read_text() == "dear"


# Bounds


@pytest.mark.usefixtures("unvalidated")
def test_max_seq_len(pair: Pair, tmp_path: Path) -> None:
    for value in (0, 15, 1025):
        with pytest.raises(DraftgraphError, match=rf"max-seq-len is {value}, expected 16 .* 1024"):
            export_bundle(*pair, tmp_path / "out", max_seq_len=value)
    assert load_bundle(export_bundle(*pair, tmp_path / "default")).max_seq_len == 1024
    for value in (16, 1024):
        out = export_bundle(*pair, tmp_path / str(value), max_seq_len=value)
        assert load_bundle(out).max_seq_len == value


def test_shortest_bundle_validates_and_runs(pair: Pair, tmp_path: Path) -> None:
    runner = Engine.load(export_bundle(*pair, tmp_path / "out", max_seq_len=16))
    output = runner.generate([70, 83], SamplingParams(max_new_tokens=14, stop_ids=()))
    assert len(output.token_ids) == 14


@pytest.mark.usefixtures("unvalidated")
def test_markov_top_k(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(DraftgraphError, match="markov-top-k is 0"):
        export_bundle(*pair, tmp_path / "out", markov_top_k=0)
    for value, stored in ((None, None), (99, 99), (100, None), (128, None)):
        opened = load_bundle(export_bundle(*pair, tmp_path / str(value), markov_top_k=value))
        assert opened.markov_top_k == stored
        assert ("markov_topk" in opened.graphs) == (stored is not None)


# Weights


def test_fused_weights(pair: Pair, bundle: Callable[..., Path]) -> None:
    """Every tensor is the checkpoint's, concatenated in the order the graphs split them."""
    target, draft = pair
    stored = load_file(bundle(NAME) / "weights.safetensors")
    t, d = target.weights, draft.weights
    prefix = "layers.2.self_attn."
    np.testing.assert_array_equal(
        stored["target.layers.2.self_attn.qkv_proj.weight"],
        np.concatenate([t[f"{prefix}{m}_proj.weight"] for m in "qkv"]),
    )
    np.testing.assert_array_equal(
        stored["backbone.layers.1.mlp.gate_up_proj.weight"],
        np.concatenate([d[f"layers.1.mlp.{m}_proj.weight"] for m in ("gate", "up")]),
    )
    np.testing.assert_array_equal(stored["markov.w2.weight"], d["markov_head.markov_w2.weight"])
    size = sum(int(np.prod(t.shape(n))) for n in t.names())
    size += sum(int(np.prod(d.shape(n))) for n in d.names())
    assert sum(a.size for a in stored.values()) == size


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("own", [(), ("embed_tokens.weight",), ("lm_head.weight",)])
def test_tables_of_the_drafter(tied: bool, own: tuple[str, ...], tmp_path: Path) -> None:
    """Stored only where they differ from the target's, and validated whichever is used."""
    target, draft = write_random_pair(tmp_path, vocab=24, tied=tied, seed=5)
    tensors = load_file(draft / "model.safetensors")
    for name in own:
        tensors[name] = np.random.default_rng(0).standard_normal((24, 16)).astype(np.float32)
    save_file(tensors, draft / "model.safetensors")
    path = export_pair(target, draft, tmp_path / "bundle")
    tables = {
        n
        for n in load_file(path / "weights.safetensors")
        if n.endswith(("embed_tokens.weight", "lm_head.weight"))
    }
    expected = {"embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    assert tables == expected | {f"backbone.{n}" for n in own}
    params = SamplingParams(max_new_tokens=12)
    runner = Engine.load(path)
    output = runner.generate([1, 2], params)
    assert output.token_ids == runner.generate([1, 2], params, speculative=False).token_ids


def test_weights_beyond_fp16(tmp_path: Path) -> None:
    target, draft = write_random_pair(tmp_path, seed=6)
    tensors = load_file(target / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 7e4
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(DraftgraphError, match=r"up_proj|gate_proj.*fp16 range.*--dtype bf16"):
        export_pair(target, draft, tmp_path / "bundle", dtype="fp16")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("name", ["qwen3-rnn", "llama-vanilla-threshold"])
def test_fp16_bundle(name: str, bundle: Callable[..., Path]) -> None:
    """Validates within its own tolerance, is smaller, and speaks like the fp32 one."""
    half, single = bundle(name, dtype="fp16"), bundle(name)
    validation = json.loads((half / "validation.json").read_text())
    assert validation["dtype"] == "fp16"
    assert 0 < validation["checks"]["target"]["max_relative_error"] < validation["tolerance"]
    size = (half / "weights.safetensors").stat().st_size
    assert size < 0.75 * (single / "weights.safetensors").stat().st_size
    opened = load_bundle(half)
    assert opened.kv_bytes == tuple(n // 2 for n in load_bundle(single).kv_bytes)
    assert opened.graphs["target"].cpu_file == "target.cpu.onnx"

    runner = Engine.load(half)
    prompt = load_golden(name).prompts[0]
    params = SamplingParams(max_new_tokens=40, stop_ids=())
    fast = runner.generate(prompt["prompt"], params)
    assert fast.token_ids == runner.generate(prompt["prompt"], params, speculative=False).token_ids
    assert fast.prompt_ids + fast.token_ids == prompt["plain_greedy"][: len(prompt["prompt"]) + 40]


def test_overflow_in_fp16_arithmetic_fails_validation(tmp_path: Path) -> None:
    """Every weight fits fp16, the product of gate and up does not.

    ONNX Runtime computes the plain fp16 graph without rounding in between on a CPU, so that graph
    runs there as if nothing were wrong; the form that rounds shows what a device would compute.
    """
    target, draft = write_random_pair(tmp_path, vocab=24, seed=6)
    tensors = load_file(target / "model.safetensors")
    for name, factor in (("gate", 300.0), ("up", 300.0), ("down", 1e-4)):
        tensors[f"model.layers.1.mlp.{name}_proj.weight"] *= np.float32(factor)
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(DraftgraphError, match=r"target has values that are not finite.*bf16 or"):
        export_pair(target, draft, tmp_path / "fp16", dtype="fp16")
    for dtype in ("bf16", "fp32"):
        export_pair(target, draft, tmp_path / dtype, dtype=dtype)


# Validation has the power to refuse


def test_validation_report(bundle: Callable[..., Path]) -> None:
    validation = json.loads((bundle(NAME) / "validation.json").read_text())
    assert set(validation["checks"]) == {
        "target",
        "features",
        "backbone",
        "base_logits",
        "markov",
        "markov_greedy",
        "confidence",
        "accept",
    }
    for name, check in validation["checks"].items():
        assert check["max_relative_error"] <= validation["tolerance"] == 2e-4, name
    assert validation["checks"]["target"]["picks_compared"] > 100


def swapped(recipe: Recipe) -> Recipe:
    return Recipe(recipe.dtype, recipe.parts[::-1])


class Scaled(Recipe):
    """A tensor that is off by 2 %."""

    def read(self) -> np.ndarray:
        return (super().read() * 1.02).astype(np.float32)


def scaled(recipe: Recipe) -> Recipe:
    return Scaled(recipe.dtype, recipe.parts)


@pytest.mark.parametrize(
    ("tensor", "damage", "message"),
    [
        ("target.layers.1.mlp.gate_up_proj.weight", swapped, "features|target"),
        ("target.layers.3.mlp.down_proj.weight", scaled, "target"),
        ("target.norm.weight", scaled, "target"),
        ("backbone.layers.0.mlp.gate_up_proj.weight", swapped, "backbone|base_logits"),
        ("backbone.layers.1.self_attn.kv_proj.weight", swapped, "backbone|base_logits"),
        ("backbone.hidden_norm.weight", scaled, "backbone|base_logits"),
        ("markov.w1.weight", scaled, "markov|confidence"),
        ("markov.w2.weight", scaled, "markov"),
        ("confidence.proj.weight", scaled, "confidence"),
    ],
)
def test_a_wrong_tensor_fails_validation(
    tensor: str,
    damage: Callable[[Recipe], Recipe],
    message: str,
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = writer.recipes

    def recipes(*args: Any) -> dict[str, Recipe]:
        table = original(*args)
        return {**table, tensor: damage(table[tensor])}

    monkeypatch.setattr(writer, "recipes", recipes)
    with pytest.raises(DraftgraphError, match=f"validation failed: ({message})"):
        export_bundle(*pair, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_wrong_rope_fails_validation(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = layers.inverse_frequencies

    def shifted(*args: Any) -> tuple[np.ndarray, float]:
        frequencies, factor = original(*args)
        return frequencies * np.float32(1.01), factor

    monkeypatch.setattr(layers, "inverse_frequencies", shifted)
    with pytest.raises(DraftgraphError, match="validation failed"):
        export_bundle(*pair, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_wrong_mask_fails_validation(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row too many is visible: the first token of what comes next."""
    original = layers.visibility_mask

    def generous(op: Any, last_visible: Any, *args: Any) -> Any:
        return original(op, op.Add(last_visible, op.Constant(value_int=1)), *args)

    monkeypatch.setattr(target_graph, "visibility_mask", generous)
    with pytest.raises(DraftgraphError, match="validation failed"):
        export_bundle(*pair, tmp_path / "out")


def test_not_finite_is_never_within_tolerance() -> None:
    check = validate.Check("logits")
    for value in (np.nan, np.inf):
        with pytest.raises(DraftgraphError, match="logits has values that are not finite"):
            check.tensor(np.array([[1.0, value]], np.float32), torch.ones(1, 2))


def test_picks_alone_can_fail() -> None:
    check = validate.Check("picks")
    check.picks([True] * 90 + [False] * 10)
    with pytest.raises(DraftgraphError, match="90 of 100"):
        check.verdict("fp32")
