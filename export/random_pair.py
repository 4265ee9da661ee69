"""Pairs with random weights, of any shape: to try a machine and to time one, without a download.

Nothing is stored. A tensor is cut from one block of normal numbers when it is read, so a pair of
billions of parameters takes no memory until it is written, and is written at the speed of copies.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ..graphs.contract import DecoderSpec, DraftContract, DType, RopeSpec, TargetContract
from .bundle import NUMPY_DTYPE
from .checkpoints import DraftCheckpoint, TargetCheckpoint, Weights
from .checkpoints.decoder import decoder_tensors
from .checkpoints.deepspec import drafter_tensors

# Normal numbers behind every tensor. A prime, so that the rows of a matrix are not each other's
# copies before that many of them.
_BLOCK = 1_048_573


def random_pair(
    target: TargetContract, draft: DraftContract, dtype: DType, *, seed: int = 0
) -> tuple[TargetCheckpoint, DraftCheckpoint]:
    """Checkpoints of these shapes with random weights in `dtype`; norms are near 1.

    Matrices keep the size of their input, so activations stay in range at any depth. The drafter
    shares embedding and head. For `export_bundle(..., validate=False)`: no files hold them.
    """
    hidden = target.decoder.hidden_size
    tables = {"embed_tokens.weight": (target.vocab_size, hidden)}
    if not target.tied_head:
        tables["lm_head.weight"] = (target.vocab_size, hidden)
    make = _Normal(dtype, seed)
    kind = np.dtype(NUMPY_DTYPE[dtype])
    where = Path("random")
    mine = Weights.computed(tables | decoder_tensors(target.decoder), kind, make)
    theirs = Weights.computed(drafter_tensors(draft), kind, make)
    return (
        TargetCheckpoint(target, mine, {}, {}, where),
        DraftCheckpoint(draft, theirs, {}, where),
    )


class _Normal:
    """make(name, shape) of `Weights.computed`."""

    def __init__(self, dtype: DType, seed: int) -> None:
        self._normal = np.random.default_rng(seed).standard_normal(_BLOCK, np.float32)
        self._dtype = NUMPY_DTYPE[dtype]
        self._scaled: dict[float, np.ndarray] = {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        start = int.from_bytes(name.encode()) % _BLOCK  # of this tensor, whatever is read first
        if name.endswith("norm.weight"):
            values = np.resize(self._normal[start:], shape)
            return (1 + 0.1 * values).astype(self._dtype)
        fan_in = 1 if name.startswith("embed_tokens") else shape[-1]
        scaled = self._scaled.get(fan_in)
        if scaled is None:
            scaled = (self._normal / math.sqrt(fan_in)).astype(self._dtype)
            self._scaled = {fan_in: scaled}
        out = np.empty(math.prod(shape), self._dtype)
        filled = 0
        while filled < out.size:  # round and round the block
            piece = scaled[start : start + out.size - filled]
            out[filled : filled + piece.size] = piece
            filled, start = filled + piece.size, 0
        return out.reshape(shape)


def tiny_contracts() -> tuple[TargetContract, DraftContract]:
    """A pair that runs in milliseconds, with heads of a size that TensorRT has kernels for."""
    decoder = _decoder(2, hidden=64, heads=2, kv_heads=1, head_dim=64, inner=96)
    target = _target(decoder, vocab=32, tied=False, positions=256)
    return target, _draft(target, layers=1, gamma=4, taps=(-1, 0), rank=8, mask=31)


def qwen3_4b_contracts(*, layers: int = 36, scale: int = 1) -> tuple[TargetContract, DraftContract]:
    """Qwen3-4B and its DSpark drafter (5 layers, γ 7, rank 256) in shape.

    layers: of the target; its drafter taps five of them, or as many as there are to tap. scale:
    what hidden sizes, heads and vocabulary are divided by.
    """
    decoder = _decoder(
        layers,
        hidden=2560 // scale,
        heads=32 // min(scale, 8),
        kv_heads=8 // min(scale, 8),
        head_dim=128 if scale == 1 else 32,
        inner=9728 // scale,
        theta=1e6,
    )
    target = _target(decoder, vocab=151936 // scale, tied=True, positions=40960)
    # Evenly spread; the last layer may not be tapped.
    taps = tuple(dict.fromkeys(round(i) for i in np.linspace(1, max(1, layers - 3), 5)))
    taps = tuple(t for t in taps if t < layers - 1) or (-1,)
    drafter_layers = 5 if scale == 1 else 1
    return target, _draft(
        target, layers=drafter_layers, gamma=7, taps=taps, rank=256 // scale, mask=0
    )


def _decoder(
    layers: int,
    *,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    inner: int,
    theta: float = 1e4,
) -> DecoderSpec:
    return DecoderSpec(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        rms_norm_eps=1e-6,
        rope=RopeSpec("default", theta),
        qk_norm=True,
    )


def _target(decoder: DecoderSpec, **shape: Any) -> TargetContract:
    return TargetContract(
        family="qwen3",
        decoder=decoder,
        vocab_size=shape["vocab"],
        max_position_embeddings=shape["positions"],
        tied_head=shape["tied"],
        stop_ids=(),
    )


def _draft(
    target: TargetContract,
    *,
    layers: int,
    gamma: int,
    taps: tuple[int, ...],
    rank: int,
    mask: int,
) -> DraftContract:
    d = target.decoder
    return DraftContract(
        family="deepspec",
        layout="anchor-first",
        block_size=gamma,
        mask_token_id=mask,
        tap_ids=taps,
        decoder=DecoderSpec(**{**vars(d), "num_layers": layers}),
        vocab_size=target.vocab_size,
        markov_type="vanilla",
        markov_rank=rank,
        has_confidence=True,
        confidence_with_markov=True,
        shares_embedding=True,
        shares_head=True,
    )
