"""What `gpu_check` finds out about one provider and one bundle: plain data, with a verdict."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...export.tolerances import AGREEMENT, TOLERANCE
from ...graphs.contract import DType
from ...runtime import Engine, SamplingParams, load_bundle
from ...runtime.backends.base import (
    AcceptSampling,
    Backend,
    ContextBatch,
    DraftSampling,
    TokenBatch,
)
from ...runtime.backends.tensorrt.backend import TensorRt
from .opening import Room, open_engine
from .recording import Call, Outputs, record, replay
from .smoke import parting

# Absolute, fp32: what the tests allow between the graphs and the official traces.
TRACE_TOLERANCE = 2e-4
# Logits of tokens that a truncated head did not consider are below this.
_LEFT_OUT = -1e29
PASSES = 4  # eager, captured, replayed twice


def prompts_for(path: Path, count: int, longest: int = 40) -> list[list[int]]:
    """Ragged prompts of random ids."""
    rng = np.random.default_rng(0)
    vocabulary = load_bundle(path, verify=False).target.vocab_size
    return [rng.integers(0, vocabulary, longest - 11 * i).tolist() for i in range(count)]


# Parity


class Figures:
    """Errors of one output of one graph, collected over many calls."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        self.max_abs = self.max_rel = 0.0
        self.agree = self.compared = self.values = 0
        self.finite = True

    def tensor(self, found: np.ndarray, expected: np.ndarray) -> None:
        """Relative to max(1, largest |expected|) of the call."""
        if not found.size:
            return
        self.values += found.size
        self.finite &= bool(np.isfinite(found).all())
        error = float(np.abs(found.astype(np.float64) - expected).max())
        self.max_abs = max(self.max_abs, error)
        self.max_rel = max(self.max_rel, error / max(1.0, float(np.abs(expected).max())))

    def picks(self, same: np.ndarray) -> None:
        self.agree += int(same.sum())
        self.compared += same.size

    def result(self) -> dict[str, Any]:
        share = self.agree / self.compared if self.compared else None
        return {
            "values": self.values,
            "max_abs": self.max_abs if self.values else None,
            "max_rel": self.max_rel if self.values else None,
            "tolerance": TOLERANCE[self.dtype],
            "agree": self.agree,
            "compared": self.compared,
            "least_share": AGREEMENT[self.dtype],
            "finite": self.finite,
            "passed": self.finite
            and self.max_rel <= TOLERANCE[self.dtype]
            and (share is None or share >= AGREEMENT[self.dtype]),
        }


def compare(
    calls: Sequence[Call], found: Sequence[Outputs], dtype: DType, head: str
) -> dict[str, dict[str, Any]]:
    """Figures of every output of every graph: found against the recording.

    head: "markov" or "markov_topk". What depends on earlier picks of a block is compared up to
    the first different pick, acceptance where all blocks are the same.
    """
    figures: dict[str, Figures] = {}

    def of(graph: str, name: str) -> Figures:
        return figures.setdefault(f"{graph}.{name}", Figures(dtype))

    graph, same, whole = head, np.ones((1, 1), bool), True  # of the last draft
    for call, outputs in zip(calls, found, strict=True):
        expected = call.outputs
        if call.name == "target":
            for name in ("logits", "features"):
                of("target", name).tensor(outputs[name], expected[name])
            top = outputs["logits"].argmax(-1) == expected["logits"].argmax(-1)
            of("target", "argmax").picks(top)
        elif call.name == "markov":
            graph = call.graph.replace("markov", head)
            picks = outputs["draft_ids"] == expected["draft_ids"]
            same = _behind_equal(picks)
            of(graph, "draft_ids").picks(picks[same])
            if "draft_logits" in expected:
                a, b = outputs["draft_logits"][same], expected["draft_logits"][same]
                both = (b > _LEFT_OUT) & ~(a <= _LEFT_OUT)  # NaN included
                of(graph, "draft_logits").tensor(a[both], b[both])
                of(graph, "candidates").picks((a > _LEFT_OUT) == (b > _LEFT_OUT))
            whole = bool(picks.all())
        elif call.name == "confidence":
            for name in ("hidden", "base_logits"):
                of("backbone", name).tensor(outputs[name], expected[name])
            if "prev_embeddings" in expected:
                a, b = outputs["prev_embeddings"], expected["prev_embeddings"]
                of(graph, "prev_embeddings").tensor(a[same], b[same])
            if "confidence_logits" in expected:
                a, b = outputs["confidence_logits"], expected["confidence_logits"]
                of("confidence", "confidence_logits").tensor(a[same], b[same])
        elif call.name == "accept":
            judged = call.arguments[0].verify_length.any()
            if not judged or whole:
                for name in ("accepted", "next_id"):
                    of(call.graph, name).picks(outputs[name] == expected[name])
    return {name: f.result() for name, f in sorted(figures.items())}


def _behind_equal(picks: np.ndarray) -> np.ndarray:
    """[B, γ] slots whose earlier picks are all equal."""
    first = np.ones((len(picks), 1), bool)
    return np.cumprod(np.concatenate([first, picks[:, :-1]], 1), 1).astype(bool)


def parity(provider: str, path: Path, room: Room, *, new_tokens: int = 24) -> dict[str, Any]:
    """Every graph of a bundle against the CPU provider, through the same calls."""
    bundle = load_bundle(path, verify=False)
    prompts = prompts_for(path, min(3, room.requests))
    heads = {"full": "markov"}
    if "markov_topk" in bundle.graphs:
        heads["topk"] = "markov_topk"
    outputs: dict[str, Any] = {}
    for markov, head in heads.items():
        calls = record(path, prompts, markov=markov, new_tokens=new_tokens)
        engine = open_engine(path, provider, room, markov=markov)
        outputs |= compare(calls, replay(engine.backend, calls), bundle.dtype, head)
    covered = {name.split(".")[0] for name in outputs}
    missing = sorted(set(bundle.graphs) - covered)
    return {
        "dtype": bundle.dtype,
        "outputs": outputs,
        "graphs_not_run": missing,
        "passed": not missing and all(f["passed"] for f in outputs.values()),
    }


# CUDA graphs


def replays(provider: str, path: Path, room: Room, *, new_tokens: int = 24) -> dict[str, Any]:
    """The same calls without CUDA graphs and, several times, with them: bit for bit the same?"""
    prompts = prompts_for(path, min(3, room.requests))
    calls = record(path, prompts, batches=("greedy", "sample"), new_tokens=new_tokens)
    eager = open_engine(path, provider, room, cuda_graphs=False)
    expected = replay(eager.backend, calls)
    again = replay(eager.backend, calls)
    del eager
    graphed = open_engine(path, provider, room)
    passes = [_same(replay(graphed.backend, calls), expected) for _ in range(PASSES)]
    report = graphed.backend.report()
    counts = report["cuda_graphs"] or {}
    return {
        "dtype": load_bundle(path, verify=False).dtype,
        "eager_twice": _same(again, expected),
        "passes": passes,
        "runs": counts,
        "without_cuda_graphs": report["without_cuda_graphs"],
        "passed": counts.get("replayed", 0) > 0
        and all(p["bit_equal"] == p["tensors"] for p in passes),
    }


def _same(found: Sequence[Outputs], expected: Sequence[Outputs]) -> dict[str, Any]:
    pairs = [(f[n], e[n]) for f, e in zip(found, expected, strict=True) for n in e]
    ids = [(f[n], e[n]) for f, e in zip(found, expected, strict=True) for n in e if _is_id(e[n])]
    return {
        "tensors": len(pairs),
        "bit_equal": sum(a.tobytes() == b.tobytes() for a, b in pairs),
        "ids_equal": all(np.array_equal(a, b) for a, b in ids),
        "max_difference": max(float(np.abs(a - b).max(initial=0)) for a, b in pairs),
    }


def _is_id(array: np.ndarray) -> bool:
    return array.dtype.kind == "i"


# Goldens


def golden(provider: str, path: Path, traces: Path, room: Room) -> dict[str, Any]:
    """Greedy decoding of the official traces' prompts.

    In fp32 tokens, rounds and the traced tensors must be those of the traces. In half precision
    the tokens must be the CPU provider's with the same bundle, up to near ties.
    """
    expected = json.loads((traces / "expected.json").read_text("utf-8"))
    engine = open_engine(path, provider, room)
    half = engine.bundle.dtype != "fp32"
    reference = open_engine(path, "cpu", Room())
    params = SamplingParams(
        max_new_tokens=expected["max_new_tokens"],
        scheduler="threshold",
        threshold=expected["confidence_threshold"],
    )
    differences, rounds, wrong_rounds = [], 0, 0
    for i, prompt in enumerate(expected["prompts"]):
        output = engine.generate(prompt["prompt"], params)
        plain = engine.generate(prompt["prompt"], params, speculative=False)
        start = len(prompt["prompt"])
        wanted = [prompt["speculative_greedy"][start:], prompt["plain_greedy"][start:]]
        if half:
            wanted = [reference.generate(prompt["prompt"], params, speculative=False).token_ids] * 2
        for what, mine, theirs in zip(
            ("speculative", "plain"), (output, plain), wanted, strict=True
        ):
            if mine.token_ids != theirs:
                found = parting(reference, prompt["prompt"], mine.token_ids, theirs)
                differences.append({"what": what, "prompt": i} | found)
        if not half:
            end = start + expected["max_new_tokens"] - expected["block_size"] - 1
            comparable = [r for r in prompt["rounds"] if r["start"] <= end]
            rounds += len(comparable)
            wrong_rounds += sum(
                (mine.draft_ids, mine.verified, mine.accepted)
                != (r["draft_tokens"], r["proposed"], r["accepted"])
                for mine, r in zip(output.rounds, comparable, strict=False)
            )
    error = None if half else _traced_error(engine.backend, expected, traces)
    return {
        "dtype": engine.bundle.dtype,
        "sequences": 2 * len(expected["prompts"]),
        "differences": differences,
        "rounds": rounds,
        "wrong_rounds": wrong_rounds,
        "max_trace_error": error,
        "tolerance": TRACE_TOLERANCE,
        "passed": all(half and d["near_tie"] for d in differences)
        and wrong_rounds == 0
        and (error is None or error <= TRACE_TOLERANCE),
    }


def _traced_error(backend: Backend, expected: dict[str, Any], traces: Path) -> float:
    """Largest error of any tensor of the traced rounds, following them through the backend."""
    from safetensors.numpy import load_file

    tensors = load_file(traces / "expected.safetensors")
    gamma, worst = expected["block_size"], 0.0

    def close(name: str, key: str, count: int | None = None) -> None:
        nonlocal worst
        found = backend.read(name)
        found = found[0] if count is None else found[:count]
        error = float(np.abs(found - tensors[key]).max())
        worst = max(worst, error if np.isfinite(error) else float("inf"))

    for i, prompt in enumerate(expected["prompts"]):
        ids, committed, drafted = prompt["speculative_greedy"], len(prompt["prompt"]), 0
        rows = np.arange(committed)
        backend.reset(1)
        backend.reserve(1, len(ids) + gamma, len(ids) + 2 * gamma)
        backend.target(_tokens(ids[:committed], 0, last_only=True))
        for j, round_ in enumerate(prompt["rounds"]):
            key = f"p{i}.r{j}."
            if f"{key}base_logits" not in tensors:
                break
            close("features", key + "context_features", len(rows))
            anchor = np.array([round_["anchor"]])
            backend.backbone(_context(rows, drafted, anchor))
            greedy = DraftSampling(np.zeros(1, np.float32), None)
            backend.markov(anchor, greedy)
            logits = backend.confidence()
            close("hidden", key + "block_hidden")
            close("base_logits", key + "base_logits")
            if logits is not None:
                close("confidence_logits", key + "confidence_logits")
            drafted += len(rows)
            verified = round_["draft_tokens"][: round_["proposed"]]
            backend.target(_tokens([round_["anchor"], *verified], committed))
            rows = np.arange(round_["accepted"] + 1)
            committed += len(rows)
    return worst


def _tokens(ids: Sequence[int], past: int, *, last_only: bool = False) -> TokenBatch:
    """One request's tokens."""
    return TokenBatch(np.array(ids), np.array([len(ids)]), np.array([past]), last_only=last_only)


def _context(rows: np.ndarray, past: int, anchor: np.ndarray) -> ContextBatch:
    one = np.array([0])
    return ContextBatch(np.array([len(rows)]), rows, np.array([past]), one, anchor)


# Times


def latency(
    provider: str,
    path: Path,
    room: Room,
    requests: Sequence[int],
    *,
    context: int,
    seconds: float,
    least: int = 10,
) -> dict[str, Any]:
    """Times of whole rounds and plain steps for several numbers of requests.

    Every request has `context` committed rows and verifies its whole block. For each number at
    least `least` rounds and, if that takes less, as many as fit into `seconds`.
    """
    engine = open_engine(path, provider, room)
    measured = {str(r): _rounds(engine, r, context, seconds, least) for r in requests}
    native = isinstance(engine.backend, TensorRt)
    return {
        "dtype": engine.bundle.dtype,
        "clock": "device events" if native else "host clock around calls that wait",
        "context": context,
        "gamma": engine.gamma,
        "requests": measured,
        "report": engine.backend.report(),
        "passed": True,
    }


def _rounds(
    engine: Engine, requests: int, context: int, seconds: float, least: int
) -> dict[str, Any]:
    """Percentiles in ms, by phase."""
    step = _Step(engine, requests, context)
    for _ in range(PASSES):  # warm up and capture
        step.round()
        step.plain()
    times: dict[str, list[float]] = {}
    end = time.perf_counter() + seconds
    while len(times.get("round", ())) < least or time.perf_counter() < end:
        for name, value in (*step.round().items(), ("plain", step.plain()["round"])):
            times.setdefault(name, []).append(value)
    found = {name: percentiles(values) for name, values in times.items()}
    # Tokens a round must commit per request to be as fast as plain decoding.
    found["break_even_tau"] = found["round"]["median"] / found["plain"]["median"]
    return found


def percentiles(ms: Sequence[float]) -> dict[str, Any]:
    """Median, 90th and 99th percentile, and of how many."""
    median, p90, p99 = np.percentile(ms, [50, 90, 99])
    return {"n": len(ms), "median": float(median), "p90": float(p90), "p99": float(p99)}


class _Step:
    """Repeats one round at the same place of the caches."""

    def __init__(self, engine: Engine, requests: int, context: int) -> None:
        self.backend, self.requests = engine.backend, requests
        self.gamma = engine.gamma
        self.everyone = np.arange(requests)
        self.past = np.full(requests, context)
        rng = np.random.default_rng(0)
        vocabulary = engine.bundle.target.vocab_size
        self.words = rng.integers(0, vocabulary, requests * (self.gamma + 1))
        self.backend.reset(requests)
        rows = context + self.gamma + 1
        self.backend.reserve(requests, rows, rows + self.gamma)
        self._verify(self.gamma + 1, 0)  # leaves features for the first draft

    def round(self) -> dict[str, float]:
        """Draft, verify all of it, accept: ms by phase and of the whole round."""
        return self._timed(True)

    def plain(self) -> dict[str, float]:
        """One token of each request."""
        return self._timed(False)

    def _timed(self, drafts: bool) -> dict[str, float]:
        before = dict(self.backend.seconds)
        device = self.backend.device if isinstance(self.backend, TensorRt) else None
        first = None if device is None else device.mark()
        start = time.perf_counter()
        if drafts:
            self._draft()
        self._verify(self.gamma + 1 if drafts else 1, self.gamma if drafts else 0)
        wall = time.perf_counter() - start
        spent = {k: v - before.get(k, 0.0) for k, v in self.backend.seconds.items()}
        draft = sum(spent.get(k, 0.0) for k in ("backbone", "markov", "confidence"))
        verify, accept = spent.get("target", 0.0), spent.get("accept", 0.0)
        whole = wall
        if device is not None:
            last = device.mark()
            device.sync()
            whole = device.seconds(first, last)
        times = {"round": whole, "draft": draft, "verify": verify, "accept": accept}
        times["host"] = wall - draft - verify - accept
        if not drafts:  # the features of a whole block, for the next draft
            self._verify(self.gamma + 1, 0)
        return {name: 1e3 * value for name, value in times.items()}

    def _draft(self) -> None:
        width, requests = self.gamma + 1, self.requests
        anchor = self.words[:requests]
        self.backend.backbone(
            ContextBatch(
                counts=np.full(requests, width),
                index=np.arange(requests * width),
                past_length=self.past - width,
                slots=self.everyone,
                anchor=anchor,
            )
        )
        self.backend.markov(anchor, DraftSampling(np.zeros(requests, np.float32), None))
        self.backend.confidence()

    def _verify(self, width: int, drafted: int) -> None:
        requests = self.requests
        words = self.words[: requests * width]
        self.backend.target(TokenBatch(words, np.full(requests, width), self.past))
        self.backend.accept(
            AcceptSampling(
                slots=self.everyone,
                verify_length=np.full(requests, drafted),
                temperature=np.zeros(requests, np.float32),
                top_k=np.zeros(requests, np.int64),
                top_p=np.ones(requests, np.float32),
                accept_uniform=None,
                sample_uniform=None,
            )
        )
