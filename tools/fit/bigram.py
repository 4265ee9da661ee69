"""First weights of the Markov head: a bigram model of the target, of the head's rank.

A slot's logits are U h + W2 l with l made from W1 of the token before. With h left out that is a
bigram model, and fitting it to the target's distributions costs a fiftieth of a drafted slot. The
drafter then starts where its trunk only has to add what the token before does not tell, instead of
finding bigrams through a product of two small matrices.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from ...graphs.contract import DraftContract
from .data import Dataset
from .loss import Targets, head_loss
from .train import Vocabulary

EPOCHS, PAIRS, RATE = 10, 1024, 1e-2
# What W2 multiplies, as a multiple of W1[previous], while h says nothing: a gate is half open.
_SCALE = {"vanilla": 1.0, "gated": 0.5}


def fit_bigram(
    contract: DraftContract,
    weights: dict[str, torch.Tensor],
    data: Dataset,
    vocabulary: Vocabulary,
    seed: int,
    report: Callable[[str], None] = lambda message: None,
) -> None:
    """Set W1 and W2 in place, where the head's type allows (vanilla and gated)."""
    if contract.markov_type not in _SCALE:
        return
    scale = _SCALE[contract.markov_type]
    names = [f"markov_head.markov_{w}.weight" for w in ("w1", "w2")]
    w1, w2 = (weights[n].detach().clone().requires_grad_() for n in names)
    tokens, labels, ids, probs = [], [], [], []
    for index in data.split(held_out=False):
        text, first = data.tokens(index), data.record(index).prompt_length
        best, p = data.targets(index)
        tokens.append(text[first - 1 : -1])
        labels.append(text[first:])
        ids.append(best)
        probs.append(p)
    previous = torch.cat(tokens)
    targets = Targets(torch.cat(labels), torch.cat(ids), torch.cat(probs))
    optimizer = torch.optim.AdamW([w1, w2], weight_decay=0.0, betas=(0.9, 0.95), fused=True)
    pieces = -(-len(previous) // PAIRS)
    overlap = 0.0
    for epoch in range(EPOCHS):
        order = torch.from_numpy(np.random.default_rng([seed, 3, epoch]).permutation(len(previous)))
        for number, rows in enumerate(order.split(PAIRS), start=epoch * pieces):
            optimizer.param_groups[0]["lr"] = RATE * (1 - number / (EPOCHS * pieces))
            optimizer.zero_grad()
            chosen = Targets(*(t[rows] for t in targets))
            columns = vocabulary.columns(chosen, number)
            low_rank = scale * F.embedding(previous[rows], w1)
            terms = head_loss(
                low_rank[:, :0],
                low_rank,
                w2.new_zeros(len(columns.tokens), 0),
                w2.index_select(0, columns.tokens),
                columns.place(chosen),
                torch.full((len(rows),), 1 / len(rows)),
                ce=0.0,
                tv=0.0,
                kl=1.0,
                offset=columns.offset,
            )
            terms.loss.backward()
            optimizer.step()
            if epoch == EPOCHS - 1:
                overlap += float(terms.overlap.sum()) / len(previous)
    report(f"the Markov head starts as a bigram model: acceptance {overlap:.3f} in training")
    for name, w in zip(names, (w1, w2), strict=True):
        weights[name].data.copy_(w.detach())
