"""The training objective, with the vocabulary-sized part computed and differentiated in pieces.

For every drafted slot with draft distribution q = softmax(z), z = U h + W2 l, and target
distribution p (DSpark, arXiv 2607.05147, section 3.4; DeepSpec's loss):

    L = ce · CE + tv · TV + confidence · BCE
    CE  = -log q(x)                 x the token that follows in the data
    TV  = ½ ‖q - p‖₁ = 1 - Σ_v min(q(v), p(v))
    BCE = cross entropy of the confidence with a = 1 - TV, the probability that speculative
          sampling accepts the slot (no gradient through a)

each averaged over the slots with weights w_k = exp(-(k-1)/decay), k = 1 … γ.

The target enters through its K most probable tokens: Σ min(q, p) over them is exact when K is the
vocabulary and otherwise misses at most the target's mass outside, which `data.py` reports. The
gradient needs no more than that list:

    ∂CE/∂z = q - 1[x]        ∂TV/∂z = q · m - q · 1[q < p],   m = Σ_{q(v) < p(v)} q(v)

so apart from a few scattered entries it is a multiple of q, and a row of logits is read and written
four times in all. Nothing of size rows × vocabulary outlives its piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PIECE_VALUES = 2**22  # logits held at a time: 16 MiB of float32, about a last-level cache


@dataclass(frozen=True)
class LossWeights:
    """Coefficients of the three terms; decay of the weights of later slots (0: none)."""

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0

    def slots(self, gamma: int) -> Tensor:
        """w_1 … w_γ."""
        k = torch.arange(gamma, dtype=torch.float64)
        return torch.exp(-k / self.decay) if self.decay > 0 else torch.ones_like(k)


class Targets(NamedTuple):
    """What the rows of a head should predict, in columns of the (perhaps reduced) head.

    labels [n] i64: the token of the data, -1 where it has no column. ids [n, K] i64 and probs
    [n, K]: the target's most probable tokens and p of them over the whole vocabulary; -1 marks one
    without a column. No id twice in a row.
    """

    labels: Tensor
    ids: Tensor
    probs: Tensor

    def first(self, slots: int, gamma: int) -> Targets:
        """Of the first slots of every block of γ."""
        return Targets(*(t.unflatten(0, (-1, gamma))[:, :slots].flatten(0, 1) for t in self))


class HeadTerms(NamedTuple):
    """loss: Σ_rows weight · (ce · CE + tv · TV + kl · KL), the only one with a gradient. overlap
    [n] = Σ min(q, p), the acceptance probability. ce [n], 0 for rows without a label."""

    loss: Tensor
    overlap: Tensor
    ce: Tensor


def head_loss(
    hidden: Tensor,
    low_rank: Tensor,
    head: Tensor,
    w2: Tensor | None,
    targets: Targets,
    weights: Tensor,
    ce: float,
    tv: float,
    kl: float = 0.0,
    offset: Tensor | None = None,
) -> HeadTerms:
    """Weighted CE, TV and KL(p ‖ q) of z = head · hidden + w2 · low_rank + offset.

    hidden [n, d]; low_rank [n, r]; head [c, d], frozen; w2 [c, r] or None; weights [n]; offset [c]
    or None. Differentiable in hidden, low_rank and w2.
    """
    return HeadTerms(
        *_HeadLoss.apply(hidden, low_rank, head, w2, targets, weights, ce, tv, kl, offset)
    )


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        low_rank: Tensor,
        head: Tensor,
        w2: Tensor | None,
        targets: Targets,
        weights: Tensor,
        ce: float,
        tv: float,
        kl: float,
        offset: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # One product with [head, w2] instead of two and a sum.
        matrix = head if w2 is None else torch.cat([head, w2.to(head.dtype)], 1)
        inputs = hidden if w2 is None else torch.cat([hidden, low_rank], 1)
        inputs = inputs.to(matrix.dtype)
        needs_grad = any(ctx.needs_input_grad)
        grad_inputs = torch.empty_like(inputs) if needs_grad else None
        grad_w2 = torch.zeros_like(w2) if w2 is not None and needs_grad else None
        rank = 0 if w2 is None else w2.shape[1]
        overlap, cross = weights.new_empty(len(inputs)), weights.new_empty(len(inputs))
        loss = weights.new_zeros(())
        step = max(1, PIECE_VALUES // len(matrix))
        for start in range(0, len(inputs), step):
            rows = slice(start, start + step)
            z = inputs[rows] @ matrix.T
            if offset is not None:
                z += offset
            q = torch.softmax(z, -1, dtype=weights.dtype)
            labels, ids, p = targets.labels[rows, None], targets.ids[rows], targets.probs[rows]
            known, labelled = ids >= 0, (labels >= 0).to(q.dtype)
            ids, labels = ids.clamp(min=0), labels.clamp(min=0)
            chosen = q.gather(1, ids) * known
            p = p.to(q.dtype) * known
            below = chosen * (chosen < p)
            overlap[rows] = torch.minimum(chosen, p).sum(-1)
            cross[rows] = -(q.gather(1, labels).clamp(min=1e-30).log() * labelled)[:, 0]
            loss += (weights[rows] * (ce * cross[rows] + tv * (1 - overlap[rows]))).sum()
            if kl:
                ratio = p.clamp(min=1e-30).log() - chosen.clamp(min=1e-30).log()
                loss += kl * (weights[rows] * (p * ratio).sum(-1)).sum()
            if grad_inputs is None:
                continue
            w = weights[rows, None]
            held = kl * p.sum(-1, keepdim=True)
            grad = q.mul_(w * (ce * labelled + tv * below.sum(-1, keepdim=True) + held))
            grad.scatter_add_(1, ids, -w * (tv * below + kl * p))
            grad.scatter_add_(1, labels, -w * ce * labelled)
            grad = grad.to(matrix.dtype)
            torch.matmul(grad, matrix, out=grad_inputs[rows])
            if grad_w2 is not None:
                grad_w2 += (grad.T @ inputs[rows, -rank:]).to(grad_w2.dtype)
        ctx.save_for_backward(grad_inputs, grad_w2)
        ctx.rank = rank
        ctx.mark_non_differentiable(overlap, cross)
        return loss, overlap, cross

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_inputs, grad_w2 = ctx.saved_tensors
        scale, d = grads[0], grad_inputs.shape[1] - ctx.rank
        grad_hidden = grad_inputs[:, :d] * scale
        if grad_w2 is None:
            return grad_hidden, *[None] * 9
        low = grad_inputs[:, d:] * scale
        return grad_hidden, low, None, grad_w2 * scale, *[None] * 6


class Terms(NamedTuple):
    """The loss with its gradient, and detached parts of it; acceptance [slots] of `valid` ones."""

    loss: Tensor
    ce: float
    tv: float
    bce: float
    acceptance: Tensor


def objective(
    hidden: Tensor,
    low_rank: Tensor,
    confidence: Tensor | None,
    head: Tensor,
    w2: Tensor | None,
    targets: Targets,
    valid: Tensor,
    slot_weights: Tensor,
    coefficients: LossWeights,
    offset: Tensor | None = None,
) -> Terms:
    """L over blocks. hidden [N, γ, d], low_rank [N, γ, r], confidence [N, γ] or None; targets of
    all N·γ slots, flattened; valid [N, γ] bool; slot_weights [γ]. At least one slot is valid."""
    weights = (valid * slot_weights).flatten()
    keep = weights.nonzero()[:, 0]
    weights = weights[keep] / weights.sum()
    if hidden.dtype != torch.float64:
        weights = weights.float()
    rows = Targets(*(t[keep] for t in targets))
    terms = head_loss(
        hidden.flatten(0, 1)[keep],
        low_rank.flatten(0, 1)[keep],
        head,
        w2,
        rows,
        weights,
        coefficients.ce,
        coefficients.tv,
        offset=offset,
    )
    loss, bce = terms.loss, 0.0
    accepted = terms.overlap.clamp(0, 1)
    if confidence is not None:
        logits = confidence.flatten()[keep].to(accepted.dtype)
        errors = F.binary_cross_entropy_with_logits(logits, accepted, reduction="none")
        term = (errors * weights).sum()
        loss = loss + coefficients.confidence * term
        bce = float(term.detach())
    acceptance = torch.zeros(valid.numel(), dtype=accepted.dtype)
    acceptance[keep] = accepted
    return Terms(
        loss,
        float((weights * terms.ce).sum()),
        float((weights * (1 - accepted)).sum()),
        bce,
        acceptance.view(valid.shape),
    )
