"""The engine's rounds: rollback, verify widths, stopping, budgets, capacity, seeds, statistics."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import GOLDENS, GOLDENS_ROOT, Golden, export_pair, load_golden, write_random_pair

from draftgraph.runtime import DraftgraphError, Engine, Output, SamplingParams
from draftgraph.runtime import engine as engine_module
from draftgraph.runtime.backends.onnxruntime import backend as onnxruntime_backend
from draftgraph.runtime.backends.onnxruntime import features
from draftgraph.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu
from draftgraph.runtime.engine import Draft, Request

EngineFactory = Callable[..., Engine]
NAME = "qwen3-vanilla"
NO_STOP: dict[str, Any] = {"stop_ids": ()}


def prompt_of(name: str = NAME) -> list[int]:
    """Of qwen3-vanilla the prompt whose greedy continuation takes longest to repeat itself."""
    return list(load_golden(name).prompts[2 if name == NAME else 0]["prompt"])


def same(a: Output, b: Output) -> bool:
    """Equal in everything but times."""
    return (a.token_ids, a.rounds, a.finish_reason) == (b.token_ids, b.rounds, b.finish_reason)


def force_widths(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, widths: Callable[[], int]
) -> None:
    """Verify `widths()` drafted tokens per round, whatever the policy says."""

    def schedule(running: list[Request], drafts: dict[int, Draft]) -> list[int]:
        return [min(widths(), engine.gamma, r.budget) if r.slot in drafts else 0 for r in running]

    monkeypatch.setattr(engine, "_schedule", schedule)


# Rollback and verify widths


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A random pair over 8 tokens, which accepts and rejects often and never repeats itself."""
    folder = tmp_path_factory.mktemp("lively")
    pair = write_random_pair(folder, vocab=8, gamma=4, sharpness=1.5, max_positions=256)
    return Engine.load(export_pair(*pair, folder / "bundle"))


@pytest.mark.parametrize("name", GOLDENS)
def test_every_verify_width(
    name: str, engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy output does not depend on how much is verified, 1 to γ + 1 tokens per target call."""
    runner = engine(name)
    params = SamplingParams(max_new_tokens=24, **NO_STOP)
    rng = np.random.default_rng(0)
    for prompt in (prompt_of(name), rng.integers(0, 96, 20).tolist()):
        plain = runner.generate(prompt, params, speculative=False)
        for width in range(runner.gamma + 1):
            force_widths(monkeypatch, runner, lambda width=width: width)  # type: ignore[misc]
            output = runner.generate(prompt, params)
            assert output.token_ids == plain.token_ids, f"width {width}"
            assert all(r.accepted <= r.verified <= width for r in output.rounds)
            assert output.rounds[0].verified == width


def test_widths_that_change_every_round(
    engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of longer rounds lie stale in both caches while shorter ones follow."""
    runner = engine(NAME)
    params = SamplingParams(max_new_tokens=80, **NO_STOP)
    plain = runner.generate(prompt_of(), params, speculative=False)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        force_widths(monkeypatch, runner, lambda rng=rng: int(rng.integers(0, 8)))  # type: ignore[misc]
        assert runner.generate(prompt_of(), params).token_ids == plain.token_ids


@pytest.mark.parametrize("name", GOLDENS)
def test_speculative_equals_plain_on_random_prompts(name: str, engine: EngineFactory) -> None:
    runner = engine(name)
    rng = np.random.default_rng(len(name))
    params = SamplingParams(max_new_tokens=24, **NO_STOP)
    accepted = 0
    for length in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89):
        prompt = rng.integers(0, 96, length).tolist()
        fast = runner.generate(prompt, params)
        assert fast.token_ids == runner.generate(prompt, params, speculative=False).token_ids
        accepted += fast.stats.accepted
    assert accepted > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_generation_leaves_nothing_behind(temperature: float, engine: EngineFactory) -> None:
    """One engine, many requests: the caches still hold the rows of the ones before."""
    runner = engine(NAME)
    params = SamplingParams(max_new_tokens=30, temperature=temperature, seed=5, **NO_STOP)
    first = runner.generate(prompt_of(), params)
    runner.generate(prompt_of(GOLDENS[0])[::-1], params)
    assert same(runner.generate(prompt_of(), params), first)


def test_rounds_are_contiguous(engine: EngineFactory) -> None:
    """Every round starts at the anchor that the round before committed last (trap 18)."""
    output = engine(NAME).generate(prompt_of(), SamplingParams(max_new_tokens=60, **NO_STOP))
    ids, position = output.prompt_ids + output.token_ids, len(output.prompt_ids)
    for r in output.rounds:
        assert r.start == position
        assert ids[r.start + 1 : r.start + 1 + r.accepted] == r.draft_ids[: r.accepted]
        position += r.accepted + (r.next_id is not None)
        if r.next_id is not None:
            assert ids[position] == r.next_id


# Prefill and capacity


@pytest.mark.parametrize("chunk", [1, 8, 129])
@pytest.mark.parametrize("speculative", [True, False])
def test_prefill_in_chunks(
    chunk: int, speculative: bool, engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine(NAME)
    params = SamplingParams(max_new_tokens=32, **NO_STOP)
    prompt = load_golden(NAME).prompts[3]["prompt"]
    assert len(prompt) == 130
    whole = runner.generate(prompt, params, speculative=speculative)
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", chunk)
    parts = runner.generate(prompt, params, speculative=speculative)
    assert parts.token_ids == whole.token_ids
    assert [r.draft_ids for r in parts.rounds] == [r.draft_ids for r in whole.rounds]
    for a, b in zip(parts.rounds, whole.rounds, strict=True):
        np.testing.assert_allclose(a.confidence, b.confidence, atol=1e-5)


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Caches exactly as large as `reserve` asks for: one row too few is an error."""
    monkeypatch.setattr(onnxruntime_backend, "capacity_step", lambda rows: rows)
    yield


@pytest.mark.usefixtures("tight")
def test_reserved_rows_are_enough(bundle: Callable[..., Path], engine: EngineFactory) -> None:
    params = SamplingParams(max_new_tokens=50, **NO_STOP)
    output = Engine.load(bundle(NAME)).generate(prompt_of(), params)
    assert same(output, engine(NAME).generate(prompt_of(), params))


def test_growing_past_a_step_changes_nothing(
    bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caches grow every 64 rows, in mid-generation; then they have room from the start."""
    prompt = load_golden(NAME).prompts[3]["prompt"]
    params = SamplingParams(max_new_tokens=150, **NO_STOP)
    grown = Engine.load(bundle(NAME)).generate(prompt, params)
    assert grown.rounds[-1].start > 256
    monkeypatch.setattr(onnxruntime_backend, "capacity_step", lambda rows: max(rows, 1024))
    roomy = Engine.load(bundle(NAME))
    assert same(grown, roomy.generate(prompt, params))
    assert grown.token_ids == roomy.generate(prompt, params, speculative=False).token_ids


def test_rows_that_earlier_requests_left_change_nothing(bundle: Callable[..., Path]) -> None:
    """The memory of the caches is used again; masked rows only have to be finite."""
    engine = Engine.load(bundle(NAME))
    params = SamplingParams(max_new_tokens=80, **NO_STOP)
    expected = engine.generate(prompt_of(), params)
    backend = engine.backend
    assert isinstance(backend, OnnxRuntimeCpu)
    for caches in backend._caches.values():
        assert caches._block is not None
        caches._block.owner.view(np.float32)[:] = 1e4
    assert same(engine.generate(prompt_of(), params), expected)


def test_feature_rows_stay_for_the_next_batch_up_to_a_limit(
    bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While eight prompts are prefilled, the features of all of them are held."""
    limit = features.KEEP_BYTES
    monkeypatch.setattr(features, "KEEP_BYTES", 0)  # no room is reserved
    engine = Engine.load(bundle(NAME))
    prompts = [load_golden(NAME).prompts[3]["prompt"][:100]] * 8
    params = SamplingParams(max_new_tokens=12, **NO_STOP)

    def rows() -> int:
        count: int = engine.backend._features.all.shape[0]  # type: ignore[attr-defined]
        return count

    before = rows()
    monkeypatch.setattr(features, "KEEP_BYTES", limit)
    first = engine.generate_batch(prompts, params)
    grown = rows()
    assert grown > before
    again = engine.generate_batch(prompts, params)
    assert rows() == grown
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    monkeypatch.setattr(features, "KEEP_BYTES", 0)
    engine.backend.reset(1)
    assert rows() == before
    assert same(engine.generate(prompts[0], params), first[0])


def test_capacity_is_exact(bundle: Callable[..., Path], engine: EngineFactory) -> None:
    """Prompt and budget may fill max_seq_len to the last row, and no more."""
    small = Engine.load(bundle(NAME, max_seq_len=64))
    prompt = prompt_of()
    room = 64 - len(prompt)
    full = SamplingParams(max_new_tokens=room, **NO_STOP)
    output = small.generate(prompt, full)
    assert len(output.token_ids) == room
    assert output.finish_reason == "length"
    assert output.token_ids == engine(NAME).generate(prompt, full).token_ids

    with pytest.raises(DraftgraphError, match=f"capacity of 64 leaves {room}"):
        small.generate(prompt, dataclasses.replace(full, max_new_tokens=room + 1))
    with pytest.raises(DraftgraphError, match=r"prompt has 64 tokens.*capacity is 64"):
        small.generate([1] * 64, full)
    last = small.generate([1] * 63, dataclasses.replace(full, max_new_tokens=1))
    assert len(last.token_ids) == 1


# Budgets


def test_exact_lengths(engine: EngineFactory) -> None:
    """Every budget from 1 gives the beginning of the same text, speculative or not."""
    runner = engine(NAME)
    long = runner.generate(prompt_of(), SamplingParams(max_new_tokens=30, **NO_STOP)).token_ids
    for budget in range(1, 31):
        for speculative in (True, False):
            params = SamplingParams(max_new_tokens=budget, **NO_STOP)
            output = runner.generate(prompt_of(), params, speculative=speculative)
            assert output.token_ids == long[:budget]
            assert output.finish_reason == "length"
            for r in output.rounds:  # nothing is verified that could not be returned
                assert r.verified <= budget - (r.start - len(output.prompt_ids))


def test_one_token_needs_no_round(engine: EngineFactory) -> None:
    output = engine(NAME).generate(prompt_of(), SamplingParams(max_new_tokens=1, **NO_STOP))
    assert output.rounds == []
    assert output.stats.tau is None
    assert output.stats.tpot_ms is None


# Stopping


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculative", [True, False])
def test_stop_id_anywhere(
    speculative: bool, temperature: float, lively: Engine, engine: EngineFactory
) -> None:
    """Each token in turn is the stop id: kept where it first appears, nothing after it."""
    where: set[str] = set()
    runner = lively if temperature else engine(NAME)
    prompts = [[3, 1, 4]] * 6 if temperature else [p["prompt"] for p in load_golden(NAME).prompts]
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(max_new_tokens=80, temperature=temperature, seed=seed, **NO_STOP)
        whole = runner.generate(prompt, params, speculative=speculative)
        for stop in sorted(set(whole.token_ids)):
            stopping = dataclasses.replace(params, stop_ids=(stop,))
            output = runner.generate(prompt, stopping, speculative=speculative)
            assert output.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
            assert output.finish_reason == "stop"
            if not speculative:
                continue
            # What was cut is not counted: the first token comes from the prefill, the rest from
            # rounds.
            counted = sum(r.accepted + (r.next_id is not None) for r in output.rounds)
            assert 1 + counted == len(output.token_ids)
            if not output.rounds:
                where.add("first token")
            elif output.rounds[-1].next_id is not None:
                where.add("token of the target")
            elif output.rounds[-1].accepted < whole.rounds[len(output.rounds) - 1].accepted:
                where.add("inside the accepted run")
    if speculative:
        assert where == {"first token", "token of the target", "inside the accepted run"}


def test_rejected_stop_id_stops_nothing(engine: EngineFactory) -> None:
    """The drafter proposes a token that the target never says; it is a stop id."""
    runner = engine(NAME)
    params = SamplingParams(max_new_tokens=60, **NO_STOP)
    whole = runner.generate(prompt_of(), params)
    rejected = {t for r in whole.rounds for t in r.draft_ids} - set(whole.token_ids)
    assert rejected
    output = runner.generate(
        prompt_of(), dataclasses.replace(params, stop_ids=tuple(sorted(rejected)))
    )
    assert same(output, whole)


def test_several_stop_ids_and_none(engine: EngineFactory) -> None:
    runner = engine(NAME)
    params = SamplingParams(max_new_tokens=60, **NO_STOP)
    whole = runner.generate(prompt_of(), params).token_ids
    early, late = whole[5], whole[8]
    assert early != late
    stopped = runner.generate(prompt_of(), dataclasses.replace(params, stop_ids=(late, early)))
    assert stopped.token_ids == whole[: min(whole.index(late), whole.index(early)) + 1]


def test_stop_ids_of_the_checkpoint(engine: EngineFactory, tmp_path: Path) -> None:
    """generation_config.json may list several; they apply when the request gives none."""
    whole = engine(NAME).generate(prompt_of(), SamplingParams(max_new_tokens=40, **NO_STOP))
    stops = [96, whole.token_ids[8]]
    shutil.copytree(GOLDENS_ROOT / NAME / "target", tmp_path / "target")
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    path = export_pair(tmp_path / "target", GOLDENS_ROOT / NAME / "draft", tmp_path / "bundle")
    runner = Engine.load(path)
    assert runner.bundle.target.stop_ids == tuple(stops)
    output = runner.generate(prompt_of(), SamplingParams(max_new_tokens=40))
    assert output.token_ids == whole.token_ids[: whole.token_ids.index(stops[1]) + 1]
    assert (
        runner.generate(prompt_of(), SamplingParams(max_new_tokens=40, **NO_STOP)).token_ids
        == whole.token_ids
    )


def test_stop_comes_before_the_budget(engine: EngineFactory) -> None:
    """A stop id as the very last token of the budget counts as a stop."""
    runner = engine(NAME)
    whole = runner.generate(prompt_of(), SamplingParams(max_new_tokens=40, **NO_STOP)).token_ids
    stop = next(t for i, t in enumerate(whole) if i > 4 and t not in whole[:i])
    budget = whole.index(stop) + 1
    output = runner.generate(prompt_of(), SamplingParams(max_new_tokens=budget, stop_ids=(stop,)))
    assert (output.token_ids, output.finish_reason) == (whole[:budget], "stop")
    output = runner.generate(
        prompt_of(), SamplingParams(max_new_tokens=budget - 1, stop_ids=(stop,))
    )
    assert (output.token_ids, output.finish_reason) == (whole[: budget - 1], "length")


# Seeds


def test_seeds_reach_every_draw(lively: Engine) -> None:
    def run(seed: int, sampling: Any) -> Output:
        return lively.generate(
            [3, 1, 4],
            SamplingParams(
                temperature=1.0, seed=seed, draft_sampling=sampling, max_new_tokens=24, **NO_STOP
            ),
        )

    sampled = [run(seed, "sample") for seed in range(24)]
    np.random.seed(0)  # the global state plays no part
    for seed in (0, 7):
        assert same(run(seed, "sample"), sampled[seed])
    assert len({tuple(o.token_ids) for o in sampled}) == len(sampled)

    # One kind of draw at a time: the first token, the draft after equal histories, acceptance of
    # equal drafts, and the token after equal rejections.
    def varies(outputs: list[Output], given: Callable[[Output], Any], what: Any) -> bool:
        groups: dict[Any, set[Any]] = {}
        for o in outputs:
            groups.setdefault(given(o), set()).add(what(o))
        return max(len(values) for values in groups.values()) > 1

    greedy = [run(seed, "greedy") for seed in range(24)]

    def first(o: Output) -> int:
        return o.token_ids[0]

    def draft(o: Output) -> tuple[int, ...]:
        return (first(o), *o.rounds[0].draft_ids)

    assert varies(sampled, lambda o: None, first)
    assert varies(sampled, first, draft)
    assert not varies(greedy, first, draft)
    assert varies(greedy, draft, lambda o: o.rounds[0].accepted)
    assert varies(greedy, lambda o: (draft(o), o.rounds[0].accepted), lambda o: o.rounds[0].next_id)


def test_a_longer_budget_continues_the_same_draws(engine: EngineFactory) -> None:
    """Numbers belong to positions, so a longer run begins with the shorter one's tokens."""
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_new_tokens=40, **NO_STOP)
    long = engine(NAME).generate(prompt_of(), params)
    boundary = long.rounds[5].start + 1 - len(long.prompt_ids)
    short = engine(NAME).generate(prompt_of(), dataclasses.replace(params, max_new_tokens=boundary))
    assert short.token_ids[: boundary - 1] == long.token_ids[: boundary - 1]


# Drafters without some of the heads


VARIANTS: dict[str, dict[str, Any]] = {
    "plain DFlash": {"markov": "none", "confidence": False},
    "DFlash with confidence": {"markov": "none", "confidence": True},
    "no confidence head": {"confidence": False},
    "confidence without Markov": {"with_markov": False},
    "gated, confidence without Markov": {"markov": "gated", "with_markov": False},
    "embedding tap": {"taps": (-1,)},
    "one tap, tied": {"taps": (0,), "tied": True},
    "block of one": {"gamma": 1},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_head_variants(variant: str, tmp_path: Path) -> None:
    """All load, validate against torch (the export does) and decode exactly."""
    options = VARIANTS[variant]
    target, draft = write_random_pair(tmp_path, vocab=40, seed=3, **options)
    runner = Engine.load(export_pair(target, draft, tmp_path / "bundle"))
    contract = runner.bundle.draft
    assert contract.has_confidence == options.get("confidence", True)
    assert (contract.markov_rank == 0) == (options.get("markov") == "none")
    params = SamplingParams(max_new_tokens=20, scheduler="threshold", threshold=0.6)
    output = runner.generate([1, 2, 3], params)
    assert output.token_ids == runner.generate([1, 2, 3], params, speculative=False).token_ids
    if not contract.has_confidence:  # then nothing is cut
        assert all(r.confidence is None for r in output.rounds)
        assert {r.verified for r in output.rounds[:-1]} == {runner.gamma}
    else:
        for r in output.rounds:
            assert r.confidence is not None
            below = [k for k, c in enumerate(r.confidence) if c < 0.6]
            budget = params.max_new_tokens - (r.start - 3)
            assert r.verified == min([*below[:1], runner.gamma, budget])


# Logits that are not finite


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("top_k", [0, 3])
def test_non_finite_logits_are_an_error(
    temperature: float, speculative: bool, top_k: int, damaged: Engine
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, max_new_tokens=8)
    with pytest.raises(DraftgraphError, match="not finite at position 3"):
        damaged.generate([1, 7, 2], params, speculative=speculative)
    # The next request does not find what this one left in the caches.
    one = dataclasses.replace(params, max_new_tokens=1)
    assert len(damaged.generate([1, 6, 2], one, speculative=speculative).token_ids) == 1


# Prompts


def test_prompts_that_are_refused(engine: EngineFactory) -> None:
    runner = engine(NAME)
    for prompt, message in (
        ([], "empty"),
        ([100], "outside the vocabulary of 100"),
        ([-1], "outside the vocabulary of 100"),
        ([1.5], "list of token ids"),
        ([True], "list of token ids"),
        ("text", "no tokenizer"),
        ([{"role": "user", "content": "text"}], "no chat template"),
    ):
        with pytest.raises(DraftgraphError, match=message):
            runner.generate(prompt)  # type: ignore[arg-type]
    with pytest.raises(DraftgraphError, match="stop strings need a tokenizer"):
        runner.generate([1], SamplingParams(stop=("x",)))
    with pytest.raises(DraftgraphError, match="stop_ids: 100"):
        runner.generate([1], SamplingParams(stop_ids=(100,)))


def test_ids_as_numpy_integers(engine: EngineFactory) -> None:
    params = SamplingParams(max_new_tokens=5)
    found = engine(NAME).generate(np.array(prompt_of()), params)  # type: ignore[arg-type]
    assert same(found, engine(NAME).generate(prompt_of(), params))
    assert all(type(i) is int for i in found.prompt_ids + found.token_ids)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("max_new_tokens", 0),
        ("max_new_tokens", True),
        ("stop_ids", (-1,)),
        ("stop_ids", 5),
        ("stop", ("",)),
        ("stop", "text"),
        ("seed", -1),
        ("seed", 2**64),
        ("draft_sampling", "beam"),
        ("scheduler", "none"),
        ("threshold", 1.5),
    ],
)
def test_parameters_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(DraftgraphError, match=f"^{field} is "):
        SamplingParams(**{field: value})


def test_parameters_from_plain_data() -> None:
    assert SamplingParams.from_dict({"stop_ids": [1, 2], "seed": 3}).stop_ids == (1, 2)
    with pytest.raises(DraftgraphError, match="typo: unknown sampling parameter"):
        SamplingParams.from_dict({"typo": 1})


# Statistics


def test_statistics(engine: EngineFactory, golden: Callable[[str], Golden]) -> None:
    """The definitions, on rounds whose figures the official traces confirm elsewhere."""
    name = "llama-vanilla-threshold"
    params = SamplingParams(max_new_tokens=96, scheduler="threshold", threshold=0.5)
    output = engine(name).generate(golden(name).prompts[0]["prompt"], params)
    rounds, s = output.rounds, output.stats
    accepted = sum(r.accepted for r in rounds)
    assert s.prompt_tokens == len(output.prompt_ids)
    assert s.generated_tokens == len(output.token_ids) == 96
    assert (s.rounds, s.accepted) == (len(rounds), accepted)
    assert s.drafted == 7 * len(rounds)
    assert s.verified == sum(r.verified for r in rounds) < s.drafted
    assert s.accepted_per_verified == accepted / s.verified
    assert s.accepted_per_drafted == accepted / s.drafted
    # τ counts the token the target adds: committed tokens per round. The prefill gives the first
    # token and a last single token may come from a plain step.
    committed = sum(r.accepted + (r.next_id is not None) for r in rounds)
    assert s.tau == committed / len(rounds)
    assert committed in (95, 94)
    assert s.ttft_ms > 0
    assert s.tpot_ms == pytest.approx((s.total_ms - s.ttft_ms) / 95, rel=0.2)
    assert set(s.phase_ms) == {"backbone", "markov", "confidence", "schedule", "target", "accept"}
    assert all(ms > 0 for ms in s.phase_ms.values())
    assert json.loads(json.dumps(s.to_dict()))["accepted"] == accepted


def test_statistics_of_plain_decoding(engine: EngineFactory) -> None:
    s = (
        engine(NAME)
        .generate(prompt_of(), SamplingParams(max_new_tokens=9, **NO_STOP), speculative=False)
        .stats
    )
    assert (s.generated_tokens, s.rounds, s.drafted, s.verified, s.accepted) == (9, 0, 0, 0, 0)
    assert (s.tau, s.accepted_per_verified, s.accepted_per_drafted) == (None, None, None)
