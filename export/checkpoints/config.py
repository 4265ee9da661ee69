"""Typed, strict access to a `config.json`.

The rule for keys: every key that a reader looks at is remembered, and `refuse_unread` turns each
other key into an error, because a field we do not know may change the arithmetic. Exempt are keys
set to null (Hugging Face's way of saying "not set"), keys that start with an underscore
(bookkeeping of transformers) and the lists of keys known to have no bearing on the forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from draftgraph.graphs.errors import DraftgraphError

# Training, bookkeeping and text generation fields that transformers 4 and 5 and common training
# tools write into the config of any model. None of them is read by a decoder's forward pass.
HARMLESS_KEYS = frozenset(
    """
    architectures model_type dtype torch_dtype transformers_version name_or_path tokenizer_class
    model_max_length max_sequence_length attn_implementation transformers.js_config is_llama_config
    unsloth_fixed unsloth_version unsloth_version_info use_cache cache_implementation
    initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
    return_dict output_hidden_states output_attentions output_scores return_dict_in_generate
    torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward is_decoder
    cross_attention_hidden_size tie_encoder_decoder remove_invalid_values
    id2label label2id num_labels problem_type finetuning_task task_specific_params prefix
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id
    forced_eos_token_id exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """.split()  # noqa: SIM905
)

# Fields that do change the arithmetic, but not at these values. Anything else is refused.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "only the SiLU activation is supported"),
    "pretraining_tp": ((1,), "tensor-parallel slicing of pretraining changes the rounding"),
    "partial_rotary_factor": ((1.0,), "only rotation of the whole head is supported"),
    "rope_interleaved": ((False,), "only the half-split pairing of RoPE is supported"),
    "pruned_heads": (({}, []), "pruned attention heads are not supported"),
    "is_encoder_decoder": ((False,), "only decoder-only models are supported"),
    "add_cross_attention": ((False,), "only decoder-only models are supported"),
    "num_experts": ((0,), "mixture-of-experts layers are not supported"),
    "num_local_experts": ((0,), "mixture-of-experts layers are not supported"),
    "n_routed_experts": ((0,), "mixture-of-experts layers are not supported"),
    "quantization_config": (
        (),
        "quantised checkpoints are not read; give the fp32, fp16 or bf16 weights",
    ),
    "compression_config": (
        (),
        "compressed checkpoints are not read; give the fp32, fp16 or bf16 weights",
    ),
}

_RECURRENT_LAYER = re.compile(r"linear|mamba|ssm|recurrent|rwkv|delta|conv", re.IGNORECASE)
RECURRENT_REASON = (
    "its recurrent (linear-attention) state cannot be rolled back by a length after drafted "
    "tokens are rejected, which is how draftgraph verifies; use a target with full attention in "
    "every layer"
)


class Config:
    """A configuration dictionary; `where` names it in messages."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._read: set[str] = set()
        self.where = where

    def get(self, key: str) -> Any:
        """The raw value, None if it is absent or null; the key counts as handled."""
        self._read.add(key)
        return self._values.get(key)

    def fail(
        self, found: str, advice: str = "check the file against its source"
    ) -> DraftgraphError:
        return DraftgraphError(f"{self.where}: {found}; {advice}")

    def integer(self, key: str, *, minimum: int = 1, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.fail(f"{key} is missing, but an integer of at least {minimum} is required")
        if type(value) is not int or value < minimum:
            raise self.fail(f"{key} is {value!r}, but an integer of at least {minimum} is expected")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """A positive number, or the default if the key is absent or null."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
            raise self.fail(f"{key} is {value!r}, but a positive number is expected")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not bool:
            found = "missing" if value is None else repr(value)
            raise self.fail(f"{key} is {found}, but true or false is expected")
        return value

    def refuse_changed_arithmetic(self) -> None:
        """Refuse the known fields that would change the arithmetic."""
        for key, (neutral, reason) in _NEUTRAL.items():
            value = self.get(key)
            if value is not None and not any(
                value == ok and isinstance(value, bool) == isinstance(ok, bool) for ok in neutral
            ):
                shown = "present" if isinstance(value, dict) else repr(value)
                raise self.fail(f"{key} is {shown}, but {reason}", "use another checkpoint")

    def refuse_windows(self, num_layers: int, *, default_on: bool) -> None:
        """Refuse sliding-window, chunked and recurrent layers.

        `default_on`: a `sliding_window` without `use_sliding_window` is in effect.
        """
        kinds = self.get("layer_types")
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != num_layers:
                raise self.fail(
                    f"layer_types does not list one type for each of the {num_layers} layers"
                )
            for kind in kinds:
                if kind == "full_attention":
                    continue
                if isinstance(kind, str) and _RECURRENT_LAYER.search(kind):
                    raise DraftgraphError(
                        f"{self.where}: layer_types contains {kind!r}: {RECURRENT_REASON}"
                    )
                raise self.fail(
                    f"layer_types contains {kind!r}, but only full_attention is supported",
                    "use a checkpoint with full attention in every layer",
                )
        window, used = self.get("sliding_window"), self.get("use_sliding_window")
        if used or (window is not None and used is None and default_on):
            raise self.fail(
                f"sliding_window is {window!r} with use_sliding_window {used!r}, but "
                "sliding-window attention is not supported",
                "use a checkpoint with full attention in every layer",
            )

    def refuse_unread(self, harmless: Iterable[str] = ()) -> None:
        allowed = self._read | HARMLESS_KEYS | set(harmless)
        unknown = sorted(
            key
            for key, value in self._values.items()
            if value is not None and key not in allowed and not key.startswith("_")
        )
        if unknown:
            raise self.fail(
                f"unknown fields {', '.join(unknown)}: they may change the arithmetic of the "
                "model, and draftgraph does not guess",
                "remove them if they are known to be without effect, or use another checkpoint",
            )


def architecture(config: Config) -> str:
    """The one class name under `architectures`."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise config.fail(
            f"architectures is {names!r}, but a list with exactly one class name is expected"
        )
    return names[0]


def token_ids(value: Any, where: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids given as one integer, a list of them, or null."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise DraftgraphError(
                f"{where}: found token id {token!r}, but an integer from 0 to {vocab_size - 1} "
                "(the vocabulary) is expected; check the file against its source"
            )
    return tuple(dict.fromkeys(ids))
