"""Drafter families side by side: the same texts, objective and number of trained blocks."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ..export.bundle import export_bundle
from ..export.checkpoints import TargetCheckpoint, read_target
from ..graphs.contract import DraftContract, to_dict
from ..graphs.errors import DraftgraphError
from ..runtime import load_bundle
from ..runtime.jsonfile import read_json
from . import console
from .fit.bigram import fit_bigram
from .fit.data import Dataset, Prompt, SamplingPlan, open_engine, sample
from .fit.drafter import as_checkpoint, embedding_and_head, new_contract, new_weights
from .fit.model import Drafter
from .fit.relatives import FAMILIES, new_relative, replay
from .fit.train import Recipe, Trainer, Vocabulary
from .fit_drafter import (
    Shape,
    TrainOptions,
    digest,
    shared_drafter,
    texts_digest,
    unused_token,
)
from .prompts import PromptSet

ALL = ("dspark", "dflash", *FAMILIES)
SAVE_EVERY = 120.0  # seconds
Report = Callable[[str], None]


def compare(
    target_path: str,
    data_folder: Path,
    families: Sequence[str],
    shape: Shape,
    train: TrainOptions,
    *,
    drafters: Sequence[Path] = (),
    prompts: Sequence[PromptSet] = (),
    max_new_tokens: int = 96,
    out: Path | None = None,
    seed: int = 0,
    threads: int | None = None,
    report: Report = lambda message: None,
) -> list[dict[str, Any]]:
    """Train every family on the data of an earlier fit and measure it on the held-out split.

    The block drafters have `shape.layers` layers, the others theirs. A block means the same for
    all: one anchor with γ slots (one slot for MTP, which is trained for the next token only).
    drafters: finished ones, measured too. prompts: the target decodes these files greedily, and
    every drafter's τ on them is measured by file. out: where checkpoints are kept, so that the
    same call goes on after an interruption. Raises `DraftgraphError`.
    """
    for family in families:
        if family not in ALL:
            raise DraftgraphError(f"family {family!r} is unknown; known: {', '.join(ALL)}")
    if not families and not drafters:
        raise DraftgraphError("nothing to compare: give --families or --drafter")
    if len({_name(s) for s in prompts}) < len(prompts):
        raise DraftgraphError("two prompt files have the same name; rename one")
    source = read_json(data_folder / "source.json", "source file of a data folder")
    target = read_target(target_path)
    if source["target"] != target.provenance:
        raise DraftgraphError(f"{data_folder}: sampled from another target than {target_path}")
    finished = [(path, *_finished(path, target, source["taps"], shape)) for path in drafters]
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
    texts = None
    if prompts:
        report(f"the target decodes {sum(len(s.prompts) for s in prompts)} prompts")
        texts = _decode(target, contract, prompts, max_new_tokens, threads)
    kept = texts_digest(data)
    rows: list[dict[str, Any]] = []

    def measure(name: str, trainer: Trainer) -> None:
        """One row; trainers without steps are of finished drafters."""
        held_out = trainer.evaluate()
        greedy = replay(trainer.drafter, head, data)
        files: dict[str, Any] = {}
        for s in prompts:
            assert texts is not None
            files[_name(s)] = asdict(replay(trainer.drafter, head, texts, None, _name(s)))
        row = {
            "family": name,
            "parameters": sum(w.numel() for w in trainer.drafter.weights.values()),
            "blocks": trainer.step * recipe.sequences * recipe.anchors,
            "seconds": trainer.seconds,
            "held_out": asdict(held_out),
            "greedy_tau": greedy.tau,
            "greedy_survival": greedy.survival,
            "files": files,
        }
        rows.append(row)
        by_file = "".join(f", {file} {f['tau']:.2f}" for file, f in files.items())
        report(f"{name}: expected {held_out.expected:.3f}, greedy τ {greedy.tau:.2f}{by_file}")

    for path, own, weights in finished:
        trainer = Trainer(Drafter(own, weights, embed), head, data, vocabulary, recipe)
        measure(path.name, trainer)
    for family in families:
        drafter = _untrained(family, contract, embed, seed)
        trainer = Trainer(drafter, head, data, vocabulary, recipe)
        run = digest(family, asdict(recipe), to_dict(contract), kept)
        file = None if out is None else out / f"{family}.safetensors"
        if file is not None and file.is_file():
            trainer.load(file, run)
            report(f"{family}: going on from step {trainer.step} of {recipe.steps}")
        elif family not in FAMILIES:
            fit_bigram(drafter.contract, drafter.weights, data, vocabulary, seed, report)
        _train(trainer, file, run)
        measure(family, trainer)
    return rows


def _untrained(family: str, contract: DraftContract, embed: Tensor, seed: int) -> Drafter:
    if family in FAMILIES:
        norm = new_weights(contract, seed)["norm.weight"]
        return new_relative(family, contract, norm, embed, seed)
    if family == "dflash":
        contract = dataclasses.replace(
            contract, markov_type="none", markov_rank=0, confidence_with_markov=False
        )
    return Drafter(contract, new_weights(contract, seed), embed)


def _train(trainer: Trainer, file: Path | None, run: str) -> None:
    saved = time.perf_counter()
    while trainer.step < trainer.recipe.steps:
        trainer.train_step()
        done = trainer.step == trainer.recipe.steps
        if file is not None and (done or time.perf_counter() - saved > SAVE_EVERY):
            trainer.save(file, run)
            saved = time.perf_counter()


def _finished(
    path: Path, target: TargetCheckpoint, taps: Sequence[int], shape: Shape
) -> tuple[DraftContract, dict[str, Tensor]]:
    contract, weights = shared_drafter(path, target)
    if list(contract.tap_ids) != list(taps) or contract.block_size != shape.block_size:
        raise DraftgraphError(
            f"{path}: taps {list(contract.tap_ids)} and γ {contract.block_size}, but the data has "
            f"features of {list(taps)} and the comparison γ {shape.block_size}; give a drafter "
            "that was fitted to such data"
        )
    return contract, weights


def _name(prompts: PromptSet) -> str:
    return prompts.file.stem


def _decode(
    target: TargetCheckpoint,
    contract: DraftContract,
    prompts: Sequence[PromptSet],
    max_new_tokens: int,
    threads: int | None,
) -> Dataset:
    """What the target says to prompts at temperature 0, as held-out texts by file."""
    with tempfile.TemporaryDirectory(prefix="draftgraph-compare-") as name:
        folder = Path(name)
        drafter = as_checkpoint(contract, new_weights(contract, 0))
        export_bundle(target, drafter, folder / "bundle")
        bundle = load_bundle(folder / "bundle", verify=False)
        engine = open_engine(bundle, 16, features=True, threads=threads)
        chat = engine.tokenizer.has_chat_template
        asked = [
            Prompt(tuple(engine.tokenizer.encode(p.formatted(chat))), _name(s), held_out=True)
            for s in prompts
            for p in s.prompts
        ]
        plan = SamplingPlan(len(asked) * max_new_tokens, max_new_tokens, (0.0,), 0)
        sample(engine, asked, plan, folder / "texts", lambda message: None)
        return Dataset(folder / "texts")


def render(rows: list[dict[str, Any]], screen: Console) -> None:
    gamma = len(rows[0]["held_out"]["acceptance"])
    positions = [str(k) for k in range(1, gamma + 1)]
    console.heading(screen, "held out: expected accepted tokens of a block and by position (T=1)")
    show = console.table("drafter", "params", "blocks", "s", "expected", *positions, "τ, greedy")
    for row in rows:
        show.add_row(
            row["family"],
            f"{row['parameters'] / 1e6:.1f}M",
            f"{row['blocks']}" if row["blocks"] else "",
            f"{row['seconds']:.0f}" if row["blocks"] else "",
            f"{row['held_out']['expected']:.3f}",
            *(f"{a:.2f}" for a in row["held_out"]["acceptance"]),
            f"{row['greedy_tau']:.2f}",
        )
    screen.print(show)
    if not rows[0]["files"]:
        return
    console.heading(
        screen, "by prompt file: greedy τ, share of rounds that accept at least k tokens"
    )
    show = console.table("drafter", "file", "τ", *positions)
    for row in rows:
        for file, found in row["files"].items():
            survival = (f"{a:.2f}" for a in found["survival"])
            show.add_row(row["family"], file, f"{found['tau']:.2f}", *survival)
    screen.print(show)
