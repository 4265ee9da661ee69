"""The figures that `draftgraph generate --stats` prints to stderr."""

from __future__ import annotations

from typing import Any

from ..runtime import Engine, Output
from ..runtime.results import PHASES
from .console import number, progress, size


def render_stats(engine: Engine, output: Output) -> None:
    """Acceptance, times and cache memory of one generation."""
    s = output.stats
    progress(
        f"tokens: prompt {s.prompt_tokens}, generated {s.generated_tokens} ({output.finish_reason})"
    )
    if s.rounds:
        progress(
            f"τ {number(s.tau)} tokens per round over {s.rounds} rounds; "
            f"accepted/verified {number(s.accepted_per_verified, '.3f')} "
            f"({s.accepted} of {s.verified}), accepted/drafted "
            f"{number(s.accepted_per_drafted, '.3f')} ({s.accepted} of {s.drafted})"
        )
    if s.schedules:
        progress("schedules: " + ", ".join(f"{n} x {what}" for what, n in s.schedules.items()))
    phases = ", ".join(f"{p} {s.phase_ms[p]:.1f}" for p in PHASES if s.phase_ms[p] > 0)
    whole = sum(s.phase_ms.values()) + s.host_ms
    share = f" ({s.host_ms / whole:.1%} of the rounds)" if whole else ""
    progress(f"ms by phase: {phases or 'none'}; host overhead {s.host_ms:.1f}{share}")
    progress(
        f"TTFT {s.ttft_ms:.1f} ms, TPOT {number(s.tpot_ms, '.1f')} ms, total {s.total_ms:.0f} ms"
    )
    target, draft = engine.backend.capacity
    per_target, per_draft = engine.bundle.kv_bytes
    progress(
        f"KV cache: {size(target * per_target + draft * per_draft)} = target {target} rows × "
        f"{per_target} bytes + draft {draft} rows × {per_draft} bytes"
    )
    for line in device_lines(engine.backend.report()):
        progress(line)


def device_lines(report: dict[str, Any]) -> list[str]:
    """Placement and CUDA graphs, for providers of a device."""
    if report["provider"] == "cpu":
        return []
    lines = []
    for graph, placed in report["placement"].items():
        counts = ", ".join(f"{n} on {ep}" for ep, n in sorted(placed["nodes"].items()))
        lines.append(f"{graph}: nodes {counts} ({len(placed['shapes'])} of them for shapes only)")
    if report["cuda_graphs"] is not None:
        counts = ", ".join(f"{n} {what}" for what, n in report["cuda_graphs"].items())
        lines.append(f"CUDA graphs: runs {counts}")
    for graph, reason in report["without_cuda_graphs"].items():
        lines.append(f"{graph}: no CUDA graphs: {reason}")
    return lines
