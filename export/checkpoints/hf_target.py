"""Targets in Hugging Face form: a directory with `config.json` and safetensors weights.

Llama (Llama 2 and 3.x, SmolLM2, ...) and dense Qwen3; both are the same decoder with switches.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftgraph.graphs.contract import TargetContract
from draftgraph.graphs.errors import DraftgraphError

from .checkpoint import TargetCheckpoint
from .config import RECURRENT_REASON, Config, architecture, token_ids
from .decoder import decoder_tensors, read_decoder
from .files import read_bytes, read_json
from .weights import Weights, open_safetensors, same_values, take_exactly

log = logging.getLogger(__name__)

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_RECURRENT = re.compile(
    r"Mamba|Rwkv|Qwen3Next|Qwen3_5|Jamba|Bamba|Zamba|FalconH1|Hybrid|NemotronH|RecurrentGemma|"
    r"Lfm2|MiniMax|KimiLinear|OlmoHybrid|xLSTM|Griffin",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Family:
    """What the supported target families differ in."""

    name: Literal["llama", "qwen3"]
    qk_norm: bool
    default_theta: float | None  # None: rope_theta is required
    has_mlp_bias: bool
    harmless: frozenset[str]  # further configuration keys without effect


FAMILIES = {
    "LlamaForCausalLM": Family("llama", False, 10000.0, True, frozenset()),
    "Qwen3ForCausalLM": Family("qwen3", True, None, False, frozenset({"max_window_layers"})),
}


def read(directory: Path) -> TargetCheckpoint:
    provenance: dict[str, str] = {}
    path = directory / "config.json"
    config = Config(read_json(path, provenance), str(path))
    generation = directory / "generation_config.json"
    contract, weights = build(
        config,
        Config(read_json(generation, provenance), str(generation)) if generation.exists() else None,
        lambda: open_safetensors(directory, provenance),
        str(directory),
    )
    return TargetCheckpoint(
        contract, weights, _tokenizer_files(directory, provenance), provenance, directory
    )


def build(
    config: Config, generation: Config | None, open_weights: Callable[[], Weights], where: str
) -> tuple[TargetContract, Weights]:
    """Contract and canonical weights; `open_weights()` gives tensors under Hugging Face names.

    The configuration is judged before the weights are touched: they may be large, or not ours.
    """
    family = _family(config)
    if config.get("auto_map") is not None:
        # The class has a stock name but brings its own code, which may compute something else.
        raise config.fail(
            "auto_map names code that comes with the checkpoint, which draftgraph never runs",
            "use a checkpoint of the stock architecture",
        )
    spec = read_decoder(
        config,
        qk_norm=family.qk_norm,
        default_theta=family.default_theta,
        has_mlp_bias=family.has_mlp_bias,
        kv_heads_default_to_heads=family.name == "llama",
    )
    vocab = config.integer("vocab_size")
    max_positions = config.integer("max_position_embeddings")
    tie_flag = config.flag("tie_word_embeddings", False)
    stop_ids, bos_id, sampling = _generation(config, generation, vocab)
    config.refuse_unread(family.harmless)

    shapes = {EMBEDDING: (vocab, spec.hidden_size), **decoder_tensors(spec)}
    stored = {name: f"model.{name}" for name in shapes} | {HEAD: HEAD}
    shapes[HEAD] = (vocab, spec.hidden_size)
    found = take_exactly(
        open_weights(), {stored[n]: s for n, s in shapes.items()}, where, optional={HEAD}
    )
    weights = found.renamed({stored[n]: n for n in shapes if stored[n] in found})
    contract = TargetContract(
        family=family.name,
        decoder=spec,
        vocab_size=vocab,
        max_position_embeddings=max_positions,
        tied_head=_is_tied(weights, tie_flag, where),
        stop_ids=stop_ids,
        bos_id=bos_id,
        sampling_defaults=sampling,
    )
    return contract, weights.without({HEAD}) if contract.tied_head else weights


def _family(config: Config) -> Family:
    name = architecture(config)
    if name in FAMILIES:
        return FAMILIES[name]
    if _RECURRENT.search(name):
        raise DraftgraphError(f"{config.where}: architecture {name} is refused: {RECURRENT_REASON}")
    raise config.fail(
        f"architecture {name} is not a supported target (supported: {', '.join(FAMILIES)})",
        "use a target of one of these",
    )


def _is_tied(weights: Weights, flag: bool, where: str) -> bool:
    """Tensors decide; the flag is only asked when there is no head at all."""
    if HEAD in weights:
        return same_values(weights[HEAD], weights[EMBEDDING])
    if not flag:
        raise DraftgraphError(
            f"{where}: there is no lm_head.weight, and tie_word_embeddings does not say that the "
            "embedding serves as the head; either the tensor or the flag is expected: check that "
            "config.json and the weights belong together"
        )
    return True


def _generation(
    config: Config, generation: Config | None, vocab: int
) -> tuple[tuple[int, ...], int | None, dict[str, float | int]]:
    """Stop ids, the id that starts a text, and the sampling parameters the model suggests."""
    stop_ids: tuple[int, ...] = ()
    sampling: dict[str, float | int] = {}
    bos = token_ids(config.get("bos_token_id"), f"{config.where}: bos_token_id", vocab)
    if generation is not None:
        eos = generation.get("eos_token_id")
        stop_ids = token_ids(eos, f"{generation.where}: eos_token_id", vocab)
        if not bos:
            bos = token_ids(
                generation.get("bos_token_id"), f"{generation.where}: bos_token_id", vocab
            )
        if generation.flag("do_sample", False):
            # Without do_sample these are leftovers: the model is meant to be decoded greedily.
            for key in ("temperature", "top_p"):
                value = generation.number(key)
                if value is not None:
                    sampling[key] = value
            if generation.get("top_k") is not None:
                sampling["top_k"] = generation.integer("top_k", minimum=0)
    if not stop_ids:
        stop_ids = token_ids(config.get("eos_token_id"), f"{config.where}: eos_token_id", vocab)
    return stop_ids, bos[0] if bos else None, sampling


def _tokenizer_files(directory: Path, provenance: dict[str, str]) -> dict[str, bytes]:
    files = {
        name: read_bytes(directory / name, provenance)
        for name in _TOKENIZER_FILES
        if (directory / name).is_file()
    }
    if "tokenizer.json" not in files:
        slow = (directory / "tokenizer.model").is_file()
        log.warning(
            "%s: there is no tokenizer.json%s; prompts will have to be given as token ids",
            directory,
            " (tokenizer.model is not read; save the fast tokenizer with transformers)"
            if slow
            else "",
        )
    return files
