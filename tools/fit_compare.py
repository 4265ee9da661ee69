"""Drafter families side by side: the same texts, objective and number of trained blocks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..export.checkpoints import read_target
from ..graphs.errors import DraftgraphError
from ..runtime.jsonfile import read_json
from . import console
from .fit.bigram import fit_bigram
from .fit.data import Dataset
from .fit.drafter import embedding_and_head, new_contract, new_weights
from .fit.model import Drafter
from .fit.relatives import FAMILIES, new_relative, replay
from .fit.train import Recipe, Trainer, Vocabulary
from .fit_drafter import Shape, TrainOptions, unused_token

ALL = ("dspark", "dflash", *FAMILIES)


def compare(
    target_path: str,
    data_folder: Path,
    families: Sequence[str],
    shape: Shape,
    train: TrainOptions,
    *,
    seed: int = 0,
    threads: int | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> list[dict[str, Any]]:
    """Train every family on the data of an earlier fit and measure it on the held-out split.

    The block drafters have `shape.layers` layers, the others theirs. A block means the same for
    all: one anchor with γ slots (one slot for MTP, which is trained for the next token only).
    """
    for family in families:
        if family not in ALL:
            raise DraftgraphError(f"family {family!r} is unknown; known: {', '.join(ALL)}")
    source = read_json(data_folder / "source.json", "source file of a data folder")
    target = read_target(target_path)
    if source["target"] != target.provenance:
        raise DraftgraphError(f"{data_folder}: sampled from another target than {target_path}")
    torch.set_num_threads(threads or torch.get_num_threads())
    data = Dataset(data_folder)
    contract = new_contract(
        target.contract,
        block_size=shape.block_size,
        layers=shape.layers,
        intermediate_size=shape.intermediate_size,
        taps=tuple(source["taps"]),
        mask_token_id=unused_token(target) if shape.mask_token_id is None else shape.mask_token_id,
        markov_type=shape.markov,
        markov_rank=shape.markov_rank,
        confidence=shape.confidence,
    )
    embed, head = embedding_and_head(target)
    vocabulary = Vocabulary(data, contract.vocab_size, train.vocab, train.sampled, seed)
    recipe = Recipe(
        steps=max(
            1, round(train.anchors / (train.sequences_per_step * train.anchors_per_sequence))
        ),
        sequences=train.sequences_per_step,
        anchors=train.anchors_per_sequence,
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
        loss=train.loss,
        vocab=train.vocab,
        sampled=train.sampled,
        seed=seed,
    )
    rows = []
    for family in families:
        if family in FAMILIES:
            norm = new_weights(contract, seed)["norm.weight"]
            drafter: Drafter = new_relative(family, contract, norm, embed, seed)
        else:
            own = contract
            if family == "dflash":
                own = dataclasses.replace(
                    contract, markov_type="none", markov_rank=0, confidence_with_markov=False
                )
            drafter = Drafter(own, new_weights(own, seed), embed)
            fit_bigram(own, drafter.weights, data, vocabulary, seed, report)
        trainer = Trainer(drafter, head, data, vocabulary, recipe)
        start = time.perf_counter()
        for _ in range(recipe.steps):
            trainer.train_step()
        seconds = time.perf_counter() - start
        held_out = trainer.evaluate()
        tau, survival = replay(drafter, head, data)
        row = {
            "family": family,
            "parameters": sum(w.numel() for w in drafter.weights.values()),
            "seconds": seconds,
            "held_out": asdict(held_out),
            "greedy_tau": tau,
            "greedy_survival": survival,
        }
        rows.append(row)
        report(f"{family}: expected {held_out.expected:.3f}, greedy τ {tau:.2f}, {seconds:.0f} s")
    return rows


def render(rows: list[dict[str, Any]], screen: Console) -> None:
    gamma = len(rows[0]["held_out"]["acceptance"])
    positions = [str(k) for k in range(1, gamma + 1)]
    console.heading(screen, "held out: expected accepted tokens of a block and by position (T=1)")
    show = console.table("family", "params", "s", "expected", *positions, "τ, greedy")
    for row in rows:
        show.add_row(
            row["family"],
            f"{row['parameters'] / 1e6:.1f}M",
            f"{row['seconds']:.0f}",
            f"{row['held_out']['expected']:.3f}",
            *(f"{a:.2f}" for a in row["held_out"]["acceptance"]),
            f"{row['greedy_tau']:.2f}",
        )
    screen.print(show)
