"""`draftgraph fit` from prompts to a drafter in the runtime, on a tiny trained target."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CHAT_TEMPLATE, character_tokenizer
from helpers import GOLDENS_ROOT, load_golden
from helpers import run_cli as run
from helpers import run_cli_ok as ok
from safetensors import safe_open

from draftgraph.export.bundle import export_bundle
from draftgraph.export.checkpoints import read_draft, read_target
from draftgraph.export.draft_vocab import read_draft_vocab, restrict
from draftgraph.export.reference import ReferenceTarget
from draftgraph.graphs.errors import DraftgraphError
from draftgraph.runtime import Engine, load_bundle
from draftgraph.runtime.backends.onnxruntime import backend as onnxruntime_backend
from draftgraph.tools import fit_drafter
from draftgraph.tools.fit import data as fit_data
from draftgraph.tools.fit.bigram import fit_bigram
from draftgraph.tools.fit.confidence import hits, outcomes, refit
from draftgraph.tools.fit.data import (
    Checks,
    Dataset,
    Record,
    Sample,
    SamplingPlan,
    write_part,
)
from draftgraph.tools.fit.drafter import default_taps, rope_parameters
from draftgraph.tools.fit.loss import Targets
from draftgraph.tools.fit.relatives import greedy_blocks
from draftgraph.tools.fit.train import Recipe, Trainer, Vocabulary

NAME = "qwen3-vanilla"
ARGUMENTS = (
    *("--tokens=2500", "--max-new-tokens=48", "--anchors=6400", "--sequences-per-step=2"),
    *("--anchors-per-sequence=16", "--checkpoints=2", "--held-out=0.15", "--markov-rank=16"),
    *("--lr=3e-3", "--threads=1", "--max-seq-len=256"),
)


@pytest.fixture(scope="module", autouse=True)
def pool_of_any_size() -> Iterator[None]:
    """torch gets one thread; the pool of this process was sized by whatever ran first."""
    onnxruntime_backend.use_one_thread_pool(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime_backend, "_thread_pool_size", 1)
        yield


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """`fit` sets the number of torch's threads; the other tests get theirs back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer and a chat template, and a file of prompts."""
    folder = tmp_path_factory.mktemp("fit")
    shutil.copytree(GOLDENS_ROOT / NAME / "target", folder / "target")
    character_tokenizer().save(str(folder / "target" / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|end|>"}
    (folder / "target" / "tokenizer_config.json").write_text(json.dumps(config))
    lines = [
        json.dumps({"prompt": list(ids[start : start + 12]), "source": f"prompt {number}"})
        for number, p in enumerate(load_golden(NAME).prompts)
        for ids in [p["plain_greedy"]]
        for start in range(0, len(ids) - 12, 4)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


def arguments(folder: Path, out: Path, *more: str) -> tuple[str | Path, ...]:
    prompts = folder / "prompts.jsonl"
    return ("fit", "--target", folder / "target", "--prompts", prompts, "--out", out, *more)


@pytest.fixture(scope="module")
def fitted(folder: Path) -> Path:
    """The output directory of a whole run; do not modify it."""
    ok(*arguments(folder, folder / "out", *ARGUMENTS))
    return folder / "out"


def history(out: Path) -> list[dict[str, Any]]:
    return json.loads((out / "fit.json").read_text())["history"]


# The result


def test_the_expected_accepted_length_triples(fitted: Path) -> None:
    first, *_, last = history(fitted)
    assert first["step"] == 0 and last["step"] == 200
    assert last["held_out"]["expected"] > 3 * first["held_out"]["expected"]
    assert last["held_out"]["acceptance"][0] > first["held_out"]["acceptance"][0] + 0.2


def test_the_runtime_accepts_what_training_expects(fitted: Path) -> None:
    """τ at temperature 1, sampled from scratch in the real loop, against the teacher-forced figure
    of the same drafter."""
    result = json.loads((fitted / "fit.json").read_text())
    tau, expected = result["runtime"]["t1"]["tau"], result["history"][-1]["held_out"]["expected"]
    assert abs(tau - 1 - expected) < 0.4 * expected
    assert result["runtime"]["t0"]["tau"] > result["history"][0]["runtime"]["t0"]["tau"] + 0.3


def test_the_drafter_is_a_deepspec_checkpoint(fitted: Path, folder: Path) -> None:
    """Read by the same reader as anybody's, embedding and head left to the target; the bundle holds
    exactly these weights."""
    config = json.loads((fitted / "drafter" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["shared_with_target"] == ["embed_tokens.weight", "lm_head.weight"]
    assert config["mask_token_id"] == 97  # <|pad|>: the first special token that is free
    checkpoint = read_draft(fitted / "drafter", read_target(folder / "target"))
    assert checkpoint.contract.shares_embedding and checkpoint.contract.shares_head
    bundle = load_bundle(fitted / "bundle")
    assert bundle.draft == checkpoint.contract
    with safe_open(fitted / "bundle" / "weights.safetensors", "np") as stored:
        np.testing.assert_array_equal(
            stored.get_tensor("markov.w2.weight"),
            checkpoint.weights["markov_head.markov_w2.weight"].astype(np.float32),
        )
    output = Engine.load(fitted / "bundle").generate([5, 6, 7])
    assert output.stats.tau is not None


def test_the_drafter_comes_with_its_vocabulary(fitted: Path, folder: Path) -> None:
    """draft_vocab.json: every token here, those that the texts are made of first."""
    target = read_target(folder / "target")
    size = target.contract.vocab_size
    ids = read_draft_vocab(fitted / "drafter" / "draft_vocab.json", size)
    assert sorted(ids) == list(range(size))
    data = Dataset(fitted / "data")
    counts = np.zeros(size)
    for index in data.split(held_out=False):
        counts += np.bincount(data.tokens(index), minlength=size)
    assert counts[ids[: size // 2]].sum() > 0.8 * counts.sum()
    assert restrict(read_draft(fitted / "drafter", target), 9).contract.draft_vocab_size == 9


def test_with_embeddings(fitted: Path, folder: Path, tmp_path: Path) -> None:
    """DeepSpec's own loader needs them in the file; ours finds that they are the target's."""
    target = read_target(folder / "target")
    checkpoint = read_draft(fitted / "drafter", target)
    weights = {n: torch.from_numpy(checkpoint.weights[n]) for n in checkpoint.weights.names()}
    fit_drafter.save_drafter(
        tmp_path, checkpoint.contract, weights, target, anchors=4, with_embeddings=True
    )
    with safe_open(tmp_path / "model.safetensors", "np") as stored:
        assert {"embed_tokens.weight", "lm_head.weight"} <= set(stored.keys())
    assert "shared_with_target" not in json.loads((tmp_path / "config.json").read_text())


# Data


def test_recorded_features_and_distributions_are_the_targets(
    fitted: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of decoding in a batch, prompts and all, against transformers on each whole text."""
    monkeypatch.setattr(fit_data, "degenerate", lambda answer: None)  # greedy ones are loops here
    data = Dataset(fitted / "data")
    bundle = load_bundle(fitted / "bundle", verify=False)
    reference = ReferenceTarget(folder / "target", bundle.draft.tap_ids)
    temperatures, indices = set(), range(0, len(data), 5)
    for index in indices:
        record, tokens = data.record(index), data.tokens(index)
        temperatures.add(record.temperature)
        logits, features = reference(tokens)
        found = data.features(index, record.length - 1)
        torch.testing.assert_close(found, features[:-1], rtol=2**-7, atol=1e-2)  # bf16
        p = torch.softmax(logits[record.prompt_length - 1 : -1], -1)
        ids, probs = data.targets(index)
        assert ids.shape == (record.length - record.prompt_length, 100)  # all of them
        torch.testing.assert_close(probs, p.gather(1, ids), rtol=2e-3, atol=1e-4)
        if record.temperature == 0:
            assert (ids[:, 0] == tokens[record.prompt_length :]).all()
    assert 0 in temperatures and len(temperatures) > 2


def test_the_split_is_by_prompt(fitted: Path) -> None:
    data = Dataset(fitted / "data")
    sides: dict[bytes, set[bool]] = {}
    for index in range(len(data)):
        record = data.record(index)
        prompt = data.tokens(index)[: record.prompt_length].numpy().tobytes()
        sides.setdefault(prompt, set()).add(record.held_out)
    assert all(len(s) == 1 for s in sides.values())
    assert {True, False} == set().union(*sides.values())
    assert {data.record(i).source for i in range(len(data))} & {"prompt 0", "prompt 3"}


def test_no_prompt_is_decoded_greedily_twice() -> None:
    """It would say the same. Otherwise a prompt that comes again gets the next temperature."""
    plan = SamplingPlan(0, 8, (0.0, 0.5, 1.0), 0)
    first = [(n % 2, plan.temperature(n, 2)) for n in itertools.islice(plan.jobs(2), 7)]
    assert first[:6] == [(0, 0.0), (1, 0.5), (0, 0.5), (1, 1.0), (0, 1.0), (1, 0.0)]
    assert first[6] == (1, 0.5)  # 6 would be prompt 0 at temperature 0
    assert list(dataclasses.replace(plan, temperatures=(0.0,)).jobs(3)) == [0, 1, 2]


def test_sampling_ends_when_every_prompt_was_decoded_greedily(fitted: Path, tmp_path: Path) -> None:
    bundle = load_bundle(fitted / "bundle", verify=False)
    prompts = [fit_data.Prompt((5 + i, 6), "p", False) for i in range(3)]
    plan, said = SamplingPlan(10_000, 8, (0.0,), 0), list[str]()
    for _ in range(2):  # the second call finds nothing left to do
        engine = fit_data.open_engine(bundle, 2, features=False, threads=1)
        fit_data.sample(engine, prompts, plan, tmp_path, said.append)
        assert [r.number for r in fit_data.records(tmp_path)] == [0, 1, 2]
        assert "more prompts" in said[-1]


def test_recomputed_features_equal_the_kept_ones(fitted: Path) -> None:
    bundle = load_bundle(fitted / "bundle", verify=False)
    backend = fit_data.RecordingBackend(bundle, features=True)
    kept = Dataset(fitted / "data")
    again = Dataset(fitted / "data", lambda ids: fit_data.run_target(backend, ids, None)[0])
    for index in (0, len(kept) - 1):
        a, b = (d.features(index, 20) for d in (kept, again))
        assert a.shape == (20, 3 * 64)
        torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-2)


def test_texts_sampled_earlier(fitted: Path, tmp_path: Path) -> None:
    """--samples: tokens alone give the features and distributions that sampling recorded."""
    sampled = Dataset(fitted / "data")
    lengths = [sampled.record(i).length for i in range(6)]
    np.savez(
        tmp_path / "old.npz",
        tokens=np.concatenate([sampled.tokens(i).numpy() for i in range(6)]).astype(np.uint16),
        lengths=lengths,
        starts=[sampled.record(i).prompt_length for i in range(6)],
        temps=[sampled.record(i).temperature for i in range(6)],
    )
    backend = fit_data.RecordingBackend(load_bundle(fitted / "bundle"), features=True)
    file = tmp_path / "old.npz"
    for _ in range(2):  # the second time there is nothing left to do
        fit_data.import_samples(backend, file, tmp_path / "data", 0.15, lambda line: None)
    taken = Dataset(tmp_path / "data")
    assert len(taken) == 6
    for i in range(6):
        j = 5 - i  # numbers count down from -1
        assert torch.equal(taken.tokens(j), sampled.tokens(i))
        torch.testing.assert_close(
            taken.features(j, lengths[i] - 1),
            sampled.features(i, lengths[i] - 1),
            rtol=2**-6,
            atol=1e-2,
        )
        for a, b in zip(taken.targets(j), sampled.targets(i), strict=True):
            assert a.shape == b.shape
        torch.testing.assert_close(
            taken.targets(j)[1][:, :3], sampled.targets(i)[1][:, :3], atol=2e-3, rtol=0
        )
        assert taken.record(j).held_out == sampled.record(i).held_out


def text_of(tokens: list[int], temperature: float, ids: list[int], probs: list[float]) -> Sample:
    """A stored text of one prompt token, with the same distribution everywhere."""
    count = len(tokens) - 1
    return Sample(
        Record(0, "test", temperature, 1, len(tokens), False),
        torch.tensor(tokens, dtype=torch.int32),
        torch.zeros(count, 4, dtype=torch.bfloat16),
        torch.tensor([ids] * count, dtype=torch.int32),
        torch.tensor([probs] * count).half(),
    )


def test_useless_texts_are_left_out(tmp_path: Path) -> None:
    varied = [int(x) for x in np.random.default_rng(0).integers(0, 50, 60)]
    texts = {
        "short": varied[:6],
        "repeated": [1, *[7] * 30],
        "loop": [1, *[5, 6, 7] * 20],
        "good": varied,
        "twice": varied,
    }
    write_part(tmp_path, [text_of(t, 1.0, [1, 2], [0.5, 0.5]) for t in texts.values()])
    data = Dataset(tmp_path)
    assert len(data) == 1 and data.tokens(0).tolist() == varied
    assert sorted(data.checks.dropped.values()) == [1, 1, 1, 1]
    assert len(data.checks.dropped) == 4
    with pytest.raises(DraftgraphError, match="4 of 5 sampled sequences are of no use"):
        data.checks.verify()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_texts_that_were_not_sampled_from_the_target_are_refused(temperature: float) -> None:
    """The figure that a shifted row, a wrong temperature or a NaN in the sampler would move."""
    p = np.array([0.6, 0.2, 0.1, 0.06, 0.04])
    q = p ** (1 / temperature) if temperature else np.eye(5)[0]
    rng = np.random.default_rng(0)
    answer = rng.choice(5, 2000, p=q / q.sum()).tolist()
    ids, probs = torch.arange(5).expand(2000, 5), torch.tensor(p).expand(2000, 5)
    checks = Checks()
    checks.add(answer, temperature, ids, probs)
    checks.verify()
    for wrong in ([0] * 2000 if temperature else [1] * 2000, rng.integers(0, 5, 2000).tolist()):
        checks = Checks()
        checks.add(wrong, temperature, ids, probs)
        with pytest.raises(DraftgraphError, match="not sampled from this target"):
            checks.verify()


def test_logits_that_are_not_finite_are_refused() -> None:
    logits = torch.zeros(2, 8)
    logits[1, 3] = float("nan")
    with pytest.raises(DraftgraphError, match="not finite"):
        fit_data.top_tokens(logits, 4)


# The softmax of training


def logit_data(folder: Path, vocab: int) -> Dataset:
    """Two texts over the first eight tokens of a vocabulary, one held out."""
    rng = np.random.default_rng(0)
    samples = []
    for number in range(2):
        sample = text_of([int(x) for x in rng.integers(0, 8, 40)], 1.0, [0, 3], [0.7, 0.2])
        samples.append(
            dataclasses.replace(
                sample, record=dataclasses.replace(sample.record, held_out=bool(number))
            )
        )
    write_part(folder, samples)
    return Dataset(folder)


def test_sampled_columns_stand_for_the_rest(tmp_path: Path) -> None:
    """The partition sum is that of the whole vocabulary: exactly with all columns, on average with
    some. Without sampled ones the rest would be forgotten."""
    data = logit_data(tmp_path, 64)
    logits = torch.randn(64, generator=torch.Generator().manual_seed(0)).double()
    targets = Targets(torch.tensor([5]), torch.tensor([[40, 3]]), torch.tensor([[0.6, 0.3]]))

    def total(vocabulary: Vocabulary, step: int) -> float:
        columns = vocabulary.columns(targets, step)
        assert len(columns.tokens.unique()) == len(columns.tokens)
        return float((logits[columns.tokens] + columns.offset).exp().sum())

    whole = float(logits.exp().sum())
    assert total(Vocabulary(data, 64, 0, 0, 0), 0) == pytest.approx(whole)
    assert total(Vocabulary(data, 64, 10, 54, 0), 0) == pytest.approx(whole)
    sampled = Vocabulary(data, 64, 10, 8, 0)
    sums = [total(sampled, step) for step in range(2000)]
    assert np.mean(sums) == pytest.approx(whole, rel=0.02)
    assert total(sampled, 7) == sums[7]  # a step's columns follow from its number
    assert total(Vocabulary(data, 64, 10, 0, 0), 0) < 0.5 * whole


def test_own_columns_hold_the_targets_then_the_frequent_tokens(tmp_path: Path) -> None:
    data = logit_data(tmp_path, 64)
    vocabulary = Vocabulary(data, 64, 10, 8, 0)
    targets = Targets(torch.tensor([5, 62]), torch.tensor([[40, 3]]), torch.tensor([[0.6, 0.3]]))
    columns = vocabulary.columns(targets, 0)
    own = columns.tokens[:10].tolist()
    assert set(own) == {40, *range(9)}  # 8: the lowest id never seen
    placed = columns.place(targets)
    assert placed.ids.tolist() == [[own.index(40), own.index(3)]]
    assert columns.tokens[placed.labels[0]] == 5 and placed.labels[1] == -1
    assert vocabulary.coverage == pytest.approx(1.0)  # tokens 0 and 3 are all that p holds


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn", "none"])
def test_the_markov_head_starts_as_a_bigram_model(markov: str, fitted: Path, folder: Path) -> None:
    """Alone, without the trunk's logits, it accepts more than guessing; other heads stay."""
    trainer = trainer_of(fitted, folder, markov)
    weights = trainer.drafter.weights
    before = {n: w.detach().clone() for n, w in weights.items()}
    contract = trainer.drafter.contract
    fit_bigram(contract, weights, trainer.data, trainer.vocabulary, seed=0)
    changed = {n for n, w in weights.items() if not torch.equal(w, before[n])}
    if markov in ("rnn", "none"):
        assert not changed
        return
    assert changed == {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    weights["norm.weight"].data.zero_()  # h = 0
    found = trainer.evaluate().acceptance
    weights["markov_head.markov_w2.weight"].data.zero_()
    guessing = trainer.evaluate().acceptance
    assert min(found) > max(guessing)


# Resuming


def trainer_of(fitted: Path, folder: Path, markov: Any = "vanilla") -> Trainer:
    shape = fit_drafter.Shape(markov=markov, markov_rank=16)
    options = fit_drafter.FitOptions(str(folder / "target"), fitted, (), shape=shape)
    target = read_target(folder / "target")
    contract, weights = fit_drafter._drafter(options, target)
    embed, head = fit_drafter.embedding_and_head(target)
    data = Dataset(fitted / "data")
    vocabulary = Vocabulary(data, 100, 48, 16, 0)
    recipe = Recipe(
        steps=8, sequences=2, anchors=8, vocab=48, sampled=16, short_slots=2, short_share=0.5
    )
    return Trainer(fit_drafter.Drafter(contract, weights, embed), head, data, vocabulary, recipe)


def test_a_resumed_run_ends_with_the_same_bits(fitted: Path, folder: Path, tmp_path: Path) -> None:
    whole = trainer_of(fitted, folder)
    for _ in range(8):
        whole.train_step()
    file = tmp_path / "checkpoint.safetensors"
    for start in (0, 3, 5):  # three processes, so to say
        part = trainer_of(fitted, folder)
        if start:
            part.load(file, "run")
        assert part.step == start
        for _ in range({0: 3, 3: 2, 5: 3}[start]):
            part.train_step()
        part.save(file, "run")
    for name, w in whole.drafter.weights.items():
        assert torch.equal(w, part.drafter.weights[name]), name
    with pytest.raises(DraftgraphError, match="other data or settings"):
        part.load(file, "another run")


@pytest.mark.parametrize("greedy", [True, False])
def test_the_confidence_is_fitted_to_held_out_outcomes(
    greedy: bool, fitted: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overconfident head predicts the held-out acceptance on average afterwards, slot by slot
    as it is reached; of greedy texts, the acceptance of greedy drafting."""
    trainer = trainer_of(fitted, folder)
    weights = trainer.drafter.weights
    if not greedy:  # as a run without temperature 0 has them
        warm = [i for i in trainer.held_out if trainer.data.record(i).temperature > 0]
        monkeypatch.setattr(trainer, "held_out", warm)
    for _ in range(4):
        trainer.train_step()
    weights["confidence_head.proj.bias"].data += 2

    def excess() -> float:
        """Mean of predicted less actual acceptance."""
        seen = outcomes(trainer, 4096)
        assert bool((seen.accepted * (1 - seen.accepted) == 0).all()) == greedy
        wrong = (seen.logits.sigmoid() - seen.accepted) * seen.weights
        return float(wrong.sum() / seen.weights.sum())

    assert excess() > 0.1
    head = refit(trainer, 4096)
    assert head is not None and head.after < head.before
    for name, w in head.into(weights).items():
        weights[name].data.copy_(w.detach())
    assert abs(excess()) < 1e-3


def test_greedy_outcomes_are_those_of_a_replay(fitted: Path, folder: Path) -> None:
    """A block is drafted as the runtime drafts it, and compared with what the target said."""
    trainer = trainer_of(fitted, folder)
    index = next(i for i in trainer.held_out if trainer.data.record(i).temperature == 0)
    (batch,) = trainer.held_out_batches(4096, [index])
    found = hits(trainer, batch, trainer.drafter.blocks(batch.contexts, batch.tokens))
    drafts = greedy_blocks(trainer.drafter, trainer.head, batch.contexts, batch.tokens[:, 0])
    same = (drafts == batch.targets.labels.view_as(drafts)) & batch.valid
    assert torch.equal(found.cumprod(1), same.cumprod(1).to(found.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["sampling", "training"])
def test_an_interrupted_command_goes_on(
    moment: str, fitted: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle and called again, it ends with the same drafter, byte for byte."""
    out, calls = tmp_path / "out", 0
    monkeypatch.setattr(fit_data, "PART_SEQUENCES", 8)
    owner, name, limit = {
        "sampling": (fit_data.RecordingBackend, "target", 150),
        "training": (Trainer, "train_step", 130),
    }[moment]
    original = getattr(owner, name)

    def dying(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > limit:
            raise KeyboardInterrupt
        return original(*given)

    monkeypatch.setattr(owner, name, dying)
    assert run(*arguments(folder, out, *ARGUMENTS)).exit_code == 130
    assert not (out / "drafter").exists()
    monkeypatch.setattr(owner, name, original)
    result = ok(*arguments(folder, out, *ARGUMENTS))
    if moment == "training":
        assert "going on from step 100 of 200" in result.stderr
        a, b = (p / "drafter" / "model.safetensors" for p in (fitted, out))
        assert a.read_bytes() == b.read_bytes()
    else:  # the batches differ, so do the texts near ties: compare the sequences sampled twice
        a, b = Dataset(fitted / "data"), Dataset(out / "data")
        assert abs(len(a) - len(b)) < 0.3 * len(a)
    monkeypatch.setattr(owner, name, None)
    assert ok(*arguments(folder, out, *ARGUMENTS)).exit_code == 0  # nothing left to do


# Continuing from a drafter, and with a bundle


def test_going_on_from_a_drafter(fitted: Path, folder: Path, tmp_path: Path) -> None:
    """--init starts with the weights (in fp16) of another run, --data with its texts."""
    more = ("--init", str(fitted / "drafter"), "--data", str(fitted / "data"))
    before = sorted((fitted / "data").iterdir())
    small = (*ARGUMENTS, "--anchors=64", "--lr=1e-5", *more)
    ok(*arguments(folder, tmp_path / "out", *small))
    start, end = history(tmp_path / "out")[0], history(fitted)[-1]
    assert start["held_out"]["expected"] == pytest.approx(end["held_out"]["expected"], rel=0.02)
    assert sorted((fitted / "data").iterdir()) == before


def test_a_bundle_as_the_source_of_features(fitted: Path, folder: Path, tmp_path: Path) -> None:
    """--bundle: its target graph is run, its drafter gives the shape, and it is left as it is."""
    target = read_target(folder / "target")
    restricted = restrict(read_draft(fitted / "drafter", target), 40)  # the fit is over all tokens
    given = export_bundle(target, restricted, tmp_path / "given")
    before = {f.name: f.read_bytes() for f in given.iterdir()}
    small = ("--tokens=600", "--max-new-tokens=32", "--anchors=64", "--held-out=0.3")
    result = ok(
        *arguments(folder, tmp_path / "out", *small, "--bundle", str(given), "--self-written=0")
    )
    assert "exporting" not in result.stderr
    assert {f.name: f.read_bytes() for f in given.iterdir()} == before
    assert load_bundle(tmp_path / "out" / "bundle").draft == load_bundle(given).draft
    checkpoint = read_draft(tmp_path / "out" / "drafter", read_target(folder / "target"))
    with safe_open(tmp_path / "out" / "bundle" / "weights.safetensors", "np") as stored:
        np.testing.assert_array_equal(
            stored.get_tensor("backbone.fc.weight"),
            checkpoint.weights["fc.weight"].astype(np.float32),
        )
        assert restricted.draft_ids is not None
        w2 = checkpoint.weights["markov_head.markov_w2.weight"][restricted.draft_ids]
        np.testing.assert_array_equal(stored.get_tensor("markov.w2.weight"), w2.astype(np.float32))


# Wrong input


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--taps=2,1",), ("--taps", "increasing")),
        (("--taps=3",), ("--taps", "2 (the last layer but one)")),
        (("--mask-id=100",), ("--mask-id", "below 100")),
        (("--temperatures=0,x",), ("--temperatures",)),
        (("--temperatures=9",), ("--temperatures", "0 to 5")),
        (("--held-out=0",), ("--held-out",)),
        (("--tokens=0",), ("--tokens",)),
        (("--lr=0",), ("--lr",)),
        (("--markov-rank=0",), ("--markov-rank", "--markov none")),
        (("--max-new-tokens=4",), ("--max-new-tokens",)),
        (("--init=nowhere",), ("nowhere",)),
        (("--bundle=nowhere",), ("nowhere",)),
    ],
)
def test_refuses(
    more: tuple[str, ...], words: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    result = run(*arguments(folder, tmp_path / "out", *more))
    assert result.exit_code == 2 and "Traceback" not in result.output
    for word in words:
        assert word in result.stderr
    assert not (tmp_path / "out" / "bundle").exists()


def test_refuses_other_settings_in_the_same_directory(fitted: Path, folder: Path) -> None:
    result = run(*arguments(folder, fitted, *ARGUMENTS, "--layers=3"))
    assert result.exit_code == 2
    assert "shape.layers: 2 before, 3 now" in result.stderr


def test_refuses_a_directory_of_something_else(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("do not lose this")
    result = run(*arguments(folder, tmp_path))
    assert result.exit_code == 2 and "not from `draftgraph fit`" in result.stderr


def test_refuses_data_of_another_target(fitted: Path, tmp_path: Path, folder: Path) -> None:
    other = GOLDENS_ROOT / "llama-vanilla-threshold" / "target"
    prompts, data = folder / "prompts.jsonl", fitted / "data"
    result = run(
        *("fit", "--target", other, "--prompts", prompts, "--data", data, "--out", tmp_path / "o"),
        "--max-seq-len=256",
    )
    assert result.exit_code == 2 and "sampled from another target" in result.stderr


# Shapes


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        (36, (1, 9, 17, 25, 33)),  # DeepSpec's own for Qwen3-4B
        (30, (1, 8, 14, 20, 27)),
        (4, (0, 1, 2)),
        (2, (0,)),
        (1, (-1,)),
    ],
)
def test_default_taps(layers: int, taps: tuple[int, ...]) -> None:
    assert default_taps(layers) == taps


@pytest.mark.parametrize("name", ["llama3", "yarn", "linear"])
def test_rope_settings_survive_being_written(name: str, tmp_path: Path) -> None:
    from draftgraph.export.checkpoints.config import Config
    from draftgraph.export.checkpoints.rope_config import read_rope
    from draftgraph.graphs.contract import RopeSpec

    rope = {
        "linear": RopeSpec("linear", 1e4, factor=2.0),
        "llama3": RopeSpec(
            "llama3",
            5e5,
            factor=8.0,
            original_max_position_embeddings=64,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        "yarn": RopeSpec("yarn", 1e6, factor=4.0, original_max_position_embeddings=64),
    }[name]
    config = Config({"rope_parameters": rope_parameters(rope)}, "config.json")
    found = read_rope(config, default_theta=None, max_position_embeddings=256)
    assert rope_parameters(found) | rope_parameters(rope) == rope_parameters(found)
