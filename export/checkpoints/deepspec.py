"""DeepSpec drafters: `Qwen3DSparkModel`, DFlash with optional Markov and confidence heads.

Whatever the target, the layers are Qwen3's (q/k norms). A Markov rank of 0 is plain DFlash. Both
are anchor-first: block slot k predicts position anchor + k + 1, and slot 0 is used.
"""

from __future__ import annotations

import dataclasses
import logging
import typing
from pathlib import Path
from typing import Any

from draftgraph.graphs.contract import DraftContract, MarkovType
from draftgraph.graphs.errors import DraftgraphError

from .checkpoint import DraftCheckpoint, TargetCheckpoint
from .config import Config
from .decoder import decoder_tensors, read_decoder
from .weights import Weights, open_safetensors, same_values, take_exactly

log = logging.getLogger(__name__)

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# Ours: tensors left out because they are the target's. DeepSpec itself does not write it.
SHARED = "shared_with_target"
_MARKOV_TYPES = ("vanilla", "gated", "rnn")
# num_anchors is a size of the training batch; auto_map would name a loader for transformers, but
# here the architecture's name fixes the arithmetic and every tensor is checked against it.
_HARMLESS = frozenset({"max_window_layers", "num_anchors", "auto_map"})


def read(
    directory: Path,
    config: Config,
    target: TargetCheckpoint,
    *,
    layout: str | None,
    provenance: dict[str, str],
) -> DraftCheckpoint:
    _refuse_mask_first(config, layout)
    spec = read_decoder(
        config,
        qk_norm=True,
        default_theta=None,
        has_mlp_bias=False,
        kv_heads_default_to_heads=False,
    )
    goal = target.contract
    if spec.hidden_size != goal.decoder.hidden_size:
        raise _mismatch(config, "hidden_size", spec.hidden_size, goal.decoder.hidden_size)
    vocab = config.integer("vocab_size")
    if vocab != goal.vocab_size:
        raise _mismatch(config, "vocab_size", vocab, goal.vocab_size)
    target_layers = config.integer("num_target_layers")
    if target_layers != goal.decoder.num_layers:
        raise _mismatch(config, "num_target_layers", target_layers, goal.decoder.num_layers)

    nested = config.get("dflash_config")
    if nested is not None and not isinstance(nested, dict):
        raise config.fail(f"dflash_config is {nested!r}, but an object is expected")
    inner = Config(nested or {}, f"{config.where}: dflash_config")
    block_size = _block_size(config, inner)
    mask_id = _mask_id(config, inner, vocab)
    taps = _tap_ids(config, inner, target_layers)
    inner.refuse_unread()
    markov, rank = _markov(config)
    confidence, with_markov = _confidence(config, rank)
    tie_flag = config.flag("tie_word_embeddings", False)
    left_to_target = _left_to_target(config)
    config.refuse_unread(_HARMLESS)

    contract = DraftContract(
        family="deepspec",
        layout="anchor-first",
        block_size=block_size,
        mask_token_id=mask_id,
        tap_ids=taps,
        decoder=spec,
        vocab_size=vocab,
        markov_type=markov,
        markov_rank=rank,
        has_confidence=confidence,
        confidence_with_markov=with_markov,
        shares_embedding=True,
        shares_head=True,
    )
    tables = {EMBEDDING: (vocab, spec.hidden_size), HEAD: (vocab, spec.hidden_size)}
    shapes = drafter_tensors(contract) | {
        name: shape for name, shape in tables.items() if name not in left_to_target
    }
    stored = open_safetensors(directory, provenance)
    _check_heads(stored, rank, confidence, str(directory))
    weights = take_exactly(stored, shapes, str(directory), optional={EMBEDDING, HEAD})

    shares_embedding, shares_head = _shared(weights, target, tie_flag, str(directory))
    contract = dataclasses.replace(
        contract, shares_embedding=shares_embedding, shares_head=shares_head
    )
    left_out = {
        n for n, is_shared in ((EMBEDDING, shares_embedding), (HEAD, shares_head)) if is_shared
    }
    return DraftCheckpoint(contract, weights.without(left_out), provenance, directory)


def drafter_tensors(contract: DraftContract) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a drafter but embedding and head."""
    spec, rank = contract.decoder, contract.markov_rank
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(contract.tap_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        **decoder_tensors(spec),
        **_markov_tensors(contract.markov_type, rank, hidden, contract.vocab_size),
    }
    if contract.has_confidence:
        width = hidden + (rank if contract.confidence_with_markov else 0)
        shapes["confidence_head.proj.weight"] = (1, width)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def _left_to_target(config: Config) -> list[str]:
    """Tensors that the file says it leaves to the target."""
    names = config.get(SHARED)
    if names is None:
        return []
    if not isinstance(names, list) or not set(names) <= {EMBEDDING, HEAD}:
        raise config.fail(
            f"{SHARED} is {names!r}, but a list of {EMBEDDING} and {HEAD} is expected"
        )
    return names


def _refuse_mask_first(config: Config, layout: str | None) -> None:
    flags = {key: config.get(key) for key in ("dspark_bonus_anchor", "sample_from_anchor")}
    given = {key: value for key, value in flags.items() if value is not None}
    for key, value in given.items():
        if type(value) is not bool:
            raise config.fail(f"{key} is {value!r}, but true or false is expected")
    if len(set(given.values())) > 1:
        raise config.fail(
            "dspark_bonus_anchor and sample_from_anchor contradict each other",
            "remove the one that does not describe how the drafter was trained",
        )
    if False not in given.values():
        return
    if layout == "anchor-first":
        log.warning(
            "%s: %s says mask-first, overridden by layout=anchor-first", config.where, given
        )
        return
    raise config.fail(
        f"{', '.join(given)} is false, so the drafter was trained mask-first (slot k predicts its "
        "own position), but only anchor-first drafters are supported yet",
        "use an anchor-first drafter, or give layout anchor-first if the flag is known to be wrong",
    )


def _mismatch(config: Config, key: str, found: int, expected: int) -> DraftgraphError:
    return config.fail(
        f"{key} is {found}, but the target has {expected}; the drafter reads the target's hidden "
        "states and proposes its tokens, so the two must agree",
        "use the drafter that was trained for this target",
    )


def _either(config: Config, inner: Config, key: str) -> Any:
    """A field that sits at the top level or inside `dflash_config`."""
    outer_value, inner_value = config.get(key), inner.get(key)
    if outer_value is not None and inner_value is not None and outer_value != inner_value:
        raise config.fail(
            f"{key} is {outer_value!r} at the top level but {inner_value!r} in dflash_config",
            "keep the value that the drafter was trained with",
        )
    return inner_value if outer_value is None else outer_value


def _block_size(config: Config, inner: Config) -> int:
    size = _either(config, inner, "block_size")
    if type(size) is not int or size < 1:
        found = "missing" if size is None else repr(size)
        raise config.fail(
            f"block_size is {found}, but the number of tokens the drafter was trained to predict "
            "at once, at least 1, is required",
            "take it from the training configuration; another value than the trained one fails",
        )
    return size


def _mask_id(config: Config, inner: Config, vocab: int) -> int:
    mask = _either(config, inner, "mask_token_id")
    if type(mask) is not int or not 0 <= mask < vocab:
        found = "missing" if mask is None else repr(mask)
        raise config.fail(
            f"mask_token_id is {found}, but a row of the embedding (0 to {vocab - 1}) is required",
            "take it from the training configuration",
        )
    return mask


def _tap_ids(config: Config, inner: Config, target_layers: int) -> tuple[int, ...]:
    ids = _either(config, inner, "target_layer_ids")
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        found = "missing" if ids is None else repr(ids)
        raise config.fail(
            f"target_layer_ids is {found}, but the list of tapped target layers is required: "
            "guessed taps load and run but ruin the acceptance",
            "take it from the training configuration",
        )
    for tap in ids:
        if tap == target_layers - 1:
            raise config.fail(
                f"target_layer_ids contains {tap}, the last target layer, which the format forbids",
                "check whether the ids count from 0",
            )
        if not -1 <= tap < target_layers:
            raise config.fail(
                f"target_layer_ids contains {tap}, but ids run from -1 (the embedding) to "
                f"{target_layers - 2} (the last layer but one) for this target"
            )
    if len(set(ids)) != len(ids):
        raise config.fail(f"target_layer_ids {ids} contains a duplicated id")
    if ids != sorted(ids):
        raise config.fail(f"target_layer_ids {ids} are not increasing, as the format requires")
    return tuple(ids)


def _markov(config: Config) -> tuple[MarkovType, int]:
    rank, kind = config.integer("markov_rank", minimum=0), config.get("markov_head_type")
    if rank == 0:
        return "none", 0
    if kind not in _MARKOV_TYPES:
        found = "missing" if kind is None else repr(kind)
        raise config.fail(
            f"markov_rank is {rank} but markov_head_type is {found}; one of "
            f"{', '.join(_MARKOV_TYPES)} is required"
        )
    return typing.cast(MarkovType, kind), rank


def _markov_tensors(
    kind: MarkovType, rank: int, hidden: int, vocab: int
) -> dict[str, tuple[int, ...]]:
    if kind == "none":
        return {}
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (vocab, rank),
    }
    if kind == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if kind == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    return shapes


def _confidence(config: Config, rank: int) -> tuple[bool, bool]:
    """Whether there is a confidence head, and whether it reads the Markov embedding."""
    enabled = config.flag("enable_confidence_head")
    with_markov = config.flag("confidence_head_with_markov", None if enabled else False)
    if with_markov and rank == 0:
        raise config.fail(
            "confidence_head_with_markov is true but markov_rank is 0, so there is no Markov "
            "embedding for the confidence head to read"
        )
    return enabled, enabled and with_markov


def _check_heads(weights: Weights, rank: int, confidence: bool, where: str) -> None:
    """The switches against the tensors; each disagreement deserves more than "unknown tensor"."""
    has = {
        h: any(n.startswith(h) for n in weights.names())
        for h in ("markov_head.", "confidence_head.")
    }
    for head, key, wanted in (
        ("markov_head.", "markov_rank", rank > 0),
        ("confidence_head.", "enable_confidence_head", confidence),
    ):
        if has[head] == wanted:
            continue
        state = "there are no such tensors" if wanted else "there are such tensors"
        raise DraftgraphError(
            f"{where}: {key} says that the drafter has {'a' if wanted else 'no'} {head[:-1]}, but "
            f"{state}; check that config.json and the weights belong together"
        )


def _shared(
    weights: Weights, target: TargetCheckpoint, tie_flag: bool, where: str
) -> tuple[bool, bool]:
    """Whether embedding and head are the target's; tensors decide, a missing one is shared."""
    goal = target.weights
    goal_head = EMBEDDING if target.contract.tied_head else HEAD
    embedding = EMBEDDING not in weights or same_values(weights[EMBEDDING], goal[EMBEDDING])
    head = HEAD not in weights or same_values(weights[HEAD], goal[goal_head])
    if (
        tie_flag
        and HEAD not in weights
        and EMBEDDING in weights
        and not (embedding and target.contract.tied_head)
    ):
        raise DraftgraphError(
            f"{where}: there is an embed_tokens.weight but no lm_head.weight, and "
            "tie_word_embeddings is true; the head could be the drafter's embedding or the "
            "target's head, which differ: store lm_head.weight in the drafter"
        )
    return embedding, head
