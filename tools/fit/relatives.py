"""Other drafter families, small, for a comparison on the same data, objective and budget.

All read the same tapped features and share the target's embedding and head; each drafts γ tokens.

- EAGLE-3 (arXiv 2503.01840): one layer, autoregressive. Row t pairs the feature of position t with
  the embedding of token t+1; later steps put the layer's own output in place of the feature, and
  training unrolls them (training-time test).
- MTP of depth 1 (DeepSeek-V3, arXiv 2412.19437, section 2.2): one layer over a projection of the
  two, trained for the next step only and reused for the later ones with its normed output. Its
  published form reads the target's last hidden state; here, like the others, the taps.
- Medusa (arXiv 2401.10774): head k is one residual block over the state of the last position and
  predicts the token k places after the anchor, which it does not see. The heads share the target's
  output matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...graphs.contract import DraftContract
from .data import Dataset
from .drafter import INIT_STD
from .model import BlockOutputs, Context, Drafter, attend, context_mask

Family = Literal["eagle3", "mtp", "medusa"]


class Relative(Drafter):
    """A drafter without Markov and confidence heads whose blocks are made otherwise.

    contract: gives γ, taps, width, heads and MLP; its layer count and mask do not matter here.
    """

    def __init__(
        self, contract: DraftContract, weights: Mapping[str, Tensor], embed: Tensor
    ) -> None:
        plain = replace(contract, markov_type="none", markov_rank=0, has_confidence=False)
        plain = replace(plain, confidence_with_markov=False)
        super().__init__(plain, weights, embed)

    def blocks(self, contexts: list[Context], tokens: Tensor) -> BlockOutputs:
        hidden = self.hidden(contexts, tokens)
        return BlockOutputs(hidden, hidden[..., :0])

    def drafting(
        self, contexts: list[Context], anchor_ids: Tensor
    ) -> Callable[[Tensor], BlockOutputs]:
        return lambda tokens: self.blocks(contexts, tokens)

    def hidden(self, contexts: list[Context], tokens: Tensor) -> Tensor:
        """[N, slots, d] after the final norm, for tokens [N, slots] before each slot."""
        raise NotImplementedError


class Chain(Relative):
    """One autoregressive layer: the common part of EAGLE-3 and MTP.

    Keys and values of the rows before an anchor follow from their inputs alone, so only the blocks
    go through the layer.
    """

    def inputs(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What enters the attention [·, width] and the residual stream [·, d]."""
        raise NotImplementedError

    def feedback(self, x: Tensor, normed: Tensor) -> Tensor:
        """The state that the next step reads instead of a feature."""
        raise NotImplementedError

    def hidden(self, contexts: list[Context], tokens: Tensor) -> Tensor:
        spec, prefix = self.contract.decoder, "layers.0."
        size = (spec.num_kv_heads, spec.head_dim)
        states = self._linear(torch.cat([c.features for c in contexts]).to(self.embed.dtype), "fc")
        rows = [len(c.features) for c in contexts]
        blocks = [len(c.anchors) for c in contexts]
        following = torch.cat(
            [c.text[1 : n + 1] for c, n in zip(contexts, rows, strict=True) if c.text is not None]
        )
        entering, residual = self.inputs(states, following)
        table = self._rope(torch.cat([torch.arange(n) for n in rows]), states.dtype)
        far_k = self._heads(entering, prefix, "k", spec.num_kv_heads, table).split(rows)
        far_v = self._heads(entering, prefix, "v", spec.num_kv_heads).split(rows)
        visible = [context_mask(c.anchors, n) for c, n in zip(contexts, rows, strict=True)]

        # The first step is the row before the anchor, which the context holds already.
        starts = np.cumsum([0, *rows[:-1]])
        last = torch.cat([c.anchors - 1 + int(s) for c, s in zip(contexts, starts, strict=True)])
        entering, residual = entering[last], residual[last]
        positions = torch.cat([c.anchors for c in contexts]) - 1
        near_k, near_v = (states.new_zeros(len(last), 0, *size) for _ in range(2))
        outputs = []
        for step in range(tokens.shape[1]):
            table = self._rope(positions + step, states.dtype)
            q = self._heads(entering, prefix, "q", spec.num_heads, table)
            if step:
                k = self._heads(entering, prefix, "k", spec.num_kv_heads, table)
                v = self._heads(entering, prefix, "v", spec.num_kv_heads)
                near_k, near_v = (
                    torch.cat([near_k, k[:, None]], 1),
                    torch.cat([near_v, v[:, None]], 1),
                )
            near = [x.flatten(0, 1).split([step * n for n in blocks]) for x in (near_k, near_v)]
            parts = zip(q.split(blocks), *near, far_k, far_v, visible, strict=True)
            x = residual + self._linear(
                torch.cat([attend(*p) for p in parts]), prefix + "self_attn.o_proj"
            )
            x = x + self._mlp(self._norm(x, prefix + "post_attention_layernorm"), prefix)
            normed = self._norm(x, "norm")
            outputs.append(normed)
            if step + 1 < tokens.shape[1]:
                entering, residual = self.inputs(self.feedback(x, normed), tokens[:, step + 1])
        return torch.stack(outputs, 1)


class Eagle3(Chain):
    """Attention over [embedding, state], each normed; the raw output is fed back."""

    def inputs(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        e = self._norm(F.embedding(tokens, self.embed), "layers.0.input_layernorm")
        return torch.cat([e, self._norm(states, "layers.0.hidden_norm")], -1), states

    def feedback(self, x: Tensor, normed: Tensor) -> Tensor:
        return x


class Mtp(Chain):
    """A projection of [embedding, state], each normed, enters an ordinary layer; the normed output
    is fed back, which training never does."""

    @property
    def trained_slots(self) -> int:
        return 1

    def inputs(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        e = self._norm(F.embedding(tokens, self.embed), "enorm")
        z = self._linear(torch.cat([e, self._norm(states, "hnorm")], -1), "eh_proj")
        return self._norm(z, "layers.0.input_layernorm"), z

    def feedback(self, x: Tensor, normed: Tensor) -> Tensor:
        return normed


class Medusa(Relative):
    """y_k = h + silu(W_k h + b_k), h the normed state of the last position."""

    def hidden(self, contexts: list[Context], tokens: Tensor) -> Tensor:
        last = torch.cat([c.features[c.anchors - 1] for c in contexts]).to(self.embed.dtype)
        h = self._norm(self._linear(last, "fc"), "norm")
        heads = [h + F.silu(self._linear(h, f"heads.{k}")) for k in range(tokens.shape[1])]
        return torch.stack(heads, 1)


FAMILIES: dict[Family, type[Relative]] = {"eagle3": Eagle3, "mtp": Mtp, "medusa": Medusa}


def new_relative(
    family: Family, contract: DraftContract, norm: Tensor, embed: Tensor, seed: int
) -> Relative:
    """A relative of the drafter of this contract, untrained; norm: the final one of the target."""
    spec = contract.decoder
    d, q, kv = (
        spec.hidden_size,
        spec.num_heads * spec.head_dim,
        spec.num_kv_heads * spec.head_dim,
    )
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (d, len(contract.tap_ids) * d),
        "norm.weight": (d,),
    }
    if family == "medusa":
        for k in range(contract.block_size):
            shapes |= {f"heads.{k}.weight": (d, d), f"heads.{k}.bias": (d,)}
    else:
        layer, width = "layers.0.", 2 * d if family == "eagle3" else d
        if family == "mtp":
            shapes |= {"enorm.weight": (d,), "hnorm.weight": (d,), "eh_proj.weight": (d, 2 * d)}
        else:
            shapes[layer + "hidden_norm.weight"] = (d,)
        shapes |= {
            layer + "input_layernorm.weight": (d,),
            layer + "post_attention_layernorm.weight": (d,),
            layer + "self_attn.q_proj.weight": (q, width),
            layer + "self_attn.k_proj.weight": (kv, width),
            layer + "self_attn.v_proj.weight": (kv, width),
            layer + "self_attn.o_proj.weight": (d, q),
            layer + "self_attn.q_norm.weight": (spec.head_dim,),
            layer + "self_attn.k_norm.weight": (spec.head_dim,),
            layer + "mlp.gate_proj.weight": (spec.intermediate_size, d),
            layer + "mlp.up_proj.weight": (spec.intermediate_size, d),
            layer + "mlp.down_proj.weight": (d, spec.intermediate_size),
        }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 2:
            weights[name] = torch.randn(shape, generator=generator) * INIT_STD
        else:
            weights[name] = torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
    weights["norm.weight"] = norm
    return FAMILIES[family](contract, weights, embed)


# Measuring


@torch.no_grad()
def greedy_blocks(
    drafter: Drafter, head: Tensor, contexts: list[Context], anchors: Tensor
) -> Tensor:
    """Blocks as the runtime drafts them at temperature 0: [N, γ] ids, every pick the next input."""
    tokens = anchors[:, None]
    outputs = drafter.drafting(contexts, anchors)
    for slot in range(drafter.contract.block_size):
        out = outputs(tokens)
        pick = drafter.picks(out.hidden[:, slot], out.low_rank[:, slot], head)
        tokens = torch.cat([tokens, pick[:, None]], 1)
    return tokens[:, 1:]


@dataclass(frozen=True)
class Replay:
    """τ and survival ([γ] share of rounds that accept at least k tokens) of decoded texts."""

    texts: int
    tau: float
    survival: list[float]


def replay(
    drafter: Drafter,
    head: Tensor,
    data: Dataset,
    limit: int | None = 16,
    source: str | None = None,
) -> Replay:
    """Greedy speculative decoding of held-out texts sampled at temperature 0, of one source or all.

    Such a text is what the target says whatever is drafted, so the loop needs no target: a drafted
    token is accepted when it is the text's. Rounds whose block reaches past the end do not count.
    """
    gamma = drafter.contract.block_size
    texts = [
        i
        for i in data.split(held_out=True)
        if data.record(i).temperature == 0
        and source in (None, data.record(i).source)
        and data.record(i).length - data.record(i).prompt_length > gamma + 1
    ][:limit]
    accepted: list[int] = []
    for index in texts:
        text, first = data.tokens(index), data.record(index).prompt_length
        # What is drafted at a position does not depend on how the loop got there.
        anchors = torch.arange(first, len(text) - gamma)
        context = Context(data.features(index, int(anchors[-1])), anchors, text)
        drafts = greedy_blocks(drafter, head, [context], text[anchors])
        same = drafts == text[anchors[:, None] + torch.arange(1, gamma + 1)]
        counts = same.int().cumprod(1).sum(1).tolist()
        at = 0
        while at < len(counts):
            accepted.append(counts[at])
            at += counts[at] + 1
    if not accepted:
        return Replay(0, float("nan"), [])
    survival = [sum(a >= k for a in accepted) / len(accepted) for k in range(1, gamma + 1)]
    return Replay(len(texts), 1 + sum(accepted) / len(accepted), survival)
