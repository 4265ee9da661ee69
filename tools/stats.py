"""The figures that `draftgraph generate --stats` prints to stderr."""

from __future__ import annotations

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
    target, draft = cache_rows(output, engine.gamma)
    per_target, per_draft = engine.bundle.kv_bytes
    progress(
        f"KV cache: {size(target * per_target + draft * per_draft)} = target {target} rows × "
        f"{per_target} bytes + draft {draft} rows × {per_draft} bytes"
    )


def cache_rows(output: Output, gamma: int) -> tuple[int, int]:
    """Capacity of the target's and the drafter's cache at the end of a generation."""
    from ..runtime.backends.onnxruntime_cpu import capacity_step

    target = len(output.prompt_ids) + len(output.token_ids) - 1
    if not output.rounds:
        return capacity_step(target), 0
    start = output.rounds[-1].start
    return capacity_step(max(target, start + 1 + gamma)), capacity_step(start + gamma)
