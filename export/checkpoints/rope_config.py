"""The RoPE fields of a configuration, in both dialects of Hugging Face.

transformers 5 writes `rope_parameters` (with `rope_theta` inside); before, `rope_theta` stood at
the top level next to `rope_scaling` (with `type`, later `rope_type`).
"""

from __future__ import annotations

import typing
from typing import Any

from draftgraph.graphs.contract import RopeSpec, RopeType

from .config import Config

SUPPORTED: tuple[RopeType, ...] = typing.get_args(RopeType)
_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}
        | {"attention_factor", "mscale", "mscale_all_dim"}
    ),
}
_REQUIRED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}


def read_rope(
    config: Config, *, default_theta: float | None, max_position_embeddings: int
) -> RopeSpec:
    """The RoPE of a decoder; `default_theta` None means that the theta must be given."""
    inner = _inner(config)
    kind = _agree(config, "rope_type", inner.get("rope_type"), inner.get("type")) or "default"
    if kind not in SUPPORTED:
        raise config.fail(
            f"RoPE type {kind!r} is not supported (supported: {', '.join(SUPPORTED)})",
            "use another checkpoint",
        )
    theta = _agree(config, "rope_theta", inner.number("rope_theta"), config.number("rope_theta"))
    theta = theta or default_theta
    if theta is None:
        raise config.fail("rope_theta is missing, and this family has no usual value for it")
    if inner.number("partial_rotary_factor", 1.0) != 1.0:
        raise config.fail(
            "partial_rotary_factor is not 1, but only rotation of the whole head is supported",
            "use another checkpoint",
        )

    # transformers reads the original length at the top level too, for the types that have one.
    original = config.get("original_max_position_embeddings")
    given: dict[str, Any] = {}
    for name in _FIELDS[kind]:
        if name == "truncate":
            given[name] = inner.flag(name, True)
        elif name == "original_max_position_embeddings":
            # Without one, transformers takes the maximum length: resolved here, once.
            given[name] = _agree(config, name, inner.get(name), original) or max_position_embeddings
            if type(given[name]) is not int or given[name] < 1:
                raise config.fail(f"{name} is {given[name]!r}, but a positive integer is expected")
        else:
            given[name] = inner.number(name)
    if kind == "yarn" and given["factor"] is None:
        given["factor"] = max_position_embeddings / given["original_max_position_embeddings"]
    for name in _REQUIRED.get(kind, ()):
        if given[name] is None:
            raise config.fail(f"RoPE type {kind} needs {name}, which is missing")
    if kind == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
        raise config.fail(
            f"high_freq_factor {given['high_freq_factor']} must be greater than low_freq_factor "
            f"{given['low_freq_factor']}"
        )
    inner.refuse_unread()
    return RopeSpec(type=typing.cast(RopeType, kind), theta=theta, **given)


def _inner(config: Config) -> Config:
    """The dictionary that holds the RoPE type, empty if there is none."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    values = _agree(config, "rope_parameters / rope_scaling", new or None, old or None) or {}
    if not isinstance(values, dict):
        raise config.fail(f"rope_parameters is {values!r}, but an object is expected")
    if any(isinstance(value, dict) for value in values.values()):
        # Nested by layer type; only one kind of layer is supported, so only one entry can apply.
        if set(values) != {"full_attention"}:
            raise config.fail(
                f"rope_parameters differ by layer type ({', '.join(sorted(values))}), but only "
                "full_attention is supported",
                "use another checkpoint",
            )
        values = values["full_attention"]
    return Config(values, f"{config.where}: rope_parameters")


def _agree(config: Config, name: str, first: Any, second: Any) -> Any:
    """The value given in one of two places; two different ones are an error."""
    if first is not None and second is not None and first != second:
        raise config.fail(
            f"{name} is given twice with different values, {first!r} and {second!r}",
            "keep the one that the model was trained with",
        )
    return second if first is None else first
