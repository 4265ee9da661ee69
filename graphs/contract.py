"""The typed contracts that the checkpoint readers, the graphs, the bundle and the runtime share.

Only the standard library is imported here: the runtime reads these types back from a bundle's
manifest without pulling in any of the export tools.

Symbols used throughout the project: R requests, N packed tokens, S padded width (largest number of
tokens of one request), C cache capacity, γ block size, d hidden size, m tapped layers, V target
vocabulary, r Markov rank.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import DraftgraphError

DType = Literal["fp32", "fp16", "bf16"]
RopeType = Literal["default", "linear", "llama3", "yarn"]
MarkovType = Literal["none", "vanilla", "gated", "rnn"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of one decoder; half-split ("neox") pairing over the full head.

    `type` decides which of the optional fields apply; they carry the Hugging Face names
    (`rope_parameters` in transformers 5, `rope_theta` + `rope_scaling` before).
    """

    type: RopeType
    theta: float
    factor: float | None = None  # linear, llama3, yarn
    original_max_position_embeddings: int | None = None  # llama3, yarn
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float | None = None  # yarn
    beta_slow: float | None = None  # yarn
    attention_factor: float | None = None  # yarn; None: derived from factor / mscale
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True)
class DecoderSpec:
    """Shape and arithmetic of a stack of pre-norm GQA decoder layers (Llama and Qwen3 alike)."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeSpec
    qk_norm: bool  # RMSNorm over every query and key head before RoPE (Qwen3)
    attention_bias: bool = False  # q, k, v
    attention_out_bias: bool = False  # o
    mlp_bias: bool = False

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of key and value cache that one token of one request occupies."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


@dataclass(frozen=True)
class TargetContract:
    """What the runtime and the graphs need to know of a target model."""

    family: Literal["llama", "qwen3"]
    decoder: DecoderSpec
    vocab_size: int
    max_position_embeddings: int
    tied_head: bool  # decided by comparing tensors, never by the configuration flag
    stop_ids: tuple[int, ...]  # generation_config.eos_token_id, else config.eos_token_id
    bos_id: int | None = None
    sampling_defaults: dict[str, float | int] = field(default_factory=dict)  # of generation_config


@dataclass(frozen=True)
class DraftContract:
    """What the runtime and the graphs need to know of a block drafter (DFlash backbone + heads).

    `tap_ids` follow the DeepSpec convention: id i is the residual stream after target layer i
    (before any final norm), -1 the embedding output; the last target layer is not allowed.
    `layout` is "anchor-first": block slot k (from 0) predicts position anchor + k + 1.
    """

    family: Literal["deepspec"]
    layout: Literal["anchor-first"]
    block_size: int  # γ, the number of drafted tokens of one round
    mask_token_id: int
    tap_ids: tuple[int, ...]
    decoder: DecoderSpec
    vocab_size: int
    markov_type: MarkovType  # "none" is plain DFlash: the picks of a block are independent
    markov_rank: int  # 0 when markov_type is "none"
    has_confidence: bool
    confidence_with_markov: bool
    shares_embedding: bool  # embedding equal to the target's tensor (or left out of the checkpoint)
    shares_head: bool
    # Tokens that may be drafted; None: all. Only they have base logits.
    draft_vocab_size: int | None = None

    @property
    def head_size(self) -> int:
        """U, the tokens that may be drafted."""
        return self.draft_vocab_size or self.vocab_size


def to_dict(spec: Any) -> dict[str, Any]:
    """The JSON form of a contract (tuples become lists, None is kept)."""
    return dataclasses.asdict(spec)


def from_dict(cls: type[Any], data: Any, where: str) -> Any:
    """Rebuild a contract from its JSON form; unknown, missing or ill-typed fields are errors.

    `where` names the place in the file for the message, e.g. "manifest.json: draft".
    """
    if not isinstance(data, dict):
        raise DraftgraphError(f"{where}: expected an object, found {type(data).__name__}")
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(data) - names)
    if unknown:
        raise DraftgraphError(
            f"{where}: unknown fields {unknown}; the bundle was written by another version of "
            "draftgraph, export it again"
        )
    required = {
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - set(data))
    if missing:
        raise DraftgraphError(f"{where}: missing fields {missing}; export the bundle again")
    return cls(**{k: _coerce(hints[k], v, f"{where}.{k}") for k, v in data.items()})


def _coerce(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    if origin is types.UnionType:
        if value is None:
            return None
        return _coerce(next(a for a in typing.get_args(hint) if a is not type(None)), value, where)
    if origin is tuple and isinstance(value, list):
        element = typing.get_args(hint)[0]
        return tuple(_coerce(element, v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is Literal and value in typing.get_args(hint):
        return value
    if origin is dict and isinstance(value, dict):
        return dict(value)
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise DraftgraphError(f"{where}: expected {hint}, found {value!r}")
