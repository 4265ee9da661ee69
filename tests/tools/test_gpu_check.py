"""The GPU check without a GPU: all of its code runs, and each of its comparisons can fail.

The dry run drives the CPU provider like a device; the native backend runs over ONNX Runtime.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import GOLDENS_ROOT
from ort_device import open_on_cpu

from draftgraph.runtime import Engine, load_bundle
from draftgraph.runtime.backends import PROVIDERS, available
from draftgraph.tools import gpu_check
from draftgraph.tools.gpu import checks
from draftgraph.tools.gpu.opening import STAND_IN, Room, open_engine
from draftgraph.tools.gpu.pairs import MEASURED_ROOM, needed_bytes
from draftgraph.tools.gpu.recording import record, replay
from draftgraph.tools.gpu.report import markdown
from draftgraph.tools.gpu.sections import Section, run_all, run_apart, run_here

BundleFactory = Callable[..., Path]
NAME = "qwen3-vanilla"
ROOM = Room(256, 4)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def arguments(out: Path) -> list[str]:
    """Of a dry run over one golden, and another in the place of the demo pair."""
    goldens = out / "goldens"
    goldens.mkdir()
    (goldens / NAME).symlink_to(GOLDENS_ROOT / NAME)
    demo = GOLDENS_ROOT / "qwen3-dflash"
    return [
        *("--out", str(out), "--cpu", "--seconds", "0.1", "--goldens", str(goldens)),
        *("--target", str(demo / "target"), "--drafter", str(demo / "draft")),
    ]


@pytest.fixture(scope="module")
def first(out: Path, arguments: list[str]) -> dict[str, Any]:
    """The JSON of a whole dry run."""
    assert gpu_check.main(arguments) == 0
    found: dict[str, Any] = json.loads((out / "gpu_check.json").read_text())
    return found


def sections(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {s["name"]: s for s in found["sections"]}


# The dry run


def test_every_section_runs(first: dict[str, Any]) -> None:
    assert first["ok"] and first["dry_run"]
    assert {s["status"] for s in first["sections"]} == {"passed"}
    kinds = {s["name"].removesuffix(f":{STAND_IN}") for s in first["sections"]}
    assert kinds == {
        *("doctor", "export:goldens", "export:demo", "export:qwen3-4b", "golden", "graphs"),
        *("parity:golden:fp32", "parity:golden:fp16", "parity:golden:bf16", "parity:demo"),
        *("latency:demo", "latency:qwen3-4b"),
    }
    done = {name: s["result"] for name, s in sections(first).items()}
    for pair in done[f"golden:{STAND_IN}"]["pairs"].values():
        assert pair["differences"] == [] and pair["wrong_rounds"] == 0 < pair["rounds"]
        assert 0 < pair["max_trace_error"] < 1e-4
    graphs = done[f"graphs:{STAND_IN}"]
    assert graphs["runs"]["replayed"] > graphs["runs"]["captured"] > 0
    for dtype in ("fp32", "fp16", "bf16"):
        parity = done[f"parity:golden:{dtype}:{STAND_IN}"]
        assert parity["dtype"] == dtype and parity["graphs_not_run"] == []
        heads = ("markov", "markov_greedy", "markov_topk", "markov_topk_greedy")
        ran = {name.split(".")[0] for name in parity["outputs"]}
        assert ran == {
            *("target", "backbone", *heads, "confidence"),
            *("accept_greedy", "accept_sample", "accept_filtered"),
        }
        assert parity["outputs"]["target.logits"]["values"] > 0
    times = done[f"latency:qwen3-4b:{STAND_IN}"]
    assert times["clock"].startswith("host clock") and list(times["requests"]) == ["1", "2"]
    for phases in times["requests"].values():
        for phase in ("draft", "verify", "accept", "round", "plain"):
            assert phases[phase]["n"] >= 10
            assert 0 < phases[phase]["median"] <= phases[phase]["p90"] <= phases[phase]["p99"]
        assert phases["round"]["median"] > phases["verify"]["median"]


def test_the_report_has_every_figure(first: dict[str, Any], out: Path) -> None:
    text = (out / "gpu_check.md").read_text()
    assert text == markdown(first)
    assert "**Dry run on the CPU: nothing here was measured on a GPU.**" in text
    for section in first["sections"]:
        assert f"| {section['name']} | passed |" in text
    assert "host clock around calls that wait" in text
    assert f"| graphs:{STAND_IN} | with graphs, pass 4 | yes |" in text


def test_a_failure_is_recorded_and_earlier_outcomes_stay(
    first: dict[str, Any],
    arguments: list[str],
    out: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(out / "sections", tmp_path / "sections")
    shutil.copytree(out / "bundles" / f"{NAME}-fp32", tmp_path / "bundles" / f"{NAME}-fp32")
    (tmp_path / "bundles" / f"{NAME}-bf16").mkdir()  # not a bundle
    name = f"parity:golden:bf16:{STAND_IN}"
    given = ["--out", str(tmp_path), *arguments[2:], "--only", "parity:golden:fp32:*", name]
    assert gpu_check.main(given) == 1
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    failed = sections(found)[name]
    assert not found["ok"] and failed["status"] == "failed"
    assert "no manifest.json here" in failed["reason"] and "load_bundle" in failed["traceback"]
    assert f"## Traceback of {name}" in capsys.readouterr().out
    others = [s for s in found["sections"] if s["name"] != name]
    assert {s["status"] for s in others} == {"passed"} and len(others) == 11
    fresh = {s["name"] for s in found["sections"] if not s["earlier"]}
    assert fresh == {name, f"parity:golden:fp32:{STAND_IN}"}


def test_without_time_everything_is_listed_as_skipped(arguments: list[str], tmp_path: Path) -> None:
    given = ["--out", str(tmp_path), *arguments[2:], "--minutes", "0.1"]
    assert gpu_check.main(given) == 0
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert len(found["sections"]) == 12
    assert {s["status"] for s in found["sections"]} == {"skipped"}
    assert all(s["reason"].startswith("time: may take 10 s, ") for s in found["sections"])


def test_as_a_script_with_a_process_for_every_section(out: Path, arguments: list[str]) -> None:
    script = Path(gpu_check.__file__).resolve()
    given = [*arguments, "--apart", "--only", "export:qwen3*", f"latency:q*:{STAND_IN}"]
    ran = subprocess.run([sys.executable, script, *given], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "# GPU check" in ran.stdout
    found = sections(json.loads((out / "gpu_check.json").read_text()))
    assert not found[f"latency:qwen3-4b:{STAND_IN}"]["earlier"]
    assert found[f"latency:qwen3-4b:{STAND_IN}"]["result"]["requests"]["2"]["round"]["n"] >= 10


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--out", str(tmp_path), "--cpu", "--only", "speed"]) == 2
    assert "--only speed names no section; there are doctor, export:goldens" in (
        capsys.readouterr().err
    )
    if all(available(p) is not None for p in PROVIDERS if p != "cpu"):
        assert gpu_check.main(["--out", str(tmp_path)]) == 2
        assert "no provider of a GPU can run here (cuda: " in capsys.readouterr().err


def test_the_order_on_a_device(tmp_path: Path) -> None:
    """What is quick and matters most comes first; every provider has all of its sections."""
    providers = ("cuda", "tensorrt-native", "tensorrt")
    options = gpu_check.parse(["--out", str(tmp_path)])
    assert options.apart and options.minutes == 8
    names = [s.name for s in gpu_check.plan(options, providers)]
    assert names[:3] == ["doctor", "export:goldens", "parity:golden:fp32:cuda"]
    kinds = [n.removesuffix(":tensorrt") for n in names if n.endswith(":tensorrt")]
    assert names[-len(kinds) :] == [f"{k}:tensorrt" for k in kinds]
    for provider in providers:
        own = {n.removesuffix(f":{provider}") for n in names if n.endswith(f":{provider}")}
        half = {"parity:golden:fp16", "parity:golden:bf16", "golden", "graphs", "parity:demo"}
        expected = half | {"latency:demo", "latency:qwen3-4b"}
        assert own == expected | ({"parity:golden:fp32"} if provider == "cuda" else set())
    assert not (tmp_path / "bundles").exists()  # a plan makes nothing


# Sections


def passing() -> dict[str, Any]:
    return {"passed": True}


def test_sections_begin_only_if_they_end_in_time(tmp_path: Path) -> None:
    ran: list[str] = []

    def execute(section: Section, left: float) -> dict[str, Any]:
        ran.append(section.name)
        return run_here(section)

    outcomes = run_all(
        [Section(n, s, passing) for n, s in (("a", 1), ("b", 1000), ("c", 1))],
        minutes=1,
        only=(),
        folder=tmp_path,
        execute=execute,
        finished=lambda outcomes: None,
        report=lambda message: None,
    )
    assert ran == ["a", "c"]
    assert [o["status"] for o in outcomes] == ["passed", "skipped", "passed"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.abort()", "its process was ended by signal 6"),
        ("raise SystemExit('bad driver')", "its process ended with code 1: bad driver"),
        ("import time; time.sleep(60)", "stopped after 1 s, when the time was up"),
    ],
)
def test_a_process_that_leaves_nothing_has_failed(code: str, reason: str, tmp_path: Path) -> None:
    start = time.monotonic()
    command = [sys.executable, "-c", code]
    outcome = run_apart(Section("x", 1, passing), tmp_path / "x.json", command, 1.0)
    assert outcome["status"] == "failed" and outcome["reason"].startswith(reason)
    assert time.monotonic() - start < 20


# Each comparison can fail


@pytest.fixture(scope="module")
def recorded(bundle: BundleFactory) -> Any:
    path = bundle(NAME, markov_top_k=20)
    calls = record(path, checks.prompts_for(path, 3), markov="full", new_tokens=12)
    return path, calls


def test_the_same_calls_give_the_same_outputs(recorded: Any) -> None:
    path, calls = recorded
    found = replay(open_engine(path, STAND_IN, ROOM, markov="full").backend, calls)
    figures = checks.compare(calls, found, "fp32", "markov")
    assert all(f["passed"] for f in figures.values())
    assert figures["target.logits"]["max_abs"] == 0.0
    picks = figures["markov_greedy.draft_ids"]
    assert picks["agree"] == picks["compared"] > 50


@pytest.mark.parametrize(
    ("call", "tensor", "figure"),
    [
        ("target", "logits", "target.logits"),
        ("target", "features", "target.features"),
        ("markov", "draft_ids", "markov.draft_ids"),
        ("markov", "draft_logits", "markov.draft_logits"),
        ("confidence", "base_logits", "backbone.base_logits"),
        ("confidence", "prev_embeddings", "markov.prev_embeddings"),
        ("confidence", "confidence_logits", "confidence.confidence_logits"),
        ("accept", "next_id", "accept_sample.next_id"),
    ],
)
def test_a_wrong_tensor_does_not_pass(recorded: Any, call: str, tensor: str, figure: str) -> None:
    _, calls = recorded
    sampled = next(i for i, c in enumerate(calls) if c.graph == "accept_sample")
    for change in (1, np.nan):
        found = [copy.deepcopy(c.outputs) for c in calls]
        if tensor in ("draft_ids", "next_id") and np.isnan(change):
            continue
        for c, outputs in list(zip(calls, found, strict=True))[sampled:]:
            if c.name == call and tensor in outputs:
                outputs[tensor] = outputs[tensor] + change
        figures = checks.compare(calls, found, "fp32", "markov")
        assert not figures[figure]["passed"]


def test_what_follows_a_different_pick_is_not_compared(recorded: Any) -> None:
    _, calls = recorded
    found = [copy.deepcopy(c.outputs) for c in calls]
    for call, outputs in zip(calls, found, strict=True):
        if call.name == "markov":
            outputs["draft_ids"][:, 2] += 1
        if call.name == "confidence":
            outputs["confidence_logits"][:, 3:] += 9
        if call.name == "accept" and call.arguments[0].verify_length.any():
            outputs["next_id"] += 1
    figures = checks.compare(calls, found, "fp32", "markov")
    assert figures["confidence.confidence_logits"]["max_abs"] == 0.0
    picks = figures["markov_greedy.draft_ids"]
    assert picks["compared"] == 3 * (picks["compared"] - picks["agree"]) and not picks["passed"]
    undrafted = [  # prompts, and last tokens
        len(c.outputs["next_id"])
        for c in calls
        if c.graph == "accept_greedy" and not c.arguments[0].verify_length.any()
    ]
    assert figures["accept_greedy.next_id"]["compared"] == sum(undrafted)


def test_one_bit_of_a_replay_is_noticed(recorded: Any) -> None:
    _, calls = recorded
    expected = [c.outputs for c in calls]
    found = copy.deepcopy(expected)
    first = next(o["logits"] for o in found if "logits" in o)
    first[0, 0] = np.nextafter(first[0, 0], np.float32(np.inf))
    same = checks._same(found, expected)
    assert same["tensors"] - same["bit_equal"] == 1 and same["ids_equal"]
    next(o["draft_ids"] for o in found if "draft_ids" in o)[0, 0] += 1
    assert not checks._same(found, expected)["ids_equal"]


def test_traces_with_another_token_or_tensor_do_not_pass(
    bundle: BundleFactory, tmp_path: Path
) -> None:
    traces = Path(shutil.copytree(GOLDENS_ROOT / NAME, tmp_path / NAME))
    path = bundle(NAME)
    expected = json.loads((traces / "expected.json").read_text())
    expected["prompts"] = expected["prompts"][:1]
    for change in ("tokens", "rounds"):
        changed = copy.deepcopy(expected)
        if change == "tokens":
            changed["prompts"][0]["plain_greedy"][-1] ^= 1
        else:
            changed["prompts"][0]["rounds"][8]["draft_tokens"][3] ^= 1  # not traced
        (traces / "expected.json").write_text(json.dumps(changed))
        found = checks.golden(STAND_IN, path, traces, Room(512, 1))
        assert not found["passed"]
        assert len(found["differences"]) == (1 if change == "tokens" else 0)
        assert found["wrong_rounds"] == (0 if change == "tokens" else 1)
    (traces / "expected.json").write_text(json.dumps(expected))
    other = Path(shutil.copy(GOLDENS_ROOT / "qwen3-gated" / "expected.safetensors", traces))
    assert other.parent == traces
    found = checks.golden(STAND_IN, path, traces, Room(512, 1))
    assert found["max_trace_error"] > checks.TRACE_TOLERANCE and not found["passed"]


def test_rounds_of_many_requests_are_replayed(bundle: BundleFactory) -> None:
    """Twelve blocks are more tokens than a short prompt has, but a round all the same."""
    found = checks.latency(
        STAND_IN, bundle(NAME), Room(requests=12), (12,), context=32, seconds=0.1
    )
    runs = found["report"]["cuda_graphs"]
    assert runs["eager"] == runs["captured"] < 10 < runs["replayed"]


# The native backend, over ONNX Runtime


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> str:
    """Engines of that provider are the TensorRT backend on the tests' device."""

    def opened(path: Path, provider: str, room: Room, **options: Any) -> Engine:
        if provider != "native":
            return open_engine(path, provider, room, **options)
        bundle = load_bundle(path)
        backend = open_on_cpu(
            bundle,
            capacity=room.capacity,
            max_batch=room.requests,
            prefill_len=room.capacity // 2,
            **options,
        )
        return Engine(bundle, backend, max_requests=room.requests)

    monkeypatch.setattr(checks, "open_engine", opened)
    return "native"


def test_parity_of_the_native_backend(native: str, bundle: BundleFactory) -> None:
    found = checks.parity(native, bundle(NAME, markov_top_k=20), ROOM, new_tokens=10)
    assert found["passed"], found
    assert found["outputs"]["target.logits"]["max_abs"] < 1e-4


def test_replays_of_the_native_backend(native: str, bundle: BundleFactory) -> None:
    found = checks.replays(native, bundle(NAME, markov_top_k=20), ROOM, new_tokens=12)
    assert found["passed"], found["passes"]
    assert found["runs"]["replayed"] > found["runs"]["captured"] > 0
    assert found["passes"][-1]["tensors"] > 100


def test_replays_that_differ_or_do_not_happen_do_not_pass(
    native: str, bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made = bundle(NAME, markov_top_k=20), []

    def tampered(backend: Any, calls: Any) -> Any:
        found = replay(backend, calls)
        made.append(found)
        if len(made) == 5:  # the third pass with graphs, after two without
            next(o["hidden"] for o in found if "hidden" in o)[0, 0, 0] += np.float32(0.5)
        return found

    monkeypatch.setattr(checks, "replay", tampered)
    found = checks.replays(native, path, ROOM, new_tokens=4)
    assert not found["passed"]
    assert [p["tensors"] - p["bit_equal"] for p in found["passes"]] == [0, 0, 1, 0]
    assert found["passes"][2]["max_difference"] == pytest.approx(0.5)

    opened = checks.open_engine

    def refusing(path: Path, provider: str, room: Room, **options: Any) -> Engine:
        if provider == native:
            options["refuse"] = tuple(load_bundle(path).graphs)
        return opened(path, provider, room, **options)

    monkeypatch.setattr(checks, "replay", replay)
    monkeypatch.setattr(checks, "open_engine", refusing)
    found = checks.replays(native, path, ROOM, new_tokens=4)
    assert found["runs"]["replayed"] == 0 and not found["passed"]
    assert "cannot be captured" in found["without_cuda_graphs"]["target"]


def test_goldens_and_times_of_the_native_backend(native: str, bundle: BundleFactory) -> None:
    path = bundle(NAME, markov_top_k=20)
    room = dataclasses.replace(ROOM, capacity=512)
    assert checks.golden(native, path, GOLDENS_ROOT / NAME, room)["passed"]
    found = checks.latency(native, path, ROOM, (1, 3), context=32, seconds=0.1)
    assert found["clock"] == "device events"
    for phases in found["requests"].values():
        whole = sum(phases[p]["median"] for p in ("draft", "verify", "accept"))
        assert phases["round"]["median"] > 0.5 * whole > 0
    assert found["report"]["cuda_graphs"]["replayed"] > 20


def test_the_memory_that_a_bundle_needs(bundle: BundleFactory) -> None:
    path = bundle(NAME)
    small, large = (needed_bytes(path, Room(1024, r)) for r in (1, 32))
    assert small < large
    opened = load_bundle(path)
    caches = MEASURED_ROOM.requests * MEASURED_ROOM.capacity * sum(opened.kv_bytes)
    assert large > caches + opened.files["weights.safetensors"]["bytes"]
