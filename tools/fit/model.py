"""The DSpark drafter with gradients: many anchors of a few sequences in one pass.

The arithmetic is that of `graphs/backbone.py`, `graphs/markov.py` and `graphs/confidence.py`; the
sources are the same (DSpark, arXiv 2607.05147). What differs is the shape: the linear layers run
once over all blocks of all sequences, and the context of a sequence is projected once for all of
its anchors.

Shapes: B sequences, P_i context rows and A_i anchors of sequence i, N = Σ A_i blocks, γ slots, d
hidden size, m tapped layers, r Markov rank, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...export.reference import inverse_frequencies
from ...graphs.contract import DraftContract
from .loss import PIECE_VALUES


@dataclass(frozen=True)
class Context:
    """What the drafter may see of one sequence, and where it drafts.

    features [P, m·d]: tapped target states of positions 0 .. P-1 (any float dtype); anchors [A]
    i64: positions, each at most P. A block at anchor a attends to the rows before a only: the
    features of the anchor itself are not known when the runtime drafts. text [> P] i64: the tokens,
    for drafters that also read them (`relatives.py`).
    """

    features: Tensor
    anchors: Tensor
    text: Tensor | None = None


@dataclass(frozen=True)
class BlockOutputs:
    """hidden [N, γ, d] after the final norm; low_rank [N, γ, r], what W2 multiplies (r = 0 without
    a Markov head); what the confidence head reads [N, γ, f] and its logits [N, γ], None without
    the head."""

    hidden: Tensor
    low_rank: Tensor
    confidence_inputs: Tensor | None = None
    confidence: Tensor | None = None


class Drafter:
    """Trainable weights under DeepSpec names, and the forward pass over blocks.

    `embed` [V, d] and the target's head are frozen and not among the weights. Norm statistics,
    rotary angles and softmax are float32 or wider whatever autocast does.
    """

    def __init__(
        self, contract: DraftContract, weights: Mapping[str, Tensor], embed: Tensor
    ) -> None:
        self.contract = contract
        self.weights = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
        self.embed = embed
        spec = contract.decoder
        self._inv_freq, self._rope_scale = inverse_frequencies(spec.rope, spec.head_dim)

    @property
    def trained_slots(self) -> int:
        """Slots that training looks at, the first ones."""
        return self.contract.block_size

    def parameters(self) -> Iterator[Tensor]:
        yield from self.weights.values()

    def blocks(self, contexts: list[Context], tokens: Tensor) -> BlockOutputs:
        """Draft every block with teacher forcing.

        tokens [N, γ] i64: the token before each slot, that is the anchor's, then the γ-1 tokens
        after it (any valid id where the sequence has ended; the caller ignores those slots). With
        fewer columns the blocks are as much shorter.
        """
        hidden = self.backbone(contexts, tokens[:, 0], tokens.shape[1])
        low_rank, embeddings = self.markov(hidden, tokens)
        return BlockOutputs(hidden, low_rank, *self.confidence(hidden, embeddings))

    def drafting(
        self, contexts: list[Context], anchor_ids: Tensor
    ) -> Callable[[Tensor], BlockOutputs]:
        """The first slots of the same anchors' blocks, as many as there are columns of tokens, for
        one choice of tokens after the other; what does not depend on them is computed once."""
        hidden = self.backbone(contexts, anchor_ids, self.contract.block_size)

        def slots(tokens: Tensor) -> BlockOutputs:
            first = hidden[:, : tokens.shape[1]]
            return BlockOutputs(first, self.markov(first, tokens)[0])

        return slots

    def backbone(self, contexts: list[Context], anchor_ids: Tensor, gamma: int) -> Tensor:
        """One parallel pass over all blocks [anchor, mask × (γ-1)] -> hidden [N, γ, d]."""
        c, spec = self.contract, self.contract.decoder
        count = len(anchor_ids)
        ids = torch.full((count, gamma), c.mask_token_id)
        ids[:, 0] = anchor_ids
        x = self.embed[ids.flatten()]  # [N·γ, d]
        features = torch.cat([part.features for part in contexts]).to(x.dtype)
        context = self._norm(self._linear(features, "fc"), "hidden_norm")
        rows = [len(part.features) for part in contexts]
        blocks = [len(part.anchors) for part in contexts]
        row_positions = torch.cat([torch.arange(n) for n in rows])
        slot_positions = torch.cat(
            [(part.anchors[:, None] + torch.arange(gamma)).flatten() for part in contexts]
        )
        tables = self._rope(row_positions, x.dtype), self._rope(slot_positions, x.dtype)
        visible = [context_mask(part.anchors, n) for part, n in zip(contexts, rows, strict=True)]
        for layer in range(spec.num_layers):
            prefix = f"layers.{layer}."
            y = self._norm(x, prefix + "input_layernorm")
            q = self._heads(y, prefix, "q", spec.num_heads, tables[1])
            keys = [
                self._heads(part, prefix, "k", spec.num_kv_heads, table)
                for part, table in ((context, tables[0]), (y, tables[1]))
            ]
            values = [self._heads(part, prefix, "v", spec.num_kv_heads) for part in (context, y)]
            near = [part.split([n * gamma for n in blocks]) for part in (q, keys[1], values[1])]
            far = [part.split(rows) for part in (keys[0], values[0])]
            mixed = torch.cat([attend(*parts) for parts in zip(*near, *far, visible, strict=True)])
            x = x + self._linear(mixed, prefix + "self_attn.o_proj")
            x = x + self._mlp(self._norm(x, prefix + "post_attention_layernorm"), prefix)
        return self._norm(x, "norm").view(count, gamma, -1)

    def markov(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What W2 multiplies and W1[previous token], both [N, γ, r]."""
        kind, w = self.contract.markov_type, self.weights
        if kind == "none":
            empty = hidden.new_zeros((*tokens.shape, 0))
            return empty, empty
        e = F.embedding(tokens, w["markov_head.markov_w1.weight"])
        if kind == "vanilla":
            return e, e
        if kind == "gated":
            gate = self._linear(torch.cat([hidden, e], -1), "markov_head.gate_proj")
            return gate.sigmoid() * e, e
        state = torch.zeros_like(e[:, 0])
        outputs = []
        for slot in range(tokens.shape[1]):
            joint = torch.cat([state, e[:, slot], hidden[:, slot]], -1)
            gate, candidate, out = self._linear(joint, "markov_head.joint_proj").chunk(3, -1)
            keep = gate.sigmoid()
            state = keep * state + (1 - keep) * candidate.tanh()
            outputs.append(out.tanh())
        return torch.stack(outputs, 1), e

    def confidence(
        self, hidden: Tensor, embeddings: Tensor
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Inputs and logits [N, γ] of P(slot accepted | all before it accepted)."""
        if not self.contract.has_confidence:
            return None, None
        x = torch.cat([hidden, embeddings], -1) if self.contract.confidence_with_markov else hidden
        return x, self._linear(x, "confidence_head.proj").squeeze(-1)

    @torch.no_grad()
    def picks(self, hidden: Tensor, low_rank: Tensor, head: Tensor) -> Tensor:
        """[n] the most probable token of slots: hidden [n, d], low_rank [n, r], head [V, d]."""
        w2 = self.weights.get("markov_head.markov_w2.weight")
        rows = max(1, PIECE_VALUES // len(head))
        ids = []
        for h, low in zip(hidden.split(rows), low_rank.split(rows), strict=True):
            logits = h @ head.T
            if w2 is not None:
                logits += low @ w2.T
            ids.append(logits.argmax(-1))
        return torch.cat(ids)

    def _heads(
        self,
        x: Tensor,
        prefix: str,
        kind: str,
        heads: int,
        table: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """[rows, heads, D]: projected, normalised and rotated where there is a table."""
        spec = self.contract.decoder
        y = self._linear(x, f"{prefix}self_attn.{kind}_proj").view(len(x), heads, spec.head_dim)
        if table is None:
            return y
        y = self._norm(y, f"{prefix}self_attn.{kind}_norm")
        low, high = y.chunk(2, -1)
        return y * table[0][:, None] + torch.cat([-high, low], -1) * table[1][:, None]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[name + ".weight"], self.contract.decoder.rms_norm_eps)

    def _mlp(self, x: Tensor, prefix: str) -> Tensor:
        gate, up = (self._linear(x, f"{prefix}mlp.{kind}_proj") for kind in ("gate", "up"))
        return self._linear(F.silu(gate) * up, prefix + "mlp.down_proj")

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].to(torch.float32) * self._inv_freq
        angles = torch.cat([angles, angles], -1)
        return (
            (angles.cos() * self._rope_scale).to(dtype),
            (angles.sin() * self._rope_scale).to(dtype),
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, the statistics in float32 at least."""
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def context_mask(anchors: Tensor, rows: int) -> Tensor:
    """[A, rows] bool: may a block at each anchor see each context row? Strictly before it."""
    return torch.arange(rows) < anchors[:, None]


def attend(
    q: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    visible: Tensor,
) -> Tensor:
    """Attention of the blocks of one sequence -> [A·γ, H·D].

    q [A·γ, H, D]; block k, v [A·n, G, D], n = γ here; context k, v [P, G, D]; visible [A, P] of
    `context_mask`. A slot sees the visible context and all rows of its own block, in both
    directions. The context part is one product per key-value head over all blocks, which keeps it
    large.
    """
    total, heads, size = q.shape
    groups, rows, blocks = context_k.shape[1], len(context_k), len(visible)
    share, gamma, near_rows = heads // groups, total // blocks, len(block_k) // blocks
    # [G, H/G, A, γ, D]
    q = q.view(blocks, gamma, groups, share, size).permute(2, 3, 0, 1, 4) * size**-0.5
    flat = q.reshape(groups, share * total, size)
    far = flat @ context_k.permute(1, 2, 0)  # [G, H/G·A·γ, P]
    far = far.view(groups, share, blocks, gamma, rows)
    far = far.masked_fill(~visible[:, None], float("-inf"))
    near_k, near_v = (
        x.view(blocks, near_rows, groups, size).permute(2, 0, 1, 3)[:, None]
        for x in (block_k, block_v)
    )  # [G, 1, A, n, D]
    near = q @ near_k.transpose(-1, -2)  # [G, H/G, A, γ, n]
    weights = torch.cat([far, near], -1).softmax(-1).to(q.dtype)
    far, near = weights.split([rows, near_rows], -1)
    mixed = far.reshape(groups, share * total, rows) @ context_v.permute(1, 0, 2)
    mixed = mixed.view(groups, share, blocks, gamma, size) + near @ near_v
    return mixed.permute(2, 3, 0, 1, 4).reshape(total, heads * size)
