"""Comparing bundles: nothing differs from itself, damage shows, other vocabularies are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import export_pair, load_golden, run_cli, run_cli_ok, write_random_pair
from safetensors import safe_open

from draftgraph.export.bundle import export_bundle
from draftgraph.export.checkpoints import read_draft, read_target
from draftgraph.export.draft_vocab import restrict, write_draft_vocab
from draftgraph.graphs.errors import DraftgraphError
from draftgraph.runtime import Engine
from draftgraph.tools.compare import NEAR_TIE, Agreement, Comparison
from draftgraph.tools.prompts import BenchPrompt, PromptSet

NAME = "qwen3-vanilla"
EngineFactory = Callable[..., Engine]

PROMPTS = [(5, 6, 7), (70, 83, 70, 1, 2, 3, 4, 5, 6, 40, 41), tuple(range(30, 60))]


def prompt_set(*prompts: tuple[int, ...]) -> list[PromptSet]:
    entries = tuple(BenchPrompt(p, i) for i, p in enumerate(prompts or PROMPTS, start=1))
    return [PromptSet(Path("prompts.jsonl"), entries)]


def compare(engine: Engine, reference: Engine, **options: Any) -> dict[str, Any]:
    return Comparison(engine, reference, **{"max_new_tokens": 20, **options}).run(prompt_set())


def test_figures_follow_their_definitions() -> None:
    agreement = Agreement()
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], np.float32))
    found = np.log(np.array([[0.2, 0.6, 0.2], [0.1, 0.1, 0.8]], np.float32))
    agreement.add(found + np.float32(3.0), reference)  # a shift changes no probability
    figures = agreement.figures()
    assert (figures["agree"], figures["positions"], figures["top1_agreement"]) == (1, 2, 0.5)
    kl = 0.5 * np.log(0.5 / 0.2) + 0.25 * np.log(0.25 / 0.6) + 0.25 * np.log(0.25 / 0.2)
    assert figures["mean_kl"] == pytest.approx(kl / 2, rel=1e-5)
    assert figures["p99_kl"] == pytest.approx(0.99 * kl, rel=1e-4)
    assert figures["max_logit_difference"] == pytest.approx(3 + np.log(0.6 / 0.25), rel=1e-5)


def test_a_bundle_equals_itself(engine: EngineFactory) -> None:
    compared = compare(engine(NAME), Engine.load(engine(NAME).bundle.path))
    greedy, target, drafter = compared["greedy"], compared["target"], compared["drafter"]
    assert greedy["identical"] == greedy["compared"] == len(PROMPTS)
    # Every position of every text once, split where the prompt has chosen its first token.
    tokens = sum(map(len, PROMPTS))
    assert target["prompts"]["positions"] == tokens - len(PROMPTS)
    assert target["continuations"]["positions"] == greedy["tokens"] + len(PROMPTS)
    for figures in (*target.values(), drafter["base_logits"]):
        assert figures["agree"] == figures["positions"] > 0
        assert figures["mean_kl"] == figures["p99_kl"] == figures["max_logit_difference"] == 0
    assert drafter["picks_agree"] == drafter["picks_compared"] > 20
    assert drafter["max_confidence_difference"] == 0


@pytest.mark.parametrize(("dtype", "least", "most_kl"), [("fp16", 0.99, 1e-4), ("bf16", 0.9, 1e-2)])
def test_half_precision_is_close(
    dtype: str, least: float, most_kl: float, engine: EngineFactory
) -> None:
    compared = compare(engine(NAME, dtype=dtype), engine(NAME))
    assert compared["bundle"]["dtype"] == dtype and compared["reference"]["dtype"] == "fp32"
    whole, drafter = compared["target"]["all"], compared["drafter"]
    assert whole["top1_agreement"] >= least
    assert 0 < whole["mean_kl"] < most_kl and whole["p99_kl"] >= whole["mean_kl"]
    assert drafter["picks_agree"] >= least * drafter["picks_compared"] > 20
    assert 0 < drafter["max_confidence_difference"] < 0.1
    assert all(m["near_tie"] for m in compared["greedy"]["mismatches"])


@pytest.fixture
def off_by_one(engine: EngineFactory, tmp_path: Path) -> Engine:
    """A copy whose head is off by one: each row stands for the token before."""
    path = Path(shutil.copytree(engine(NAME).bundle.path, tmp_path / "bundle"))
    file = path / "weights.safetensors"
    with safe_open(file, "np") as opened:
        head = opened.get_tensor("lm_head.weight")
    content = file.read_bytes()
    assert content.count(head.tobytes()) == 1
    file.write_bytes(content.replace(head.tobytes(), np.roll(head, 1, axis=0).tobytes()))
    return Engine.load(path, verify=False)


def test_damage_shows(off_by_one: Engine, engine: EngineFactory) -> None:
    compared = compare(off_by_one, engine(NAME))
    assert compared["target"]["all"]["top1_agreement"] < 0.2
    assert compared["target"]["all"]["mean_kl"] > 1
    greedy = compared["greedy"]
    assert greedy["identical"] == greedy["near_ties"] == 0
    for m in greedy["mismatches"]:
        assert m["position"] == 0 and m["bundle_id"] == m["reference_id"] + 1
        assert m["behind"] >= m["logit_gap"] > NEAR_TIE


def test_logits_that_are_not_finite_are_an_error(damaged: Engine, tmp_path: Path) -> None:
    sound = Engine.load(
        export_pair(*write_random_pair(tmp_path, vocab=40, seed=4), tmp_path / "bundle")
    )
    with pytest.raises(DraftgraphError, match=r"not finite at 3 of 3 positions.* line 1"):
        Comparison(damaged, sound, max_new_tokens=4).run(prompt_set((5, 7, 9)))


def test_only_the_same_tokens_can_be_compared(
    engine: EngineFactory, text_engine: Engine, damaged: Engine
) -> None:
    with pytest.raises(DraftgraphError, match=r"vocabulary of 40 tokens.* 100"):
        Comparison(damaged, engine(NAME))
    with pytest.raises(DraftgraphError, match="different tokenizers"):
        Comparison(engine(NAME), text_engine)


@pytest.mark.parametrize(("other", "compared"), [(30, True), (20, False)])
def test_drafters_are_compared_over_the_tokens_that_both_draft(
    other: int, compared: bool, tmp_path: Path
) -> None:
    golden = load_golden(NAME)
    shutil.copytree(golden.draft, tmp_path / "draft")
    write_draft_vocab(tmp_path / "draft", np.arange(40))
    target = read_target(golden.target)
    drafter = read_draft(tmp_path / "draft", target)
    engines = [
        Engine.load(export_bundle(target, restrict(drafter, size), tmp_path / f"{i}"))
        for i, size in enumerate((30, other))
    ]
    found = compare(*engines, max_new_tokens=8)["drafter"]
    assert (found is not None) == compared
    if compared:
        assert found["picks_agree"] == found["picks_compared"] > 0


def test_blocks_of_different_size_are_not_compared(tmp_path: Path) -> None:
    paths = []
    for gamma in (3, 4):
        pair = write_random_pair(tmp_path / str(gamma), vocab=24, gamma=gamma, seed=4)
        paths.append(export_pair(*pair, tmp_path / str(gamma) / "bundle"))
    run = Comparison(*map(Engine.load, paths), max_new_tokens=4).run
    assert run(prompt_set((1, 2)))["drafter"] is None


def test_command(
    engine: EngineFactory, bundle: Callable[..., Path], off_by_one: Engine, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [*PROMPTS, [5] * 1020]
    prompts.write_text("".join(json.dumps({"prompt": list(p)}) + "\n" for p in lines))
    out = tmp_path / "figures.json"
    arguments = ("--prompts", prompts, "--max-new-tokens", "8", "--no-verify")
    result = run_cli_ok("compare", off_by_one.bundle.path, bundle(NAME), *arguments, "--json", out)
    figures = json.loads(out.read_text())
    assert figures["greedy"]["compared"] == len(PROMPTS)
    assert figures["skipped"] == [{"file": str(prompts), "line": 4, "tokens": 1020}]
    text = " ".join(result.stdout.split())
    for part in (
        "0 of 3 identical",
        "drafted tokens",
        "gap of the reference's two best",
        "left out",
        f"{figures['target']['all']['top1_agreement']:.2%}",
    ):
        assert part in text

    refused = run_cli("compare", bundle(NAME), bundle(NAME), *arguments, "--json", tmp_path)
    assert refused.exit_code == 2 and "give a file name" in refused.output
    arguments = ("--prompts", prompts, "--max-new-tokens", "1024")
    refused = run_cli("compare", bundle(NAME), bundle(NAME), *arguments)
    assert refused.exit_code == 2 and "no prompt fits" in refused.output
