"""Rotary position embedding: the frequencies of one decoder, computed once at export time.

Every step is taken in float32 and in the order of the Hugging Face implementation. That is not
pedantry: an angle is position times frequency, so at position 100,000 a relative difference of 1e-6
in a frequency turns a head by 0.1 rad away from what the model was trained with.
"""

from __future__ import annotations

import math

import numpy as np

from .contract import RopeSpec
from .errors import DraftgraphError


def inverse_frequencies(
    spec: RopeSpec, head_dim: int, max_position_embeddings: int | None
) -> tuple[np.ndarray, float]:
    """Frequencies float32 [head_dim/2] and the factor that multiplies cos and sin.

    Angle of pair i (elements i and i + head_dim/2) at position p: p * frequencies[i].
    `max_position_embeddings` is only used by yarn, for a factor or an original length left out.
    """
    if head_dim < 2 or head_dim % 2:
        raise DraftgraphError(
            f"rotary embedding: head_dim is {head_dim}, but pairs of elements are rotated, so it "
            "must be even; check head_dim in the checkpoint's config.json"
        )
    if spec.type == "default":
        return _base(spec.theta, head_dim), 1.0
    if spec.type == "linear":
        return _base(spec.theta, head_dim) / np.float32(_need(spec, "factor")), 1.0
    if spec.type == "llama3":
        return _llama3(spec, head_dim), 1.0
    if spec.type == "yarn":
        return _yarn(spec, head_dim, max_position_embeddings)
    raise DraftgraphError(
        f"rotary embedding: type {spec.type!r} is not supported; expected one of default, linear, "
        "llama3, yarn"
    )


def _base(theta: float, head_dim: int) -> np.ndarray:
    """theta^(-2i/head_dim), float32 [head_dim/2]."""
    return np.float32(1) / _powers(theta, head_dim)


def _powers(theta: float, head_dim: int) -> np.ndarray:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(np.float32(theta), exponents, dtype=np.float32)


def _need(spec: RopeSpec, name: str) -> float:
    value = getattr(spec, name)
    if value is None:
        raise DraftgraphError(
            f"rotary embedding of type {spec.type}: {name} is missing; it must be given in "
            "rope_parameters (or rope_scaling) of the checkpoint's config.json"
        )
    return float(value)


def _llama3(spec: RopeSpec, head_dim: int) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between are blended."""
    factor = np.float32(_need(spec, "factor"))
    low, high = _need(spec, "low_freq_factor"), _need(spec, "high_freq_factor")
    original = _need(spec, "original_max_position_embeddings")
    if high <= low:
        raise DraftgraphError(
            f"rotary embedding of type llama3: high_freq_factor {high} must be greater than "
            f"low_freq_factor {low}; check config.json"
        )
    frequencies = _base(spec.theta, head_dim)
    wavelengths = np.float32(2 * math.pi) / frequencies
    long, short = wavelengths > original / low, wavelengths < original / high
    blend = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - blend) * frequencies / factor + blend * frequencies
    return np.where(long, frequencies / factor, np.where(short, frequencies, blended))


def _yarn(
    spec: RopeSpec, head_dim: int, max_position_embeddings: int | None
) -> tuple[np.ndarray, float]:
    """YaRN: interpolate the slow pairs, keep the fast ones, ramp linearly between the two."""
    original = spec.original_max_position_embeddings or max_position_embeddings
    if original is None:
        raise DraftgraphError(
            "rotary embedding of type yarn: original_max_position_embeddings is missing and there "
            "is no max_position_embeddings to stand in for it; give one of them in config.json"
        )
    factor = spec.factor
    if factor is None:
        if max_position_embeddings is None:
            raise DraftgraphError(
                "rotary embedding of type yarn: factor is missing and cannot be derived without "
                "max_position_embeddings; give one of them in config.json"
            )
        factor = max_position_embeddings / original

    powers = _powers(spec.theta, head_dim)
    kept = np.float32(1) / powers
    interpolated = np.float32(1) / (np.float32(factor) * powers)

    def pair_that_turns(rotations: float) -> float:
        """The (fractional) pair index that makes `rotations` turns over the original length."""
        turns = math.log(original / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(spec.theta))

    low, high = pair_that_turns(spec.beta_fast or 32), pair_that_turns(spec.beta_slow or 1)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as the reference does, so that the ramp is a step and not 0/0
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    frequencies = interpolated * (np.float32(1) - keep) + kept * keep

    attention_factor = spec.attention_factor
    if attention_factor is None:
        if spec.mscale and spec.mscale_all_dim:
            attention_factor = _mscale(factor, spec.mscale) / _mscale(factor, spec.mscale_all_dim)
        else:
            attention_factor = _mscale(factor, 1.0)
    return frequencies, float(attention_factor)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
