"""The training loop: steps of many anchors, held-out figures, checkpoints that resume exactly.

What a step sees depends on nothing but the seed and the step's number, so a checkpoint is the
weights, the optimiser's moments and that number. On one CPU thread an interrupted and resumed run
ends with the same bits as an uninterrupted one.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...graphs.errors import DraftgraphError
from .data import Dataset
from .loss import LossWeights, Targets, Terms, head_loss, objective
from .model import BlockOutputs, Context, Drafter

Report = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """How to train. A step takes `sequences` sequences and up to `anchors` anchors of each."""

    steps: int
    sequences: int = 8
    anchors: int = 64
    learning_rate: float = 1.2e-3
    warmup: float = 0.04  # share of the steps
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    loss: LossWeights = field(default_factory=LossWeights)
    vocab: int = 4096  # tokens with a column of their own in the training softmax, 0: all
    sampled: int = 1024  # columns that stand for all others
    # Slots of the blocks, 0: γ, in the first `short_share` of the steps. Later slots follow from
    # the first ones, which matter most and then cost less.
    short_slots: int = 0
    short_share: float = 0.75
    bf16: bool = False
    seed: int = 0

    def slots(self, step: int, gamma: int) -> int:
        """Of the blocks of a step."""
        short = self.short_slots and step < self.short_share * self.steps
        return min(self.short_slots, gamma) if short else gamma

    def rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to 0. Step counts from 0."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Batch:
    """Blocks of a step. tokens [N, γ]: before each slot; valid [N, γ]: slots with a label."""

    contexts: list[Context]
    tokens: Tensor
    targets: Targets
    valid: Tensor


@dataclass(frozen=True)
class Columns:
    """The columns of one step's softmax. tokens [c]; of [V]: the own column of a token, -1 without;
    offset [c]: what is added to the logits."""

    tokens: Tensor
    of: Tensor
    offset: Tensor

    def place(self, targets: Targets) -> Targets:
        """Targets given in token ids, in columns."""
        return Targets(self.of[targets.labels], self.of[targets.ids], targets.probs)


class Vocabulary:
    """Which tokens have a column in the training softmax, step by step.

    `own` columns go to the tokens that carry most of the step's target mass, then to the most
    frequent ones of the data. `sampled` further columns are drawn from all other tokens and stand
    for them: with log(others / sampled) added to their logits, the sum of exponentials is on
    average that of the whole vocabulary (sampled softmax, Jean et al. 2015, arXiv 1412.2007).
    Without them nothing holds down the logits of tokens that never have a column, and when drafting
    over the real vocabulary these swallow the probability.
    """

    def __init__(self, data: Dataset, size: int, own: int, sampled: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.own = min(own or size, size)
        self.sampled = min(sampled, size - self.own)
        weight = torch.zeros(size, dtype=torch.float64)
        for index in data.split(held_out=False):
            weight += torch.bincount(data.tokens(index), minlength=size)
            ids, probs = data.targets(index)
            weight.index_add_(0, ids.flatten(), probs.flatten().double())
        # Tokens never seen are told apart by id: tokenizers number frequent tokens first.
        weight -= torch.arange(size) * (1e-3 / size)
        self._frequency = (weight / weight.sum()).float()
        frequent = torch.zeros(size, dtype=torch.bool)
        frequent[self._frequency.topk(self.own).indices] = True
        kept = total = 0.0
        for index in data.split(held_out=True):
            ids, probs = data.targets(index)
            kept += float((probs * frequent[ids]).sum())
            total += float(probs.sum())
        # Share of the held-out target mass on the `own` most frequent tokens.
        self.coverage = kept / total if total else 0.0

    def ranked(self, count: int) -> np.ndarray:
        """Up to `count` tokens, the most frequent of the training texts first."""
        order = self._frequency.sort(descending=True, stable=True).indices
        return order[:count].numpy()

    def columns(self, targets: Targets, step: int) -> Columns:
        """Of a step; targets in token ids."""
        if self.own == self.size:
            everything = torch.arange(self.size)
            return Columns(everything, everything, torch.zeros(self.size))
        mass = torch.zeros(self.size)
        mass.index_add_(0, targets.ids.flatten(), targets.probs.flatten().float())
        own = (mass + self._frequency).topk(self.own).indices
        of = torch.full((self.size,), -1)
        of[own] = torch.arange(self.own)
        offset = torch.zeros(self.own + self.sampled)
        if not self.sampled:
            return Columns(own, of, offset)
        others = (of < 0).nonzero()[:, 0]
        rng = np.random.default_rng([self.seed, 2, step])
        drawn = torch.from_numpy(rng.choice(len(others), self.sampled, replace=False))
        offset[self.own :] = math.log(len(others) / self.sampled)
        return Columns(torch.cat([own, others[drawn]]), of, offset)


def make_batch(data: Dataset, chosen: list[tuple[int, np.ndarray]], gamma: int) -> Batch:
    """Blocks at the given anchors (sorted) of the given sequences; targets in token ids."""
    contexts, tokens, labels, ids, probs, valid = [], [], [], [], [], []
    slots = torch.arange(gamma)
    for index, places in chosen:
        anchors = torch.from_numpy(places)
        text, first = data.tokens(index), data.record(index).prompt_length
        contexts.append(Context(data.features(index, int(anchors.max())), anchors, text))
        at = anchors[:, None] + slots  # of the tokens before the slots; labels are one further
        last = len(text) - 1
        tokens.append(text[at.clamp(max=last)])
        valid.append(at + 1 <= last)
        at = (at + 1).clamp(max=last).flatten()
        labels.append(text[at])
        best, p = data.targets(index)
        ids.append(best[at - first])
        probs.append(p[at - first])
    targets = Targets(torch.cat(labels), torch.cat(ids), torch.cat(probs))
    return Batch(contexts, torch.cat(tokens), targets, torch.cat(valid))


def candidates(data: Dataset, index: int) -> np.ndarray:
    """Positions that the runtime can have as an anchor: generated tokens with one after them."""
    record = data.record(index)
    return np.arange(record.prompt_length, record.length - 1)


@dataclass(frozen=True)
class HeldOut:
    """Figures on the held-out split, over the whole vocabulary, teacher-forced, temperature 1.

    acceptance[k]: mean of Σ min(q, p) at slot k. expected: mean over blocks of Σ_k Π_{j≤k} of it,
    the drafted tokens that speculative sampling accepts (τ is one more).
    """

    blocks: int
    expected: float
    acceptance: list[float]


class Trainer:
    """Trains a drafter on a data set; `step` counts finished steps."""

    def __init__(
        self, drafter: Drafter, head: Tensor, data: Dataset, vocabulary: Vocabulary, recipe: Recipe
    ) -> None:
        self.drafter, self.data, self.recipe, self.vocabulary = drafter, data, recipe, vocabulary
        self.gamma = drafter.contract.block_size
        self.head = head
        self._train = [i for i in data.split(held_out=False) if len(candidates(data, i))]
        self.held_out = [i for i in data.split(held_out=True) if len(candidates(data, i))]
        for name, split in (("training", self._train), ("held-out", self.held_out)):
            if not split:
                raise DraftgraphError(f"the data has no {name} sequences; sample more")
        self._permutation = cache(self._shuffled)
        self.optimizer = torch.optim.AdamW(
            [
                # Vectors (norms, biases) and tables of token embeddings do not decay.
                {"params": self._group(True), "weight_decay": recipe.weight_decay},
                {"params": self._group(False), "weight_decay": 0.0},
            ],
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.step = 0
        self.seconds = 0.0  # in training steps
        self.history: list[dict[str, Any]] = []

    def _group(self, decays: bool) -> list[Tensor]:
        return [
            w
            for name, w in self.drafter.weights.items()
            if (w.ndim == 2 and "markov_w" not in name) == decays
        ]

    # Batches

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.recipe.seed, epoch]).permutation(len(self._train))

    def batch(self, step: int) -> Batch:
        """The batch of a step, from the seed and its number alone."""
        chosen = []
        for n in range(step * self.recipe.sequences, (step + 1) * self.recipe.sequences):
            epoch, place = divmod(n, len(self._train))
            index = self._train[self._permutation(epoch)[place]]
            places = candidates(self.data, index)
            count = min(self.recipe.anchors, len(places))
            rng = np.random.default_rng([self.recipe.seed, 1, n])
            chosen.append((index, np.sort(rng.choice(places, count, replace=False))))
        return make_batch(self.data, chosen, self.recipe.slots(step, self.gamma))

    # Steps

    def train_step(self) -> Terms:
        start = time.perf_counter()
        batch = self.batch(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        terms = self.loss(batch)
        if not torch.isfinite(terms.loss):
            raise DraftgraphError(
                f"the loss is not finite at step {self.step}; lower the learning rate (the last "
                "checkpoint is intact)"
            )
        terms.loss.backward()
        parameters = list(self.drafter.parameters())
        torch.nn.utils.clip_grad_norm_(parameters, self.recipe.max_grad_norm, foreach=True)
        self.optimizer.step()
        self.step += 1
        self.seconds += time.perf_counter() - start
        return terms

    def loss(self, batch: Batch) -> Terms:
        gamma = batch.tokens.shape[1]
        slots = min(self.drafter.trained_slots, gamma)
        with self._autocast():
            out = self.drafter.blocks(batch.contexts, batch.tokens[:, :slots])
        targets = batch.targets if slots == gamma else batch.targets.first(slots, gamma)
        columns = self.vocabulary.columns(targets, self.step)
        head = self.head.index_select(0, columns.tokens)
        w2 = self.drafter.weights.get("markov_head.markov_w2.weight")
        hidden, low_rank = out.hidden, out.low_rank
        if self.recipe.bf16:
            head, hidden, low_rank = head.bfloat16(), hidden.float(), low_rank.float()
        return objective(
            hidden,
            low_rank,
            out.confidence,
            head,
            None if w2 is None else w2.index_select(0, columns.tokens),
            columns.place(targets),
            batch.valid[:, :slots],
            self.recipe.loss.slots(slots),
            self.recipe.loss,
            columns.offset.to(head.dtype),
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.recipe.bf16:
            return torch.autocast("cpu", torch.bfloat16)
        return nullcontext()

    @torch.no_grad()
    def evaluate(self, blocks: int = 512) -> HeldOut:
        """On about `blocks` anchors of the held-out sequences, always the same ones."""
        sums, counts = torch.zeros(self.gamma), torch.zeros(self.gamma)
        expected, total = 0.0, 0
        for batch in self.held_out_batches(blocks):
            out = self.drafter.blocks(batch.contexts, batch.tokens)
            accepted = self.overlap(batch, out)
            sums += accepted.sum(0)
            counts += batch.valid.sum(0)
            expected += float(accepted.cumprod(1).sum())
            total += len(accepted)
        return HeldOut(total, expected / total, (sums / counts.clamp(min=1)).tolist())

    def held_out_batches(self, blocks: int, texts: Sequence[int] = ()) -> Iterator[Batch]:
        """About `blocks` blocks of held-out sequences, of all or of `texts`, one by one."""
        texts = texts or self.held_out
        spread = sum(len(candidates(self.data, i)) for i in texts)
        stride = max(1, spread // blocks)
        for index in texts:
            places = candidates(self.data, index)[stride // 2 % stride :: stride]
            if len(places):
                yield make_batch(self.data, [(index, places)], self.gamma)

    @torch.no_grad()
    def overlap(self, batch: Batch, out: BlockOutputs) -> Tensor:
        """[N, γ] Σ min(q, p) over the whole vocabulary, 0 where a slot has no label."""
        rows = batch.valid.flatten()
        terms = head_loss(
            out.hidden.flatten(0, 1)[rows],
            out.low_rank.flatten(0, 1)[rows],
            self.head,
            self.drafter.weights.get("markov_head.markov_w2.weight"),
            Targets(*(t[rows] for t in batch.targets)),
            torch.ones(int(rows.sum())),
            0.0,
            0.0,
        )
        accepted = torch.zeros(len(rows))
        accepted[rows] = terms.overlap.clamp(0, 1)
        return accepted.view_as(batch.valid)

    # Checkpoints

    def save(self, file: Path, digest: str) -> None:
        """Weights, moments, step and history, atomically; digest names the run they belong to."""
        tensors: dict[str, Tensor] = {}
        for name, w in self.drafter.weights.items():
            tensors[f"weight.{name}"] = w.detach()
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment in self.optimizer.state[w]:
                    tensors[f"{moment}.{name}"] = self.optimizer.state[w][moment]
        metadata = {
            "step": str(self.step),
            "seconds": str(self.seconds),
            "digest": digest,
            "history": json.dumps(self.history),
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.partial")
        save_file(tensors, temporary, metadata)
        os.replace(temporary, file)

    def load(self, file: Path, digest: str) -> None:
        """Go on from a checkpoint of the same run."""
        try:
            with safe_open(str(file), framework="pt") as handle:
                metadata = handle.metadata()
                tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise DraftgraphError(
                f"{file}: this checkpoint cannot be read ({error}); remove it to train from "
                "the start"
            ) from None
        if metadata["digest"] != digest:
            raise DraftgraphError(
                f"{file}: this checkpoint is of a run with other data or settings; remove it to "
                "train from the start, or use another --out"
            )
        self.step = int(metadata["step"])
        self.seconds = float(metadata.get("seconds", 0))
        self.history = json.loads(metadata["history"])
        for name, w in self.drafter.weights.items():
            w.data.copy_(tensors[f"weight.{name}"])
            if f"exp_avg.{name}" in tensors:
                self.optimizer.state[w] = {
                    "step": torch.tensor(float(self.step)),
                    "exp_avg": tensors[f"exp_avg.{name}"].clone(),
                    "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].clone(),
                }


def bf16_is_faster() -> bool:
    """Measured on a product of this model's kind: without AMX or AVX512-BF16 it is slower."""
    a, b = torch.randn(512, 512), torch.randn(512, 512)

    def seconds(x: Tensor, y: Tensor) -> float:
        x @ y
        times = []
        for _ in range(5):
            start = time.perf_counter()
            x @ y
            times.append(time.perf_counter() - start)
        return min(times)

    return seconds(a.bfloat16(), b.bfloat16()) < 0.7 * seconds(a, b)
