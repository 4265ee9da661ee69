"""Drafters as files: the shape and first weights of a new one, DeepSpec directories, and putting
weights into a bundle that has the graphs already."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from ...export.bundle import recipes, seal
from ...export.checkpoints import DraftCheckpoint, TargetCheckpoint, Weights
from ...export.checkpoints.deepspec import EMBEDDING, HEAD, SHARED, drafter_tensors
from ...graphs.contract import DecoderSpec, DraftContract, MarkovType, RopeSpec, TargetContract
from ...graphs.errors import DraftgraphError
from ...runtime.bundle import WEIGHTS, Bundle, weights_header
from ...runtime.jsonfile import write_text

INIT_STD = 0.02  # `initializer_range` of DeepSpec and Qwen3
MARKOV_STD = 0.1  # of W1; W2 starts at 0, and a product of two small matrices would stay small


def default_taps(layers: int) -> tuple[int, ...]:
    """Up to five target layers, evenly spaced, as DeepSpec's own configurations have them: from the
    second layer to the third from the end."""
    first, last = (1, layers - 3) if layers >= 8 else (0, layers - 2)
    if last < 0:
        return (-1,)  # one layer only: its output must not be tapped, the embedding may
    count = min(5, last - first + 1)
    return tuple(round(first + i * (last - first) / max(1, count - 1)) for i in range(count))


def new_contract(
    target: TargetContract,
    *,
    block_size: int,
    layers: int,
    intermediate_size: int | None,
    taps: tuple[int, ...] | None,
    mask_token_id: int,
    markov_type: MarkovType,
    markov_rank: int,
    confidence: bool,
) -> DraftContract:
    """A drafter with the target's width, heads and rope."""
    spec = target.decoder
    return DraftContract(
        family="deepspec",
        layout="anchor-first",
        block_size=block_size,
        mask_token_id=mask_token_id,
        tap_ids=taps or default_taps(spec.num_layers),
        decoder=DecoderSpec(
            hidden_size=spec.hidden_size,
            num_layers=layers,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            intermediate_size=intermediate_size or spec.intermediate_size,
            rms_norm_eps=spec.rms_norm_eps,
            rope=spec.rope,
            qk_norm=True,
        ),
        vocab_size=target.vocab_size,
        markov_type=markov_type,
        markov_rank=markov_rank if markov_type != "none" else 0,
        has_confidence=confidence,
        confidence_with_markov=confidence and markov_type != "none",
        shares_embedding=True,
        shares_head=True,
    )


def new_weights(contract: DraftContract, seed: int) -> dict[str, Tensor]:
    """First weights: small random matrices; Markov bias and confidence logits start at 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in drafter_tensors(contract).items():
        if len(shape) == 1 and name.endswith("norm.weight"):
            w = torch.ones(shape)
        elif name.endswith(".bias") or name.startswith(("confidence", "markov_head.markov_w2")):
            w = torch.zeros(shape)
        else:
            std = MARKOV_STD if name.startswith("markov_head.markov_w1") else INIT_STD
            w = torch.randn(shape, generator=generator) * std
        weights[name] = w
    return weights


def as_checkpoint(contract: DraftContract, weights: Mapping[str, Tensor]) -> DraftCheckpoint:
    """In memory what `read_draft` returns for a directory."""
    arrays = {name: w.detach().float().numpy() for name, w in weights.items()}
    return DraftCheckpoint(contract, Weights.from_arrays(arrays), {}, Path("."))


# DeepSpec directories


def save_drafter(
    folder: Path,
    contract: DraftContract,
    weights: Mapping[str, Tensor],
    target: TargetCheckpoint,
    *,
    anchors: int,
    with_embeddings: bool = False,
) -> None:
    """`config.json` and `model.safetensors` (fp16) as DeepSpec's Qwen3DSparkModel has them.

    Embedding and head are the target's and left out unless asked for; the key shared_with_target
    says so, since DeepSpec itself would start such a drafter with random ones.
    """
    tensors = {name: w.detach().half().contiguous() for name, w in weights.items()}
    if with_embeddings:
        embed, head = embedding_and_head(target)
        tensors |= {EMBEDDING: embed.half(), HEAD: head.half().clone()}
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise DraftgraphError(f"{name}: values that are not finite in fp16; nothing was saved")
    config = deepspec_config(contract, target.contract, anchors)
    if not with_embeddings:
        config[SHARED] = [EMBEDDING, HEAD]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.safetensors"
    temporary = file.with_name(f".{file.name}.partial")
    save_file(tensors, temporary, {"format": "pt"})
    os.replace(temporary, file)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def deepspec_config(
    contract: DraftContract, target: TargetContract, anchors: int
) -> dict[str, Any]:
    spec = contract.decoder
    markov = {"markov_head_type": contract.markov_type} if contract.markov_rank else {}
    confidence = (
        {"confidence_head_with_markov": contract.confidence_with_markov}
        if contract.has_confidence
        else {}
    )
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "dtype": "float16",
        "vocab_size": contract.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": rope_parameters(spec.rope),
        "max_position_embeddings": target.max_position_embeddings,
        "attention_bias": spec.attention_bias,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * spec.num_layers,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "num_target_layers": target.decoder.num_layers,
        "target_layer_ids": list(contract.tap_ids),
        "block_size": contract.block_size,
        "mask_token_id": contract.mask_token_id,
        "num_anchors": anchors,
        "markov_rank": contract.markov_rank,
        **markov,
        "enable_confidence_head": contract.has_confidence,
        **confidence,
    }


def rope_parameters(rope: RopeSpec) -> dict[str, Any]:
    """The keys of transformers 5."""
    fields = {
        k: v
        for k, v in vars(rope).items()
        if v is not None and k not in ("type", "theta", "truncate")
    }
    if rope.type == "yarn":
        fields["truncate"] = rope.truncate
    return {"rope_type": rope.type, "rope_theta": rope.theta, **fields}


def embedding_and_head(target: TargetCheckpoint) -> tuple[Tensor, Tensor]:
    """[V, d] float32 each; one tensor when the target ties them."""
    embed = torch.from_numpy(target.weights[EMBEDDING].astype(np.float32))
    if target.contract.tied_head:
        return embed, embed
    return embed, torch.from_numpy(target.weights[HEAD].astype(np.float32))


# Bundles


def put_drafter(bundle: Bundle, target: TargetCheckpoint, draft: DraftCheckpoint) -> None:
    """Replace the drafter's weights in a bundle of this target and a drafter of the same shape.

    The graphs refer to ranges of the weights file, so only those bytes change, and the manifest's
    hashes. An interruption in between leaves a bundle that its hashes refuse.
    """
    if replace(bundle.draft, draft_vocab_size=None) != draft.contract:
        raise DraftgraphError(
            f"{bundle.path}: its drafter has another shape than the one to put in; export the "
            "target with a drafter of this shape"
        )
    if bundle.draft.draft_vocab_size is not None:
        draft = replace(draft, contract=bundle.draft, draft_ids=bundle.draft_ids())
    file = bundle.path / WEIGHTS
    table = {
        name: recipe
        for name, recipe in recipes(target, draft, bundle.dtype).items()
        if name.startswith(("backbone.", "markov.", "confidence."))
    }
    with file.open("r+b") as stream:
        start, header = weights_header(stream)
        for name, recipe in table.items():
            begin, end = header[name]["data_offsets"]
            data = recipe.read().tobytes()
            if list(recipe.shape) != header[name]["shape"] or len(data) != end - begin:
                raise DraftgraphError(f"{file}: {name} is stored in another form than expected")
            stream.seek(start + begin)
            stream.write(data)
    seal(bundle.path)
