"""What `draftgraph doctor` says of a machine, and that what can run here is really run."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import run_cli
from rich.console import Console

from draftgraph.graphs.errors import DraftgraphError
from draftgraph.runtime import Engine
from draftgraph.runtime.backends import PROVIDERS, available
from draftgraph.runtime.costs import CostTable, fingerprint_name
from draftgraph.runtime.machine import Gpu
from draftgraph.tools import doctor as doctor_module
from draftgraph.tools.doctor import doctor, facts, render
from draftgraph.tools.gpu import smoke
from draftgraph.tools.gpu.opening import takes
from draftgraph.tools.gpu.smoke import decode, decode_apart, judge, prompts_of


@pytest.fixture
def copied(bundle: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle("qwen3-vanilla"), tmp_path / "bundle"))


def by_provider(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {b["provider"]: b for b in found["backends"]}


def test_without_a_bundle_a_tiny_pair_is_made_and_decoded(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    result = run_cli("doctor", "--json", file)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert found["ok"] and found["bundle"] is None
    assert found["packages"]["runtime"]["draftgraph"] is not None
    assert found["packages"]["export"]["onnx"] is not None
    assert "CPUExecutionProvider" in found["onnxruntime"]["providers"]
    assert found["system"]["cores_available"] >= 1
    assert [b["provider"] for b in found["backends"]] == list(PROVIDERS)

    cpu = by_provider(found)["cpu"]
    assert (cpu["status"], cpu["dtype"], cpu["differences"]) == ("passed", "fp32", [])
    assert 0 < cpu["accepted"] < cpu["verified"]  # the pair accepts and rejects
    for name, backend in by_provider(found).items():
        reason = available(name)
        assert backend["status"] == ("passed" if reason is None else "unavailable")
        assert backend["problem"] == reason
        if reason is not None:  # says what to do
            assert f"{name}: unavailable: {reason}" in result.stdout
            assert "install" in reason or "use" in reason


def test_gpus_and_wheels_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [Gpu("Card A", "9.0", "580.1", 80 << 30), Gpu("Card B", "8.9", "580.1", 24 << 30), None]
    monkeypatch.setattr(doctor_module, "gpu", lambda index: cards[index])
    monkeypatch.setattr(doctor_module, "driver_versions", lambda: ("580.1", "13.0"))
    monkeypatch.setattr(doctor_module, "_version", lambda name: "1.0")  # all wheels, both of ORT
    found = facts()
    assert [g["compute_capability"] for g in found["gpus"]] == ["9.0", "8.9"]
    assert found["driver"] == {"version": "580.1", "cuda": "13.0"}
    out = io.StringIO()
    nothing = {"backends": [], "bundle": None, "ok": True}
    render({**found, **nothing}, Console(file=out, width=200))
    text = " ".join(out.getvalue().split())
    assert "GPU 1 Card B, compute capability 8.9, 24 GiB" in text and "GPUs none" not in text
    assert "580.1, serves CUDA 13.0" in text
    assert "tensorrt-rtx-cu13-bindings 1.0" in text
    assert "warning: both wheels of ONNX Runtime are installed" in text


def test_a_bundle_is_tried_and_its_cost_tables_are_judged(copied: Path) -> None:
    here = Engine.load(copied).backend.fingerprint()
    elsewhere = {**here, "device": "another"}
    prints = {"here": here, "elsewhere": elsewhere, "gpu": {**here, "backend": "onnxruntime-x"}}
    for current in prints.values():
        table = CostTable({(1, 1): 1.0}, fingerprint=current)
        table.save(copied / "costs" / f"{fingerprint_name(current)}.json")
    (copied / "costs" / "damaged.json").write_text("{")
    found = doctor(copied)
    assert found["ok"]
    assert found["bundle"]["dtype"] == "fp32"
    backends = by_provider(found)
    assert backends["cpu"]["status"] == "passed"
    costs = {c["file"].removesuffix(".json"): c for c in found["bundle"]["costs"]}
    assert costs[fingerprint_name(here)] == {
        "file": f"{fingerprint_name(here)}.json",
        "used_by": "cpu",
        "problem": None,
    }
    problems = {
        name: costs[fingerprint_name(p)]["problem"] for name, p in prints.items() if name != "here"
    }
    assert "device (table: 'another'" in problems["elsewhere"]
    assert problems["gpu"] == "measured with onnxruntime-x, which did not run here"
    assert "not a readable cost table" in costs["damaged"]["problem"]


def test_a_broken_bundle_is_not_well(copied: Path) -> None:
    weights = copied / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    result = run_cli("doctor", copied)
    assert result.exit_code == 1
    assert "weights.safetensors: its content differs from the manifest's SHA-256" in result.stdout
    assert "cpu: not tested: the bundle cannot be read" in result.stdout


def test_wrong_tokens_are_a_failure(
    bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One id of the speculative output is changed behind the engine's back."""

    def changed(engine: Engine, prompts: list[list[int]]) -> dict[str, Any]:
        found = decode(engine, prompts)
        found["speculative"][1][5] = (found["speculative"][1][5] + 1) % 96
        return found

    monkeypatch.setattr(doctor_module, "decode", changed)
    found = doctor(bundle("qwen3-vanilla"))
    cpu = by_provider(found)["cpu"]
    assert not found["ok"] and cpu["status"] == "failed"
    assert "speculative from plain decoding differs at token 5 of prompt 1" in cpu["problem"]


def test_a_provider_that_should_run_and_does_not(
    bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = next(p for p in PROVIDERS if available(p) is not None and takes(p, "fp32"))
    monkeypatch.setattr(doctor_module, "PROVIDERS", ("cpu", missing))
    monkeypatch.setattr(doctor_module, "available", lambda provider: None)
    found = doctor(bundle("qwen3-vanilla"))
    assert not found["ok"]
    backends = by_provider(found)
    assert backends["cpu"]["status"] == "passed"
    assert backends[missing]["status"] == "failed"
    assert available(missing) in backends[missing]["problem"]  # of its own process


def test_what_a_bundle_cannot_show_is_said(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "available", lambda provider: None)
    monkeypatch.setattr(doctor_module, "PROVIDERS", ("cpu", "tensorrt"))
    found = doctor(copied)
    tensorrt = by_provider(found)["tensorrt"]
    assert found["ok"] and tensorrt["status"] == "not tested"
    assert "is fp32, which this provider does not run" in tensorrt["problem"]


def test_native_providers_need_engines_in_a_bundle(
    bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_module, "available", lambda provider: None)
    monkeypatch.setattr(doctor_module, "PROVIDERS", ("tensorrt-native",))
    path = bundle("qwen3-vanilla", dtype="fp16", markov_top_k=20)
    (native,) = doctor(path)["backends"]
    assert native["status"] == "not tested"
    assert f"draftgraph build {path} --backend tensorrt --capacity" in native["problem"]


def test_without_the_export_tools_a_bundle_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "draftgraph.export.random_pair", None)
    found = doctor(None)
    cpu = by_provider(found)["cpu"]
    assert found["ok"] and cpu["status"] == "not tested"
    assert 'draftgraph doctor BUNDLE), or pip install "draftgraph[export]"' in cpu["problem"]


# The process of its own


def test_another_process_decodes_the_same(bundle: Callable[..., Path], tmp_path: Path) -> None:
    engine = Engine.load(bundle("qwen3-vanilla"))
    prompts = prompts_of(engine.bundle)
    expected = decode(engine, prompts)
    found = decode_apart(engine.bundle.path, "cpu", prompts, build=False, cache=tmp_path)
    assert found["speculative"] == expected["speculative"] == expected["plain"]
    assert judge(engine, prompts, expected, found) == []


def test_a_process_that_ends_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = tmp_path / "python"
    crash.write_text('#!/bin/sh\necho "cuda: illegal address" >&2\nkill -ABRT $$\n')
    crash.chmod(0o755)
    monkeypatch.setattr(smoke.sys, "executable", str(crash))
    with pytest.raises(DraftgraphError, match="was ended by signal 6: cuda: illegal address"):
        decode_apart(tmp_path, "cuda", [[1]], build=False, cache=tmp_path)
    crash.write_text("#!/bin/sh\nexec sleep 20\n")
    monkeypatch.setattr(smoke, "SECONDS", 0.2)
    with pytest.raises(DraftgraphError, match="not done after 0 s"):
        decode_apart(tmp_path, "cuda", [[1]], build=False, cache=tmp_path)


def test_near_ties_are_told_from_mistakes(
    bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(bundle("qwen3-vanilla"))
    prompts = prompts_of(engine.bundle)
    expected = decode(engine, prompts)
    found = json.loads(json.dumps(expected))
    found["plain"][0][3] ^= 1
    first, second = judge(engine, prompts, expected, found)
    assert (first["what"], first["position"]) == ("speculative from plain decoding", 3)
    assert (second["what"], second["position"]) == ("plain decoding from the CPU's", 3)
    assert not first["near_tie"] and first["behind"] > 1e-3
    monkeypatch.setitem(smoke.TIE, "fp32", first["behind"])
    assert all(d["near_tie"] for d in judge(engine, prompts, expected, found))
    found["plain"][0] = expected["plain"][0][:7]  # one that stops early is no tie
    assert not judge(engine, prompts, expected, found)[0]["near_tie"]
