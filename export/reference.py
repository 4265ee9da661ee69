"""Numeric reference in torch eager: what the exported graphs are compared with.

Written from the formulas of the DSpark paper (arXiv 2607.05147) and independent of the graphs: no
ONNX, no key-value cache, no padding, one request at a time. Every call recomputes everything from
the full history, so the only attention mask is the causal one inside the target.

Shapes: S tokens, P committed tokens before the anchor, γ block slots, d hidden size, m tapped
layers, V vocabulary, r Markov rank, H query heads, G key-value heads, D head size, ℓ verified
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..graphs.contract import DraftContract, RopeSpec
from ..graphs.errors import DraftgraphError
from .quiet import quiet_transformers

GREEDY_BELOW = 1e-5  # a lower temperature means argmax, as in the official evaluator


class ReferenceDrafter:
    """Block drafter (DFlash backbone, Markov and confidence heads) without any cache.

    `tensors` carries the official DeepSpec names (`fc.weight`, `layers.0.self_attn.q_proj.weight`,
    `markov_head.*`, `confidence_head.*`); `embed` and `lm_head` are [V, d]. Everything runs in
    `dtype`, except RMSNorm statistics, rotary angles, softmax and the confidence head (fp32).
    draft_ids: [U] tokens that may be drafted, increasing, None for all (U = V); only they have base
    logits, and others get corrected ones of -1e30 (of the lowest number in fp16).
    """

    def __init__(
        self,
        contract: DraftContract,
        tensors: Mapping[str, Tensor],
        *,
        embed: Tensor,
        lm_head: Tensor,
        draft_ids: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (contract.vocab_size, contract.decoder.hidden_size)
        for name, tensor in (("embed", embed), ("lm_head", lm_head)):
            if tuple(tensor.shape) != shape:
                raise DraftgraphError(
                    f"{name} has shape {tuple(tensor.shape)}, the drafter needs {shape}"
                )
        self.contract = contract
        self.dtype = dtype
        self.weights = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        self.embed = embed.to(dtype)
        self.draft_ids = torch.arange(contract.vocab_size)
        self.lm_head = lm_head.to(dtype)
        if draft_ids is not None:
            self.draft_ids = draft_ids
            self.lm_head = self.lm_head[draft_ids]
            if contract.markov_type != "none":
                w2 = "markov_head.markov_w2.weight"
                self.weights[w2] = self.weights[w2][draft_ids]
        self.inv_freq, self.rope_scale = inverse_frequencies(
            contract.decoder.rope, contract.decoder.head_dim
        )

    @torch.no_grad()
    def backbone(self, features: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
        """One parallel pass over the block: hidden [γ, d] after the final norm, base logits [γ, U].

        `features` [P, m*d] are the tapped target states of positions 0..P-1; the block is the token
        `anchor` at position P followed by γ-1 masks. Every slot attends to all P context rows and
        to the whole block. Slot k predicts the token at position P + k + 1.
        """
        spec, w = self.contract.decoder, self.weights
        width = len(self.contract.tap_ids) * spec.hidden_size
        if features.ndim != 2 or features.shape[1] != width:
            raise DraftgraphError(
                f"features have shape {tuple(features.shape)}, expected [P, {width}] "
                f"({len(self.contract.tap_ids)} taps of {spec.hidden_size})"
            )
        committed, gamma = features.shape[0], self.contract.block_size
        heads, groups, size = spec.num_heads, spec.num_kv_heads, spec.head_dim

        # the anchor and the masks; the context in the drafter's space, the same for all layers
        ids = torch.tensor([anchor] + [self.contract.mask_token_id] * (gamma - 1))
        x = self.embed[ids]  # [γ, d]
        context = features.to(self.dtype) @ w["fc.weight"].T  # [P, d]
        context = rms_norm(context, w["hidden_norm.weight"], spec.rms_norm_eps)

        # context rows at their own positions, block slot k at P + k
        cos, sin = self._rope(committed + gamma)  # [P+γ, D] each

        for layer in range(spec.num_layers):
            prefix = f"layers.{layer}."

            # attention: queries from the block, keys and values from context and block alike
            y = rms_norm(x, w[prefix + "input_layernorm.weight"], spec.rms_norm_eps)
            rows = torch.cat([context, y])  # [P+γ, d]
            q = self._linear(y, prefix + "self_attn.q_proj", spec.attention_bias)
            k = self._linear(rows, prefix + "self_attn.k_proj", spec.attention_bias)
            v = self._linear(rows, prefix + "self_attn.v_proj", spec.attention_bias)
            q = q.view(gamma, heads, size)
            k = k.view(committed + gamma, groups, size)
            v = v.view(committed + gamma, groups, size)
            if spec.qk_norm:
                q = rms_norm(q, w[prefix + "self_attn.q_norm.weight"], spec.rms_norm_eps)
                k = rms_norm(k, w[prefix + "self_attn.k_norm.weight"], spec.rms_norm_eps)
            q = rotate(q, cos[committed:], sin[committed:])
            k = rotate(k, cos, sin)
            k = k.repeat_interleave(heads // groups, dim=1)  # [P+γ, H, D]
            v = v.repeat_interleave(heads // groups, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5  # [H, γ, P+γ]
            probs = scores.float().softmax(-1).to(self.dtype)
            mixed = torch.einsum("hqk,khd->qhd", probs, v).reshape(gamma, heads * size)
            x = x + self._linear(mixed, prefix + "self_attn.o_proj", spec.attention_out_bias)

            # SwiGLU
            y = rms_norm(x, w[prefix + "post_attention_layernorm.weight"], spec.rms_norm_eps)
            gate = self._linear(y, prefix + "mlp.gate_proj", spec.mlp_bias)
            up = self._linear(y, prefix + "mlp.up_proj", spec.mlp_bias)
            x = x + self._linear(F.silu(gate) * up, prefix + "mlp.down_proj", spec.mlp_bias)

        hidden = rms_norm(x, w["norm.weight"], spec.rms_norm_eps)
        return hidden, hidden @ self.lm_head.T

    @torch.no_grad()
    def markov(
        self,
        base_logits: Tensor,
        hidden: Tensor,
        anchor: int,
        *,
        temperature: float = 0.0,
        uniforms: Tensor | None = None,
        forced_ids: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sequential head: each pick shifts the logits of the next slot.

        `base_logits` [γ, U] and `hidden` [γ, d] come from `backbone`. Returns the draft ids [γ]
        (int64), the corrected logits they were picked from [γ, V], and W1[previous token] [γ, r]
        (r = 0 without a Markov head), the confidence head's second input.

        Greedy at temperature 0, else inverse-CDF sampling in float64 with one number in [0, 1) of
        `uniforms` [γ] per slot. `forced_ids` [γ] replaces every pick (teacher forcing).
        """
        kind, w = self.contract.markov_type, self.weights
        gamma, rank = base_logits.shape[0], self.contract.markov_rank
        lowest = max(-1e30, torch.finfo(base_logits.dtype).min)
        excluded = torch.full((self.contract.vocab_size,), lowest, dtype=base_logits.dtype)

        state = torch.zeros(rank, dtype=self.dtype)  # of the rnn head, zero at every block start
        previous = anchor
        picks, logits, embeddings = [], [], []
        for slot in range(gamma):
            h = hidden[slot]
            e = torch.zeros(0, dtype=self.dtype)
            bias = torch.zeros_like(base_logits[slot])
            if kind != "none":
                e = w["markov_head.markov_w1.weight"][previous]  # [r]
            if kind == "vanilla":
                bias = w["markov_head.markov_w2.weight"] @ e
            elif kind == "gated":
                gate = self._linear(torch.cat([h, e]), "markov_head.gate_proj", True)  # [r]
                bias = w["markov_head.markov_w2.weight"] @ (gate.sigmoid() * e)
            elif kind == "rnn":
                joint = self._linear(torch.cat([state, e, h]), "markov_head.joint_proj", True)
                gate, candidate, out = joint.chunk(3)  # [r] each
                keep = gate.sigmoid()
                state = keep * state + (1 - keep) * candidate.tanh()
                bias = w["markov_head.markov_w2.weight"] @ out.tanh()

            corrected = base_logits[slot] + bias
            if forced_ids is not None:
                previous = int(forced_ids[slot])
            elif temperature < GREEDY_BELOW:
                previous = int(self.draft_ids[corrected.argmax()])
            elif uniforms is None:
                raise DraftgraphError("sampling needs one uniform number per block slot")
            else:
                probs = (corrected.double() / temperature).softmax(-1)
                choice = inverse_cdf(probs.numpy(), float(uniforms[slot]))
                previous = int(self.draft_ids[choice])
            picks.append(previous)
            logits.append(excluded.index_copy(0, self.draft_ids, corrected))
            embeddings.append(e)
        return torch.tensor(picks), torch.stack(logits), torch.stack(embeddings)

    @torch.no_grad()
    def confidence(self, hidden: Tensor, prev_embeddings: Tensor) -> Tensor | None:
        """Acceptance logits [γ] in fp32 (before the sigmoid); None without a confidence head.

        Slot k reads its own post-norm hidden state and, with `confidence_with_markov`, the Markov
        embedding of the token before it (the anchor for slot 0).
        """
        if not self.contract.has_confidence:
            return None
        inputs = [hidden, prev_embeddings] if self.contract.confidence_with_markov else [hidden]
        weight = self.weights["confidence_head.proj.weight"].float()  # [1, d (+ r)]
        bias = self.weights["confidence_head.proj.bias"].float()  # [1]
        return (torch.cat(inputs, dim=-1).float() @ weight.T + bias).squeeze(-1)

    def _linear(self, x: Tensor, name: str, bias: bool) -> Tensor:
        y = x @ self.weights[name + ".weight"].T
        return y + self.weights[name + ".bias"] if bias else y

    def _rope(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [length, D] of positions 0..length-1, the halves repeated."""
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self.inv_freq  # [length, D/2]
        angles = torch.cat([angles, angles], dim=-1)
        return (
            (angles.cos() * self.rope_scale).to(self.dtype),
            (angles.sin() * self.rope_scale).to(self.dtype),
        )


class ReferenceTarget:
    """A causal LM run by transformers that also returns the features a drafter taps.

    `source` is a model directory or one `.gguf` file (dequantised); nothing is downloaded.
    Tap id i is the residual stream after layer i, -1 the embedding output. The last layer cannot
    be tapped: transformers reports it after the final norm.
    """

    def __init__(
        self, source: Path, tap_ids: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> None:
        source = Path(source)
        if not source.exists():
            raise DraftgraphError(f"{source}: no such model directory or .gguf file")
        if source.suffix == ".gguf":
            location, gguf_file = source.parent, source.name
        else:
            location, gguf_file = source, None
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(location),
                gguf_file=gguf_file,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                output_loading_info=True,
            )
        self.model, loading = loaded
        if loading["missing_keys"]:
            raise DraftgraphError(
                f"{source}: tensors {sorted(loading['missing_keys'])} are missing; transformers "
                "would run with random values in their place"
            )
        self.model.eval()
        self.tap_ids = tuple(tap_ids)
        last = self.model.config.num_hidden_layers - 1
        for tap in self.tap_ids:
            if not -1 <= tap < last:
                raise DraftgraphError(
                    f"tap id {tap} is not allowed, {source} offers -1 (embedding) to {last - 1}"
                )

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [S, V] and features [S, m*d] (in the order of the tap ids) of the tokens [S]."""
        output = self.model(ids[None].long(), output_hidden_states=True, use_cache=False)
        features = torch.cat([output.hidden_states[tap + 1][0] for tap in self.tap_ids], dim=-1)
        return output.logits[0], features


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis; the statistics in fp32, the weight multiplied in x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of x [rows, heads, D] with tables [rows, D]: i is paired with i + D/2."""
    low, high = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] in fp32 and the factor on cosines and sines.

    Scaled types are computed by transformers itself, from a configuration with the same keys.
    """
    if rope.type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / rope.theta**exponents, 1.0
    needs = {
        "linear": {"factor"},
        "llama3": {
            "factor",
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
        },
        "yarn": {"factor", "original_max_position_embeddings"},
    }[rope.type]
    names = ["factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"]
    names += ["beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"]
    given = {name: value for name in names if (value := getattr(rope, name)) is not None}
    if missing := sorted(needs - set(given)):
        raise DraftgraphError(f"rope type {rope.type} needs {missing}")
    parameters = {"rope_type": rope.type, "rope_theta": rope.theta, **given}
    if rope.type == "yarn":
        parameters["truncate"] = rope.truncate
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=parameters
    )
    inv_freq, scale = ROPE_INIT_FUNCTIONS[rope.type](config)
    return inv_freq.float(), float(scale)


def inverse_cdf(weights: NDArray[np.float64], uniform: float) -> int:
    """Smallest i with cumsum(weights)[i] > uniform * sum(weights), for uniform in [0, 1)."""
    if not 0.0 <= uniform < 1.0:
        raise DraftgraphError(f"a uniform number must be in [0, 1), found {uniform}")
    cumulative = np.cumsum(weights)
    if not (np.isfinite(cumulative[-1]) and cumulative[-1] > 0):
        raise DraftgraphError(f"cannot sample from weights with the sum {cumulative[-1]}")
    return int(np.argmax(cumulative > uniform * cumulative[-1]))


def one_hot(ids: ArrayLike, vocab: int) -> NDArray[np.float64]:
    """Rows [..., V] with a single 1 each, for ids [...]."""
    index = np.asarray(ids)[..., None]
    rows = np.zeros((*index.shape[:-1], vocab))
    np.put_along_axis(rows, index, 1.0, axis=-1)
    return rows


def processed_probs(
    logits: Tensor | ArrayLike, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> NDArray[np.float64]:
    """Sampling distribution of logits [..., V]: temperature, then top-k, then top-p; float64.

    Top-k (0: off) keeps every token tied with the k-th largest. Top-p (1: off) works on the
    renormalised result and keeps the smallest set of largest probabilities whose sum reaches
    `top_p`, together with every token tied with the last one kept. Below a temperature of 1e-5 the
    result is one-hot at the first largest logit.
    """
    if isinstance(logits, Tensor):
        logits = logits.detach().double().numpy()
    rows = np.asarray(logits, dtype=np.float64)
    best = rows.max(-1, keepdims=True)
    if not np.isfinite(best).all():  # NaN anywhere, +inf, or nothing but -inf
        raise DraftgraphError("logits are not finite; no distribution can be drawn from them")
    vocab = rows.shape[-1]

    if temperature < GREEDY_BELOW:
        return one_hot(rows.argmax(-1), vocab)
    probs = np.exp((rows - best) / temperature)

    if 0 < top_k < vocab:
        kth = np.sort(rows, -1)[..., vocab - top_k, None]
        probs = np.where(rows >= kth, probs, 0.0)
    probs = probs / probs.sum(-1, keepdims=True)

    if top_p < 1.0:
        ordered = np.sort(probs, -1)[..., ::-1]
        reached = np.cumsum(ordered, -1) >= top_p
        reached[..., -1] = True  # rounding may leave the whole sum below top_p
        last = np.take_along_axis(ordered, reached.argmax(-1)[..., None], -1)
        probs = np.where(probs >= last, probs, 0.0)
        probs = probs / probs.sum(-1, keepdims=True)
    return probs


def verify_reference(
    target_probs: NDArray[np.float64],
    draft_ids: Sequence[int] | NDArray[np.int64],
    draft_probs: NDArray[np.float64],
    accept_uniforms: Sequence[float] | NDArray[np.float64],
    sample_uniform: float,
) -> tuple[int, int]:
    """Exact rejection sampling of a chain: (number of accepted drafts, the token after them).

    `target_probs` [ℓ+1, V] and `draft_probs` [ℓ, V] are the distributions p and q the tokens are
    drawn from (one-hot when greedy), `accept_uniforms` [ℓ] and `sample_uniform` lie in [0, 1).
    Draft x is accepted iff u q(x) < p(x). The first rejection draws from max(p - q, 0), or from p
    should nothing be left of it; after ℓ acceptances the next token is drawn from the last p.
    """
    for slot, draft in enumerate(draft_ids):
        p = np.asarray(target_probs[slot], dtype=np.float64)
        q = np.asarray(draft_probs[slot], dtype=np.float64)
        if accept_uniforms[slot] * q[draft] < p[draft]:
            continue
        residual = np.maximum(p - q, 0.0)
        return slot, inverse_cdf(residual if residual.sum() > 0 else p, sample_uniform)
    bonus = np.asarray(target_probs[len(draft_ids)], dtype=np.float64)
    return len(draft_ids), inverse_cdf(bonus, sample_uniform)
