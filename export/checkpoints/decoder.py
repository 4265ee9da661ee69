"""The decoder stack of a configuration, and the tensors it must come with."""

from __future__ import annotations

from draftgraph.graphs.contract import DecoderSpec

from .config import Config
from .rope_config import read_rope


def read_decoder(
    config: Config,
    *,
    qk_norm: bool,
    default_theta: float | None,
    has_mlp_bias: bool,
    kv_heads_default_to_heads: bool,
) -> DecoderSpec:
    """Read the shape of the stack; the keyword arguments are what the families differ in."""
    config.refuse_changed_arithmetic()
    layers = config.integer("num_hidden_layers")
    # Llama does not know use_sliding_window, so a window there is meant; Qwen3's is off by default.
    config.refuse_windows(layers, default_on=not qk_norm)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    default_kv = heads if kv_heads_default_to_heads else None
    kv_heads = config.integer("num_key_value_heads", default=default_kv)
    if heads % kv_heads:
        raise config.fail(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if config.get("head_dim") is None and hidden % heads:
        raise config.fail(
            f"head_dim is missing and hidden_size {hidden} is not a multiple of "
            f"num_attention_heads {heads}"
        )
    head_dim = config.integer("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise config.fail(f"head_dim is {head_dim}, but RoPE needs an even one")
    mlp_bias = config.flag("mlp_bias", False)
    if mlp_bias and not has_mlp_bias:
        raise config.fail("mlp_bias is true, but this family has no biases in its MLP")
    eps = config.number("rms_norm_eps")
    if eps is None:
        raise config.fail("rms_norm_eps is missing, but a positive number is required")
    bias = config.flag("attention_bias", False)
    return DecoderSpec(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        rms_norm_eps=eps,
        rope=read_rope(
            config,
            default_theta=default_theta,
            max_position_embeddings=config.integer("max_position_embeddings"),
        ),
        qk_norm=qk_norm,
        attention_bias=bias,
        attention_out_bias=bias,  # in Llama and Qwen3 one switch covers q, k, v and o
        mlp_bias=mlp_bias,
    )


def decoder_tensors(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every layer's tensors and of the final norm (`norm.weight`)."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    projections = {  # name: (rows, columns, has a bias)
        "self_attn.q_proj": (q, hidden, spec.attention_bias),
        "self_attn.k_proj": (kv, hidden, spec.attention_bias),
        "self_attn.v_proj": (kv, hidden, spec.attention_bias),
        "self_attn.o_proj": (hidden, q, spec.attention_out_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(spec.num_layers):
        layer = f"layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
        if spec.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (spec.head_dim,)
    shapes["norm.weight"] = (hidden,)
    return shapes
