"""Several schedules side by side: speed and acceptance by batch size and prompt file.

Every group of prompts is decoded with every schedule in turn before the next group starts, so that
all of them meet the same machine; speeds are ratios to plain decoding of the same pass.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..graphs.errors import DraftgraphError
from ..runtime import Engine, Output, SamplingParams
from ..runtime.scheduler import NO_CONFIDENCE, NO_COSTS, NOT_COVERED
from .console import number, table
from .prompts import PromptSet

PLAIN = "plain"
# Why a schedule did the same as full.
IDLE = {NO_CONFIDENCE, NO_COSTS, NOT_COVERED}


@dataclass(frozen=True)
class Schedule:
    """A way of decoding and its name. params: None is plain decoding."""

    name: str
    params: SamplingParams | None


def parse_schedule(text: str, params: SamplingParams) -> Schedule:
    """plain, full, full:WIDTH, threshold:VALUE, early-stop, lagged or live-argmax."""
    name, _, value = text.partition(":")
    if text == PLAIN:
        return Schedule(text, None)
    try:
        if name == "full" and value:
            return Schedule(text, replace(params, scheduler=name, max_verify=int(value)))
        if name == "threshold":
            return Schedule(text, replace(params, scheduler=name, threshold=float(value)))
    except ValueError:
        raise DraftgraphError(
            f"schedule {text!r}: expected a number after the colon, as in full:3 or threshold:0.4"
        ) from None
    if value:
        raise DraftgraphError(f"schedule {text!r}: only full and threshold take a number")
    return Schedule(text, replace(params, scheduler=name))


@dataclass
class Tally:
    """What one schedule did in one pass over a file at one batch size."""

    decode_ms: float = 0.0
    tokens: int = 0  # after the first of each request
    rounds: int = 0
    committed: int = 0
    verified: int = 0
    accepted: int = 0
    ids: list[list[int]] = field(default_factory=list)
    idle: set[str] = field(default_factory=set)  # of `IDLE`

    def add(self, outputs: Sequence[Output]) -> None:
        """The outputs of one batch; prefill is not counted."""
        stats = [o.stats for o in outputs]
        self.decode_ms += max(s.total_ms for s in stats) - max(s.ttft_ms for s in stats)
        self.tokens += sum(s.generated_tokens - 1 for s in stats)
        self.ids += [o.token_ids for o in outputs]
        for s in stats:
            self.rounds += s.rounds
            self.committed += round((s.tau or 0) * s.rounds)
            self.verified += s.verified
            self.accepted += s.accepted
            self.idle |= IDLE.intersection(s.schedules)

    @property
    def speed(self) -> float:
        """Tokens per second of decoding."""
        return 1e3 * self.tokens / self.decode_ms


class Sweep:
    """The settings of one sweep. Batches that do not fill up are decoded as they are."""

    def __init__(
        self,
        engine: Engine,
        schedules: Sequence[Schedule],
        *,
        max_new_tokens: int,
        repeat: int = 5,
        chat: bool | None = None,
        report: Callable[[str], None] = lambda message: None,
    ) -> None:
        if repeat < 1:
            raise DraftgraphError(f"--repeat is {repeat}, expected at least 1")
        if len({s.name for s in schedules}) != len(schedules):
            raise DraftgraphError("a schedule is named twice")
        self.engine, self.repeat, self.report = engine, repeat, report
        self.schedules = [s for s in schedules if s.params is not None]
        self.plain = SamplingParams(max_new_tokens=max_new_tokens)
        self.chat = engine.tokenizer.has_chat_template if chat is None else chat

    def run(self, sets: Sequence[PromptSet], batches: Sequence[int]) -> dict[str, Any]:
        """Figures by batch size, file and schedule."""
        jobs = {
            str(s.file): [self.engine.tokenizer.encode(p.formatted(self.chat)) for p in s.prompts]
            for s in sets
        }
        self._decode(next(iter(jobs.values()))[:1], None)  # warm-up
        result: dict[str, Any] = {"batches": {}}
        reference: dict[str, list[list[int]]] = {}
        for batch in batches:
            passes: list[dict[str, dict[str, Tally]]] = []
            for turn in range(self.repeat):
                passes.append({f: self._pass(prompts, batch, turn) for f, prompts in jobs.items()})
                self.report(f"batch {batch}: pass {turn + 1} of {self.repeat}")
            files = {f: self._figures([{f: p[f]} for p in passes]) for f in jobs}
            for f in jobs:
                reference.setdefault(f, passes[0][f][PLAIN].ids)
                for name, figures in files[f].items():
                    ids = passes[0][f][name].ids
                    same = sum(a == b for a, b in zip(ids, reference[f], strict=True))
                    figures["identical_ids"], figures["prompts"] = same, len(ids)
            result["batches"][batch] = {"files": files, "overall": self._figures(passes)}
        return result

    def _pass(self, prompts: list[list[int]], batch: int, turn: int) -> dict[str, Tally]:
        ways = [Schedule(PLAIN, None), *self.schedules]
        tallies = {way.name: Tally() for way in ways}
        for i, start in enumerate(range(0, len(prompts), batch)):
            first = (turn + i) % len(ways)
            for way in (*ways[first:], *ways[:first]):
                tallies[way.name].add(self._decode(prompts[start : start + batch], way.params))
        return tallies

    def _decode(self, prompts: list[list[int]], params: SamplingParams | None) -> list[Output]:
        return self.engine.generate_batch(
            prompts, params or self.plain, speculative=params is not None
        )

    def _figures(self, passes: Sequence[dict[str, dict[str, Tally]]]) -> dict[str, Any]:
        """By schedule, over the files of every pass. speed is the median over passes."""
        figures = {}
        for name in (PLAIN, *(s.name for s in self.schedules)):
            ratios = []
            for files in passes:
                # Time per token, summed over files: all decode the same tokens.
                own = sum(t[name].decode_ms / t[name].tokens for t in files.values())
                plain = sum(t[PLAIN].decode_ms / t[PLAIN].tokens for t in files.values())
                ratios.append(plain / own)
            tallies = [t[name] for t in passes[0].values()]
            rounds, verified = sum(t.rounds for t in tallies), sum(t.verified for t in tallies)
            figures[name] = {
                "speed": statistics.median(ratios),
                "speed_range": [min(ratios), max(ratios)],
                "tokens_per_s": statistics.median(
                    1e3
                    * sum(p[name].tokens for p in files.values())
                    / sum(p[name].decode_ms for p in files.values())
                    for files in passes
                ),
                "tau": sum(t.committed for t in tallies) / rounds if rounds else None,
                "verified_per_round": verified / rounds if rounds else None,
                "acceptance": sum(t.accepted for t in tallies) / verified if verified else None,
                "tokens_per_step": self._per_step(tallies),
                "idle": sorted({reason for t in tallies for reason in t.idle}),
            }
        return figures

    @staticmethod
    def _per_step(tallies: Sequence[Tally]) -> float:
        """Tokens per target step of a request, rounds that did not draft included."""
        tokens = sum(t.tokens for t in tallies)
        steps = sum(t.rounds + max(0, t.tokens - t.committed) for t in tallies)
        return tokens / steps


def render(result: dict[str, Any], out: Any) -> None:
    """Tables by batch size: speed over plain by file, then acceptance over all files."""
    for batch, measured in result["batches"].items():
        names = {f: f.rsplit("/", 1)[-1].removesuffix(".jsonl") for f in measured["files"]}
        out.print(f"\nbatch {batch}: speed over plain decoding, median (range) of passes")
        rows = table("schedule", *names.values(), "all", "tok/s", "identical ids")
        for name, overall in measured["overall"].items():
            cells = [measured["files"][f][name] for f in names]
            same = sum(c["identical_ids"] for c in cells), sum(c["prompts"] for c in cells)
            rows.add_row(
                name,
                *(_speed(c) for c in cells),
                _speed(overall),
                f"{overall['tokens_per_s']:.1f}",
                f"{same[0]} of {same[1]}",
            )
        out.print(rows)
        out.print(f"\nbatch {batch}: tokens per step / accepted per verified token")
        rows = table("schedule", *names.values(), "all")
        for name, overall in measured["overall"].items():
            cells = [*(measured["files"][f][name] for f in names), overall]
            rows.add_row(name, *(_acceptance(c) for c in cells))
        out.print(rows)
        for name, overall in measured["overall"].items():
            for reason in overall["idle"]:
                out.print(f"{name} {reason}", soft_wrap=True)


def _speed(figures: dict[str, Any]) -> str:
    low, high = figures["speed_range"]
    return f"{figures['speed']:.2f} ({low:.2f}-{high:.2f})"


def _acceptance(figures: dict[str, Any]) -> str:
    return f"{figures['tokens_per_step']:.2f} / {number(figures['acceptance'])}"
