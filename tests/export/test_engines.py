"""TensorRT engines: every golden parses as the manifest says, builds without a GPU, and is kept.

What does not fit is refused before anything is built or deserialised.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers import GOLDENS, GOLDENS_ROOT, export_pair, load_golden, smollm2_gguf
from typer.testing import CliRunner

from draftgraph.export.bundle import export_bundle
from draftgraph.export.checkpoints import read_draft, read_target
from draftgraph.export.draft_vocab import restrict, write_draft_vocab
from draftgraph.export.engines import EngineOptions, build_engines
from draftgraph.export.engines import build as build_module
from draftgraph.export.engines.build import _progress_monitor, device_capability
from draftgraph.export.engines.network import parse_graph
from draftgraph.export.engines.options import check_options
from draftgraph.graphs.errors import DraftgraphError
from draftgraph.runtime import Bundle, load_bundle
from draftgraph.runtime.backends.tensorrt import library
from draftgraph.runtime.backends.tensorrt.library import LogKeeper
from draftgraph.runtime.engine_cache import Sidecar, check_engine, sidecars
from draftgraph.runtime.profiles import Profile, check_profiles, profiles
from draftgraph.tools.cli import app

BundleFactory = Callable[..., Path]

ASSETS = Path(__file__).parents[2] / "assets"
TOP_K = 20  # below the goldens' vocabulary, so that the truncated Markov graphs are there too
OPTIONS = EngineOptions("tensorrt-rtx", 128, ("8.9", "12.0"), max_batch=2, prefill_len=32)


@pytest.fixture(scope="session")
def half(bundle: BundleFactory) -> BundleFactory:
    """half(name, dtype="fp16") -> bundle directory; do not modify it."""
    return lambda name, dtype="fp16": bundle(name, dtype=dtype, markov_top_k=TOP_K)


@pytest.fixture
def copied(half: BundleFactory, tmp_path: Path) -> Path:
    """A bundle of its own for a test that builds into it or changes it."""
    return Path(shutil.copytree(half("qwen3-vanilla"), tmp_path / "bundle"))


# Parsing and building


def parse_all(trt: Any, bundle: Bundle) -> None:
    log = LogKeeper(trt)
    builder = trt.Builder(log.logger)
    for name in bundle.graphs:
        parsed = parse_graph(trt, builder, log, bundle, name, 128)
        decoder = {"target": bundle.target.decoder, "backbone": bundle.draft.decoder}.get(name)
        layers = decoder.num_layers if decoder else 0
        assert parsed.layers == {"attention": layers, "kv_cache_update": 2 * layers}


@pytest.mark.parametrize("name", GOLDENS)
def test_every_graph_parses_as_the_manifest_says(trt: Any, half: BundleFactory, name: str) -> None:
    parse_all(trt, load_bundle(half(name)))


def test_bf16_parses_too(trt: Any, half: BundleFactory) -> None:
    bundle = load_bundle(half("qwen3-vanilla", "bf16"))
    assert bundle.dtype == "bf16"
    parse_all(trt, bundle)


def test_a_draft_vocabulary_parses_and_builds(trt: Any, tmp_path: Path) -> None:
    target = read_target(GOLDENS_ROOT / "qwen3-vanilla" / "target")
    drafter = shutil.copytree(GOLDENS_ROOT / "qwen3-vanilla" / "draft", tmp_path / "drafter")
    write_draft_vocab(drafter, np.arange(60, 20, -1))
    draft = restrict(read_draft(drafter, target), 30)
    path = export_bundle(target, draft, tmp_path / "bundle", dtype="fp16", validate=False)
    parse_all(trt, load_bundle(path))
    (built,) = build_engines(path, OPTIONS, graphs=["backbone"])
    assert built.sidecar.bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [*((g, "fp16") for g in GOLDENS), ("qwen3-vanilla", "bf16")]
)
def test_engines_build_without_a_gpu_and_are_kept(
    trt: Any, half: BundleFactory, tmp_path: Path, name: str, dtype: str
) -> None:
    path = Path(shutil.copytree(half(name, dtype), tmp_path / "bundle"))
    build_twice(trt, path, OPTIONS)


@pytest.mark.slow
def test_the_demo_pair_parses_and_builds(trt: Any, tmp_path: Path) -> None:
    """SmolLM2-135M and its drafter, at sizes that would be used."""
    target = read_target(smollm2_gguf())
    draft = read_draft(ASSETS / "smollm2-dspark", target)
    path = tmp_path / "bundle"
    export_bundle(target, draft, path, dtype="fp16", max_seq_len=2048, validate=False)
    parse_all(trt, load_bundle(path))
    options = EngineOptions("tensorrt-rtx", 2048, ("8.9", "12.0"))
    build_twice(trt, path, options, found_in=10)  # its weights are hashed


def build_twice(trt: Any, path: Path, options: EngineOptions, found_in: float = 2) -> None:
    """Every graph is built and kept, and the second time found, in so many seconds."""
    lines: list[str] = []
    built = build_engines(path, options, report=lines.append)
    bundle = load_bundle(path)  # engines in the bundle do not disturb it
    assert [b.sidecar.graph for b in built] == list(bundle.graphs)
    assert not any(b.hit for b in built)
    for b in built:
        assert b.reason == "no engine yet"
        assert b.sidecar.file.stat().st_size == b.sidecar.bytes > 0
        assert b.sidecar == Sidecar.load(b.sidecar.file.with_suffix(".json"))
        assert b.sidecar.key.version == trt.__version__
        assert b.sidecar.key.compute_capabilities == ("8.9", "12.0")
        assert b.sidecar.key.precision == bundle.dtype
    assert len({b.sidecar.file.parent for b in built}) == 1

    start = time.perf_counter()
    lines.clear()
    again = build_engines(path, options, report=lines.append)
    assert time.perf_counter() - start < found_in
    assert all(b.hit for b in again)
    assert all("cache hit" in line for line in lines)
    assert [b.sidecar for b in again] == [b.sidecar for b in built]


def test_a_miss_says_what_changed(trt: Any, copied: Path) -> None:
    def build(**changes: Any) -> tuple[bool, str]:
        options = dataclasses.replace(OPTIONS, **changes)
        (built,) = build_engines(copied, options, graphs=["confidence"])
        return built.hit, built.reason

    assert build() == (False, "no engine yet")
    assert build() == (True, "")
    assert build(capacity=256) == (False, "changed: capacity (128 → 256)")
    assert build(max_batch=3, prefill_len=16) == (
        False,
        "changed: max_batch (2 → 3), prefill_len (32 → 16)",
    )
    assert build(compute_capabilities=("8.9",)) == (
        False,
        "changed: compute capabilities (8.9, 12.0 → 8.9)",
    )
    assert build() == (True, "")  # each build has its own folder
    (sidecar,) = [s for s in sidecars(load_bundle(copied), "confidence") if _is_first(s)]
    key = dataclasses.replace(sidecar.key, graph_sha256="0" * 64, version="1.0")
    shutil.rmtree(copied / "engines")
    sidecar.file.parent.mkdir(parents=True)
    dataclasses.replace(sidecar, key=key).save()
    assert build() == (False, f"changed: TensorRT version (1.0 → {trt.__version__}), graph")
    sidecar.file.write_bytes(b"cut short")
    hit, reason = build()
    assert not hit and "9 bytes" in reason
    sidecar.file.with_suffix(".json").write_text("{}")
    assert build() == (False, "no engine yet")  # a damaged sidecar is none


def _is_first(sidecar: Sidecar) -> bool:
    settings = sidecar.key.settings
    return (settings["capacity"], settings["max_batch"]) == (128, 2) and len(
        sidecar.key.compute_capabilities
    ) == 2


def test_rebuild_on_request(trt: Any, copied: Path) -> None:
    for reason in ("no engine yet", "rebuild asked for"):
        (built,) = build_engines(copied, OPTIONS, graphs=["confidence"], rebuild=True)
        assert (built.hit, built.reason) == (False, reason)


def test_progress_is_reported(trt: Any, copied: Path) -> None:
    lines: list[str] = []
    monitor = _progress_monitor(trt, "target", lines.append)
    monitor.last -= 5
    monitor.phase_start("Optimizing", None, 4)
    assert monitor.step_complete("Optimizing", 1)
    assert monitor.step_complete("Optimizing", 2)  # within a second: not reported
    monitor.phase_finish("Optimizing")
    assert lines == ["target: Optimizing, 2 of 4"]


def test_command_line(trt: Any, copied: Path) -> None:
    arguments = ["build", str(copied), "--capacity", "128", "--prefill-len", "32"]
    arguments += ["--compute-capability", "8.9", "--graph", "confidence"]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert "built" in first.stdout and "tensorrt-rtx-" in first.stdout
    second = CliRunner().invoke(app, arguments)
    assert "cache hit" in second.stdout
    refused = CliRunner().invoke(app, arguments[:2])
    assert refused.exit_code == 2


# What TensorRT would accept silently, found in the parsed network


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no mask", "without its mask"),
        ("causal", "with causal kind UPPER_LEFT"),
        ("no layer", "expected 4 and 8"),
    ],
)
def test_attention_that_lost_something_is_found(
    trt: Any, copied: Path, change: str, message: str
) -> None:
    bundle = load_bundle(copied)
    path = bundle.graph_path("target")
    model = onnx.load(path, load_external_data=False)
    node = next(n for n in model.graph.node if n.op_type == "Attention")
    if change == "no mask":
        del node.input[3]
    elif change == "causal":
        del node.input[3]
        next(a for a in node.attribute if a.name == "is_causal").i = 1
    else:
        node.op_type = "Identity"
        del node.input[1:], node.attribute[:]
    onnx.save(model, path)
    log = LogKeeper(trt)
    with pytest.raises(DraftgraphError, match=message):
        parse_graph(trt, trt.Builder(log.logger), log, bundle, "target", 128)


def test_a_manifest_that_lies_is_found(trt: Any, half: BundleFactory) -> None:
    bundle = load_bundle(half("qwen3-vanilla"))
    info = bundle.graphs["confidence"]
    renamed = dataclasses.replace(info.inputs[0], name="other")
    lying = dataclasses.replace(
        bundle,
        graphs={"confidence": dataclasses.replace(info, inputs=(renamed, *info.inputs[1:]))},
    )
    log = LogKeeper(trt)
    with pytest.raises(DraftgraphError, match=r"'other'.* became \('hidden'"):
        parse_graph(trt, trt.Builder(log.logger), log, lying, "confidence", 128)


# Refusals


def test_fp32_is_refused_up_front(bundle: BundleFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "load_tensorrt", lambda backend: pytest.fail("too late"))
    with pytest.raises(DraftgraphError, match=r"no dedicated fp32 kernel.*--dtype fp16"):
        build_engines(bundle("qwen3-vanilla"), OPTIONS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": None}, "no capacity given"),
        ({"capacity": 46}, r"take 47 rows; raise --capacity"),  # 32 + 2·7 + 1
        ({"capacity": 22, "prefill_len": 1}, "take 23 rows"),  # 8 + 2·7 + 1
        ({"max_batch": 0}, "at least 1"),
        ({"prefill_len": 0}, "at least 1"),
        ({"backend": "cuda"}, "expected one of"),
        ({"compute_capabilities": ("sm89",)}, "for example 8.9"),
    ],
)
def test_options_that_cannot_work(
    half: BundleFactory, changes: dict[str, Any], message: str
) -> None:
    options = dataclasses.replace(OPTIONS, **changes)
    with pytest.raises(DraftgraphError, match=message):
        build_engines(half("qwen3-vanilla"), options)


def test_smallest_capacity_is_enough(half: BundleFactory) -> None:
    bundle = load_bundle(half("qwen3-vanilla"))
    check_options(bundle, dataclasses.replace(OPTIONS, capacity=47))


def test_profiles_cover_every_width(half: BundleFactory) -> None:
    bundle = load_bundle(half("qwen3-vanilla"))
    for graph in bundle.graphs:
        made = profiles(bundle, graph, OPTIONS.limits)
        check_profiles(bundle, graph, OPTIONS.limits, made)
        assert [p.name for p in made] == (
            ["verify", "prefill"] if graph in ("target", "backbone") else ["verify"]
        )
    (cells,) = [t for t in bundle.graphs["target"].inputs if t.name == "cell_token"]
    verify, prefill = profiles(bundle, "target", OPTIONS.limits)
    assert verify.shape(cells) == ((1, 1), (2, 8), (2, 8))
    assert prefill.shape(cells) == ((1, 1), (1, 32), (2, 32))


@pytest.mark.parametrize(
    ("axis", "limits", "message"),
    [
        ("S", (1, 4, 7), "2 requests of 8 tokens|1 requests of 8 tokens"),  # γ + 1 is 8
        ("S", (2, 8, 8), "1 requests of 1 tokens"),
        ("N", (1, 8, 15), "2 requests of 8 tokens"),
        ("R", (2, 2, 2), "1 requests of 1 tokens"),
        ("S", (8, 4, 8), "smallest ≤ optimal ≤ largest"),
    ],
)
def test_a_profile_that_excludes_a_width(
    half: BundleFactory, axis: str, limits: tuple[int, int, int], message: str
) -> None:
    bundle = load_bundle(half("qwen3-vanilla"))
    verify = profiles(bundle, "target", OPTIONS.limits)[0]
    narrow = Profile("verify", {**verify.axes, axis: limits})
    with pytest.raises(DraftgraphError, match=message):
        check_profiles(bundle, "target", OPTIONS.limits, [narrow])
    missing = Profile("verify", {a: r for a, r in verify.axes.items() if a != axis})
    with pytest.raises(DraftgraphError, match=f"no range for \\['{axis}'\\]"):
        check_profiles(bundle, "target", OPTIONS.limits, [missing])


def test_a_capability_that_rtx_does_not_have(trt: Any, copied: Path) -> None:
    options = dataclasses.replace(OPTIONS, compute_capabilities=("8.9", "9.0"))
    with pytest.raises(DraftgraphError, match=r"8\.9.*, not 9\.0; use --backend tensorrt"):
        build_engines(copied, options, graphs=["confidence"])


def test_an_unknown_graph(half: BundleFactory) -> None:
    with pytest.raises(DraftgraphError, match="no graph 'nothing'"):
        build_engines(half("qwen3-vanilla"), OPTIONS, graphs=["nothing"])


def test_missing_library(monkeypatch: pytest.MonkeyPatch, half: BundleFactory) -> None:
    """Neither an install on the loader's path nor the wheel."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(library, "_SONAME", "absent-{}.so.1")
    monkeypatch.setattr(library, "PROVIDER_WHEEL", "absent_wheel")
    monkeypatch.setattr(library, "_RTX_LIBRARIES", ("libtensorrt_rtx",))
    with pytest.raises(DraftgraphError) as caught:
        library.preload_rtx()
    message = str(caught.value)
    assert 'pip install "draftgraph[tensorrt-rtx]"' in message
    assert "LD_LIBRARY_PATH" in message and "\n" not in message


def test_missing_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DraftgraphError, match=r'pip install "draftgraph\[tensorrt\]"'):
        library.load_tensorrt("tensorrt")


def test_library_and_bindings_of_two_versions(trt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        __version__ = "1.5.0.10"

    with pytest.raises(DraftgraphError, match=r"bindings are 1\.5\.0\.10"):
        library._check_library_version(Other)


def test_tensorrt_builds_for_the_gpu_at_hand_only(
    monkeypatch: pytest.MonkeyPatch, half: BundleFactory
) -> None:
    options = dataclasses.replace(OPTIONS, backend="tensorrt")
    for found, message in ((None, "there is none"), ("9.0", "has compute capability 9.0")):
        monkeypatch.setattr(build_module, "device_capability", lambda found=found: found)
        with pytest.raises(DraftgraphError, match=message):
            build_module._for_this_device(options)
    plain = dataclasses.replace(options, compute_capabilities=())
    assert build_module._for_this_device(plain).compute_capabilities == ("9.0",)
    assert device_capability() is None or device_capability() > "0"  # type: ignore[operator]


# Sidecars


@pytest.fixture
def sidecar(trt: Any, copied: Path) -> Sidecar:
    return build_engines(copied, OPTIONS, graphs=["confidence"])[0].sidecar


def test_an_engine_that_fits(trt: Any, copied: Path, sidecar: Sidecar) -> None:
    bundle = load_bundle(copied)
    assert sidecars(bundle, "confidence") == [sidecar]
    for capability in ("8.9", "12.0", None):
        check_engine(bundle, sidecar, version=trt.__version__, compute_capability=capability)


def test_another_version_or_device_is_refused(trt: Any, copied: Path, sidecar: Sidecar) -> None:
    bundle = load_bundle(copied)
    with pytest.raises(DraftgraphError, match=r"but 1\.8\.0 is installed"):
        check_engine(bundle, sidecar, version="1.8.0", compute_capability="8.9")
    with pytest.raises(DraftgraphError, match=r"this device has 8\.6.*--compute-capability 8\.6"):
        check_engine(bundle, sidecar, version=trt.__version__, compute_capability="8.6")


def test_a_stale_sidecar_is_refused(trt: Any, half: BundleFactory, sidecar: Sidecar) -> None:
    """The same pair with other weights, or another graph under the same name."""
    bf16 = load_bundle(half("qwen3-vanilla", "bf16"))
    with pytest.raises(DraftgraphError, match="stale"):
        check_engine(bf16, sidecar, version=trt.__version__, compute_capability="8.9")


def test_a_missing_or_cut_engine_is_refused(trt: Any, copied: Path, sidecar: Sidecar) -> None:
    bundle = load_bundle(copied)

    def check(message: str) -> None:
        with pytest.raises(DraftgraphError, match=message):
            check_engine(bundle, sidecar, version=trt.__version__, compute_capability=None)

    sidecar.file.write_bytes(b"12345")
    check("5 bytes, its sidecar says")
    sidecar.file.unlink()
    check("the file is missing")


def test_damaged_and_newer_sidecars(trt: Any, sidecar: Sidecar) -> None:
    path = sidecar.file.with_suffix(".json")
    good = json.loads(path.read_text())
    for change, message in (
        ({"schema_version": 99}, "schema_version is 99"),
        ({"key": {}}, "damaged engine sidecar"),
        ({"key": {**good["key"], "extra": 1}}, "damaged engine sidecar"),
    ):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(DraftgraphError, match=message):
            Sidecar.load(path)


def test_a_damaged_bundle_is_not_built(trt: Any, tmp_path: Path) -> None:
    golden = load_golden("qwen3-dflash")
    path = export_pair(golden.target, golden.draft, tmp_path / "bundle", dtype="fp16")
    weights = path / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(DraftgraphError, match="SHA-256"):
        build_engines(path, OPTIONS)
