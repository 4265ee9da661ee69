"""The benchmark's figures: definitions, structure and wrong input; never its timings."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from draftgraph.graphs.errors import DraftgraphError
from draftgraph.runtime import Engine, Output, Round, SamplingParams, Stats
from draftgraph.tools.bench import Bench, check_comparison, divergence, write_json
from draftgraph.tools.bench_figures import Pair, summarise, warnings
from draftgraph.tools.bench_report import render
from draftgraph.tools.bench_steps import logit_gap, measure_steps
from draftgraph.tools.cli import app
from draftgraph.tools.prompts import BenchPrompt, PromptSet, read_prompts

GAMMA = 3


def a_round(verified: int, accepted: int) -> Round:
    return Round(
        start=0,
        draft_ids=[1] * GAMMA,
        verified=verified,
        accepted=accepted,
        confidence=None,
        next_id=2,
    )


def an_output(rounds: list[Round], tpot_ms: float = 10.0, ids: list[int] | None = None) -> Output:
    ids = ids or [1] * (1 + sum(r.accepted + 1 for r in rounds))
    phases = dict.fromkeys(
        ("backbone", "markov", "confidence", "schedule", "target", "accept"), 3.0
    )
    verified, accepted = sum(r.verified for r in rounds), sum(r.accepted for r in rounds)
    stats = Stats(
        prompt_tokens=2,
        generated_tokens=len(ids),
        rounds=len(rounds),
        drafted=GAMMA * len(rounds),
        verified=verified,
        accepted=accepted,
        tau=None,
        accepted_per_verified=None,
        accepted_per_drafted=None,
        ttft_ms=5.0,
        tpot_ms=tpot_ms,
        total_ms=100.0,
        phase_ms=phases,
        host_ms=2.0,
        schedules={},
    )
    return Output([1, 2], ids, None, "length", rounds, stats)


def a_pair(line: int, rounds: list[Round], plain_ms: float = 20.0, fast_ms: float = 10.0) -> Pair:
    return Pair(
        file=Path("file.jsonl"),
        prompt=BenchPrompt("text", line),
        repeat=0,
        speculative_first=False,
        plain=an_output([], plain_ms),
        speculative=an_output(rounds, fast_ms),
        greedy=True,
        divergence=None,
        peer=None,
    )


def test_acceptance_figures_follow_their_definitions() -> None:
    rounds = [a_round(3, 3), a_round(3, 1), a_round(1, 1), a_round(2, 0)]
    figures = summarise([a_pair(1, rounds)], GAMMA)
    assert figures["tau"] == (3 + 1 + 1 + 0 + 4) / 4
    assert figures["accepted_per_verified"] == 5 / 9
    assert figures["accepted_per_drafted"] == 5 / 12
    first, second, third = figures["positions"]
    assert first["accepted_given_verified"] == 3 / 4
    assert first["prefix_survival"] == 3 / 4
    assert second["accepted_given_verified"] == 1 / 3  # verified in rounds 1, 2 and 4
    assert second["accepted_given_prefix"] == 1 / 2  # of these, round 4 never got there
    assert second["prefix_survival"] == 1 / 4
    assert third["accepted_given_verified"] == 1 / 2
    assert third["accepted_given_prefix"] == 1.0


def test_speedup_is_given_as_ratio_of_medians_and_as_median_of_ratios() -> None:
    times = [(10.0, 10.0), (20.0, 5.0), (60.0, 40.0)]
    figures = summarise([a_pair(i, [a_round(3, 1)], *t) for i, t in enumerate(times)], GAMMA)
    assert figures["speedup"] == {"of_medians": 20 / 10, "median_of_runs": 1.5}
    assert figures["tpot_ms"]["plain"]["p90"] == pytest.approx(52.0)


def test_host_share_is_of_the_rounds_time() -> None:
    figures = summarise([a_pair(1, [a_round(3, 1)] * 2)], GAMMA)
    assert figures["host_share"] == pytest.approx(2 / (6 * 3 + 2))
    assert figures["phase_ms_per_round"]["target"] == pytest.approx(3 / 2)


@pytest.mark.parametrize(
    ("accepted", "verified", "word"),
    [
        (0, 199, None),
        (0, 200, "layout"),
        (1, 201, "layout"),
        (1, 200, None),
        (200, 200, "every one"),
        (199, 199, None),
        (199, 200, None),
    ],
)
def test_implausible_acceptance_is_warned_of(
    accepted: int, verified: int, word: str | None
) -> None:
    figures = {"accepted": accepted, "verified": verified}
    found = warnings({"a": figures}, figures)
    assert (len(found) == 1 and word in found[0]) if word else found == []


def test_one_implausible_file_is_found_among_good_ones() -> None:
    good, bad = {"accepted": 100, "verified": 300}, {"accepted": 0, "verified": 300}
    found = warnings({"good": good, "bad": bad}, {"accepted": 100, "verified": 600})
    assert len(found) == 1 and found[0].startswith("bad: ")


# On a bundle


@pytest.fixture(scope="module")
def golden_engine(engine: Callable[..., Engine]) -> Engine:
    return engine("qwen3-vanilla")


@pytest.fixture(scope="module")
def prompts() -> PromptSet:
    ids = ((5, 6, 7, 8), (40, 41), (70, 71, 72))
    return PromptSet(Path("ids.jsonl"), tuple(BenchPrompt(p, i + 1) for i, p in enumerate(ids)))


@pytest.fixture(scope="module")
def measured(golden_engine: Engine, prompts: PromptSet) -> dict[str, Any]:
    return Bench(golden_engine, SamplingParams(max_new_tokens=30), repeat=2).run([prompts])


def test_speculative_ids_are_the_plain_ids(measured: dict[str, Any]) -> None:
    assert measured["overall"]["greedy_identical"] == {"identical": 6, "compared": 6}
    assert all(r["divergence"] is None for r in measured["records"])


def test_the_order_alternates(measured: dict[str, Any]) -> None:
    order = [r["first"] for r in measured["records"]]
    assert order[:3] == ["plain", "speculative", "plain"]
    assert order[3:] == ["speculative", "plain", "speculative"]


def test_overall_sums_the_records(measured: dict[str, Any]) -> None:
    overall, records = measured["overall"], measured["records"]
    assert overall["prompts"] == 3 and overall["runs"] == 6
    for key in ("drafted", "verified", "accepted", "rounds"):
        assert overall[key] == sum(r["speculative"][key] for r in records)
    assert overall == measured["files"]["ids.jsonl"]


def test_the_report_names_machine_steps_and_every_figure(measured: dict[str, Any]) -> None:
    steps = measured["steps"]
    assert list(steps["target_ms"]) == ["1", "2", "4", "8"]
    assert set(steps["draft_ms"]) == {"backbone", "markov", "confidence", "draft"}
    machine = measured["machine"]
    assert machine["threads"] >= 1 and len(machine["bundle_sha256"]) == 64
    console = Console(width=120, record=True, file=io.StringIO())
    render(measured, console)
    text = console.export_text()
    for part in ("TPOT p90", "accepted/verified", "prefix survival", "width 8", "6 of 6"):
        assert part in text


def test_steps_fit_a_small_capacity(bundle: Callable[..., Path]) -> None:
    small = Engine.load(bundle("qwen3-vanilla", max_seq_len=32))
    assert measure_steps(small, [5, 6])["past_length"] == 32 - 8


def test_the_logit_gap_is_of_the_next_token(golden_engine: Engine) -> None:
    prompt = [5, 6, 7, 8]
    ids = golden_engine.generate(prompt, SamplingParams(max_new_tokens=5)).token_ids
    gap, best = logit_gap(golden_engine, [*prompt, *ids[:3]])
    assert best[0] == ids[3]
    logits = np.sort(golden_engine.backend.read("logits")[-1])
    assert gap == pytest.approx(float(logits[-1]) - float(logits[-2]))


def test_a_divergence_is_located(golden_engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=6)
    plain = golden_engine.generate([5, 6, 7, 8], params)
    changed = [*plain.token_ids[:2], 99, *plain.token_ids[3:]]
    found = divergence(golden_engine, plain, an_output([], ids=changed))
    assert found is not None
    assert (found.position, found.plain_id, found.speculative_id) == (2, plain.token_ids[2], 99)
    assert found.best_ids[0] == plain.token_ids[2] and found.logit_gap > 0
    shorter = divergence(golden_engine, plain, an_output([], ids=plain.token_ids[:4]))
    assert shorter is not None
    assert (shorter.position, shorter.speculative_id) == (4, None)


def test_sampled_runs_make_no_claim_of_identity(golden_engine: Engine, prompts: PromptSet) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=1.0, scheduler="threshold")
    measured = Bench(golden_engine, params).run([prompts])
    assert measured["overall"]["greedy_identical"]["compared"] == 0
    assert {r["identical"] for r in measured["records"]} == {None}


def test_prompts_that_do_not_fit_are_left_out_and_listed(golden_engine: Engine) -> None:
    long = PromptSet(Path("l"), (BenchPrompt((5,) * 1020, 1), BenchPrompt((5, 6), 2)))
    measured = Bench(golden_engine, SamplingParams(max_new_tokens=5)).run([long])
    assert measured["skipped"] == [{"file": "l", "line": 1, "tokens": 1020}]
    assert measured["overall"]["prompts"] == 1
    with pytest.raises(DraftgraphError, match="no prompt fits"):
        Bench(golden_engine, SamplingParams(max_new_tokens=2000)).run([long])


def test_chat_is_the_default_with_a_template(text_engine: Engine) -> None:
    prompts = PromptSet(Path("t"), (BenchPrompt("hi", 1),))
    params = SamplingParams(max_new_tokens=4)
    chat = Bench(text_engine, params).run([prompts])["records"][0]["plain"]["prompt_tokens"]
    text = Bench(text_engine, params, chat=False).run([prompts])["records"][0]["plain"]
    assert chat == len("user: hi\nassistant: ") and text["prompt_tokens"] == len("hi")


@pytest.mark.slow
def test_the_transformers_peer_decodes_the_same_ids(
    golden_engine: Engine, prompts: PromptSet, goldens_root: Path
) -> None:
    target = goldens_root / "qwen3-vanilla" / "target"
    bench = Bench(
        golden_engine, SamplingParams(max_new_tokens=10), peer_path=target, peer_limit=2, threads=1
    )
    peer = bench.run([prompts])["peer"]
    assert peer["prompts"] == 2 and peer["identical_to_plain"] == 2


# The command and its files


def run_bench(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_the_command_writes_json(bundle: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": [5, 6], "source": "x"}\n\n{"prompt": [7]}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": [8, 9, 10]}\n' * 3)
    out = tmp_path / "out.json"
    result = run_bench(
        *(bundle("qwen3-vanilla"), "--prompts", tmp_path / "a.jsonl"),
        *("--prompts", tmp_path / "b.jsonl", "--limit", "2", "--max-new-tokens=8", "--json", out),
    )
    assert result.exit_code == 0, result.output
    assert "overall" in result.stdout
    written = json.loads(out.read_text())
    assert written["schema_version"] == 1
    assert [(r["line"], r["source"]) for r in written["records"]] == [
        (1, "x"),
        (3, None),
        (1, None),
        (2, None),
    ]
    assert [p.name for p in tmp_path.glob("*out.json*")] == ["out.json"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b"", "no prompts"),
        ("p.txt", b"\n \n", "no prompts"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt"\n', "line 2: not valid JSON"),
        ("p.jsonl", b'\n{"text": "a"}\n', 'line 2: expected an object with the key "prompt"'),
        ("p.jsonl", b'["a"]', "line 1: expected an object"),
        ("p.jsonl", b'{"prompt": ""}', "line 1: prompt is ''"),
        ("p.jsonl", b'{"prompt": 5}', "line 1: prompt is 5"),
        ("p.jsonl", b'{"prompt": "a", "source": 1}', "line 1: source"),
        ("p.txt", b"a\n\xff\n", "line 2: not UTF-8"),
    ],
)
def test_malformed_prompt_files_are_refused(
    plain_bundle: Path, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    result = run_bench(plain_bundle, "--prompts", tmp_path / name)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--scheduler", "magic"], "scheduler"),
        (["--compare", "other", "--target", "."], "transformers"),
        (["--compare", "transformers"], "come together"),
        (["--target", "."], "come together"),
        (["--compare", "transformers", "--target", "no-such"], "no such checkpoint"),
        (["--json", "no/such/out.json"], "existing directory"),
        ([], "no tokenizer"),
        (["--chat"], "no chat template"),
    ],
)
def test_the_command_refuses(
    plain_bundle: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "p.txt").write_text("some text\n")
    result = run_bench(plain_bundle, "--prompts", tmp_path / "p.txt", *arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: ") and message in result.stderr


@pytest.fixture
def plain_bundle(bundle: Callable[..., Path]) -> Path:
    return bundle("qwen3-vanilla")


@pytest.fixture
def goldens_root() -> Path:
    return Path(__file__).parents[1] / "goldens"


def test_text_files_hold_one_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text('first\r\n\n{"prompt": "x"}\nthird')
    found = read_prompts(tmp_path / "p.txt", 2).prompts
    assert [(p.content, p.line) for p in found] == [("first", 1), ('{"prompt": "x"}', 3)]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text("old")
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "out.json", {"x": float("nan")})
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    assert (tmp_path / "out.json").read_text() == "old"


def test_no_comparison_is_no_peer() -> None:
    assert check_comparison(None, None) is None
