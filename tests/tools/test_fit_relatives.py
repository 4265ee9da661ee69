"""EAGLE-3, MTP and Medusa: what a block may see, and that each learns on the common data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import export_pair, run_cli, run_cli_ok, write_random_pair

from draftgraph.export.checkpoints import read_target
from draftgraph.runtime import Engine, SamplingParams
from draftgraph.tools.fit.data import Dataset, Record, Sample, write_part
from draftgraph.tools.fit.drafter import embedding_and_head, new_contract, new_weights
from draftgraph.tools.fit.model import Context, Drafter
from draftgraph.tools.fit.relatives import FAMILIES, Family, greedy_blocks, new_relative, replay
from draftgraph.tools.fit.train import Recipe, Trainer, Vocabulary

GAMMA, V, D = 3, 24, 16


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_random_pair(tmp_path_factory.mktemp("relatives"), vocab=V, gamma=GAMMA)


@pytest.fixture(scope="module")
def target_path(pair: tuple[Path, Path]) -> Path:
    return pair[0]


@pytest.fixture(scope="module")
def drafters(target_path: Path) -> dict[str, Drafter]:
    """One of every family, in float64, for the same target."""
    target = read_target(target_path)
    contract = new_contract(
        target.contract,
        block_size=GAMMA,
        layers=1,
        intermediate_size=None,
        taps=(-1, 0),
        mask_token_id=V - 1,
        markov_type="vanilla",
        markov_rank=4,
        confidence=True,
    )
    embed, _ = embedding_and_head(target)
    weights = new_weights(contract, 0)
    made: dict[str, Drafter] = {"dspark": Drafter(contract, weights, embed)}
    made |= {f: new_relative(f, contract, weights["norm.weight"], embed, 0) for f in FAMILIES}
    for drafter in made.values():
        drafter.embed = embed.double()
        for name, w in drafter.weights.items():
            # Matrices of size one, so that no influence is too small to see.
            scale = 1.0 if w.ndim == 1 else w.shape[-1] ** -0.5 / max(float(w.std()), 1e-3)
            drafter.weights[name] = (w.detach().double() * scale).requires_grad_()
    return made


def block_of(
    drafter: Drafter, features: torch.Tensor, text: torch.Tensor, anchor: int
) -> torch.Tensor:
    tokens = text[anchor : anchor + GAMMA][None]
    return drafter.blocks([Context(features, torch.tensor([anchor]), text)], tokens).hidden[0]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_what_a_block_depends_on(family: Family, drafters: dict[str, Drafter]) -> None:
    """Slot k of a chain: features before the anchor, tokens up to the anchor and k after it. A
    Medusa head: the last feature alone."""
    drafter, anchor = drafters[family], 4
    torch.manual_seed(0)
    features = torch.randn(8, 2 * D, dtype=torch.float64, requires_grad=True)
    text = torch.arange(10)  # all different: the embedding's gradient tells positions apart
    drafter.embed.requires_grad_()
    hidden = block_of(drafter, features, text, anchor)
    for slot in range(GAMMA):
        rows, ids = torch.autograd.grad(
            hidden[slot, 0], (features, drafter.embed), retain_graph=True, allow_unused=True
        )
        seen = [] if ids is None else (ids != 0).any(1).nonzero()[:, 0].tolist()
        assert (rows != 0).any(1).nonzero()[:, 0].tolist() == (
            [3] if family == "medusa" else [0, 1, 2, 3]
        )
        # Token 0 is paired with no feature: row t holds token t + 1.
        assert seen == ([] if family == "medusa" else list(range(1, anchor + slot + 1)))
    drafter.embed.requires_grad_(False)


@pytest.mark.parametrize("family", ["eagle3", "mtp"])
def test_a_chain_is_an_ordinary_causal_layer(family: Family, drafters: dict[str, Drafter]) -> None:
    """Step 0 at anchor a equals row a-1 of the layer run over the whole text, one row at a time."""
    drafter = drafters[family]
    torch.manual_seed(1)
    features, text = torch.randn(8, 2 * D, dtype=torch.float64), torch.randint(V, (12,))
    spec, w = drafter.contract.decoder, drafter.weights
    with torch.no_grad():
        states = features @ w["fc.weight"].T
        entering, residual = drafter.inputs(states, text[1:9])  # type: ignore[attr-defined]
        table = drafter._rope(torch.arange(8), torch.float64)
        q, k = (
            drafter._heads(entering, "layers.0.", kind, heads, table)
            for kind, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads))
        )
        v = drafter._heads(entering, "layers.0.", "v", spec.num_kv_heads)
        share = spec.num_heads // spec.num_kv_heads
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
        )
        x = residual + drafter._linear(
            mixed.transpose(0, 1).flatten(1), "layers.0.self_attn.o_proj"
        )
        x = x + drafter._mlp(drafter._norm(x, "layers.0.post_attention_layernorm"), "layers.0.")
        expected = drafter._norm(x, "norm")
        for anchor in (1, 5, 8):
            found = block_of(drafter, features[:anchor], text, anchor)[0]
            torch.testing.assert_close(found, expected[anchor - 1], atol=1e-10, rtol=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Texts that count upwards from a random start, with certainty; features show the token."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    table = torch.randn(V, 2 * D, generator=torch.Generator().manual_seed(0))
    samples = []
    for number in range(40):
        tokens = (rng.integers(V) + torch.arange(30)) % V
        record = Record(number, "counting", 0.0, 4, 30, number % 8 == 0)
        ids = torch.stack([tokens[4:], (tokens[4:] + 1) % V], 1).int()
        probs = torch.tensor([[1.0, 0.0]]).expand(26, 2).half()
        samples.append(Sample(record, tokens.int(), table[tokens[:-1]].bfloat16(), ids, probs))
    write_part(folder, samples)
    (folder / "source.json").write_text("{}")
    return Dataset(folder)


@pytest.mark.parametrize("family", ["dspark", *FAMILIES])
def test_every_family_learns_to_count(family: str, target_path: Path, data: Dataset) -> None:
    """MTP, trained for the next token only, must at least get that one right."""
    target = read_target(target_path)
    contract = new_contract(
        target.contract,
        block_size=GAMMA,
        layers=1,
        intermediate_size=None,
        taps=(-1, 0),
        mask_token_id=V - 1,
        markov_type="vanilla",
        markov_rank=4,
        confidence=True,
    )
    embed, head = embedding_and_head(target)
    weights = new_weights(contract, 0)
    drafter = Drafter(contract, weights, embed)
    if family in FAMILIES:
        drafter = new_relative(family, contract, weights["norm.weight"], embed, 0)  # type: ignore[arg-type]
    recipe = Recipe(steps=300, sequences=4, anchors=16, learning_rate=1e-2)
    trainer = Trainer(drafter, head, data, Vocabulary(data, V, 0, 0, 0), recipe)
    before, greedy_before = trainer.evaluate(), replay(drafter, head, data)
    assert replay(drafter, head, data, source="another").texts == 0
    for _ in range(recipe.steps):
        trainer.train_step()
    after, greedy = trainer.evaluate(), replay(drafter, head, data)
    assert after.acceptance[0] > 0.9 > before.acceptance[0] + 0.5
    assert greedy.survival[0] > 0.9 and greedy.tau > greedy_before.tau + 0.5
    if family != "mtp":
        assert after.expected > 2.5 and greedy.tau > 3.4  # of 3 and 4


def test_greedy_blocks_follow_their_own_picks(drafters: dict[str, Drafter]) -> None:
    """Fed with its own block, a drafter predicts that block."""
    torch.manual_seed(2)
    head = torch.randn(V, D, dtype=torch.float64)
    text = torch.randint(V, (10,))
    for drafter in drafters.values():
        context = Context(torch.randn(5, 2 * D, dtype=torch.float64), torch.tensor([5]), text)
        drafts = greedy_blocks(drafter, head, [context], text[5:6])[0]
        tokens = torch.cat([text[5:6], drafts[:-1]])[None]
        with torch.no_grad():
            out = drafter.blocks([context], tokens)
            logits = out.hidden[0] @ head.T
            if out.low_rank.shape[-1]:
                logits += out.low_rank[0] @ drafter.weights["markov_head.markov_w2.weight"].T
        assert logits.argmax(-1).tolist() == drafts.tolist()


def test_one_command_compares_all(pair: tuple[Path, Path], data: Dataset, tmp_path: Path) -> None:
    target, draft = pair
    source = {"target": read_target(target).provenance, "taps": [-1, 0]}
    (data.folder / "source.json").write_text(json.dumps(source))
    prompts = {
        name: [rng.integers(V, size=5).tolist() for _ in range(6)]
        for name, rng in (("one", np.random.default_rng(1)), ("two", np.random.default_rng(2)))
    }
    arguments = ["fit-compare", "--target", target, "--data", data.folder, "--anchors=256"]
    arguments += ["--block-size=3", "--layers=1", "--markov-rank=4", "--max-new-tokens=24"]
    arguments += ["--drafter", draft, "--out", tmp_path / "out", "--json", tmp_path / "all.json"]
    for name, ids in prompts.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"prompt": i}) + "\n" for i in ids))
        arguments += ["--prompts", file]
    result = run_cli_ok(*arguments)
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert [r["family"] for r in rows] == [
        draft.name,
        *("dspark", "dflash", "eagle3", "mtp", "medusa"),
    ]
    for row in rows:
        assert row["family"] in result.stdout and len(row["held_out"]["acceptance"]) == GAMMA
        assert [f["texts"] for f in row["files"].values()] == [6, 6]

    # The runtime's own loop says the same of the finished drafter.
    engine = Engine.load(export_pair(target, draft, tmp_path / "bundle"))
    for name, ids in prompts.items():
        outputs = engine.generate_batch(ids, SamplingParams(max_new_tokens=24))
        accepted = [r.accepted for o in outputs for r in o.rounds if r.verified == GAMMA]
        assert rows[0]["files"][name]["tau"] == pytest.approx(1 + np.mean(accepted))

    # The same call finds everything trained.
    again = run_cli_ok(*arguments)
    assert "going on from step 1 of 1" in again.stderr
    figures = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert figures == rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--families=dspark,hydra"], "hydra"),
        (["--families="], "nothing to compare"),
        (["--block-size=4", "--drafter", "{draft}"], "γ 3.*comparison γ 4"),
        (["--prompts", "{here}/a.txt", "--prompts", "{here}/b/a.jsonl"], "same name"),
    ],
)
def test_refusals(
    options: list[str], message: str, pair: tuple[Path, Path], data: Dataset, tmp_path: Path
) -> None:
    (data.folder / "source.json").write_text(
        json.dumps({"target": read_target(pair[0]).provenance, "taps": [-1, 0]})
    )
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("Hello\n")
    (tmp_path / "b" / "a.jsonl").write_text('{"prompt": [1]}\n')
    options = [o.format(draft=pair[1], here=tmp_path) for o in options]
    refused = run_cli("fit-compare", "--target", pair[0], "--data", data.folder, *options)
    assert refused.exit_code == 2
    assert re.search(message, " ".join(refused.stderr.split()))
