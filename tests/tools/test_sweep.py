"""Schedules side by side: what is counted, what is refused; never the timings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from helpers import load_golden
from helpers import run_cli as run
from helpers import run_cli_ok as ok

from draftgraph.graphs.errors import DraftgraphError
from draftgraph.runtime import Engine, Output, SamplingParams
from draftgraph.tools.prompts import BenchPrompt, PromptSet
from draftgraph.tools.sweep import Lane, Sweep, Tally, Watch, _groups, parse_schedule, twin

NAME, GAMMA = "qwen3-vanilla", 7
PARAMS = SamplingParams(max_new_tokens=12, stop_ids=())


def test_a_fixed_width_verifies_so_many_tokens(engine: Callable[..., Engine]) -> None:
    """Greedy ids do not depend on it; the block's tail is drafted and dropped."""
    made, prompt = engine(NAME), list(load_golden(NAME).prompts[0]["prompt"])
    plain = made.generate(prompt, PARAMS, speculative=False)
    for width in (1, 3, GAMMA):
        way = parse_schedule(f"full:{width}", PARAMS)
        output = made.generate(prompt, way.params)
        assert output.token_ids == plain.token_ids
        verified = [r.verified for r in output.rounds]
        assert max(verified) == width
        assert set(verified[:-1]) == {width} or width == GAMMA  # the budget cuts the last rounds


@pytest.mark.parametrize("text", ["full:x", "threshold:", "lagged:2", "fast", "full:0"])
def test_a_schedule_that_is_none_is_named(text: str) -> None:
    with pytest.raises(DraftgraphError):
        parse_schedule(text, PARAMS)


def test_the_tally_counts_every_token_once(engine: Callable[..., Engine]) -> None:
    made = engine(NAME)
    prompts = [list(p["prompt"]) for p in load_golden(NAME).prompts]
    tally = Tally()
    lane = Lane(made, prompts, PARAMS, tally, speculative=True)
    while not lane.done:
        lane.turn(0.001)
    outputs = made.generate_batch(prompts, PARAMS)
    assert tally.ids == [o.token_ids for o in outputs]
    assert tally.tokens == sum(len(o.token_ids) - 1 for o in outputs)
    rounds = [r for o in outputs for r in o.rounds]
    assert tally.rounds == len(rounds)
    assert tally.committed == sum(r.accepted + (r.next_id is not None) for r in rounds)
    assert (tally.verified, tally.accepted) == (
        sum(r.verified for r in rounds),
        sum(r.accepted for r in rounds),
    )
    assert lane.tokens == tally.tokens + len(prompts)  # the first tokens are the prefills'
    assert 0 < tally.timed_tokens <= tally.tokens
    assert tally.decode_ms > 0


def test_engines_over_the_same_sessions_do_not_disturb_each_other(
    engine: Callable[..., Engine],
) -> None:
    """Step by step in turns: the ids and rounds of each alone."""
    made = engine(NAME)
    other = twin(made)
    prompts = [list(p["prompt"]) for p in load_golden(NAME).prompts]
    drawn = replace(PARAMS, temperature=0.8)
    alone = made.generate_batch(prompts, PARAMS), made.generate_batch(prompts[:2], drawn)
    lanes = made.stream_batch(prompts, PARAMS), other.stream_batch(prompts[:2], drawn)
    together: dict[int, list[Output]] = {}
    while len(together) < 2:
        for i, steps in enumerate(lanes):
            try:
                next(steps)
            except StopIteration as end:
                together.setdefault(i, end.value)
    for i, outputs in enumerate(alone):
        assert [o.token_ids for o in together[i]] == [o.token_ids for o in outputs]
        assert [o.rounds for o in together[i]] == [o.rounds for o in outputs]


@pytest.mark.parametrize("turns", [True, False])
def test_schedules_decode_in_turns_or_one_after_another(
    engine: Callable[..., Engine], turns: bool
) -> None:
    made = engine(NAME)
    ids = [list(p["prompt"]) for p in load_golden(NAME).prompts]
    prompts = tuple(BenchPrompt(tuple(p), line) for line, p in enumerate(ids, start=1))
    params = SamplingParams(max_new_tokens=8)
    result = Sweep(
        made,
        [parse_schedule("full", params), parse_schedule("full:2", params)],
        another=partial(twin, made) if turns else None,
        max_new_tokens=8,
        repeat=1,
        chat=False,
    ).run([PromptSet(Path("a"), prompts)], [2])
    figures = result["batches"][2]["files"]["a"]
    assert all(f["identical_ids"] == f["prompts"] == len(ids) for f in figures.values())


def test_only_rounds_in_which_all_slots_decode_are_timed(engine: Callable[..., Engine]) -> None:
    """Plain decoding of requests of 3, 3, 3, 9 and 5 tokens in two slots.

    The first token of a request is the prefill's. Two and two decode together until 3 and 3 are
    done; then 3 beside 9; then 5 beside the 9 that goes on.
    """
    made = Engine(engine(NAME).bundle, engine(NAME).backend, max_requests=2)
    lengths = (3, 3, 3, 9, 5)
    params = [SamplingParams(max_new_tokens=n, stop_ids=()) for n in lengths]
    tally = Tally()
    watch = Watch(tally, slots=2)
    for requests in made.stream_batch([[5, 6, 7]] * 5, params, speculative=False):
        watch(requests)
        watch.resume()
    assert tally.timed_tokens == 2 * (2 + 2 + 4)
    assert tally.decode_ms > 0


@pytest.mark.parametrize(
    ("count", "batch", "sizes"), [(12, 4, [12]), (20, 4, [16, 4]), (19, 4, [19]), (9, 1, [4, 4, 1])]
)
def test_a_group_fills_the_slots(count: int, batch: int, sizes: list[int]) -> None:
    prompts = [[i] for i in range(count)]
    groups = _groups(prompts, batch)
    assert [len(g) for g in groups] == sizes
    assert [p for g in groups for p in g] == prompts


def test_the_command_compares_schedules_by_batch_and_file(
    bundle: Callable[..., Path], tmp_path: Path
) -> None:
    files = []
    for name in ("a", "b"):
        files.append(tmp_path / f"{name}.jsonl")
        lines = [json.dumps({"prompt": list(p["prompt"])}) for p in load_golden(NAME).prompts[:3]]
        files[-1].write_text("\n".join(lines) + "\n")
    out = tmp_path / "sweep.json"
    arguments = [a for f in files for a in ("--prompts", f)]
    result = ok(
        *("sweep", bundle(NAME), *arguments, "--batch=1,2", "--repeat=1", "--max-new-tokens=8"),
        *("--schedule=full", "--schedule=full:2", "--schedule=threshold:0.9", "--json", out),
    )
    measured = json.loads(out.read_text())
    names = ["plain", "full", "full:2", "threshold:0.9"]
    for batch in ("1", "2"):
        figures = measured["batches"][batch]
        assert list(figures["overall"]) == names
        for file in files:
            of_file = figures["files"][str(file)]
            assert all(f["identical_ids"] == f["prompts"] == 3 for f in of_file.values())
            assert of_file["plain"]["speed"] == 1.0
            assert of_file["plain"]["tokens_per_step"] == 1.0
            # Verifying less never accepts more tokens per step.
            assert of_file["full"]["tokens_per_step"] >= of_file["full:2"]["tokens_per_step"] > 1
            assert of_file["full:2"]["verified_per_round"] <= 2
    assert "batch 2: tokens per step" in result.stdout


def test_a_schedule_that_cannot_choose_is_told(bundle: Callable[..., Path], tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": list(load_golden(NAME).prompts[0]["prompt"])}) + "\n")
    result = ok(
        *("sweep", bundle(NAME), "--prompts", prompts, "--batch=1", "--repeat=1"),
        *("--max-new-tokens=8", "--schedule=full", "--schedule=early-stop"),
    )
    said = [line for line in result.stdout.splitlines() if "no measured cost table" in line]
    assert len(said) == 1
    assert said[0].startswith("early-stop verified all")


@pytest.mark.parametrize(
    ("option", "words"),
    [("--batch=0", "--batch"), ("--schedule=slow", "scheduler"), ("--repeat=0", "--repeat")],
)
def test_wrong_options_are_refused(
    bundle: Callable[..., Path], tmp_path: Path, option: str, words: str
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": [1, 2]}\n')
    result = run("sweep", bundle(NAME), "--prompts", file, "--schedule=full", option)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert words in result.stderr
