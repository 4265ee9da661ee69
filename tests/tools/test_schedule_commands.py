"""profile, calibrate and simulate as a user runs them, and what generate makes of their files."""

from __future__ import annotations

import json
import os
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import load_golden
from helpers import run_cli as run
from helpers import run_cli_ok as ok

from draftgraph.graphs.errors import DraftgraphError
from draftgraph.runtime import Engine
from draftgraph.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu
from draftgraph.runtime.calibration import Calibration
from draftgraph.runtime.costs import CostTable, fingerprint_name
from draftgraph.runtime.scheduler import NO_COSTS, NOT_COVERED, POLICIES
from draftgraph.runtime.simulate import load_trace
from draftgraph.tools.profile import split

NAME, GAMMA = "qwen3-vanilla", 7
PROFILE = ("--batch=2", "--batch=1,2", "--context=16", "--repeat=3")
LAGGED = ("--prompt-ids=5,6,7", "--max-new-tokens=24", "--stop-ids=", "--scheduler=lagged")


def refused(result: Any, *words: str) -> None:
    """One paragraph on stderr, exit code 2."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    for word in words:
        assert word in last


@pytest.fixture
def copy(bundle: Callable[..., Path], tmp_path: Path) -> Path:
    """A bundle to write into."""
    return Path(shutil.copytree(bundle(NAME), tmp_path / "bundle"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lists of ids, one prompt a line."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    ids = [list(p["prompt"]) for p in load_golden(NAME).prompts]
    lines = [json.dumps({"prompt": p}) for p in [*ids, *(p[::-1] for p in ids)]]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def made(
    bundle: Callable[..., Path], prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A bundle after profile and calibrate, and the trace beside it; do not modify it."""
    path = Path(shutil.copytree(bundle(NAME), tmp_path_factory.mktemp("made") / "bundle"))
    ok("profile", path, *PROFILE)
    ok(
        *("calibrate", path, "--prompts", prompts, "--max-new-tokens=32", "--batch=3"),
        *("--trace", path.parent / "trace.jsonl"),
    )
    return path


def table_file(path: Path) -> Path:
    (file,) = (path / "costs").iterdir()
    return file


# What is written, and who reads it


def test_the_engine_picks_both_files_up(made: Path) -> None:
    engine = Engine.load(made)
    assert engine.costs == CostTable.load(table_file(made))
    assert engine.calibration is not None
    assert engine.calibration == Calibration.load(made / "calibration.json", GAMMA)
    assert engine.costs is not None
    assert table_file(made).stem == fingerprint_name(engine.backend.fingerprint())
    # Every cell of one request; those of two in steps of one.
    expected = {(r, n) for r in (1, 2) for n in range(r, r * (GAMMA + 1) + 1)}
    assert set(engine.costs.cells) == expected
    # Three passes; where a split can be uneven, two of them are even.
    assert engine.costs.samples == {cell: 3 if cell[0] == 1 else 2 for cell in expected}
    assert set(engine.costs.pad_ms) == {2}
    assert set(engine.costs.draft_ms) == {1, 2}
    assert engine.costs.context_ms >= 0
    assert all(ms > 0 for ms in [*engine.costs.cells.values(), *engine.costs.draft_ms.values()])


def test_profile_prints_every_cell(copy: Path) -> None:
    result = ok("profile", copy, "--batch=1", "--context=8", "--repeat=3")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [r[:2] for r in rows[1 : GAMMA + 2]] == [["1", str(n)] for n in range(1, GAMMA + 2)]
    assert "1 requests: 8 widths, 3 passes" in result.stderr
    # A second run replaces the file of this machine.
    before = table_file(copy).read_bytes()
    ok("profile", copy, "--batch=2", "--context=8", "--repeat=3")
    assert table_file(copy).read_bytes() != before


def test_calibrate_writes_temperatures_metrics_and_a_diagram(made: Path) -> None:
    payload = json.loads((made / "calibration.json").read_text())
    assert payload["gamma"] == GAMMA and len(payload["temperatures"]) == GAMMA
    assert payload["sampling_temperature"] == 0.0
    assert payload["fitted"] > payload["held_out"] > 0
    for part in ("before", "after"):
        assert {len(payload[part][m]) for m in ("ece", "auroc", "brier")} == {GAMMA}
    assert ET.parse(made / "calibration.svg").getroot().tag.endswith("svg")


def test_the_trace_holds_raw_confidences(made: Path, prompts: Path, tmp_path: Path) -> None:
    """Also when the bundle has a calibration already: a fit must not build on the last one."""
    again = Path(shutil.copytree(made, tmp_path / "again"))
    trace = tmp_path / "trace.jsonl"
    arguments = ("--max-new-tokens=32", "--batch=2", "--trace", trace)
    ok("calibrate", again, "--prompts", prompts, *arguments)
    for a, b in zip(load_trace(trace), load_trace(made.parent / "trace.jsonl"), strict=True):
        np.testing.assert_allclose(a.confidence, b.confidence, atol=1e-4)
        assert a.accepted.tolist() == b.accepted.tolist()
    found, first = (Calibration.load(p / "calibration.json") for p in (again, made))
    np.testing.assert_allclose(found.temperatures, first.temperatures, rtol=0.05)


def test_calibrate_measures_on_as_many_prompts_as_asked(copy: Path, prompts: Path) -> None:
    ok("calibrate", copy, "--prompts", prompts, "--max-new-tokens=24", "--held-out=0.7")
    found = Calibration.load(copy / "calibration.json")
    assert 0 < found.fitted < found.held_out


def test_simulate_shows_every_policy(made: Path, tmp_path: Path) -> None:
    trace, figure = made.parent / "trace.jsonl", tmp_path / "figure.svg"
    arguments = ("--trace", trace, "--costs", table_file(made), "--blocks=60")
    rows = ok("simulate", *arguments, "--svg", figure).stdout.splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [
        [r, p] for r in ("1", "2") for p in ("plain", *POLICIES)
    ]
    assert ET.parse(figure).getroot().tag.endswith("svg")
    sampled = ok("simulate", *arguments, "--sampled", "--concurrency=2").stdout
    assert "live-argmax" not in sampled
    assert len(sampled.splitlines()) == len(POLICIES) + 1


# generate with a cost-based scheduler


def test_lagged_uses_the_table(made: Path) -> None:
    found = json.loads(ok("generate", made, *LAGGED, "--json").stdout)
    plain = json.loads(ok("generate", made, *LAGGED, "--json", "--no-speculative").stdout)
    assert found["token_ids"] == plain["token_ids"]
    assert sum(found["stats"]["schedules"].values()) == found["stats"]["rounds"]
    assert not {NO_COSTS, NOT_COVERED} & set(found["stats"]["schedules"])


def test_lagged_without_a_table_says_so(bundle: Callable[..., Path]) -> None:
    found = json.loads(ok("generate", bundle(NAME), *LAGGED, "--json").stdout)
    assert found["stats"]["schedules"] == {NO_COSTS: found["stats"]["rounds"]}
    full = ok("generate", bundle(NAME), *LAGGED[:-1], "--json")
    assert found["token_ids"] == json.loads(full.stdout)["token_ids"]
    assert "no measured cost table" in ok("generate", bundle(NAME), *LAGGED, "--stats").stderr


@pytest.mark.parametrize("scheduler", ["early-stop", "lagged", "live-argmax"])
def test_every_cost_based_scheduler_is_offered(made: Path, scheduler: str) -> None:
    arguments = ("generate", made, *LAGGED[:-1], "--scheduler", scheduler)
    ok(*arguments)
    sampled = run(*arguments, "--temperature=0.8")
    if scheduler == "live-argmax":
        refused(sampled, "live-argmax", "draft_sampling")
    assert run(*arguments, "--temperature=0.8", "--draft-sampling=greedy").exit_code == 0


# Tables of other machines


def edit(file: Path, **changes: Any) -> None:
    payload = json.loads(file.read_text())
    payload["fingerprint"] |= changes
    file.write_text(json.dumps(payload))


def test_a_table_of_another_machine_is_not_used(made: Path, copy: Path) -> None:
    """It lies under another name; one that was renamed or edited is refused by difference."""
    folder = copy / "costs"
    shutil.copytree(made / "costs", folder)
    file = table_file(copy)
    file.rename(folder / "0123456789abcdef.json")
    assert Engine.load(copy).costs is None

    (folder / "0123456789abcdef.json").rename(file)
    edit(file, device="another processor, 64 cores", threads=64)
    current = Engine.load(made).backend.fingerprint()
    with pytest.raises(DraftgraphError, match=r"differs in device .*another processor.*threads"):
        CostTable.load(file).check_fingerprint(current)
    refused(run("generate", copy, *LAGGED), "measured elsewhere", "another processor", "threads")


def test_a_calibration_of_another_block_size(made: Path, copy: Path) -> None:
    payload = json.loads((made / "calibration.json").read_text())
    cut = {name: payload[name][:3] for name in ("temperatures", "strongest", "weakest")}
    payload |= {"gamma": 3, **cut}
    (copy / "calibration.json").write_text(json.dumps(payload))
    refused(run("generate", copy, *LAGGED), "γ = 3", "γ = 7")


# Wrong input


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--batch=",), "--batch"),
        (("--batch=0",), "--batch"),
        (("--batch=1,x",), "--batch"),
        (("--repeat=2",), "--repeat"),
        (("--context=0",), "--context"),
        (("--context=1017",), "--context"),
    ],
)
def test_profile_refuses(copy: Path, arguments: tuple[str, ...], word: str) -> None:
    refused(run("profile", copy, *arguments), word)
    assert not (copy / "costs").exists()


def test_calibrate_refuses_prompt_files(copy: Path, tmp_path: Path) -> None:
    file = tmp_path / "few.jsonl"
    for content, word in (
        ("", "no prompts in it"),
        ("\n\n", "no prompts in it"),
        ('{"prompt": [5, 6, 7]}\n', "1 prompt; at least 2 are needed"),
        ('{"prompt": []}\n', "line 1"),
        ('{"prompt": [5, 600]}\n', "vocabulary of 100"),
    ):
        file.write_text(content)
        refused(run("calibrate", copy, "--prompts", file, "--max-new-tokens=16"), word)
    file.write_text('{"prompt": [5, 6]}\n{"prompt": [7, 8]}\n')
    # No block is verified in full: nothing to fit on.
    refused(run("calibrate", copy, "--prompts", file, "--max-new-tokens=5"), "empty")
    refused(run("calibrate", copy, "--prompts", tmp_path / "none.jsonl"), "cannot be read")
    refused(run("calibrate", copy, "--prompts", file, "--held-out=1"), "between 0 and 1")
    assert not (copy / "calibration.json").exists()


def test_calibrate_refuses_confidences_that_are_not_finite(
    copy: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = OnnxRuntimeCpu.confidence

    def broken(self: OnnxRuntimeCpu) -> np.ndarray | None:
        logits = original(self)
        assert logits is not None
        return np.where(np.arange(GAMMA) == 4, np.float32(np.nan), logits)

    monkeypatch.setattr(OnnxRuntimeCpu, "confidence", broken)
    result = run("calibrate", copy, "--prompts", prompts, "--max-new-tokens=16")
    refused(result, "confidence logits are not finite")
    assert not (copy / "calibration.json").exists()
    refused(run("generate", copy, *LAGGED[:-1], "--scheduler=threshold"), "confidences must lie")


def test_calibrate_needs_a_confidence_head(bundle: Callable[..., Path], prompts: Path) -> None:
    refused(run("calibrate", bundle("qwen3-dflash"), "--prompts", prompts), "no confidence head")


def test_simulate_refuses(made: Path, tmp_path: Path) -> None:
    trace, costs = made.parent / "trace.jsonl", table_file(made)
    arguments = ("simulate", "--trace", trace, "--costs", costs)
    refused(run(*arguments, "--concurrency=4"), "does not cover 4 requests")
    refused(run(*arguments, "--concurrency=1,x"), "--concurrency")
    refused(run(*arguments[:3], "--costs", tmp_path / "none.json"), "no such cost table")
    refused(run("simulate", "--trace", tmp_path / "none", "--costs", costs), "readable trace")
    (tmp_path / "mixed").write_text(
        trace.read_text() + '{"rounds": [{"confidence": [0.5], "accepted": 1}]}\n'
    )
    refused(run("simulate", "--trace", tmp_path / "mixed", "--costs", costs), "different γ")
    (tmp_path / "empty").write_text("\n")
    refused(run("simulate", "--trace", tmp_path / "empty", "--costs", costs), "empty")
    bad = '{"rounds": [{"confidence": [NaN, 0.5], "accepted": 1}]}\n'
    (tmp_path / "bad").write_text(bad)
    refused(run("simulate", "--trace", tmp_path / "bad", "--costs", costs), "line 1", "finite")


# Interruptions


@pytest.mark.parametrize("moment", ["measuring", "writing"])
@pytest.mark.parametrize("command", ["profile", "calibrate"])
def test_an_interrupted_command_leaves_the_old_file(
    command: str, moment: str, made: Path, copy: Path, prompts: Path, monkeypatch: Any
) -> None:
    """The end comes in the middle of a target call, or after the new file's content was written
    beside the old one."""
    shutil.copytree(made / "costs", copy / "costs")
    for name in ("calibration.json", "calibration.svg"):
        shutil.copy(made / name, copy / name)
    before = {f: f.read_bytes() for f in copy.rglob("*") if f.is_file()}
    calls = 0

    def die(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if moment == "writing" or calls > 5:
            raise KeyboardInterrupt

    if moment == "writing":
        monkeypatch.setattr(os, "replace", die)
    else:
        target = OnnxRuntimeCpu.target

        def dying(self: OnnxRuntimeCpu, batch: Any) -> None:
            die()
            target(self, batch)

        monkeypatch.setattr(OnnxRuntimeCpu, "target", dying)
    if command == "profile":
        result = run("profile", copy, *PROFILE)
    else:
        result = run("calibrate", copy, "--prompts", prompts, "--max-new-tokens=16")
    assert result.exit_code == 130
    assert calls
    assert {f: f.read_bytes() for f in copy.rglob("*") if f.is_file()} == before
    monkeypatch.undo()
    assert Engine.load(copy).costs is not None


def test_steps_are_measured_with_even_and_uneven_widths() -> None:
    assert split(4, 6, 3, uneven=False).tolist() == [2, 2, 1, 1]
    assert split(4, 6, 3, uneven=True).tolist() == [3, 1, 1, 1]
    assert split(4, 11, 3, uneven=True).tolist() == [4, 4, 2, 1]
    for uneven in (False, True):
        for tokens in range(4, 17):
            widths = split(4, tokens, 3, uneven)
            assert widths.sum() == tokens and widths.min() >= 1 and widths.max() <= 4
