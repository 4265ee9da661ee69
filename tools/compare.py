"""How close one bundle's outputs are to another's, such as fp16 to fp32 of the same pair.

Over text (every prompt and the reference's greedy continuation of it) both bundles see the same
tokens, so their logits compare position by position; greedy decoding then shows what the
differences do to the output. `Comparison.run` returns plain data: what `--json` writes and `render`
prints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..graphs.errors import DraftgraphError
from ..runtime import Engine, Output, SamplingParams
from ..runtime.backends.base import ContextBatch, DraftSampling, TokenBatch
from ..runtime.bundle import MANIFEST, sha256
from .bench_steps import prefill_target
from .console import heading, number, table
from .prompts import PromptSet

SCHEMA_VERSION = 1
# Tokens of a prompt in one target call; all of them want logits.
CHUNK = 128
# A pick within this of the reference's best logit (0.1 nats: odds of 1.1 to 1) is a near tie.
NEAR_TIE = 0.1


@dataclass
class Agreement:
    """Logits [M, V] of a bundle against the reference's, collected over many calls."""

    same: list[np.ndarray] = field(default_factory=list)  # argmax equal
    kl: list[np.ndarray] = field(default_factory=list)  # KL(reference || bundle), nats
    max_difference: float = 0.0

    def add(self, found: np.ndarray, reference: np.ndarray) -> None:
        self.same.append(found.argmax(-1) == reference.argmax(-1))
        self.max_difference = max(
            self.max_difference, float(np.abs(found - reference).max(initial=0))
        )
        q, p = log_softmax(found), log_softmax(reference)
        self.kl.append((np.exp(p) * (p - q)).sum(-1))

    def figures(self) -> dict[str, Any]:
        """Rounding can make a KL of zero slightly negative; the mean is cut at 0."""
        same = np.concatenate([np.zeros(0, bool), *self.same])
        kl = np.concatenate([np.zeros(0), *self.kl])
        return {
            "positions": len(same),
            "agree": int(same.sum()),
            "top1_agreement": float(same.mean()) if len(same) else None,
            "mean_kl": max(0.0, float(kl.mean())) if len(kl) else None,
            "p99_kl": max(0.0, float(np.percentile(kl, 99))) if len(kl) else None,
            "max_logit_difference": self.max_difference,
        }

    def __add__(self, other: Agreement) -> Agreement:
        largest = max(self.max_difference, other.max_difference)
        return Agreement(self.same + other.same, self.kl + other.kl, largest)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@dataclass
class DraftAgreement:
    """Greedy blocks of two drafters after the same tokens, each on its own target's features."""

    base: Agreement = field(default_factory=Agreement)
    picks_agree: int = 0
    picks_compared: int = 0  # slots behind an equal run of picks
    max_confidence_difference: float | None = None  # of probabilities, at the same slots

    def add(self, found: _Block, reference: _Block) -> None:
        self.base.add(found.base_logits, reference.base_logits)
        same = found.ids == reference.ids
        comparable = np.cumprod(np.concatenate([[True], same[:-1]])).astype(bool)
        self.picks_compared += int(comparable.sum())
        self.picks_agree += int((same & comparable).sum())
        if found.confidence is not None and reference.confidence is not None:
            difference = np.abs(found.confidence - reference.confidence)[comparable].max()
            self.max_confidence_difference = max(
                self.max_confidence_difference or 0.0, float(difference)
            )

    def figures(self) -> dict[str, Any]:
        return {
            "base_logits": self.base.figures(),
            "picks_agree": self.picks_agree,
            "picks_compared": self.picks_compared,
            "max_confidence_difference": self.max_confidence_difference,
        }


@dataclass(frozen=True)
class _Block:
    base_logits: np.ndarray  # [γ, U]
    ids: np.ndarray  # [γ]
    confidence: np.ndarray | None  # [γ], probabilities without calibration


@dataclass(frozen=True)
class _Job:
    """One prompt that fits both bundles."""

    file: Path
    line: int
    ids: list[int]

    @property
    def where(self) -> str:
        return f"{self.file}, line {self.line}"


class Comparison:
    """Two loaded bundles and how to compare them; both stay in memory."""

    def __init__(
        self,
        engine: Engine,
        reference: Engine,
        *,
        max_new_tokens: int = 64,
        chat: bool | None = None,
        report: Callable[[str], None] = lambda message: None,
    ) -> None:
        check_comparable(engine, reference)
        self.engine, self.reference, self.report = engine, reference, report
        self.chat = reference.tokenizer.has_chat_template if chat is None else chat
        # Both stop where the reference does.
        self.params = SamplingParams(
            temperature=0.0,
            max_new_tokens=max_new_tokens,
            stop_ids=reference.bundle.target.stop_ids,
        )
        self.prompt_part, self.continuation_part = Agreement(), Agreement()
        same_blocks = engine.gamma == reference.gamma
        same_tokens = np.array_equal(engine.bundle.draft_ids(), reference.bundle.draft_ids())
        self.drafts = DraftAgreement() if same_blocks and same_tokens else None

    def run(self, sets: Sequence[PromptSet]) -> dict[str, Any]:
        """All figures. Raises `DraftgraphError` when logits are not finite."""
        jobs, skipped = self._jobs(sets)
        expected = self._greedy(self.reference, jobs, "reference")
        for i, (job, output) in enumerate(zip(jobs, expected, strict=True)):
            self._over_text(job, output.token_ids)
            self.report(f"logits: {i + 1} of {len(jobs)} texts")
        found = self._greedy(self.engine, jobs, "bundle")
        mismatches = [
            self._mismatch(job, mine.token_ids, theirs.token_ids)
            for job, mine, theirs in zip(jobs, found, expected, strict=True)
            if mine.token_ids != theirs.token_ids
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            "bundle": _identity(self.engine),
            "reference": _identity(self.reference),
            "settings": {
                "max_new_tokens": self.params.max_new_tokens,
                "chat": self.chat,
                "near_tie": NEAR_TIE,
            },
            "target": {
                "prompts": self.prompt_part.figures(),
                "continuations": self.continuation_part.figures(),
                "all": (self.prompt_part + self.continuation_part).figures(),
            },
            "drafter": None if self.drafts is None else self.drafts.figures(),
            "greedy": {
                "identical": len(jobs) - len(mismatches),
                "compared": len(jobs),
                "tokens": sum(len(o.token_ids) for o in expected),
                "near_ties": sum(m["near_tie"] for m in mismatches),
                "mismatches": mismatches,
            },
            "skipped": skipped,
        }

    def _jobs(self, sets: Sequence[PromptSet]) -> tuple[list[_Job], list[dict[str, Any]]]:
        """Prompts as ids; those that do not fit both bundles are left out and listed."""
        jobs, skipped = [], []
        budget = self.params.max_new_tokens
        capacity = min(e.bundle.max_seq_len for e in (self.engine, self.reference))
        for prompt_set in sets:
            for prompt in prompt_set.prompts:
                ids = self.reference.tokenizer.encode(prompt.formatted(self.chat))
                if len(ids) + budget <= capacity:
                    jobs.append(_Job(prompt_set.file, prompt.line, ids))
                else:
                    where = {"file": str(prompt_set.file), "line": prompt.line, "tokens": len(ids)}
                    skipped.append(where)
        if not jobs:
            raise DraftgraphError(
                f"no prompt fits: the smaller capacity of the two bundles is {capacity} and "
                f"max_new_tokens is {budget}; lower it or shorten the prompts"
            )
        return jobs, skipped

    def _greedy(self, engine: Engine, jobs: Sequence[_Job], name: str) -> list[Output]:
        """Target-only greedy continuations, in batches."""
        outputs: list[Output] = []
        for start in range(0, len(jobs), engine.max_requests):
            prompts = [job.ids for job in jobs[start : start + engine.max_requests]]
            outputs += engine.generate_batch(prompts, self.params, speculative=False)
            self.report(f"greedy, {name}: {len(outputs)} of {len(jobs)} prompts")
        return outputs

    def _over_text(self, job: _Job, continuation: list[int]) -> None:
        """Run both bundles over one text.

        The prompt goes in large chunks, the continuation in chunks as wide as a verification; the
        drafters draft after every chunk.
        """
        ids = np.array(job.ids + continuation, np.int64)
        split, width = len(job.ids), self.reference.gamma + 1
        starts = [*range(0, split, CHUNK), *range(split, len(ids), width), len(ids)]
        for start, stop in pairwise(starts):
            chunk = ids[start:stop]
            found, expected = (_logits(e, chunk, start, job) for e in (self.engine, self.reference))
            # Row i of a chunk chooses the token at start + i + 1.
            chosen = max(0, min(split - 1 - start, len(chunk)))
            self.prompt_part.add(found[:chosen], expected[:chosen])
            self.continuation_part.add(found[chosen:], expected[chosen:])
            if self.drafts is not None and stop < len(ids):
                anchor = int(ids[stop])
                blocks = (_draft(e, start, stop, anchor) for e in (self.engine, self.reference))
                self.drafts.add(*blocks)

    def _mismatch(self, job: _Job, found: list[int], expected: list[int]) -> dict[str, Any]:
        """The first difference of two continuations, judged by the reference's logits there."""
        position = next(i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b)
        prefill_target(self.reference, job.ids + expected[:position])
        logits = self.reference.backend.read("logits")[-1].astype(np.float64)
        second, best = np.sort(logits)[-2:]
        behind = float(best - logits[found[position]])
        return {
            "file": str(job.file),
            "line": job.line,
            "position": position,
            "bundle_id": found[position],
            "reference_id": expected[position],
            "logit_gap": float(best - second),  # between the reference's two best tokens
            "behind": behind,  # how far the bundle's token is behind the reference's best
            "near_tie": behind <= NEAR_TIE,
        }


def check_comparable(engine: Engine, reference: Engine) -> None:
    """Refuse bundles whose token ids do not mean the same."""
    a, b = engine.bundle, reference.bundle
    if a.target.vocab_size != b.target.vocab_size:
        raise DraftgraphError(
            f"{a.path} has a vocabulary of {a.target.vocab_size} tokens, {b.path} of "
            f"{b.target.vocab_size}; compare bundles of the same tokenizer"
        )
    if a.text_file("tokenizer.json") != b.text_file("tokenizer.json"):
        raise DraftgraphError(
            f"{a.path} and {b.path} have different tokenizers (tokenizer.json); compare bundles "
            "of the same tokenizer"
        )


def _logits(engine: Engine, chunk: np.ndarray, start: int, job: _Job) -> np.ndarray:
    """Logits [M, V] of a chunk of one request, appended to the target's cache at row `start`."""
    engine.backend.reserve(1, start + len(chunk), 0)
    engine.backend.target(TokenBatch(chunk, np.array([len(chunk)]), np.array([start])))
    logits = engine.backend.read("logits")
    bad = ~np.isfinite(logits).all(-1)
    if bad.any():
        raise DraftgraphError(
            f"{engine.bundle.path}: logits are not finite at {int(bad.sum())} of {len(chunk)} "
            f"positions, the first is {start + int(bad.argmax())} of {job.where}; if the bundle "
            "is fp16, export it with --dtype bf16 or fp32"
        )
    return logits


def _draft(engine: Engine, start: int, stop: int, anchor: int) -> _Block:
    """One greedy block behind the tokens start .. stop-1 of the last target call."""
    backend, anchors = engine.backend, np.array([anchor])
    backend.reserve(1, 0, stop + engine.gamma)
    backend.backbone(
        ContextBatch(
            counts=np.array([stop - start]),
            index=np.arange(stop - start),
            past_length=np.array([start]),
            slots=np.array([0]),
            anchor=anchors,
        )
    )
    base = backend.read("base_logits")[0]
    ids = backend.markov(anchors, DraftSampling(np.zeros(1, np.float32), None))[0].copy()
    confidence = backend.confidence()
    if confidence is not None:
        confidence = 1 / (1 + np.exp(-confidence[0].astype(np.float64)))
    return _Block(base, ids, confidence)


def _identity(engine: Engine) -> dict[str, Any]:
    bundle = engine.bundle
    return {
        "path": str(bundle.path),
        "dtype": bundle.dtype,
        "manifest_sha256": sha256(bundle.path / MANIFEST),
    }


def render(compared: dict[str, Any], console: Console) -> None:
    """Print all figures."""
    a, b, greedy = compared["bundle"], compared["reference"], compared["greedy"]
    console.print(f"bundle {a['path']} ({a['dtype']}), reference {b['path']} ({b['dtype']})")
    heading(console, "logits over the same text (KL of the bundle from the reference, nats)")
    rows = [(f"target, {part}", figures) for part, figures in compared["target"].items()]
    drafter = compared["drafter"]
    if drafter is not None:
        rows.append(("drafter, base logits", drafter["base_logits"]))
    show = table("", "positions", "same top 1", "mean KL", "p99 KL", "largest difference")
    for name, figures in rows:
        show.add_row(
            name,
            str(figures["positions"]),
            number(figures["top1_agreement"], ".2%"),
            number(figures["mean_kl"], ".1e"),
            number(figures["p99_kl"], ".1e"),
            number(figures["max_logit_difference"], ".3g"),
        )
    console.print(show)
    if drafter is None:
        console.print("drafters of different block sizes or draft vocabularies: not compared")
    else:
        line = f"drafted tokens: {drafter['picks_agree']} of {drafter['picks_compared']} equal"
        if drafter["max_confidence_difference"] is not None:
            line += f"; largest confidence difference {drafter['max_confidence_difference']:.2g}"
        console.print(line)
    heading(
        console, f"greedy continuations of up to {compared['settings']['max_new_tokens']} tokens"
    )
    near = compared["settings"]["near_tie"]
    console.print(
        f"{greedy['identical']} of {greedy['compared']} identical; of the others "
        f"{greedy['near_ties']} part at a near tie (the bundle's token within {near} of the "
        "reference's best logit)"
    )
    for m in greedy["mismatches"]:
        console.print(
            f"{m['file']}, line {m['line']}: token {m['position']} is {m['bundle_id']} instead of "
            f"{m['reference_id']}, {m['behind']:.3g} behind it; gap of the reference's two best "
            f"{m['logit_gap']:.3g}"
        )
    for entry in compared["skipped"]:
        console.print(f"left out: {entry['file']}, line {entry['line']}: {entry['tokens']} tokens")
