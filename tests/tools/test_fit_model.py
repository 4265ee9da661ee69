"""The trainable drafter and its loss, against the reference and against the formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import load_golden, write_random_pair

from draftgraph.export.checkpoints import DraftCheckpoint, read_draft, read_target
from draftgraph.export.reference import ReferenceDrafter
from draftgraph.tools.fit.loss import LossWeights, Targets, head_loss, objective
from draftgraph.tools.fit.model import Context, Drafter, context_mask

DOUBLE = torch.float64


def read_pair(
    folder: Path, **options: object
) -> tuple[DraftCheckpoint, torch.Tensor, torch.Tensor]:
    """A random drafter with its embedding and head in float64."""
    target_path, draft_path = write_random_pair(folder, **options)  # type: ignore[arg-type]
    target = read_target(target_path)
    embed = torch.from_numpy(target.weights["embed_tokens.weight"]).to(DOUBLE)
    head = torch.from_numpy(target.weights["lm_head.weight"]).to(DOUBLE)
    return read_draft(draft_path, target), embed, head


def drafter_of(checkpoint: DraftCheckpoint, embed: torch.Tensor) -> Drafter:
    weights = {n: torch.from_numpy(checkpoint.weights[n]) for n in checkpoint.weights.names()}
    return Drafter(checkpoint.contract, {n: w.to(embed.dtype) for n, w in weights.items()}, embed)


def blocks_of(
    sequences: list[torch.Tensor], anchors: list[torch.Tensor], gamma: int
) -> torch.Tensor:
    """The token before each slot of every block."""
    slots = torch.arange(gamma)
    pairs = zip(sequences, anchors, strict=True)
    return torch.cat([s[a[:, None] + slots] for s, a in pairs])


# The network


@pytest.mark.parametrize("name", ["qwen3-vanilla", "qwen3-gated", "qwen3-rnn", "qwen3-dflash"])
def test_equals_the_reference_on_the_goldens(name: str) -> None:
    """Trained checkpoints of the official implementation: hidden states, logits, confidences."""
    golden = load_golden(name)
    target = read_target(golden.target)
    checkpoint = read_draft(golden.draft, target)
    embed = torch.from_numpy(target.weights["embed_tokens.weight"])
    head = torch.from_numpy(target.weights["lm_head.weight"])
    weights = {n: torch.from_numpy(checkpoint.weights[n]) for n in checkpoint.weights.names()}
    drafter = Drafter(checkpoint.contract, weights, embed)
    reference = ReferenceDrafter(checkpoint.contract, weights, embed=embed, lm_head=head)
    gamma, width = checkpoint.contract.block_size, len(checkpoint.contract.tap_ids) * 64
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(100, (n,), generator=generator) for n in (40, 23)]
    features = [torch.randn(n, width, generator=generator) for n in (40, 23)]
    anchors = [torch.tensor([1, 7, 30]), torch.tensor([4, 12])]
    tokens = blocks_of(sequences, anchors, gamma)
    contexts = [Context(f[: a.max()], a) for f, a in zip(features, anchors, strict=True)]
    with torch.no_grad():
        found = drafter.blocks(contexts, tokens)
    block = 0
    for f, places, sequence in zip(features, anchors, sequences, strict=True):
        for anchor in places.tolist():
            hidden, base = reference.backbone(f[:anchor], int(sequence[anchor]))
            following = sequence[anchor + 1 : anchor + 1 + gamma].tolist()
            _, corrected, e = reference.markov(
                base, hidden, int(sequence[anchor]), forced_ids=following
            )
            torch.testing.assert_close(found.hidden[block], hidden, atol=2e-5, rtol=2e-5)
            logits = found.hidden[block] @ head.T
            if found.low_rank.shape[-1]:
                logits = logits + found.low_rank[block] @ weights["markov_head.markov_w2.weight"].T
            torch.testing.assert_close(logits, corrected, atol=1e-4, rtol=1e-4)
            expected = reference.confidence(hidden, e)
            if expected is None:
                assert found.confidence is None
            else:
                assert found.confidence is not None
                torch.testing.assert_close(found.confidence[block], expected, atol=5e-5, rtol=1e-4)
            block += 1


def test_what_a_block_sees_entry_by_entry(tmp_path: Path) -> None:
    """The gradient of every slot with respect to every context row and every block's anchor:
    rows strictly before the anchor and the own block, in both directions, nothing else."""
    checkpoint, embed, _ = read_pair(tmp_path, gamma=3)
    rows, anchors, gamma = 6, torch.tensor([1, 4, 6, 3]), 3
    drafter = drafter_of(checkpoint, embed.clone().requires_grad_())
    features = torch.randn(rows, 32, dtype=DOUBLE, requires_grad=True)
    # The anchors are different tokens, so the embedding's gradient tells the blocks apart.
    ids = torch.tensor([0, 1, 2, 3])
    tokens = torch.stack([ids, ids, ids], 1)
    hidden = drafter.blocks([Context(features, anchors)], tokens).hidden
    for block in range(4):
        for slot in range(gamma):
            # Not the sum: a normed vector's sum of squares has no gradient.
            by_row, by_token = torch.autograd.grad(
                hidden[block, slot, 0], (features, drafter.embed), retain_graph=True
            )
            assert ((by_row != 0).any(1)).tolist() == [row < anchors[block] for row in range(rows)]
            assert ((by_token[:4] != 0).any(1)).tolist() == [other == block for other in range(4)]
            assert (by_token[checkpoint.contract.mask_token_id] != 0).any()
    expected = [[row < anchor for row in range(rows)] for anchor in (1, 4, 6, 3)]
    assert context_mask(anchors, rows).tolist() == expected


def test_fewer_tokens_are_shorter_blocks(tmp_path: Path) -> None:
    """As if the drafter's γ were smaller: what is not in the block is not seen."""
    checkpoint, embed, head = read_pair(tmp_path, gamma=5)
    drafter = drafter_of(checkpoint, embed)
    contract = replace(checkpoint.contract, block_size=3)
    shorter = ReferenceDrafter(contract, drafter.weights, embed=embed, lm_head=head)
    features = torch.randn(6, 32, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    anchors, tokens = torch.tensor([2, 6]), torch.tensor([[3, 1, 4, 1, 5], [0, 2, 6, 5, 3]])
    with torch.no_grad():
        found = drafter.blocks([Context(features, anchors)], tokens[:, :3]).hidden
        whole = drafter.blocks([Context(features, anchors)], tokens).hidden[:, :3]
        expected = [
            shorter.backbone(features[:a], int(t[0]))[0]
            for a, t in zip((2, 6), tokens, strict=True)
        ]
    torch.testing.assert_close(found, torch.stack(expected).double(), atol=1e-5, rtol=1e-5)
    assert (found - whole).abs().max() > 1e-3


def test_a_sequence_does_not_depend_on_the_others(tmp_path: Path) -> None:
    checkpoint, embed, _ = read_pair(tmp_path)
    drafter = drafter_of(checkpoint, embed)
    torch.manual_seed(0)
    contexts = [
        Context(torch.randn(n, 32, dtype=DOUBLE), torch.tensor(a))
        for n, a in ((5, [2, 5]), (9, [1, 4, 9]))
    ]
    tokens = torch.randint(8, (5, 3))
    together = drafter.blocks(contexts, tokens).hidden
    alone = [
        drafter.blocks([c], t).hidden for c, t in zip(contexts, tokens.split([2, 3]), strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-12, rtol=0)


# The loss


def formula(
    logits: torch.Tensor,
    p: torch.Tensor,
    labels: torch.Tensor,
    confidence: torch.Tensor | None,
    valid: torch.Tensor,
    c: LossWeights,
) -> torch.Tensor:
    """L written down from the paper, with autograd through everything; a is detached."""
    blocks, gamma, _ = logits.shape
    total = torch.zeros((), dtype=DOUBLE)
    norm = 0.0
    for block in range(blocks):
        for k in range(1, gamma + 1):
            if not valid[block, k - 1]:
                continue
            w = math.exp(-(k - 1) / c.decay)
            norm += w
            z = logits[block, k - 1]
            q = z.exp() / z.exp().sum()
            tv = 0.5 * (q - p[block, k - 1]).abs().sum()
            total = total + w * (c.ce * -q[labels[block, k - 1]].log() + c.tv * tv)
            if confidence is not None:
                a, s = 1 - tv.detach(), confidence[block, k - 1].sigmoid()
                total = total - w * c.confidence * (a * s.log() + (1 - a) * (1 - s).log())
    return total / norm


@pytest.mark.parametrize("markov", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("confidence", [False, True])
def test_loss_and_gradient_follow_the_formulas(
    markov: str, confidence: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every weight's gradient in float64, through pieces of the vocabulary part of two rows."""
    monkeypatch.setattr("draftgraph.tools.fit.loss.PIECE_VALUES", 2 * 8)
    checkpoint, embed, head = read_pair(tmp_path, markov=markov, confidence=confidence)
    torch.manual_seed(1)
    sequences = [torch.randint(8, (n,)) for n in (12, 9)]
    anchors = [torch.tensor([2, 5, 8]), torch.tensor([1, 4])]
    features = [torch.randn(n, 32, dtype=DOUBLE) for n in (8, 4)]
    contexts = [Context(f, a) for f, a in zip(features, anchors, strict=True)]
    tokens = blocks_of(sequences, anchors, 3)
    labels = torch.randint(8, (5, 3))
    p = torch.softmax(2 * torch.randn(5, 3, 8, dtype=DOUBLE), -1)
    valid = torch.ones(5, 3, dtype=torch.bool)
    valid[1, 2] = valid[4, 1] = valid[4, 2] = False
    c = LossWeights(decay=2.5)
    gradients = []
    for fused in (True, False):
        drafter = drafter_of(checkpoint, embed)
        out = drafter.blocks(contexts, tokens)
        w2 = drafter.weights.get("markov_head.markov_w2.weight")
        if fused:
            ids = torch.stack([torch.randperm(8) for _ in range(15)])
            targets = Targets(labels.flatten(), ids, p.flatten(0, 1).gather(1, ids))
            terms = objective(
                out.hidden, out.low_rank, out.confidence, head, w2, targets, valid, c.slots(3), c
            )
            loss = terms.loss
        else:
            logits = out.hidden @ head.T
            if w2 is not None:
                logits = logits + out.low_rank @ w2.T
            loss = formula(logits, p, labels, out.confidence, valid, c)
            q = torch.softmax(logits, -1)
            a = torch.where(valid, 1 - 0.5 * (q - p).abs().sum(-1), 0.0)
            torch.testing.assert_close(terms.acceptance, a)
            torch.testing.assert_close(terms.loss, loss)
        loss.backward()
        gradients.append({n: w.grad for n, w in drafter.weights.items()})
    for name, expected in gradients[1].items():
        assert expected is not None and expected.abs().max() > 1e-6, name
        torch.testing.assert_close(gradients[0][name], expected, atol=1e-12, rtol=1e-7, msg=name)


def test_a_reduced_head(tmp_path: Path) -> None:
    """Columns of some tokens only: q is a distribution over them, p stays that of the whole
    vocabulary, and a label without a column has no cross entropy."""
    torch.manual_seed(2)
    hidden = torch.randn(3, 4, dtype=DOUBLE, requires_grad=True)
    full = torch.randn(8, 4, dtype=DOUBLE)
    columns = torch.tensor([6, 1, 3])
    p = torch.softmax(torch.randn(3, 8, dtype=DOUBLE), -1)
    labels = torch.tensor([1, 5, 6])  # token 5 has no column
    column_of = torch.full((8,), -1)
    column_of[columns] = torch.arange(3)
    top = p.topk(5, -1)
    targets = Targets(column_of[labels], column_of[top.indices], top.values)
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=DOUBLE)
    offset = torch.tensor([0.0, 0.5, -1.0], dtype=DOUBLE)
    terms = head_loss(
        hidden, hidden[:, :0], full[columns], None, targets, weights, 0.3, 0.7, 0.4, offset
    )
    q = torch.softmax(hidden @ full[columns].T + offset, -1)
    kept = torch.zeros(3, 8, dtype=DOUBLE).scatter(1, top.indices, top.values)[:, columns]
    overlap = torch.minimum(q, kept).sum(-1)
    ce = torch.stack([-q[0, 1].log(), torch.zeros((), dtype=DOUBLE), -q[2, 0].log()])
    kl = torch.where(kept > 0, kept * (kept.clamp(min=1e-30).log() - q.log()), 0.0).sum(-1)
    expected = (weights * (0.3 * ce + 0.7 * (1 - overlap) + 0.4 * kl)).sum()
    torch.testing.assert_close(terms.loss, expected)
    torch.testing.assert_close(terms.overlap, overlap)
    torch.testing.assert_close(
        torch.autograd.grad(terms.loss, hidden)[0], torch.autograd.grad(expected, hidden)[0]
    )


def test_slot_weights() -> None:
    np.testing.assert_allclose(
        LossWeights(decay=4).slots(4).numpy(), [1, math.exp(-0.25), math.exp(-0.5), math.exp(-0.75)]
    )
    assert LossWeights(decay=0).slots(3).tolist() == [1, 1, 1]
