"""The figures of a benchmark, computed from its runs. Times are in milliseconds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime import Output
from ..runtime.results import PHASES
from .prompts import BenchPrompt
from .transformers_peer import PeerResult

# Acceptance is judged only over this many verified tokens.
_ENOUGH_VERIFIED = 200
_CHANCE_LIKE = 0.005


@dataclass(frozen=True)
class Divergence:
    """Where the speculative ids first differ from the plain ones."""

    position: int  # of the generated tokens, from 0
    plain_id: int | None  # None: that output had already ended
    speculative_id: int | None
    logit_gap: float  # between the target's two best tokens there
    best_ids: tuple[int, int]


@dataclass(frozen=True)
class Pair:
    """One prompt decoded both ways."""

    file: Path
    prompt: BenchPrompt
    repeat: int
    speculative_first: bool
    plain: Output
    speculative: Output
    greedy: bool
    divergence: Divergence | None  # only looked for in greedy runs
    peer: PeerResult | None


def summarise(pairs: Sequence[Pair], gamma: int) -> dict[str, Any]:
    """The figures of some runs. Times in milliseconds, medians over runs."""
    plain = [p.plain.stats for p in pairs]
    fast = [p.speculative.stats for p in pairs]
    greedy = [p for p in pairs if p.greedy]
    rounds = [r for p in pairs for r in p.speculative.rounds]
    drafted = sum(s.drafted for s in fast)
    verified = sum(s.verified for s in fast)
    accepted = sum(s.accepted for s in fast)
    committed = accepted + sum(r.next_id is not None for r in rounds)
    ratios = [
        a.tpot_ms / b.tpot_ms for a, b in zip(plain, fast, strict=True) if a.tpot_ms and b.tpot_ms
    ]
    both = {"plain": plain, "speculative": fast}
    tpot = {name: _spread(s.tpot_ms for s in stats) for name, stats in both.items()}
    # The steps after prefill; a last single token is decoded without a round.
    steps = len(rounds) + max(0, sum(s.generated_tokens - 1 for s in fast) - committed)
    phase_ms = {p: sum(s.phase_ms[p] for s in fast) for p in PHASES}
    host_ms = sum(s.host_ms for s in fast)
    return {
        "prompts": len({(p.file, p.prompt.line) for p in pairs}),
        "runs": len(pairs),
        "prompt_tokens": sum(s.prompt_tokens for s in fast),
        "tokens": {name: sum(s.generated_tokens for s in stats) for name, stats in both.items()},
        "ttft_ms": {name: _median(s.ttft_ms for s in stats) for name, stats in both.items()},
        "tpot_ms": tpot,
        # Prefill included.
        "tokens_per_s": {
            name: 1e3 * sum(s.generated_tokens for s in stats) / sum(s.total_ms for s in stats)
            for name, stats in both.items()
        },
        "speedup": {
            "of_medians": _ratio(tpot["plain"]["median"], tpot["speculative"]["median"]),
            "median_of_runs": _median(ratios),
        },
        "rounds": len(rounds),
        "tau": _ratio(committed, len(rounds)),
        "drafted": drafted,
        "verified": verified,
        "accepted": accepted,
        "accepted_per_verified": _ratio(accepted, verified),
        "accepted_per_drafted": _ratio(accepted, drafted),
        "positions": [
            {
                "position": k + 1,
                "verified": (seen := sum(r.verified > k for r in rounds)),
                "accepted": (taken := sum(r.accepted > k for r in rounds)),
                "accepted_given_verified": _ratio(taken, seen),
                "accepted_given_prefix": _ratio(
                    taken, sum(r.verified > k and r.accepted >= k for r in rounds)
                ),
                "prefix_survival": _ratio(taken, len(rounds)),
            }
            for k in range(gamma)
        ],
        "phase_ms_per_round": {p: _ratio(ms, steps) for p, ms in phase_ms.items()},
        "host_ms_per_round": _ratio(host_ms, steps),
        "host_share": _ratio(host_ms, host_ms + sum(phase_ms.values())),
        "greedy_identical": {
            "identical": sum(p.divergence is None for p in greedy),
            "compared": len(greedy),
        },
    }


def warnings(files: Mapping[str, dict[str, Any]], overall: dict[str, Any]) -> list[str]:
    """What makes the figures implausible; of the whole, else of single files."""
    found = _implausible("overall", overall)
    return found or [w for name, figures in files.items() for w in _implausible(name, figures)]


def _implausible(name: str, figures: dict[str, Any]) -> list[str]:
    verified, accepted = figures["verified"], figures["accepted"]
    if verified < _ENOUGH_VERIFIED:
        return []
    counts = f"{name}: {accepted} of {verified} verified tokens were accepted"
    if accepted < _CHANCE_LIKE * verified:
        return [f"{counts}, no more than by chance: the block layout or the taps may be wrong"]
    if accepted == verified:
        return [
            f"{counts}, every one: implausible unless the drafter is the target itself; the "
            "comparison of drafts with the target may be short-circuited"
        ]
    return []


def summarise_peer(
    pairs: Sequence[Pair], facts: Mapping[str, Any], steps: Mapping[str, Any]
) -> dict[str, Any]:
    """The peer's figures beside ours on the prompts that it ran."""
    ran = [(p, p.peer) for p in pairs if p.peer is not None]
    tpot = _median(peer.tpot_ms for _, peer in ran)
    ours = _median(p.plain.stats.tpot_ms for p, _ in ran)
    fast = _median(p.speculative.stats.tpot_ms for p, _ in ran)
    step = steps["target_ms"]["1"]
    return {
        "name": "transformers",
        **facts,
        "prompts": len(ran),
        "ttft_ms": _median(peer.ttft_ms for _, peer in ran),
        "tpot_ms": tpot,
        "plain_tpot_ms": ours,
        "speculative_tpot_ms": fast,
        "width_1_step_ms": step,
        "width_1_step_relative_to_peer": _ratio(step, tpot),
        "speedup_of_plain": _ratio(tpot, ours),
        "speedup_of_speculative": _ratio(tpot, fast),
        "identical_to_plain": sum(peer.token_ids == p.plain.token_ids for p, peer in ran)
        if all(p.greedy for p, _ in ran)
        else None,
    }


def record(pair: Pair) -> dict[str, Any]:
    """One run for the JSON report."""
    return {
        "file": str(pair.file),
        "line": pair.prompt.line,
        "source": pair.prompt.source,
        "repeat": pair.repeat,
        "first": "speculative" if pair.speculative_first else "plain",
        "plain": _output(pair.plain),
        "speculative": _output(pair.speculative),
        "identical": pair.divergence is None if pair.greedy else None,
        "divergence": None if pair.divergence is None else asdict(pair.divergence),
        "peer": None if pair.peer is None else asdict(pair.peer),
    }


def _output(output: Output) -> dict[str, Any]:
    return {
        "finish_reason": output.finish_reason,
        "token_ids": output.token_ids,
        **output.stats.to_dict(),
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _spread(values: Iterable[float | None]) -> dict[str, float | None]:
    known = [v for v in values if v is not None]
    p90 = float(np.percentile(known, 90)) if known else None
    return {"median": _median(known), "p90": p90}


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
