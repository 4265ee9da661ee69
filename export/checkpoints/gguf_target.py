"""Targets as a GGUF file (Llama and Qwen3), dequantised to fp32 by transformers.

The contract is read from the GGUF metadata and every tensor name is checked here, because the
loader of transformers ignores what it does not know (RoPE scaling and head size among it) and fills
tensors it does not find with random numbers.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from draftgraph.graphs.errors import DraftgraphError

from ..quiet import quiet_transformers
from .checkpoint import TargetCheckpoint
from .config import Config
from .files import sha256
from .hf_target import HEAD, build
from .weights import Weights

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LLAMA_TENSORS = {"attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"}
_LLAMA_TENSORS |= {"ffn_norm", "ffn_gate", "ffn_up", "ffn_down"}
_LAYER_TENSORS = {
    "llama": _LLAMA_TENSORS,
    "qwen3": _LLAMA_TENSORS | {"attn_q_norm", "attn_k_norm"},
}
# Metadata of an architecture that is read below, or has no bearing on the arithmetic.
_KNOWN_KEYS = frozenset(
    """
    block_count context_length embedding_length feed_forward_length vocab_size
    attention.head_count attention.head_count_kv attention.layer_norm_rms_epsilon
    attention.key_length attention.value_length rope.dimension_count rope.freq_base
    rope.scaling.type rope.scaling.finetuned expert_count expert_used_count tensor_data_layout
    """.split()  # noqa: SIM905
)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def read(path: Path) -> TargetCheckpoint:
    config, generation = _metadata(path)

    def open_weights() -> Weights:
        arrays = _dequantised(path)
        if config.get("tie_word_embeddings"):
            arrays.pop(HEAD, None)  # transformers shows the embedding under this name as well
        return Weights.from_arrays(arrays)

    contract, weights = build(config, generation, open_weights, str(path))
    return TargetCheckpoint(
        contract, weights, _tokenizer_files(path), {path.name: sha256(path)}, path
    )


def _metadata(path: Path) -> tuple[Config, Config]:
    """The configuration in Hugging Face terms, after checking that nothing else is in the file."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise DraftgraphError(
            f"{path}: reading a GGUF file needs the gguf package; install draftgraph[export]"
        ) from None
    try:
        reader = GGUFReader(str(path))
        values = {key: field.contents() for key, field in reader.fields.items() if _small(key)}
        vocab = len(reader.fields["tokenizer.ggml.tokens"].data)
        names = {tensor.name for tensor in reader.tensors}
    except Exception as error:  # the reader has no error type of its own: index, value, key errors
        reason = f"{type(error).__name__}: {error}"
        raise DraftgraphError(
            f"{path}: this is not a complete GGUF file with a vocabulary ({reason}); it is damaged "
            "or was cut off while being copied: fetch it again"
        ) from None
    kind = values.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise DraftgraphError(
            f"{path}: the GGUF architecture is {kind!r}, but only {', '.join(_ARCHITECTURES)} are "
            "supported; use a target of one of these"
        )
    own = {k.removeprefix(f"{kind}."): v for k, v in values.items() if k.startswith(f"{kind}.")}
    _refuse_unknown(path, kind, own)
    layers = own.get("block_count")
    _check_names(path, kind, names, layers if isinstance(layers, int) else 0)
    heads = own.get("attention.head_count")
    head_dim = own.get("attention.key_length", own.get("rope.dimension_count"))
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise DraftgraphError(
                f"{path}: {kind}.{key} is {own[key]}, but the size of a query head is {head_dim}; "
                "only heads of one size that are rotated as a whole are supported: use another file"
            )
    where = f"{path}: GGUF metadata"
    config = {
        "architectures": [_ARCHITECTURES[kind]],
        "num_hidden_layers": layers,
        "hidden_size": own.get("embedding_length"),
        "intermediate_size": own.get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": own.get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": own.get("context_length"),
        "rope_theta": own.get("rope.freq_base"),
        "vocab_size": own.get("vocab_size", vocab),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
    }
    # End of text, of turn and of message: llama.cpp stops at each of them.
    ends = [values.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    stop_ids = {"eos_token_id": [end for end in ends if end is not None]}
    return Config(config, where), Config(stop_ids, where)


def _small(key: str) -> bool:
    """Not one of the vocabulary-sized arrays, which are slow to unpack."""
    return not key.startswith("tokenizer.") or key.endswith("_token_id")


def _refuse_unknown(path: Path, kind: str, own: dict[str, Any]) -> None:
    if own.get("expert_count"):
        raise DraftgraphError(
            f"{path}: the model has {own['expert_count']} experts, but mixture-of-experts layers "
            "are not supported; use a dense model"
        )
    if own.get("rope.scaling.type", "none") != "none":
        raise DraftgraphError(
            f"{path}: RoPE scaling {own['rope.scaling.type']!r} in a GGUF file is not supported, "
            "as the loader would ignore it; give the Hugging Face checkpoint instead"
        )
    unknown = sorted(f"{kind}.{key}" for key in set(own) - _KNOWN_KEYS)
    if unknown:
        raise DraftgraphError(
            f"{path}: unknown GGUF metadata {', '.join(unknown)}: it may change the arithmetic of "
            "the model, and draftgraph does not guess; give the Hugging Face checkpoint instead"
        )


def _check_names(path: Path, kind: str, names: set[str], layers: int) -> None:
    if "rope_freqs.weight" in names:
        raise DraftgraphError(
            f"{path}: the file carries rope_freqs.weight, the RoPE scaling of Llama 3.1 and later, "
            "which the loader would ignore; give the Hugging Face checkpoint instead"
        )
    expected = {f"blk.{i}.{t}.weight" for i in range(layers) for t in _LAYER_TENSORS[kind]}
    expected |= {"token_embd.weight", "output_norm.weight"}
    missing, extra = expected - names, names - expected - {"output.weight"}
    for what, wrong in (("are missing", missing), ("have no place in the model", extra)):
        if wrong:
            raise DraftgraphError(
                f"{path}: tensors {', '.join(sorted(wrong)[:6])} ({len(wrong)} in all) {what}; a "
                f"{kind} model of {layers} layers is expected: use another file"
            )


def _dequantised(path: Path) -> dict[str, np.ndarray]:
    """Every parameter in float32, under its Hugging Face name."""
    import torch
    from transformers import AutoModelForCausalLM

    with _quiet(path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    model, info = loaded  # a pair because of output_loading_info
    invented = {*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])} - {HEAD}
    if invented:
        raise DraftgraphError(
            f"{path}: transformers found no data for {', '.join(sorted(invented)[:6])} and would "
            "use random numbers; give the Hugging Face checkpoint instead"
        )
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def _tokenizer_files(path: Path) -> dict[str, bytes]:
    from transformers import AutoTokenizer

    with _quiet(path), tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True
        )
        tokenizer.save_pretrained(folder)
        return {
            name: (Path(folder) / name).read_bytes()
            for name in _TOKENIZER_FILES
            if (Path(folder) / name).is_file()
        }


@contextlib.contextmanager
def _quiet(path: Path) -> Iterator[None]:
    """Silence transformers and turn its failures into ours."""
    try:
        with quiet_transformers():
            yield
    except DraftgraphError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise DraftgraphError(
            f"{path}: transformers cannot load this GGUF file ({reason}); it may be damaged: fetch "
            "it again, or give the Hugging Face checkpoint"
        ) from error
