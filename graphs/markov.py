"""The Markov head graph: picks the γ tokens of a block from left to right.

Source: DSpark (arXiv 2607.05147) section 3.2; variants as in DeepSpec's markov_head. Step k adds a
low-rank bias that depends on the previous pick, B_k = W1[x_{k-1}] · W2, to the base logits U_k.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript import nn

from .contract import DraftContract, DType
from .layers import EXCLUDED, I64, IR_DTYPE, Linear, cast
from .sampling import float_constant, pick


class Markov(nn.Module):
    """The sequential head, unrolled over the γ slots, token choice included.

    Inputs: base_logits [B, γ, U] f32; hidden [B, γ, d] f32 (gated and rnn only); anchor [B] i64;
    uniforms [B, γ] f32 in [0, 1); temperature [B] f32, 0 for greedy drafting.
    Outputs: draft_ids [B, γ] i64; draft_logits [B, γ, V] f32, the logits that were drawn from
    (before the temperature); prev_embeddings [B, γ, r] f32, W1 of the token before each slot (only
    with a Markov head).

    The `greedy` form has neither uniforms nor temperature and returns no draft_logits: a third of
    the nodes, for requests that are greedy on both sides.

    With `top_k` the head looks only at the k largest base logits of each slot; every other token
    gets a logit of -1e30. Acceptance uses the same truncated q, so verification stays exact. With a
    draft vocabulary the parameter draft_ids [U] i64 holds its tokens, increasing; W2 has a row for
    each of them, and every other token gets -1e30 likewise (as FR-Spec, arXiv 2502.14856, and the
    draft vocabularies of EAGLE-3).
    """

    def __init__(self, contract: DraftContract, dtype: DType, top_k: int | None, greedy: bool):
        super().__init__()
        r, d = contract.markov_rank, contract.decoder.hidden_size
        if contract.markov_type != "none":
            self.markov_w1 = Weight([contract.vocab_size, r], dtype)
            self.markov_w2 = Weight([contract.head_size, r], dtype)
        restricted = contract.draft_vocab_size is not None
        self.draft_ids = nn.Parameter([contract.head_size], I64) if restricted else None
        # The small projections stay in float32: they see hidden states and feed sigmoids.
        if contract.markov_type == "gated":
            self.gate_proj = Linear(d + r, r, "fp32", bias=True)
        if contract.markov_type == "rnn":
            self.joint_proj = Linear(2 * r + d, 3 * r, "fp32", bias=True)
        self.contract = contract
        self.dtype = dtype
        self.top_k = top_k
        self.greedy = greedy

    def forward(
        self,
        op: Any,
        base_logits: ir.Value,
        hidden: ir.Value | None,
        anchor: ir.Value,
        uniforms: ir.Value | None = None,
        temperature: ir.Value | None = None,
    ) -> list[ir.Value]:
        c = self.contract
        size = self.top_k or c.head_size
        candidates = None
        logits = base_logits
        if self.top_k:
            k = op.Constant(value_ints=[self.top_k])
            logits, candidates = op.TopK(base_logits, k, axis=-1, _outputs=2)
        slots = [op.Gather(logits, op.Constant(value_int=k), axis=1) for k in range(c.block_size)]
        previous = anchor
        state: ir.Value | None = None
        ids, drawn_from, embeddings = [], [], []
        for k, base in enumerate(slots):
            index = op.Constant(value_int=k)
            slot_ids = None if candidates is None else op.Gather(candidates, index, axis=1)
            if c.markov_type != "none":
                h = None if hidden is None else op.Gather(hidden, index, axis=1)
                e = cast(op, op.Gather(self.markov_w1(op), previous, axis=0), self.dtype, "fp32")
                low_rank, state = self._transform(op, e, h, state)
                base = op.Add(base, self._bias(op, low_rank, slot_ids))
                embeddings.append(op.Unsqueeze(e, [1]))
            if uniforms is None or temperature is None:  # the greedy form
                choice = op.ArgMax(base, axis=1, keepdims=0)
            else:
                choice = pick(op, base, temperature, op.Gather(uniforms, index, axis=1), size)
            if slot_ids is not None:
                chosen = op.GatherElements(slot_ids, op.Unsqueeze(choice, [1]), axis=1)
                choice = op.Squeeze(chosen, [1])
            if self.draft_ids is not None:
                choice = op.Gather(self.draft_ids, choice)
            previous = choice
            ids.append(op.Unsqueeze(choice, [1]))
            drawn_from.append(op.Unsqueeze(base, [1]))
        results = [op.Concat(*ids, axis=1)]
        if not self.greedy:
            results.append(self._over_all(op, op.Concat(*drawn_from, axis=1), candidates))
        if embeddings:
            results.append(op.Concat(*embeddings, axis=1))
        return results

    def _over_all(self, op: Any, logits: ir.Value, candidates: ir.Value | None) -> ir.Value:
        """[B, γ, n] logits of the candidates, or of all that may be drafted -> [B, γ, V]."""
        tokens = candidates
        if self.draft_ids is not None:
            tokens = (
                op.Expand(op.Unsqueeze(self.draft_ids, [0, 1]), op.Shape(logits))
                if candidates is None
                else op.Gather(self.draft_ids, candidates)
            )
        if tokens is None:
            return logits
        size = op.Constant(value_ints=[self.contract.vocab_size])
        everywhere = op.Concat(op.Shape(logits, start=0, end=2), size, axis=0)
        excluded = op.Expand(float_constant(op, EXCLUDED), everywhere)
        return op.ScatterElements(excluded, tokens, logits, axis=-1)

    def _transform(
        self, op: Any, e: ir.Value, h: ir.Value | None, state: ir.Value | None
    ) -> tuple[ir.Value, ir.Value | None]:
        """What W2 multiplies, [B, r], and the recurrent state after this slot (rnn only)."""
        kind, r = self.contract.markov_type, self.contract.markov_rank
        if kind == "gated":
            gate = op.Sigmoid(self.gate_proj(op, op.Concat(h, e, axis=1)))
            return op.Mul(gate, e), None
        if kind == "rnn":
            if state is None:  # zero at the start of every block
                state = op.Mul(e, float_constant(op, 0.0))
            z = self.joint_proj(op, op.Concat(state, e, h, axis=1))
            gate, new, out = op.Split(z, [r, r, r], axis=1, _outputs=3)
            gate = op.Sigmoid(gate)
            keep = op.Mul(gate, state)
            fresh = op.Mul(op.Sub(float_constant(op, 1.0), gate), op.Tanh(new))
            return op.Tanh(out), op.Add(keep, fresh)
        return e, None

    def _bias(self, op: Any, low_rank: ir.Value, slot_ids: ir.Value | None) -> ir.Value:
        """W2 · low_rank over all that may be drafted [B, U], or over the candidates [B, k]."""
        x = cast(op, low_rank, "fp32", self.dtype)
        w2 = self.markov_w2(op)
        if slot_ids is None:
            return cast(op, op.Gemm(x, w2, transB=1), self.dtype, "fp32")
        rows = op.Gather(w2, slot_ids, axis=0)  # [B, k, r]
        return cast(op, op.Squeeze(op.MatMul(rows, op.Unsqueeze(x, [2])), [2]), self.dtype, "fp32")


class Weight(nn.Module):
    """A bare matrix, so that its checkpoint name ends in `.weight`."""

    def __init__(self, shape: list[int], dtype: DType):
        super().__init__()
        self.weight = nn.Parameter(shape, IR_DTYPE[dtype])

    def forward(self, op: Any) -> ir.Value:
        return self.weight
