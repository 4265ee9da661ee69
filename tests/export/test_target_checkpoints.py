"""Reading targets: what is understood, and what is refused with which message."""

import hashlib
import json
import logging
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import smollm2_gguf
from safetensors.numpy import load_file, save_file

from draftgraph.export.checkpoints import Weights, check_finite, read_target
from draftgraph.graphs.contract import RopeSpec
from draftgraph.graphs.errors import DraftgraphError

LLAMA, QWEN3 = "llama-vanilla-threshold/target", "qwen3-vanilla/target"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
Edited = Callable[..., Path]


def refused(path: str | Path, *parts: str) -> None:
    """Reading fails with one paragraph that contains all parts."""
    with pytest.raises(DraftgraphError) as caught:
        read_target(path)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


# --- what is understood


def test_llama_golden(goldens: Path) -> None:
    target = read_target(goldens / LLAMA)
    contract = target.contract
    assert (contract.family, contract.vocab_size, contract.tied_head) == ("llama", 100, True)
    assert (contract.stop_ids, contract.bos_id, contract.sampling_defaults) == ((96,), None, {})
    spec = contract.decoder
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 4, 2, 16)
    assert spec.rope == RopeSpec("default", 10000.0)
    assert not (spec.qk_norm or spec.attention_bias or spec.attention_out_bias or spec.mlp_bias)

    stored = load_file(goldens / LLAMA / "model.safetensors")
    assert target.weights.names() == sorted(name.removeprefix("model.") for name in stored)
    for name in target.weights.names():
        np.testing.assert_array_equal(target.weights[name], stored[f"model.{name}"])
        assert target.weights.shape(name) == stored[f"model.{name}"].shape
    digest = hashlib.sha256((goldens / LLAMA / "model.safetensors").read_bytes()).hexdigest()
    assert target.provenance["model.safetensors"] == digest
    assert {"config.json", "generation_config.json"} < set(target.provenance)


def test_qwen3_golden(goldens: Path) -> None:
    target = read_target(str(goldens / QWEN3))
    assert (target.contract.family, target.contract.tied_head) == ("qwen3", False)
    assert target.contract.decoder.qk_norm and target.contract.decoder.head_dim == 32
    assert "lm_head.weight" in target.weights
    assert target.weights.shape("layers.3.self_attn.q_norm.weight") == (32,)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_transformers_saves(tmp_path: Path, family: str, tied: bool, bias: bool) -> None:
    """Names, shapes and biases against a model that transformers built and saved."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    fields: dict[str, Any] = {
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "tie_word_embeddings": tied,
        "attention_bias": bias,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "rope_parameters": {"rope_theta": 5e4, "rope_type": "linear", "factor": 2.0},
    }
    torch.manual_seed(0)
    model: Any
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(mlp_bias=bias, **fields))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**fields))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    target = read_target(tmp_path)

    spec = target.contract.decoder
    assert (spec.attention_bias, spec.attention_out_bias) == (bias, bias)
    assert spec.mlp_bias == (bias and family == "llama")
    assert spec.rope == RopeSpec("linear", 5e4, factor=2.0)
    assert target.contract.tied_head == tied
    assert (target.contract.bos_id, target.contract.stop_ids) == (1, (2, 3))
    state = {n.removeprefix("model."): t for n, t in model.state_dict().items()}
    if tied:
        del state["lm_head.weight"]
    assert set(target.weights.names()) == set(state)
    for name, tensor in state.items():
        assert target.weights.dtype(name) == target.weights[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(
            target.weights[name].astype(np.float32), tensor.float().numpy()
        )


OLD_DIALECT = {  # Llama 3.1 as transformers 4 wrote it
    "rope_parameters": "REMOVE",
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
        "rope_type": "llama3",
    },
    "torch_dtype": "bfloat16",
    "dtype": "REMOVE",
}
LLAMA3 = RopeSpec(
    "llama3",
    500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=512,
)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OLD_DIALECT, LLAMA3),
        ({"rope_parameters": "REMOVE"}, RopeSpec("default", 10000.0)),
        ({"rope_parameters": {"rope_theta": 7.0}}, RopeSpec("default", 7.0)),
        (
            {
                "rope_parameters": "REMOVE",
                "rope_theta": 9.0,
                "rope_scaling": {"type": "linear", "factor": 2},
            },
            RopeSpec("linear", 9.0, factor=2.0),
        ),
        (
            {"rope_parameters": {"type": "yarn", "factor": 4.0}},
            RopeSpec("yarn", 10000.0, factor=4.0, original_max_position_embeddings=1024),
        ),
        (
            {
                "rope_parameters": {"rope_type": "yarn", "truncate": False, "factor": None},
                "original_max_position_embeddings": 256,
            },
            RopeSpec(
                "yarn",
                10000.0,
                factor=4.0,
                original_max_position_embeddings=256,
                truncate=False,
            ),
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 8.0}}},
            RopeSpec("default", 8.0),
        ),
    ],
)
def test_rope_dialects(edited: Edited, config: dict[str, Any], expected: RopeSpec) -> None:
    assert read_target(edited(LLAMA, config=config)).contract.decoder.rope == expected


@pytest.mark.parametrize(
    "config",
    [
        {"unknown_but_null": None, "_attn_implementation_autoset": True, "unsloth_version": "1"},
        {"head_dim": "REMOVE", "use_sliding_window": False, "sliding_window": 4096},
        {"transformers.js_config": {"dtype": "q4"}, "is_llama_config": True},
        {"rope_interleaved": False, "pretraining_tp": 1, "id2label": {"0": "a"}, "top_k": 50},
    ],
)
def test_harmless_fields(edited: Edited, config: dict[str, Any]) -> None:
    assert read_target(edited(LLAMA, config=config)).contract.decoder.head_dim == 16


def test_qwen3_window_that_is_off(edited: Edited) -> None:
    read_target(edited(QWEN3, config={"sliding_window": 4096, "use_sliding_window": "REMOVE"}))


def test_harmless_buffers(edited: Edited) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    target = read_target(edited(LLAMA, tensors={name: np.ones(8, np.float32)}))
    assert not any("inv_freq" in n for n in target.weights.names())


def equal_head(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"].copy()}


def different_head(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"] * 2}


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("head", [equal_head, different_head])
def test_tensors_decide_tying(edited: Edited, head: Any, flag: bool) -> None:
    target = read_target(edited(LLAMA, config={"tie_word_embeddings": flag}, change=head))
    assert target.contract.tied_head == (head is equal_head)
    assert ("lm_head.weight" in target.weights) == (head is different_head)


def test_absent_head_with_untied_flag(edited: Edited) -> None:
    refused(edited(LLAMA, config={"tie_word_embeddings": False}), "no lm_head.weight")


@pytest.mark.parametrize(
    ("generation", "stop_ids", "sampling"),
    [
        ({"eos_token_id": [7, 8, 7]}, (7, 8), {}),
        ({"eos_token_id": 5, "temperature": 0.6}, (5,), {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9},
            (96,),
            {"temperature": 0.6, "top_k": 20, "top_p": 0.9},
        ),
        (None, (96,), {}),
    ],
)
def test_generation_config(
    edited: Edited, generation: Any, stop_ids: tuple[int, ...], sampling: dict[str, float]
) -> None:
    contract = read_target(edited(LLAMA, generation=generation)).contract
    assert (contract.stop_ids, contract.sampling_defaults) == (stop_ids, sampling)


def test_bos_id(edited: Edited) -> None:
    directory = edited(LLAMA, generation={"bos_token_id": 4})
    assert read_target(directory).contract.bos_id == 4


def test_tokenizer_files(edited: Edited, caplog: pytest.LogCaptureFixture) -> None:
    directory = edited(LLAMA, generation={"eos_token_id": 3})
    (directory / "tokenizer.model").write_bytes(b"slow")
    with caplog.at_level(logging.WARNING):
        files = read_target(directory).tokenizer_files
    assert set(files) == {"generation_config.json"}
    assert "tokenizer.model is not read" in caplog.text

    (directory / "tokenizer.json").write_bytes(b"{}")
    (directory / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n")
    target = read_target(directory)
    assert target.tokenizer_files["chat_template.jinja"] == b"{{ messages }}\r\n"
    assert {"tokenizer.json", "chat_template.jinja"} < set(target.provenance)


# --- what is refused


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"architectures": ["MistralForCausalLM"]}, ("MistralForCausalLM", "LlamaForCausalLM")),
        ({"architectures": []}, ("architectures is []", "exactly one")),
        ({"architectures": "REMOVE"}, ("architectures is None",)),
        ({"architectures": ["Qwen3NextForCausalLM"]}, ("cannot be rolled back by a length",)),
        ({"architectures": ["Mamba2ForCausalLM"]}, ("cannot be rolled back by a length",)),
        (
            {"layer_types": ["linear_attention"] + 3 * ["full_attention"]},
            ("'linear_attention'", "cannot be rolled back by a length"),
        ),
        ({"layer_types": 4 * ["sliding_attention"]}, ("only full_attention is supported",)),
        ({"layer_types": ["full_attention"]}, ("layer_types does not list one",)),
        ({"sliding_window": 512}, ("sliding_window is 512",)),
        ({"use_sliding_window": True}, ("sliding-window attention is not supported",)),
        ({"attn_logit_softcapping": 30.0}, ("unknown fields attn_logit_softcapping",)),
        ({"some_switch": False}, ("unknown fields some_switch",)),
        ({"hidden_act": "gelu"}, ("hidden_act is 'gelu'", "SiLU")),
        ({"pretraining_tp": 2}, ("pretraining_tp is 2",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor is 0.5",)),
        ({"rope_interleaved": True}, ("rope_interleaved is True",)),
        ({"num_experts": 8}, ("mixture-of-experts",)),
        ({"num_local_experts": 8}, ("mixture-of-experts",)),
        ({"quantization_config": {"bits": 4}}, ("quantised checkpoints are not read",)),
        ({"auto_map": {"AutoModel": "code.Model"}}, ("auto_map", "never runs")),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ("'dynamic'", "yarn")),
        ({"rope_parameters": {"rope_type": "longrope"}}, ("'longrope' is not supported",)),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, ("unknown fields factor",)),
        ({"rope_parameters": {"rope_type": "linear"}}, ("linear needs factor",)),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, ("factor is -1",)),
        ({"rope_parameters": {"rope_type": "linear", "type": "yarn"}}, ("given twice",)),
        ({"rope_theta": 5.0}, ("rope_theta is given twice",)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("given twice",)),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}}}, ("by layer type",)),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ("whole head",)),
        ({"rope_parameters": 3}, ("rope_parameters is 3",)),
        (
            {"rope_parameters": OLD_DIALECT["rope_scaling"] | {"high_freq_factor": 0.5}},
            ("must be greater than low_freq_factor",),
        ),
        ({"hidden_size": "REMOVE"}, ("hidden_size is missing",)),
        ({"num_hidden_layers": 0}, ("num_hidden_layers is 0",)),
        ({"num_hidden_layers": 4.0}, ("num_hidden_layers is 4.0",)),
        ({"num_key_value_heads": 3}, ("not a multiple of num_key_value_heads 3",)),
        ({"head_dim": 15}, ("needs an even one",)),
        ({"head_dim": None, "num_attention_heads": 6}, ("hidden_size 64 is not a multiple",)),
        ({"rms_norm_eps": "REMOVE"}, ("rms_norm_eps is missing",)),
        ({"rms_norm_eps": 0}, ("rms_norm_eps is 0",)),
        ({"max_position_embeddings": "REMOVE"}, ("max_position_embeddings is missing",)),
        ({"attention_bias": 1}, ("attention_bias is 1",)),
        ({"attention_bias": True}, ("tensors missing", "self_attn.o_proj.bias")),
        ({"mlp_bias": True}, ("tensors missing", "mlp.down_proj.bias")),
        ({"eos_token_id": 100}, ("eos_token_id", "token id 100", "0 to 99")),
        ({"eos_token_id": "</s>"}, ("token id '</s>'",)),
        ({"vocab_size": 99, "eos_token_id": 96}, ("embed_tokens.weight has shape [100, 64]",)),
        ({"intermediate_size": 161}, ("mlp.gate_proj.weight has shape", "implies [161, 64]")),
        ({"num_hidden_layers": 3}, ("without a place", "model.layers.3.")),
        ({"num_hidden_layers": 5}, ("tensors missing", "model.layers.4.", "and 3 more")),
        ({"num_key_value_heads": 1}, ("k_proj.weight has shape [32, 64]",)),
    ],
)
def test_refused_llama_config(
    edited: Edited, config: dict[str, Any], parts: tuple[str, ...]
) -> None:
    # No generation_config: the ids of config.json are in effect.
    refused(edited(LLAMA, config=config), *parts)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"rope_parameters": "REMOVE"}, ("rope_theta is missing",)),
        ({"num_key_value_heads": "REMOVE"}, ("num_key_value_heads is missing",)),
        ({"mlp_bias": True}, ("mlp_bias is true",)),
        ({"num_experts": 4}, ("mixture-of-experts",)),
        ({"use_sliding_window": True, "sliding_window": 64}, ("sliding_window is 64",)),
        ({"architectures": ["LlamaForCausalLM"]}, ("unknown fields max_window_layers",)),
        ({"attention_bias": True}, ("q_proj.bias",)),
    ],
)
def test_refused_qwen3_config(
    edited: Edited, config: dict[str, Any], parts: tuple[str, ...]
) -> None:
    refused(edited(QWEN3, config=config), *parts)


@pytest.mark.parametrize(
    ("tensors", "parts"),
    [
        ({"model.extra.weight": np.ones(3, np.float32)}, ("without a place", "model.extra.weight")),
        ({"norm.weight": np.ones(64, np.float32)}, ("without a place in the model: norm.weight",)),
        ({Q_PROJ: "REMOVE"}, ("tensors missing", Q_PROJ)),
        ({Q_PROJ: np.ones((64, 64), np.int8)}, (Q_PROJ, "I8", "only fp32, fp16 and bf16")),
        ({Q_PROJ: np.ones((64, 64), ml_dtypes.float8_e4m3fn)}, (Q_PROJ, "F8_E4M3")),
        ({Q_PROJ: np.ones((64, 64), np.float64)}, (Q_PROJ, "F64")),
        ({Q_PROJ: np.ones((64, 65), np.float32)}, ("[64, 65]", "implies [64, 64]")),
    ],
)
def test_refused_tensors(edited: Edited, tensors: dict[str, Any], parts: tuple[str, ...]) -> None:
    refused(edited(LLAMA, tensors=tensors), *parts)


@pytest.mark.parametrize(
    ("generation", "part"),
    [
        ({"eos_token_id": [3, 100]}, "token id 100"),
        ({"eos_token_id": True}, "token id True"),
        ({"do_sample": True, "temperature": -1}, "temperature is -1"),
        ({"do_sample": True, "top_k": 0.5}, "top_k is 0.5"),
    ],
)
def test_refused_generation_config(edited: Edited, generation: Any, part: str) -> None:
    refused(edited(LLAMA, generation=generation), "generation_config.json", part)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_damaged_config(edited: Edited, text: str) -> None:
    directory = edited(LLAMA)
    (directory / "config.json").write_bytes(text.encode("latin-1"))
    refused(directory, "config.json", "fetch the file again")


@pytest.mark.parametrize("damage", ["truncated", "header", "garbage", "empty"])
def test_damaged_weights(edited: Edited, damage: str) -> None:
    path = edited(LLAMA) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(
        {
            "truncated": data[:-100],
            "header": data[:40],
            "garbage": struct.pack("<Q", 20) + b"x" * 40,
            "empty": b"",
        }[damage]
    )
    refused(path.parent, str(path), "fetch it again")


def shard(directory: Path, index_edit: dict[str, str] | None = None) -> Path:
    """Turn model.safetensors into two shards with an index."""
    arrays = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(arrays)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({n: arrays[n] for n in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    weight_map |= index_edit or {}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def test_shards(edited: Edited, goldens: Path) -> None:
    target = read_target(shard(edited(QWEN3)))
    whole = read_target(goldens / QWEN3)
    assert target.weights.names() == whole.weights.names()
    for name in whole.weights.names():
        np.testing.assert_array_equal(target.weights[name], whole.weights[name])
    assert sum(name.endswith(".safetensors") for name in target.provenance) == 2


@pytest.mark.parametrize(
    ("index_edit", "parts"),
    [
        ({"x": "model-9.safetensors"}, ("model-9.safetensors", "no such file")),
        ({"x": "../model.safetensors"}, ("'../model.safetensors'", "plain name")),
        ({"x": "/etc/passwd"}, ("plain name",)),
        ({"x": "sub\\model.safetensors"}, ("plain name",)),
        ({"x": "model.bin"}, ("plain name",)),
        ({"x": "model-00001-of-00002.safetensors"}, ("tensors x are listed", "not in it")),
    ],
)
def test_refused_shards(edited: Edited, index_edit: dict[str, str], parts: tuple[str, ...]) -> None:
    refused(shard(edited(QWEN3), index_edit), "model.safetensors.index.json", *parts)


def test_tensor_in_two_shards(edited: Edited) -> None:
    directory = shard(edited(QWEN3))
    first = directory / "model-00001-of-00002.safetensors"
    both = {**load_file(first), "model.norm.weight": np.ones(64, np.float32)}
    second = load_file(directory / "model-00002-of-00002.safetensors")
    save_file({**second, **both}, directory / "model-00002-of-00002.safetensors")
    refused(directory, "are in another shard too")


def test_index_without_map(edited: Edited) -> None:
    directory = shard(edited(QWEN3))
    (directory / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    refused(directory, "weight_map is missing")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights(edited: Edited, name: str) -> None:
    directory = edited(LLAMA)
    (directory / "model.safetensors").rename(directory / name)
    refused(directory, name, "never reads", "convert them to model.safetensors")


def test_no_weights(edited: Edited) -> None:
    directory = edited(LLAMA)
    (directory / "model.safetensors").rename(directory / "weights.safetensors")
    refused(directory, "found weights.safetensors", "model.safetensors or")
    (directory / "weights.safetensors").unlink()
    refused(directory, "found no weights")


def test_paths(tmp_path: Path, edited: Edited) -> None:
    refused(tmp_path / "absent", "absent", "no such file or directory")
    refused(tmp_path, "no config.json")
    refused(edited(LLAMA) / "model.safetensors", "this is a file")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    refused(tmp_path, "2 .gguf files")


def test_hub(monkeypatch: pytest.MonkeyPatch, goldens: Path) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    asked: dict[str, Any] = {}

    def give(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(goldens / LLAMA)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)
    assert read_target("org/name").contract.vocab_size == 100
    assert asked["repo_id"] == "org/name"
    assert not any("bin" in p or "py" in p or p == "*" for p in asked["allow_patterns"])

    for error in (
        LocalEntryNotFoundError("no snapshot\nmore"),
        OfflineModeIsEnabled("offline"),
        ConnectionError(),
    ):

        def fail(repo_id: str, error: Exception = error, **options: Any) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        refused("org/name", "org/name", "offline?", "local checkpoint directory")


def test_weights_are_read_only_when_asked(goldens: Path) -> None:
    weights = read_target(goldens / LLAMA).weights
    assert weights["norm.weight"] is not weights["norm.weight"]
    with pytest.raises(KeyError):
        weights["absent"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_check_finite(dtype: Any, bad: float) -> None:
    good = {"a": np.ones(3, dtype), "b": np.zeros((2, 2), dtype)}
    check_finite(Weights.from_arrays(good))
    good["b"][1, 0] = bad
    with pytest.raises(DraftgraphError, match="tensor b holds"):
        check_finite(Weights.from_arrays(good))


# --- GGUF


def gguf_file(path: Path, change: Callable[[Any], None], *, kind: str = "llama") -> Path:
    """A one-layer GGUF of zeros; `change(writer)` adds what should be refused."""
    from gguf import GGUFWriter

    path.parent.mkdir(exist_ok=True)
    writer = GGUFWriter(str(path), kind)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(12)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b", "c"])
    shapes = {"token_embd": (3, 8), "output_norm": (8,)}
    shapes |= {f"blk.0.{n}": (8,) for n in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{n}": (8, 8) for n in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (12, 8), "blk.0.ffn_up": (12, 8), "blk.0.ffn_down": (8, 12)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("kind", "change", "parts"),
    [
        ("gemma3", lambda w: None, ("'gemma3'", "llama, qwen3")),
        ("llama", lambda w: w.add_expert_count(8), ("8 experts",)),
        ("llama", lambda w: w.add_rope_scaling_factor(2.0), ("llama.rope.scaling.factor",)),
        ("llama", lambda w: w.add_float32("llama.odd", 2.0), ("unknown GGUF metadata llama.odd",)),
        ("llama", lambda w: w.add_string("llama.rope.scaling.type", "yarn"), ("scaling 'yarn'",)),
        ("llama", lambda w: w.add_rope_dimension_count(2), ("cannot load this GGUF",)),
        (
            "llama",
            lambda w: (w.add_key_length(4), w.add_rope_dimension_count(2)),
            ("llama.rope.dimension_count is 2", "query head is 4"),
        ),
        (
            "llama",
            lambda w: w.add_tensor("rope_freqs.weight", np.ones(2, np.float32)),
            ("rope_freqs.weight", "Hugging Face checkpoint"),
        ),
        (
            "llama",
            lambda w: w.add_tensor("blk.0.attn_q.bias", np.ones(8, np.float32)),
            ("blk.0.attn_q.bias", "no place"),
        ),
        ("qwen3", lambda w: None, ("blk.0.attn_k_norm.weight", "are missing")),
    ],
)
def test_refused_gguf(tmp_path: Path, kind: str, change: Any, parts: tuple[str, ...]) -> None:
    refused(gguf_file(tmp_path / "x" / "model.gguf", change, kind=kind), "model.gguf", *parts)


@pytest.mark.parametrize("keep", [0, 20, 200, -20])
def test_truncated_gguf(tmp_path: Path, keep: int) -> None:
    path = gguf_file(tmp_path / "x" / "model.gguf", lambda w: None)
    path.write_bytes(path.read_bytes()[:keep])
    refused(path.parent, "model.gguf", "fetch it again")  # the one .gguf of a directory is taken


@pytest.mark.slow
def test_smollm2_gguf(goldens: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = smollm2_gguf()
    target = read_target(path)
    contract, decoder = target.contract, target.contract.decoder
    assert (contract.family, contract.vocab_size, contract.tied_head) == ("llama", 49152, True)
    assert (contract.stop_ids, contract.max_position_embeddings) == ((2,), 8192)
    assert (decoder.num_layers, decoder.hidden_size, decoder.head_dim) == (30, 576, 64)
    assert (decoder.num_heads, decoder.num_kv_heads) == (9, 3)
    assert decoder.rope == RopeSpec("default", 100000.0)
    assert "lm_head.weight" not in target.weights
    assert target.weights.dtype("norm.weight") == np.float32
    assert target.weights["embed_tokens.weight"].std() > 0.01
    check_finite(target.weights)
    assert list(target.provenance) == [path.name]
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(target.tokenizer_files)
    assert b"im_start" in target.tokenizer_files["chat_template.jinja"]
    output = capfd.readouterr()
    assert output.out == "" and output.err == ""

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(target.tokenizer_files["tokenizer.json"].decode())
    assert tokenizer.token_to_id("<|im_end|>") == 2
    assert tokenizer.decode(tokenizer.encode("2 + 2 = 4").ids) == "2 + 2 = 4"

    # The published drafter leaves out embedding and head, and stores fp16.
    from draftgraph.export.checkpoints import read_draft

    assets = goldens.parents[1] / "assets" / "smollm2-dspark"
    draft = read_draft(assets, target)
    assert draft.contract.shares_embedding and draft.contract.shares_head
    assert (draft.contract.tap_ids, draft.contract.mask_token_id) == ((1, 8, 15, 22, 27), 4)
    assert draft.weights.dtype("fc.weight") == np.float16


def test_small_gguf(tmp_path: Path) -> None:
    """The GGUF path end to end on a file that takes no time, with a permuted q to undo."""
    from gguf import GGUFWriter, TokenType

    rng = np.random.default_rng(0)
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(12)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(4)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(4)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "a", "b", "ab"])
    writer.add_token_types([TokenType.CONTROL] + 3 * [TokenType.NORMAL])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(3)
    query = rng.standard_normal((8, 8)).astype(np.float32)
    # llama.cpp interleaves the rotated pairs: rows (0, 2, 1, 3) of each head of four.
    stored = query.reshape(2, 2, 2, 8).swapaxes(1, 2).reshape(8, 8)
    shapes = {"token_embd": (4, 8), "output_norm": (8,), "output": (4, 8)}
    shapes |= {f"blk.0.{n}": (8,) for n in ("attn_norm", "ffn_norm")}
    shapes |= {"blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8), "blk.0.attn_output": (8, 8)}
    shapes |= {"blk.0.ffn_gate": (12, 8), "blk.0.ffn_up": (12, 8), "blk.0.ffn_down": (8, 12)}
    arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    for name, array in {**arrays, "blk.0.attn_q": stored}.items():
        writer.add_tensor(f"{name}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    target = read_target(tmp_path)
    assert target.source == path
    assert target.contract.decoder.rope == RopeSpec("default", 5000.0)
    assert (target.contract.stop_ids, target.contract.bos_id) == ((0, 3), 0)
    assert not target.contract.tied_head
    weights = target.weights
    np.testing.assert_array_equal(weights["layers.0.self_attn.q_proj.weight"], query)
    np.testing.assert_array_equal(weights["lm_head.weight"], arrays["output"])
    np.testing.assert_array_equal(weights["layers.0.mlp.up_proj.weight"], arrays["blk.0.ffn_up"])
    assert "tokenizer.json" in target.tokenizer_files
    shutil.rmtree(tmp_path)  # everything was read
    assert np.isfinite(weights["norm.weight"]).all()
