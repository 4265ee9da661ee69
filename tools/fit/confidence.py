"""The confidence head, fitted once more, to texts that the drafter was not trained on.

Training leaves it wrong in two ways. On texts that a drafter was trained on more of its tokens are
accepted than on new ones, and that is where the head has learnt how many. And it has learnt
1 - TV, the acceptance at temperature 1, while a greedy draft is accepted when both have the same
most probable token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import BlockOutputs
from .train import Batch, Trainer

WEIGHT, BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
# Standard deviations of normal priors. Of the correction of a logit, in logits: with less than a
# thousand outcomes the head hardly changes but for its level. Of that level (scale and shift of the
# logits): wide, it only holds them where all outcomes are the same.
PRIOR, LEVEL_PRIOR = 0.35, 20.0


@dataclass(frozen=True)
class Outcomes:
    """Slots of held-out blocks. inputs [n, f] of the head; logits [n]; accepted [n] in [0, 1];
    weights [n]: the chance that the slot is reached."""

    inputs: Tensor
    logits: Tensor
    accepted: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Refit:
    """weight [1, f] and bias [1] of the head, and the mean cross entropy of the outcomes that it
    was fitted to, before and after."""

    weight: Tensor
    bias: Tensor
    before: float
    after: float

    def into(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The drafter's weights with this head."""
        return {**weights, WEIGHT: self.weight, BIAS: self.bias}


def refit(trainer: Trainer, blocks: int = 8192) -> Refit | None:
    """The head that predicts the held-out outcomes; None without one.

    Its logits get a scale and a shift, and every weight a correction, with a normal prior (ridge
    regression) so that few outcomes change little.
    """
    if not trainer.drafter.contract.has_confidence:
        return None
    seen = outcomes(trainer, blocks)
    x, z, a, w = (t.double() for t in (seen.inputs, seen.logits, seen.accepted, seen.weights))
    mean, spread = x.mean(0), x.std(0, correction=0).clamp(min=1e-6)
    x = (x - mean) / spread
    count = float(w.sum())
    strength, hold = x.shape[1] / (2 * PRIOR**2 * count), 1 / (2 * LEVEL_PRIOR**2 * count)
    as_trained = torch.tensor([1.0, 0.0], dtype=torch.float64)
    line = as_trained.clone().requires_grad_()
    change = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([line, change], max_iter=200, line_search_fn="strong_wolfe")

    def entropy() -> Tensor:
        logits = line[0] * z + line[1] + x @ change
        return F.binary_cross_entropy_with_logits(logits, a, w, reduction="sum") / count

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = entropy() + strength * change.square().sum()
        value = value + hold * (line - as_trained).square().sum()
        value.backward()
        return value

    before = entropy().item()
    optimizer.step(loss)
    after = entropy().item()
    weights = trainer.drafter.weights
    scale, shift = line.tolist()
    own = (change / spread).detach()
    weight = scale * weights[WEIGHT].detach() + own.to(weights[WEIGHT].dtype)
    bias = scale * weights[BIAS].detach() + float(shift - own @ mean)
    return Refit(weight, bias, before, after)


@torch.no_grad()
def outcomes(trainer: Trainer, blocks: int) -> Outcomes:
    """Of about `blocks` blocks, teacher-forced.

    Of the texts sampled at temperature 0, if there are any: a slot is accepted, and the next one
    reached, if the drafter's most probable token is the text's. Else 1 - TV of all texts.
    """
    texts = [i for i in trainer.held_out if trainer.data.record(i).temperature == 0]
    parts = []
    for batch in trainer.held_out_batches(blocks, texts):
        out = trainer.drafter.blocks(batch.contexts, batch.tokens)
        assert out.confidence is not None and out.confidence_inputs is not None
        accepted = hits(trainer, batch, out) if texts else trainer.overlap(batch, out)
        before = accepted[:, :-1].cumprod(1)
        reached = torch.cat([torch.ones(len(accepted), 1), before], 1)
        keep = batch.valid & (reached > 0)
        parts.append(
            (out.confidence_inputs[keep], out.confidence[keep], accepted[keep], reached[keep])
        )
    return Outcomes(*(torch.cat(part) for part in zip(*parts, strict=True)))


def hits(trainer: Trainer, batch: Batch, out: BlockOutputs) -> Tensor:
    """[N, γ] 1 where the most probable drafted token is the label."""
    picks = trainer.drafter.picks(
        out.hidden.flatten(0, 1), out.low_rank.flatten(0, 1), trainer.head
    )
    same = (picks == batch.targets.labels).view_as(batch.valid)
    return (same & batch.valid).to(out.hidden.dtype)
