"""Everything that only a GPU can show, in a few minutes: `python tools/gpu_check.py --out DIR`.

Compares every graph on every provider that can run here with the CPU provider, decodes the official
traces, compares CUDA graphs with eager runs, and measures rounds. Writes `gpu_check.json` and
`gpu_check.md` after every section; a section that fails does not end the others, and one that would
not end in time is listed as skipped. `--cpu` runs it all without a GPU, with small sizes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path.pop(0)  # this folder: its profile.py would hide the standard library's

from draftgraph.graphs.contract import DType
from draftgraph.graphs.errors import DraftgraphError
from draftgraph.runtime.backends import PROVIDERS, available
from draftgraph.runtime.jsonfile import write_json, write_text
from draftgraph.runtime.machine import gpu
from draftgraph.tools.doctor import doctor, facts
from draftgraph.tools.gpu.checks import golden, latency, parity, replays
from draftgraph.tools.gpu.opening import STAND_IN, takes
from draftgraph.tools.gpu.pairs import (
    GOLDEN,
    GOLDEN_ROOM,
    MEASURED_ROOM,
    Pairs,
    Skipped,
    needed_bytes,
)
from draftgraph.tools.gpu.report import markdown
from draftgraph.tools.gpu.sections import (
    SCHEMA_VERSION,
    Section,
    plain_json,
    run_all,
    run_apart,
    run_here,
)

# Seconds that a section may take: on cuda, on a native provider, which builds engines once, and on
# ONNX Runtime's TensorRT providers, which compile in every process. Guesses until a GPU has run it.
ESTIMATES = {
    "doctor": (40, 90, 90),
    "export:goldens": (40, 40, 40),
    "export:demo": (60, 60, 60),
    "export:qwen3-4b": (90, 90, 90),
    "golden": (25, 60, 90),
    "parity:golden": (15, 60, 60),
    "graphs": (15, 30, 45),
    "parity:demo": (40, 90, 120),
    "latency:demo": (35, 60, 90),
    "latency:qwen3-4b": (60, 200, 240),
}
DRY_ESTIMATE = 10.0
DTYPES: tuple[DType, ...] = ("fp32", "fp16", "bf16")


def plan(options: argparse.Namespace, providers: Sequence[str]) -> list[Section]:
    """All sections, what matters most first.

    Those of ONNX Runtime's TensorRT providers come last: they compile in every process.
    """
    pairs = Pairs(
        options.out.absolute() / "bundles",
        options.goldens,
        options.target,
        options.drafter,
        small=options.cpu,
        layers=options.layers,
    )
    requests = (1, 2) if options.cpu else (1, 8, 32)
    seconds = options.seconds or (0.2 if options.cpu else 4.0)
    context = 64 if options.cpu else 512
    tokens = 8 if options.cpu else 24
    demo: DType = "fp32" if options.cpu else "fp16"

    def estimate(kind: str, provider: str = "cuda") -> float:
        cost = 1 if provider.endswith("-native") else 2 if "tensorrt" in provider else 0
        return DRY_ESTIMATE if options.cpu else ESTIMATES[kind][cost]

    def goldens(provider: str) -> dict[str, Any]:
        dtype: DType = "fp32" if takes(provider, "fp32") else "fp16"
        names = pairs.golden_names()
        if dtype != "fp32":  # every pair is compiled first
            names = [n for n in names if n in (GOLDEN, "llama-vanilla-threshold")]
        found = {
            name: golden(provider, pairs.golden(name, dtype), pairs.goldens / name, GOLDEN_ROOM)
            for name in names
        }
        return {"pairs": found, "passed": all(f["passed"] for f in found.values())}

    def tiny_parity(provider: str, dtype: DType) -> dict[str, Any]:
        _check_bf16(dtype)
        return parity(provider, pairs.golden(GOLDEN, dtype), GOLDEN_ROOM, new_tokens=tokens)

    def large(provider: str) -> dict[str, Any]:
        path = pairs.large("fp16")
        needed, found = needed_bytes(path, MEASURED_ROOM), gpu()
        if not options.cpu and found is not None and found.memory < needed:
            raise Skipped(
                f"needs about {needed / 2**30:.0f} GiB, {found.name} has "
                f"{found.memory / 2**30:.0f}; pass --layers 12 or fewer"
            )
        return latency(provider, path, MEASURED_ROOM, requests, context=context, seconds=seconds)

    def exported(*paths: Path) -> dict[str, Any]:
        return {"paths": [str(p) for p in paths], "passed": True}

    def all_goldens() -> dict[str, Any]:
        made = [pairs.golden(n, "fp32") for n in pairs.golden_names()]
        return exported(*made, *(pairs.golden(GOLDEN, d) for d in ("fp16", "bf16")))

    def checked() -> dict[str, Any]:
        found = doctor(None)
        return {**found, "passed": found["ok"]}

    def for_all(kind: str, name: str, run: Any, *wanted: str) -> list[Section]:
        return [
            Section(name.format(p), estimate(kind, p), partial(run, p))
            for p in providers
            if not wanted or p in wanted
        ]

    def tiny(dtype: DType) -> list[Section]:
        run = [p for p in providers if takes(p, dtype)]
        return [
            Section(
                f"parity:golden:{dtype}:{p}",
                estimate("parity:golden", p),
                partial(tiny_parity, p, dtype),
            )
            for p in run
        ]

    sections = [
        Section("doctor", estimate("doctor"), checked),
        Section("export:goldens", estimate("export:goldens"), all_goldens),
        *(s for dtype in DTYPES for s in tiny(dtype)),
        *for_all("golden", "golden:{}", goldens),
        *for_all(
            "graphs",
            "graphs:{}",
            lambda p: replays(p, pairs.golden(GOLDEN, "fp16"), GOLDEN_ROOM, new_tokens=tokens),
        ),
        Section(
            "export:qwen3-4b", estimate("export:qwen3-4b"), lambda: exported(pairs.large("fp16"))
        ),
        *for_all("latency:qwen3-4b", "latency:qwen3-4b:{}", large),
        Section("export:demo", estimate("export:demo"), lambda: exported(pairs.demo(demo))),
        *for_all(
            "latency:demo",
            "latency:demo:{}",
            lambda p: latency(
                p,
                pairs.demo(demo),
                MEASURED_ROOM,
                requests,
                context=context,
                seconds=seconds,
            ),
        ),
        *for_all(
            "parity:demo",
            "parity:demo:{}",
            lambda p: parity(p, pairs.demo(demo), MEASURED_ROOM, new_tokens=8),
        ),
    ]
    late = (":tensorrt", ":nv-tensorrt-rtx")
    return sorted(sections, key=lambda s: s.name.endswith(late))


def _check_bf16(dtype: DType) -> None:
    found = gpu()
    if dtype == "bf16" and found and int(found.compute_capability.split(".")[0]) < 8:
        raise Skipped(f"{found.name} has no bf16 arithmetic")


def devices() -> list[str]:
    """Providers of a device that can run here, quick ones first."""
    order = ("cuda", "tensorrt-native", "tensorrt-rtx-native", "nv-tensorrt-rtx", "tensorrt")
    found = [p for p in order if available(p) is None]
    if not found:
        reasons = "; ".join(f"{p}: {available(p)}" for p in PROVIDERS if p != "cpu")
        raise DraftgraphError(f"no provider of a GPU can run here ({reasons}); or pass --cpu")
    return found


def check(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Run the sections and write both files; returns what the JSON has."""
    start = time.monotonic()
    providers = [STAND_IN] if options.cpu else devices()
    sections = plan(options, providers)
    folder = options.out / "sections"
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "dry_run": options.cpu,
        "arguments": list(arguments),
        "minutes": options.minutes,
        "providers": providers,
        "environment": facts(),
        "sections": [],
    }

    def finished(outcomes: list[dict[str, Any]]) -> None:
        found["sections"] = outcomes
        found["seconds"] = round(time.monotonic() - start, 1)
        found["ok"] = not any(o["status"] == "failed" for o in outcomes)
        plain = plain_json(found)
        write_json(options.out / "gpu_check.json", plain)
        write_text(options.out / "gpu_check.md", markdown(plain))

    def execute(section: Section, left: float) -> dict[str, Any]:
        if not options.apart:
            return run_here(section)
        file = folder / f"{section.name.replace(':', '-')}.json"
        command = [sys.executable, "-m", "draftgraph.tools.gpu_check", *arguments]
        return run_apart(section, file, [*command, "--section", section.name], left)

    run_all(
        sections,
        minutes=options.minutes,
        only=options.only,
        folder=folder,
        execute=execute,
        finished=finished,
        report=lambda message: print(message, file=sys.stderr, flush=True),
    )
    if not found["sections"]:
        names = ", ".join(s.name for s in sections)
        raise DraftgraphError(
            f"--only {' '.join(options.only)} names no section; there are {names}"
        )
    return found


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of report and bundles")
    parser.add_argument("--target", help="target of the demo pair: directory or .gguf file")
    parser.add_argument("--drafter", help="its drafter, such as assets/smollm2-dspark")
    parser.add_argument("--minutes", type=float, default=8.0, help="time budget (default 8)")
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        help="names of sections, as patterns; the others keep what an earlier run found",
    )
    parser.add_argument("--layers", type=int, help="layers of the Qwen3-4B-shaped target")
    parser.add_argument("--seconds", type=float, help="of every measurement")
    parser.add_argument(
        "--goldens", type=Path, default=Path(__file__).resolve().parents[1] / "tests" / "goldens"
    )
    parser.add_argument("--cpu", action="store_true", help="dry run without a GPU, small sizes")
    parser.add_argument(
        "--apart",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="every section in a process of its own (default: but for --cpu)",
    )
    parser.add_argument("--section", help=argparse.SUPPRESS)  # what such a process runs
    options = parser.parse_args(arguments)
    if options.apart is None:
        options.apart = not options.cpu
    options.out = options.out.absolute()
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 when a section failed, 2 for wrong arguments."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(given)
    try:
        if options.section is not None:
            providers = [STAND_IN] if options.cpu else devices()
            (section,) = [s for s in plan(options, providers) if s.name == options.section]
            file = options.out / "sections" / f"{section.name.replace(':', '-')}.json"
            write_json(file, {"schema_version": SCHEMA_VERSION, **plain_json(run_here(section))})
            return 0
        found = check(options, given)
    except DraftgraphError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print((options.out / "gpu_check.md").read_text("utf-8"))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
