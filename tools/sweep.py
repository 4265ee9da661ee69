"""Several schedules side by side: speed and acceptance by batch size and prompt file.

On the CPU every schedule has an engine of its own (weights are shared, caches are not), and all
decode a group of prompts at the same time, taking turns of `TURN_S`: whoever is furthest behind in
tokens is next. So all meet the same machine, however its speed changes. On a device the schedules
decode a group one after another. Speeds are ratios to plain decoding of the same pass. A group has
`WAVES` prompts for each slot: whoever ends makes room for the next, as in a server, and only rounds
in which all slots decode are timed. (In a batch that none joins, what the fast requests gain would
be lost in waiting for the slowest.)
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from ..graphs.errors import DraftgraphError
from ..runtime import Engine, Output, SamplingParams
from ..runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu
from ..runtime.request import Request
from ..runtime.scheduler import NO_CONFIDENCE, NO_COSTS, NOT_COVERED
from .console import number, table
from .prompts import PromptSet

PLAIN = "plain"
WAVES = 4
TURN_S = 0.1
# Why a schedule did the same as full.
IDLE = {NO_CONFIDENCE, NO_COSTS, NOT_COVERED}


def twin(engine: Engine) -> Engine:
    """An engine over the same sessions on the CPU, with caches of its own."""
    assert isinstance(engine.backend, OnnxRuntimeCpu)
    return Engine(
        engine.bundle,
        engine.backend.twin(),
        max_requests=engine.max_requests,
        calibration=engine.calibration,
        costs=engine.costs,
    )


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

    decode_ms: float = 0.0  # of the rounds in which all slots decode
    timed_tokens: int = 0  # in that time
    tokens: int = 0  # after the first of each request
    rounds: int = 0
    committed: int = 0
    verified: int = 0
    accepted: int = 0
    ids: list[list[int]] = field(default_factory=list)
    idle: set[str] = field(default_factory=set)  # of `IDLE`

    def add(self, outputs: Sequence[Output]) -> None:
        """What became of a group of prompts."""
        stats = [o.stats for o in outputs]
        self.tokens += sum(s.generated_tokens - 1 for s in stats)
        self.ids += [o.token_ids for o in outputs]
        for s in stats:
            self.rounds += s.rounds
            self.committed += round((s.tau or 0) * s.rounds)
            self.verified += s.verified
            self.accepted += s.accepted
            self.idle |= IDLE.intersection(s.schedules)

    @property
    def ms_per_token(self) -> float:
        """Of decoding, nan if nothing was timed."""
        return self.decode_ms / self.timed_tokens if self.timed_tokens else math.nan


class Watch:
    """Adds the rounds in which `slots` requests decode to a tally; prefill is left out.

    Call `resume` before every step and the watch itself after it.
    """

    def __init__(self, tally: Tally, slots: int) -> None:
        self.tally, self.slots = tally, slots
        self._counts: dict[int, int] = {}
        self.resume()

    def resume(self) -> None:
        """The next step begins now; what was done since the last one does not count."""
        self._last = time.perf_counter()

    def __call__(self, requests: Sequence[Request]) -> None:
        """After every step."""
        now, begin = time.perf_counter(), self._last
        decoded = []
        for i, request in enumerate(requests):
            count = len(request.generated)
            if i not in self._counts and count:  # it joined: its first token is the prefill's
                begin = max(begin, request.clock.first)
                self._counts[i] = 1
            if count > self._counts.get(i, 0):
                decoded.append(count - self._counts[i])
                self._counts[i] = count
        if len(decoded) == self.slots:
            self.tally.decode_ms += 1e3 * (now - begin)
            self.tally.timed_tokens += sum(decoded)


class Lane:
    """One schedule that decodes a group of prompts, turn by turn. tokens: generated so far."""

    def __init__(
        self,
        engine: Engine,
        prompts: list[list[int]],
        params: SamplingParams,
        tally: Tally,
        *,
        speculative: bool,
    ) -> None:
        self.tokens, self.done = 0, False
        self._steps = engine.stream_batch(prompts, params, speculative=speculative)
        self._tally = tally
        self._watch = Watch(tally, min(engine.max_requests, len(prompts)))

    def turn(self, seconds: float) -> None:
        """Steps until they took so long."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._watch.resume()
            try:
                requests = next(self._steps)
            except StopIteration as ended:
                self._tally.add(ended.value)
                self.done = True
                return
            self._watch(requests)
            self.tokens = sum(len(r.generated) for r in requests)


class Sweep:
    """The settings of one sweep. A file of fewer prompts than slots is decoded with as many.

    another: makes an engine like the first one, so that the schedules can decode in turns.
    """

    def __init__(
        self,
        engine: Engine,
        schedules: Sequence[Schedule],
        *,
        another: Callable[[], Engine] | None = None,
        max_new_tokens: int,
        repeat: int = 5,
        chat: bool | None = None,
        report: Callable[[str], None] = lambda message: None,
    ) -> None:
        if repeat < 1:
            raise DraftgraphError(f"--repeat is {repeat}, expected at least 1")
        if len({s.name for s in schedules}) != len(schedules):
            raise DraftgraphError("a schedule is named twice")
        self.repeat, self.report = repeat, report
        self.ways = [Schedule(PLAIN, None), *(s for s in schedules if s.params is not None)]
        self.turn_s = TURN_S if another else math.inf
        self.engines = {
            way.name: another() if another and way.params else engine for way in self.ways
        }
        self.plain = SamplingParams(max_new_tokens=max_new_tokens)
        self.tokenizer = engine.tokenizer
        self.chat = self.tokenizer.has_chat_template if chat is None else chat

    def run(self, sets: Sequence[PromptSet], batches: Sequence[int]) -> dict[str, Any]:
        """Figures by batch size, file and schedule."""
        jobs = {
            str(s.file): [self.tokenizer.encode(p.formatted(self.chat)) for p in s.prompts]
            for s in sets
        }
        self._decode(
            next(iter(jobs.values()))[:1], {way.name: Tally() for way in self.ways}
        )  # warm-up
        result: dict[str, Any] = {"batches": {}}
        reference: dict[str, list[list[int]]] = {}
        for batch in batches:
            for engine in self.engines.values():
                engine.max_requests = batch
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
        tallies = {way.name: Tally() for way in self.ways}
        for i, group in enumerate(_groups(prompts, batch)):
            self._decode(group, tallies, first=turn + i)
        return tallies

    def _decode(self, prompts: list[list[int]], tallies: dict[str, Tally], first: int = 0) -> None:
        lanes = [
            Lane(
                self.engines[way.name],
                prompts,
                way.params or self.plain,
                tallies[way.name],
                speculative=way.params is not None,
            )
            for way in self.ways
        ]
        first %= len(lanes)
        lanes = lanes[first:] + lanes[:first]
        while running := [lane for lane in lanes if not lane.done]:
            min(running, key=lambda lane: lane.tokens).turn(self.turn_s)

    def _figures(self, passes: Sequence[dict[str, dict[str, Tally]]]) -> dict[str, Any]:
        """By schedule, over the files of every pass. speed is the median over passes."""
        figures = {}
        for name in (way.name for way in self.ways):
            ratios = []
            for files in passes:
                # Time per token, summed over files: all count alike.
                own = sum(t[name].ms_per_token for t in files.values())
                plain = sum(t[PLAIN].ms_per_token for t in files.values())
                ratios.append(plain / own)
            tallies = [t[name] for t in passes[0].values()]
            rounds, verified = sum(t.rounds for t in tallies), sum(t.verified for t in tallies)
            figures[name] = {
                "speed": statistics.median(ratios),
                "speed_range": [min(ratios), max(ratios)],
                "tokens_per_s": statistics.median(
                    1e3 * len(files) / sum(p[name].ms_per_token for p in files.values())
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


def _groups(prompts: list[list[int]], batch: int) -> list[list[list[int]]]:
    """`WAVES` prompts for each slot; what would not fill the slots goes with the last."""
    count = max(1, (len(prompts) + WAVES * batch - batch) // (WAVES * batch))
    ends = [WAVES * batch * (i + 1) for i in range(count - 1)]
    return [prompts[a:b] for a, b in pairwise([0, *ends, len(prompts)])]


def render(result: dict[str, Any], out: Any) -> None:
    """Tables by batch size: speed over plain by file, then acceptance over all files."""
    for batch, measured in result["batches"].items():
        names = {f: f.rsplit("/", 1)[-1].removesuffix(".jsonl") for f in measured["files"]}
        out.print(
            f"\nbatch {batch}: speed over plain decoding while {batch} requests decode, median "
            "(range) of passes"
        )
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
