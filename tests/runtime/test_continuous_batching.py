"""Requests that decode together: each gives what it gives alone, whenever it joins or leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from helpers import GOLDENS, export_pair, load_golden, write_random_pair

from draftgraph.runtime import DraftgraphError, Engine, Output, SamplingParams
from draftgraph.runtime import engine as engine_module
from draftgraph.runtime.costs import CostTable
from draftgraph.runtime.engine import Draft, Request
from draftgraph.runtime.results import Round
from draftgraph.runtime.scheduler import LOW_GAIN, NOT_COVERED, POLICIES, TRIMMED

EngineFactory = Callable[..., Engine]
NAME = "qwen3-vanilla"
BATCHES = (1, 2, 4, 8)
COST_BASED = ("early-stop", "lagged", "live-argmax")
CONFIDENCE = 1e-4  # other batches sum in another order
NO_STOP: dict[str, Any] = {"stop_ids": ()}


def prompts_of(name: str) -> list[list[int]]:
    """The prompts of the traces, and pieces of them: between 1 and 130 tokens."""
    traced = [list(p["prompt"]) for p in load_golden(name).prompts]
    return [*traced, *(p[::-1] for p in traced), *(p[: 3 + len(p) // 2] for p in traced)]


def staircase(gamma: int, largest: int = 8) -> CostTable:
    """Steps of two tokens; the confidences of the goldens pay for some of them, in every batch."""
    cells = {}
    for r in range(1, largest + 1):
        for n in sorted({*range(r, r * (gamma + 1), 2), r * (gamma + 1)}):
            cells[r, n] = 4.0 + r + 0.3 * (n - r)
    return CostTable(cells, {r: 1.0 for r, _ in cells})


def without_confidence(rounds: Sequence[Round]) -> list[Round]:
    return [replace(r, confidence=None) for r in rounds]


def assert_same(found: Output, expected: Output) -> None:
    """Equal in everything but times and rounding."""
    assert found.token_ids == expected.token_ids
    assert found.finish_reason == expected.finish_reason
    assert without_confidence(found.rounds) == without_confidence(expected.rounds)
    for a, b in zip(found.rounds, expected.rounds, strict=True):
        if a.confidence is None:
            assert b.confidence is None
        else:
            np.testing.assert_allclose(a.confidence, b.confidence, rtol=0, atol=CONFIDENCE)


def drain(engine: Engine) -> list[Request]:
    """Step until nothing is left; the requests in the order in which they ended."""
    ended: list[Request] = []
    while engine.busy:
        ended += engine.step()
    return ended


@dataclass
class Pattern:
    """Drafts in the rounds, counted from 0, that `on` names."""

    on: Callable[[int], bool]
    round: int = -1

    def drafts(self) -> bool:
        self.round += 1
        return self.on(self.round)


PATTERNS_OF: WeakKeyDictionary[Request, Pattern] = WeakKeyDictionary()


@pytest.fixture(autouse=True)
def stand_in_for_the_off_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with a pattern follow it."""
    able = Engine._drafting

    def drafting(self: Engine, running: list[Request]) -> list[Request]:
        always = Pattern(lambda _: True)
        return [r for r in able(self, running) if PATTERNS_OF.get(r, always).drafts()]

    monkeypatch.setattr(Engine, "_drafting", drafting)


def follow(request: Request, on: Callable[[int], bool]) -> Request:
    PATTERNS_OF[request] = Pattern(on)
    return request


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A random pair over 8 tokens: sampled text never settles, drafts are often rejected."""
    folder = tmp_path_factory.mktemp("lively")
    pair = write_random_pair(folder, vocab=8, gamma=4, sharpness=1.5, max_positions=256, seed=2)
    return Engine.load(export_pair(*pair, folder / "bundle"))


# Batches against single requests


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("name", GOLDENS)
def test_a_batch_gives_what_every_prompt_gives_alone(
    name: str, speculative: bool, engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, prompts = engine(name), prompts_of(name)
    params = SamplingParams(max_new_tokens=24, **NO_STOP)
    alone = [runner.generate(p, params, speculative=speculative) for p in prompts]
    assert any(o.rounds for o in alone) == speculative
    for batch in BATCHES:
        monkeypatch.setattr(runner, "max_requests", batch)
        together = runner.generate_batch(prompts, params, speculative=speculative)
        for found, expected in zip(together, alone, strict=True):
            assert_same(found, expected)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["qwen3-vanilla", "qwen3-rnn", "llama-vanilla-threshold"])
def test_greedy_ids_do_not_depend_on_the_policy(
    name: str, policy: str, engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on the number of requests, with which the cost-based policies change their lengths."""
    runner, prompts = engine(name), prompts_of(name)[:9]
    monkeypatch.setattr(runner, "costs", staircase(runner.gamma))
    params = SamplingParams(max_new_tokens=24, **NO_STOP)
    plain = runner.generate_batch(prompts, params, speculative=False)
    params = replace(
        params, scheduler=policy, draft_sampling="greedy", min_gain=0.0, off_switch=False
    )
    for batch in BATCHES:
        monkeypatch.setattr(runner, "max_requests", batch)
        outputs = runner.generate_batch(prompts, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        lengths = Counter(r.verified for o in outputs for r in o.rounds)
        statuses = sum((Counter(o.stats.schedules) for o in outputs), Counter[str]())
        if policy in COST_BASED:
            assert statuses[TRIMMED] > 0.2 * statuses.total()
        if policy != "full":
            assert len(lengths) > 2


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_together_with_the_off_switch(
    policy: str, engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table on which drafting never pays: requests stop drafting, the ids stay."""
    runner, prompts = engine(NAME), prompts_of(NAME)
    costs = staircase(runner.gamma)
    dear = CostTable(costs.cells, {r: 200.0 for r, _ in costs.cells})
    params = SamplingParams(max_new_tokens=48, **NO_STOP)
    plain = runner.generate_batch(prompts, params, speculative=False)
    monkeypatch.setattr(runner, "costs", dear)
    monkeypatch.setattr(runner, "max_requests", 4)
    params = replace(params, scheduler=policy, draft_sampling="greedy", off_switch=True)
    outputs = runner.generate_batch(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert sum(o.stats.rounds for o in outputs) <= 3 * len(outputs)


# Joining and leaving


def test_requests_join_and_leave_between_rounds(
    engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests than slots, arriving while others run, of different kinds and lengths."""
    runner, prompts = engine(NAME), prompts_of(NAME)
    words = runner.generate(prompts[2], SamplingParams(max_new_tokens=40, **NO_STOP)).token_ids
    budgets = [40, 1, 7, 25, 2, 33, 40, 12, 5, 18, 3, 28]
    arrivals = [0, 0, 0, 0, 0, 1, 1, 4, 9, 9, 12, 40]  # the step before which each is added
    cases = [
        (
            prompts[i % len(prompts)],
            SamplingParams(max_new_tokens=b, stop_ids=tuple(words[: i % 3])),
            i % 4 != 3,  # every fourth decodes plainly
        )
        for i, b in enumerate(budgets)
    ]
    alone = [runner.generate(p, params, speculative=s) for p, params, s in cases]
    assert {o.finish_reason for o in alone} == {"stop", "length"}

    monkeypatch.setattr(runner, "max_requests", 3)
    requests: list[Request] = []
    ended: list[Request] = []
    longest_queue = step = 0
    while len(requests) < len(cases) or runner.busy:
        while len(requests) < len(cases) and arrivals[len(requests)] <= step:
            prompt, params, speculative = cases[len(requests)]
            requests.append(runner.add_request(prompt, params, speculative=speculative))
        longest_queue = max(longest_queue, len(requests) - len(ended))
        ended += runner.step()
        step += 1
    assert longest_queue > runner.max_requests
    assert sorted(map(id, ended)) == sorted(map(id, requests))  # each is returned once
    assert [id(r) for r in ended] != [id(r) for r in requests]
    for request, expected in zip(requests, alone, strict=True):
        assert_same(runner.output(request), expected)


def test_a_step_without_requests_does_nothing(engine: EngineFactory) -> None:
    runner = engine(NAME)
    assert not runner.busy
    assert runner.step() == []
    assert runner.generate_batch([]) == []


def test_requests_that_end_with_their_first_token(
    engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They never take part in a round; the slot is free in the next step."""
    runner, prompts = engine(NAME), prompts_of(NAME)[:5]
    monkeypatch.setattr(runner, "max_requests", 2)
    outputs = runner.generate_batch(prompts, SamplingParams(max_new_tokens=1, **NO_STOP))
    long = SamplingParams(max_new_tokens=12, **NO_STOP)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.rounds == []
        assert output.token_ids == runner.generate(prompt, long).token_ids[:1]
    # One of them beside a request that goes on.
    params = [long, replace(long, max_new_tokens=1), long]
    for output, prompt, p in zip(
        runner.generate_batch(prompts[:3], params), prompts, params, strict=False
    ):
        assert_same(output, runner.generate(prompt, p))


def test_prefill_in_chunks_while_others_run(
    engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 130 tokens enters in 17 target calls in the middle of two running requests."""
    runner, prompts = engine(NAME), prompts_of(NAME)
    params = SamplingParams(max_new_tokens=40, **NO_STOP)
    order = [prompts[2], prompts[1], prompts[3], prompts[0]]
    alone = [runner.generate(p, params) for p in order]
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 8)
    monkeypatch.setattr(runner, "max_requests", 3)
    requests = [runner.add_request(p, params) for p in order[:2]]
    for _ in range(3):
        assert runner.step() == []
    requests += [runner.add_request(p, params) for p in order[2:]]
    drain(runner)
    for request, expected in zip(requests, alone, strict=True):
        assert_same(runner.output(request), expected)


def test_capacity_grows_while_others_run(bundle: Callable[..., Path]) -> None:
    """The caches are copied at 256 rows under three running requests."""
    runner = Engine.load(bundle(NAME), max_requests=3)
    prompts = prompts_of(NAME)
    cases = [(prompts[3], 150), (prompts[0], 90), (prompts[2], 60), (prompts[1], 110)]
    params = [SamplingParams(max_new_tokens=n, **NO_STOP) for _, n in cases]
    together = runner.generate_batch([p for p, _ in cases], params)
    assert together[0].rounds[-1].start > 256
    for (prompt, _), p, found in zip(cases, params, together, strict=True):
        assert_same(found, Engine.load(bundle(NAME)).generate(prompt, p))


# Sampling


NEIGHBOURS: dict[str, list[tuple[SamplingParams, bool]]] = {
    "greedy": [(SamplingParams(max_new_tokens=30, **NO_STOP), True)] * 3,
    "plain": [(SamplingParams(temperature=1.0, max_new_tokens=30, **NO_STOP), False)] * 2,
    "sampled": [
        (SamplingParams(temperature=1.3, seed=s, max_new_tokens=9 + 7 * s, **NO_STOP), True)
        for s in range(4)
    ],
    "filtered": [
        (SamplingParams(temperature=0.8, top_k=3, top_p=0.7, max_new_tokens=30, **NO_STOP), True),
        (SamplingParams(max_new_tokens=11, **NO_STOP), True),
    ],
}


@pytest.mark.parametrize("draft_sampling", ["sample", "greedy"])
@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_a_sampled_request_does_not_see_its_neighbours(
    neighbours: str, draft_sampling: Any, lively: Engine
) -> None:
    """Its tokens depend on its prompt, its parameters, its seed and its number."""
    for number in (0, 3):
        params = SamplingParams(
            temperature=0.9,
            top_p=0.95 if number else 1.0,
            seed=11,
            max_new_tokens=40,
            draft_sampling=draft_sampling,
            **NO_STOP,
        )
        alone = lively.add_request([3, 1, 4], params, number=number)
        drain(lively)
        first, *others = NEIGHBOURS[neighbours]
        lively.add_request([2, 2], first[0], speculative=first[1], number=7)
        lively.step()
        among = lively.add_request([3, 1, 4], params, number=number)
        for i, (p, speculative) in enumerate(others):
            lively.add_request([5, i, 1, 0, 2], p, speculative=speculative, number=8 + i)
        drain(lively)
        assert among.slot != alone.slot
        assert_same(lively.output(among), lively.output(alone))


def test_numbers_and_seeds_tell_requests_apart(lively: Engine) -> None:
    """generate_batch numbers its requests, so that equal prompts do not give equal texts."""
    params = SamplingParams(temperature=1.0, seed=4, max_new_tokens=30, **NO_STOP)
    outputs = lively.generate_batch([[3, 1, 4]] * 6, params)
    assert len({tuple(o.token_ids) for o in outputs}) == 6
    for number, output in enumerate(outputs):
        request = lively.add_request([3, 1, 4], params, number=number)
        drain(lively)
        assert_same(lively.output(request), output)
    assert_same(lively.generate([3, 1, 4], params), outputs[0])
    seeds = [replace(params, seed=s) for s in range(3)]
    assert len({tuple(o.token_ids) for o in lively.generate_batch([[3, 1, 4]] * 3, seeds)}) == 3


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_acceptance_by_position_does_not_depend_on_the_batch(
    temperature: float, engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batched, the slots of one request must not be judged by the rows of another (trap 17)."""
    runner, prompts = engine(NAME), prompts_of(NAME)
    params = SamplingParams(temperature=temperature, max_new_tokens=40, **NO_STOP)

    def accepted(batch: int) -> list[int]:
        monkeypatch.setattr(runner, "max_requests", batch)
        outputs = runner.generate_batch(prompts, params)
        counts = [r.accepted for o in outputs for r in o.rounds]
        return [sum(c > k for c in counts) for k in range(runner.gamma)]

    one = accepted(1)
    assert one == sorted(one, reverse=True)
    assert one[0] > one[3] > 0
    assert accepted(4) == one


def test_greedy_and_sampled_requests_together(
    engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch with every kind of request, so every graph takes neutral values for some."""
    runner, prompts = engine(NAME), prompts_of(NAME)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(temperature=1.1, top_k=5, draft_sampling="greedy", seed=2),
        SamplingParams(temperature=0.7, top_p=0.8, scheduler="threshold", threshold=0.3, seed=3),
        SamplingParams(scheduler="threshold", threshold=0.6),
    ]
    cases = [
        (prompts[i % len(prompts)], replace(k, max_new_tokens=12 + 9 * i, **NO_STOP), i % 5 != 2)
        for i, k in enumerate([*kinds, *kinds])
    ]

    def decode(batch: int) -> list[Request]:
        monkeypatch.setattr(runner, "max_requests", batch)
        requests = [
            runner.add_request(p, params, speculative=s, number=i)
            for i, (p, params, s) in enumerate(cases)
        ]
        drain(runner)
        return requests

    for together, alone in zip(decode(4), decode(1), strict=True):
        assert_same(runner.output(together), runner.output(alone))


@pytest.mark.parametrize("top_k", [0, 3])
def test_only_greedy_requests_draft_in_a_sampled_batch(top_k: int, lively: Engine) -> None:
    """Two sampled requests draft in every other round; between them no draft was drawn."""
    params = SamplingParams(temperature=1.0, top_k=top_k, max_new_tokens=40, seed=3, **NO_STOP)
    greedy = SamplingParams(max_new_tokens=40, **NO_STOP)

    def sampled(number: int) -> Request:
        return follow(lively.add_request([3, 1, 4], params, number=number), lambda n: n % 2 == 0)

    alone = []
    for number in range(2):
        alone.append(sampled(number))
        drain(lively)
    together = [sampled(0), sampled(1)]
    others = [lively.add_request([2, 6], greedy) for _ in range(2)]
    drain(lively)
    for a, b in zip(together, alone, strict=True):
        assert_same(lively.output(a), lively.output(b))
    for other in others:
        assert other.generated == lively.generate([2, 6], greedy).token_ids


# Requests that skip drafting


def drafts_at_every_position(
    runner: Engine, prompt: list[int], params: SamplingParams
) -> dict[int, Round]:
    """By anchor, the drafts of a request that drafts always and verifies nothing."""

    def schedule(running: list[Request], drafts: dict[int, Draft]) -> list[int]:
        return [0] * len(running)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_schedule", schedule)
        rounds = runner.generate(prompt, params).rounds
    assert [r.start for r in rounds] == list(range(len(prompt), len(prompt) + len(rounds)))
    return {r.start: r for r in rounds}


PATTERNS: dict[str, Callable[[int], bool]] = {
    "every third round": lambda n: n % 3 == 2,
    "off, then on": lambda n: n >= 20,
    "on, off, on": lambda n: n < 3 or n >= 12,
    "one round": lambda n: n == 9,
    "never": lambda n: False,
}


@pytest.mark.parametrize("chunk", [512, 8])
@pytest.mark.parametrize("name", ["qwen3-vanilla", "qwen3-rnn"])
def test_drafting_resumes_as_if_it_had_never_paused(
    name: str, chunk: int, engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The features of the rounds between are held for the drafter: it misses no position."""
    runner, prompts = engine(name), prompts_of(name)
    params = SamplingParams(max_new_tokens=48, **NO_STOP)
    plain = [runner.generate(p, params, speculative=False).token_ids for p in prompts[:5]]
    reference = [drafts_at_every_position(runner, p, params) for p in prompts[:5]]
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", chunk)
    for batch in (1, 3):
        monkeypatch.setattr(runner, "max_requests", batch)
        requests = [
            follow(runner.add_request(p, params), on)
            for p, on in zip(prompts, PATTERNS.values(), strict=False)
        ]
        drain(runner)
        assert [r.generated for r in requests] == plain
        assert len(requests[-1].rounds) == 0
        assert all(len(r.rounds) > 0 for r in requests[:-1])
        for request, every in zip(requests, reference, strict=True):
            for found in request.rounds:
                expected = every[found.start]
                assert found.draft_ids == expected.draft_ids
                assert found.confidence is not None and expected.confidence is not None
                np.testing.assert_allclose(
                    found.confidence, expected.confidence, rtol=0, atol=CONFIDENCE
                )


def test_what_is_held_goes_with_its_request(engine: EngineFactory) -> None:
    """A request that ends without drafting leaves nothing for the next one in its slot."""
    runner, prompts = engine(NAME), prompts_of(NAME)
    params = SamplingParams(max_new_tokens=24, **NO_STOP)
    expected = runner.generate(prompts[1], params)
    follow(runner.add_request(prompts[0], params), lambda n: False)
    drain(runner)
    request = runner.add_request(prompts[1], params)
    drain(runner)
    assert_same(runner.output(request), expected)


# Policies in mixed batches


def test_a_batch_that_the_table_does_not_cover(
    engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is verified, and the statistics say why; one request alone is scheduled."""
    runner, prompts = engine(NAME), prompts_of(NAME)[:3]
    monkeypatch.setattr(runner, "costs", staircase(runner.gamma, largest=1))
    params = SamplingParams(max_new_tokens=24, **NO_STOP)
    plain = runner.generate_batch(prompts, params, speculative=False)
    for policy in COST_BASED:
        p = replace(params, scheduler=policy, draft_sampling="greedy")
        outputs = runner.generate_batch(prompts, p)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        assert all(NOT_COVERED in o.stats.schedules for o in outputs)
        assert NOT_COVERED not in runner.generate(prompts[0], p).stats.schedules


def test_the_minimum_gain_is_of_the_requests_that_ask(
    engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour with another scheduler does not lower it."""
    runner, prompts = engine(NAME), prompts_of(NAME)[:2]
    monkeypatch.setattr(runner, "costs", staircase(runner.gamma))
    careful = SamplingParams(
        max_new_tokens=24, scheduler="lagged", min_gain=0.99, off_switch=False, **NO_STOP
    )
    careless = replace(careful, scheduler="full", min_gain=0.0)
    output, _ = runner.generate_batch(prompts, [careful, careless])
    assert set(output.stats.schedules) == {LOW_GAIN}


def test_every_policy_in_one_batch(engine: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, prompts = engine(NAME), prompts_of(NAME)[: len(POLICIES)]
    monkeypatch.setattr(runner, "costs", staircase(runner.gamma))
    params = SamplingParams(max_new_tokens=40, draft_sampling="greedy", min_gain=0.0, **NO_STOP)
    plain = runner.generate_batch(prompts, params, speculative=False)
    outputs = runner.generate_batch(prompts, [replace(params, scheduler=p) for p in POLICIES])
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


# Errors


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_in_one_request(temperature: float, damaged: Engine) -> None:
    """An error that names the position; it ends the batch and leaves no trace in the caches."""
    params = SamplingParams(temperature=temperature, max_new_tokens=4)
    prompts = [[1, 6, 2], [4, 4], [9, 3, 1, 2]]
    expected = damaged.generate_batch(prompts, params)
    with pytest.raises(DraftgraphError, match="not finite at position 4"):
        damaged.generate_batch([*prompts[:2], [1, 7, 2, 5], prompts[2]], params)
    assert not damaged.busy
    for found, reference in zip(damaged.generate_batch(prompts, params), expected, strict=True):
        assert_same(found, reference)

    running = damaged.add_request(prompts[0], params)
    damaged.step()
    damaged.add_request([7], params)
    with pytest.raises(DraftgraphError, match="not finite at position 1"):
        damaged.step()
    assert not damaged.busy and running.finish_reason is None
    assert_same(damaged.generate(prompts[0], params), expected[0])


def test_an_error_in_a_step_leaves_the_engine_free(
    engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, prompts = engine(NAME), prompts_of(NAME)
    params = SamplingParams(max_new_tokens=24, scheduler="threshold", threshold=0.3, **NO_STOP)
    expected = runner.generate(prompts[0], params)
    runner.add_request(prompts[0], params)
    runner.step()
    with monkeypatch.context() as patch:
        bad = np.full((1, runner.gamma), np.nan, np.float32)
        patch.setattr(runner.backend, "confidence", lambda: bad)
        with pytest.raises(DraftgraphError, match="confidences must lie"):
            runner.step()
    assert not runner.busy
    assert_same(runner.generate(prompts[0], params), expected)


def test_calls_that_need_the_engine_to_themselves(text_engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=20)
    request = text_engine.add_request("the cat", params)
    for call in (
        lambda: text_engine.generate("a", params),
        lambda: text_engine.generate_batch(["a"], params),
        lambda: next(text_engine.stream("a", params)),
    ):
        with pytest.raises(DraftgraphError, match="decoding requests of add_request"):
            call()
    drain(text_engine)
    assert_same(text_engine.output(request), text_engine.generate("the cat", params))


def test_a_stream_that_is_abandoned(text_engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=40)
    expected = text_engine.generate("the cat", params)
    stream = text_engine.stream("the cat", params)
    next(stream)
    with pytest.raises(DraftgraphError, match="decoding requests"):
        text_engine.generate("the cat", params)
    stream.close()
    assert not text_engine.busy
    assert_same(text_engine.generate("the cat", params), expected)


def test_a_finished_stream_does_not_end_later_requests(text_engine: Engine) -> None:
    """Its last piece of text may be read after the engine has taken up other work."""
    params = SamplingParams(max_new_tokens=10)
    stream, text = text_engine.stream("the cat", params), ""
    while not text or text_engine.busy:
        text += next(stream)
    request = text_engine.add_request("a dog", params)
    text += "".join(stream)
    assert text == text_engine_text(text_engine, "the cat", params, request)


def text_engine_text(
    runner: Engine, prompt: str, params: SamplingParams, pending: Request
) -> str | None:
    """The text of `prompt`, once the pending request has ended."""
    assert drain(runner) == [pending]
    return runner.generate(prompt, params).text


def test_a_batch_that_is_refused_runs_nothing(engine: EngineFactory) -> None:
    runner = engine(NAME)
    with pytest.raises(DraftgraphError, match="2 params for 3 prompts"):
        runner.generate_batch([[1]] * 3, [SamplingParams()] * 2)
    with pytest.raises(DraftgraphError, match="outside the vocabulary"):
        runner.generate_batch([[1], [100]])
    with pytest.raises(DraftgraphError, match="the prompt is empty"):
        runner.add_request([])
    assert not runner.busy
    with pytest.raises(DraftgraphError, match="max_requests is 0"):
        Engine(runner.bundle, runner.backend, max_requests=0)


def test_a_batch_can_be_left_before_its_end(engine: EngineFactory) -> None:
    made = engine(NAME)
    prompts = prompts_of(NAME)
    params = SamplingParams(max_new_tokens=12, **NO_STOP)
    steps = made.stream_batch(prompts, params)
    requests = next(steps)
    assert len(requests) == len(prompts)
    with pytest.raises(DraftgraphError, match="decoding requests"):
        made.generate(prompts[0], params)
    steps.close()
    assert not made.busy
    made.generate(prompts[0], params)


def test_a_batch_that_has_ended_leaves_later_requests_alone(engine: EngineFactory) -> None:
    made = engine(NAME)
    params = SamplingParams(max_new_tokens=12, **NO_STOP)
    steps = made.stream_batch(prompts_of(NAME)[:2], params)
    for requests in steps:
        if all(r.clock.done for r in requests):
            break
    later = made.add_request(prompts_of(NAME)[0], params)
    with pytest.raises(StopIteration) as ended:
        next(steps)
    assert [len(o.token_ids) for o in ended.value.value] == [12, 12]
    assert made.busy and not later.generated
    drain(made)
    assert later.finish_reason == "length"


def test_a_batch_that_another_caller_dropped_is_an_error(
    engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(NAME)
    steps = made.stream_batch(prompts_of(NAME), SamplingParams(max_new_tokens=12, **NO_STOP))
    next(steps)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="broken"):

        def broken(*_: Any) -> Any:
            raise RuntimeError("broken")

        patch.setattr(made, "_verify", broken)
        made.step()
    with pytest.raises(DraftgraphError, match="dropped by another caller"):
        next(steps)
    assert not made.busy
