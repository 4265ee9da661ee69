"""The confidence head graph.

Source: DSpark (arXiv 2607.05147) section 3.3; DeepSpec's confidence_head.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript import nn

from .contract import DraftContract
from .layers import Linear


class Confidence(nn.Module):
    """The confidence head: c_k = σ(logit_k) = P(token k accepted | all before it accepted).

    Inputs: hidden [B, γ, d] f32 after the final norm (the lm_head's input); prev_embeddings
    [B, γ, r] f32 when the head was trained with them. Output: confidence_logits [B, γ] f32.
    """

    def __init__(self, contract: DraftContract):
        super().__init__()
        r = contract.markov_rank if contract.confidence_with_markov else 0
        self.width = contract.decoder.hidden_size + r
        self.proj = Linear(self.width, 1, "fp32", bias=True)
        self.block_size = contract.block_size

    def forward(self, op: Any, hidden: ir.Value, prev_embeddings: ir.Value | None) -> ir.Value:
        x = hidden if prev_embeddings is None else op.Concat(hidden, prev_embeddings, axis=-1)
        return op.Reshape(self.proj(op, op.Reshape(x, [-1, self.width])), [-1, self.block_size])
