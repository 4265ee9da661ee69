"""Numeric validation of a bundle: every graph in ONNX Runtime against torch eager.

Each comparison states its error relative to max(1, largest reference value) and must stay below the
tolerance of the bundle's dtype; picks must agree except where the reference itself is near a tie.
The figures go into validation.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..graphs.contract import DType
from ..graphs.errors import DraftgraphError
from ..runtime.backends.base import AcceptSampling, ContextBatch, DraftSampling, TokenBatch
from ..runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu
from ..runtime.bundle import Bundle
from ..runtime.tokenizer import Tokenizer
from .checkpoints import DraftCheckpoint, TargetCheckpoint
from .reference import (
    ReferenceDrafter,
    ReferenceTarget,
    one_hot,
    processed_probs,
    verify_reference,
)
from .tolerances import AGREEMENT, TIE, TOLERANCE

TEXTS = (
    "The capital of France is Paris, and the river that runs through it is the",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "Question: A train travels 60 km in 45 minutes. How far does it travel in 2 hours? Answer: The "
    "train covers 60 km in 0.75 hours, which is 80 km per hour, so in 2 hours it travels",
)
# Overflow in half precision shows on some texts only, often on rare, special or repeated tokens.
# These run once each, as chat messages where there is a template.
LONG_TEXTS = (
    "Let $f(x) = \\frac{x^3 - 2x}{\\sqrt{1 + x^2}}$. Compute $f'(1)$ and $\\int_0^1 f(x)\\,dx$.\n"
    "\n| n | n^2 | n^3 |\n|---|-----|-----|\n| 12 | 144 | 1728 |\n| 25 | 625 | 15625 |\n",
    "import json\n\n\nclass Cache(dict):\n\tdef __missing__(self, key):\n\t\tself[key] = key * 2\n"
    '\t\treturn self[key]\n\n\nprint(json.dumps({"a": [1, -2.5e-3], "b": {"c": "\\u00e9"}}))\n\n\n',
    "Résumé naïf: Größe, señor. Привет, мир! γειά σου; 你好，世界。 こんにちは 안녕 مرحبا 🙂🚀",
    "the the the the the the the the 0000000000000000 ................ aaaaaaaa \n\n\n\n       END",
)
LONG_TOKENS = 256  # at most, of each of these


@dataclass
class Check:
    """One line of validation.json."""

    name: str
    max_error: float = 0.0  # relative, see the module's docstring
    agree: int = 0
    compared: int = 0
    kl: list[float] = field(default_factory=list)

    def tensor(self, found: np.ndarray, expected: torch.Tensor) -> None:
        """Compare values; a value that is not finite is an error at once, before it spreads."""
        reference = expected.float().numpy()
        if found.shape != reference.shape:
            raise DraftgraphError(f"{self.name}: shape {found.shape}, torch has {reference.shape}")
        if not found.size:
            return
        excluded = reference < -1e29  # logits of tokens that cannot be drafted
        if ((found < -1e29) != excluded).any():
            raise DraftgraphError(
                f"validation failed: {self.name} leaves out other tokens than torch; no bundle was "
                "written"
            )
        found, reference = found[~excluded], reference[~excluded]
        scale = max(1.0, float(np.abs(reference).max()))
        if not np.isfinite(found).all():
            raise DraftgraphError(
                f"validation failed: {self.name} has values that are not finite, torch in float32 "
                "has none there; no bundle was written; instead of fp16 try --dtype bf16 or fp32"
            )
        self.max_error = max(self.max_error, float(np.abs(found - reference).max()) / scale)

    def picks(self, same: Iterable[bool]) -> None:
        flags = list(same)
        self.agree += sum(flags)
        self.compared += len(flags)

    def logits(self, found: np.ndarray, expected: torch.Tensor, tie: float) -> None:
        """Values, argmax (near ties of the reference count as agreement) and KL."""
        self.tensor(found, expected)
        top = expected.float().topk(2, dim=-1).values
        near_tie = (top[..., 0] - top[..., 1] < tie).numpy().ravel()
        same = (found.argmax(-1) == expected.argmax(-1).numpy()).ravel()
        self.picks((same | near_tie).tolist())
        p = torch.log_softmax(expected.double(), -1)
        q = torch.log_softmax(torch.from_numpy(found).double(), -1)
        self.kl += (p.exp() * (p - q)).sum(-1).flatten().tolist()

    def verdict(self, dtype: DType) -> dict[str, Any]:
        """The figures; raises when they break the bounds of the dtype."""
        if not self.max_error <= TOLERANCE[dtype]:
            raise DraftgraphError(
                f"validation failed: {self.name} differs from torch by {self.max_error:.2e} "
                f"(relative), {dtype} allows {TOLERANCE[dtype]:.0e}; no bundle was written"
                + ("; try --dtype bf16 or fp32" if dtype == "fp16" else "")
            )
        share = self.agree / self.compared if self.compared else 1.0
        if share < AGREEMENT[dtype]:
            raise DraftgraphError(
                f"validation failed: {self.name} picks the same token as torch in {self.agree} of "
                f"{self.compared} cases, {dtype} needs {AGREEMENT[dtype]:.0%}; no bundle was "
                "written"
            )
        figures: dict[str, Any] = {"max_relative_error": _short(self.max_error)}
        if self.compared:
            figures |= {"picks_agree": self.agree, "picks_compared": self.compared}
        if self.kl:
            figures["mean_kl"] = _short(max(0.0, float(np.mean(self.kl))))
        return figures


def _short(x: float) -> float:
    """One significant digit: what matters, and stable across runs."""
    return float(f"{x:.0e}")


def validate_bundle(
    bundle: Bundle,
    target: TargetCheckpoint,
    draft: DraftCheckpoint,
    report: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Run every graph on real prompts (ids when there is no tokenizer), batch 1 and 3.

    Widths 1, 2, γ and γ+1 and ragged batches are covered, then longer texts as a whole. Returns
    the content of validation.json; raises `DraftgraphError` when a figure is out of bounds.
    """
    # One torch thread: its OpenMP team would fight ONNX Runtime's spinning pool for the cores.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _Validation(bundle, target, draft, report).run()
    finally:
        torch.set_num_threads(threads)


class _Validation:
    def __init__(
        self,
        bundle: Bundle,
        target: TargetCheckpoint,
        draft: DraftCheckpoint,
        report: Callable[[str], None],
    ) -> None:
        self.bundle, self.report = bundle, report
        self.tie = TIE[bundle.dtype]
        self.gamma = bundle.draft.block_size
        self.prompts = _prompts(bundle, room=3 * (self.gamma + 1))
        self.long_prompts = _long_prompts(bundle)
        report("loading the torch reference")
        self.reference = ReferenceTarget(target.source, draft.contract.tap_ids)
        embed, head = _embedding_and_head(target, draft)
        weights = {n: _torch(draft.weights[n]) for n in draft.weights.names()}
        ids = None if draft.draft_ids is None else torch.from_numpy(draft.draft_ids)
        self.drafter = ReferenceDrafter(
            draft.contract, weights, embed=embed, lm_head=head, draft_ids=ids
        )
        self.checks: dict[str, Check] = {}

    def check(self, name: str) -> Check:
        return self.checks.setdefault(name, Check(name))

    def run(self) -> dict[str, Any]:
        backend = OnnxRuntimeCpu(self.bundle, markov="full")
        expected = [self.reference(torch.tensor(ids)) for ids in self.prompts]
        for batch in ([0], [1], [2], [0, 1, 2]):
            self.report(f"validating on a batch of {len(batch)}")
            self._batch(backend, batch, expected)
        self.report(f"validating on {len(self.long_prompts)} longer texts")
        for ids in self.long_prompts:
            self._long(backend, ids)
        if "markov_topk" in self.bundle.graphs:
            self._truncated()
        if not self.bundle.draft.has_confidence:
            self.checks.pop("confidence", None)
        # In the order of computation: a message names the cause, not what follows from it.
        checks = {name: check.verdict(self.bundle.dtype) for name, check in self.checks.items()}
        return {
            "dtype": self.bundle.dtype,
            "tolerance": TOLERANCE[self.bundle.dtype],
            "minimum_agreement": AGREEMENT[self.bundle.dtype],
            "prompt_lengths": [len(p) for p in self.prompts + self.long_prompts],
            "checks": dict(sorted(checks.items())),
        }

    def _batch(
        self, backend: OnnxRuntimeCpu, members: list[int], expected: list[tuple[Any, Any]]
    ) -> None:
        """Feed the prompts in chunks of several widths, then draft and accept once."""
        prompts = [self.prompts[i] for i in members]
        references = [expected[i] for i in members]
        r, gamma = len(prompts), self.gamma
        longest = max(len(p) for p in prompts)
        backend.reserve(r, longest + gamma + 1, longest + 2 * (gamma + 1))
        done = np.zeros(r, np.int64)
        drafted = np.zeros(r, np.int64)
        tail = gamma + 1 + gamma + 2 + 1  # widths kept for the decode-sized chunks below
        head = np.array([len(p) - tail - i for i, p in enumerate(prompts)])
        for widths in (head, gamma + 1, np.arange(r) % gamma + 1, 2, 1):
            lengths = np.minimum(np.full(r, widths), [len(p) for p in prompts] - done)
            chunks = [p[a : a + n] for p, a, n in zip(prompts, done, lengths, strict=True)]
            ids = np.concatenate([np.array(c, np.int64) for c in chunks])
            backend.target(TokenBatch(ids, lengths, done.copy()))
            logits, features = backend.read("logits"), backend.read("features")
            starts = np.cumsum(lengths) - lengths
            for i in range(r):
                rows = slice(starts[i], starts[i] + lengths[i])
                span = slice(done[i], done[i] + lengths[i])
                self.check("target").logits(logits[rows], references[i][0][span], self.tie)
                self.check("features").tensor(features[rows], references[i][1][span])
            done += lengths
            anchors = np.array(
                [p[n] if n < len(p) else p[0] for p, n in zip(prompts, done, strict=True)]
            )
            index, slots = np.arange(len(ids)), np.arange(r)
            backend.backbone(ContextBatch(lengths, index, drafted.copy(), slots, anchors))
            drafted += lengths
        self._draft(backend, done, anchors, references)

    def _long(self, backend: OnnxRuntimeCpu, ids: list[int]) -> None:
        """A whole prompt in one call, and the block after it."""
        context, anchor = ids[:-1], ids[-1]
        n = len(context)
        logits, features = self.reference(torch.tensor(context))
        backend.reserve(1, n, n + 2 * self.gamma)
        backend.target(TokenBatch(np.array(context, np.int64), np.array([n]), np.array([0])))
        self.check("target").logits(backend.read("logits"), logits, self.tie)
        self.check("features").tensor(backend.read("features"), features)
        backend.backbone(_first_context(n, anchor))
        hidden, base = self.drafter.backbone(features, anchor)
        self.check("backbone").tensor(backend.read("hidden")[0], hidden)
        self.check("base_logits").logits(backend.read("base_logits")[0], base, self.tie)

    def _draft(
        self,
        backend: OnnxRuntimeCpu,
        done: np.ndarray,
        anchors: np.ndarray,
        references: list[tuple[Any, Any]],
    ) -> None:
        hidden, base = backend.read("hidden"), backend.read("base_logits")
        r, gamma = len(anchors), self.gamma
        rng = np.random.default_rng(0)
        zeros = np.zeros(r, np.float32)
        greedy_ids = backend.markov(anchors, DraftSampling(zeros, None)).copy()
        draws = (rng.integers(0, 2**24, (r, gamma)) * 2.0**-24).astype(np.float32)
        warm = np.full(r, 0.8, np.float32)
        for temperature, uniforms in ((zeros, draws), (warm, draws)):
            ids = backend.markov(anchors, DraftSampling(temperature, uniforms)).copy()
            logits = backend.read("draft_logits")
            confidence = backend.confidence()
            if not temperature.any():
                self.check("markov_greedy").picks((ids == greedy_ids).ravel().tolist())
            for i in range(r):
                features, anchor = references[i][1][: done[i]], int(anchors[i])
                h, u = self.drafter.backbone(features, anchor)
                self.check("backbone").tensor(hidden[i], h)
                self.check("base_logits").logits(base[i], u, self.tie)
                # The heads are compared on the graph's own inputs, following the graph's picks.
                own_u, own_h = torch.from_numpy(base[i]), torch.from_numpy(hidden[i])
                forced = ids[i].tolist()
                _, corrected, embeddings = self.drafter.markov(
                    own_u, own_h, anchor, forced_ids=forced
                )
                self.check("markov").tensor(logits[i], corrected)
                self._markov_picks(corrected, forced, float(temperature[i]), draws[i])
                if confidence is not None:
                    expected = self.drafter.confidence(own_h, embeddings)
                    assert expected is not None
                    self.check("confidence").tensor(confidence[i], expected)
            self._accept(backend, ids, logits, float(temperature[0]), rng)

    def _markov_picks(
        self, logits: torch.Tensor, ids: list[int], temperature: float, draws: np.ndarray
    ) -> None:
        probs = processed_probs(logits, temperature)
        for slot, pick in enumerate(ids):
            cdf = np.concatenate([[0.0], np.cumsum(probs[slot])])
            if temperature == 0.0:
                top = logits[slot].topk(2).values
                same = pick == int(logits[slot].argmax()) or float(top[0] - top[1]) < self.tie
            else:  # the draw falls into the pick's share of the distribution, up to rounding
                slack = 2 * TOLERANCE[self.bundle.dtype]
                same = cdf[pick] - slack <= draws[slot] <= cdf[pick + 1] + slack
            self.check("markov").picks([bool(same)])

    def _accept(
        self,
        backend: OnnxRuntimeCpu,
        ids: np.ndarray,
        draft_logits: np.ndarray,
        temperature: float,
        rng: np.random.Generator,
    ) -> None:
        """Acceptance on the graph's own logits: the drafted ids are verified after each prompt."""
        r, gamma = ids.shape
        lengths = np.array([(gamma - i) % gamma + 1 if gamma > 1 else 1 for i in range(r)])
        lengths = np.minimum(lengths, gamma)
        past = np.array([len(p) for p in self.prompts[:r]]) - 1
        past = np.minimum(past, backend.capacity[0] - gamma - 1)
        tokens = np.concatenate(
            [np.concatenate([[self.prompts[i][-1]], ids[i, : lengths[i]]]) for i in range(r)]
        )
        backend.target(TokenBatch(tokens, lengths + 1, past))
        target_logits = backend.read("logits")
        starts = np.cumsum(lengths + 1) - lengths - 1
        greedy = temperature == 0.0
        for top_k, top_p in ((0, 1.0), (5, 1.0), (0, 0.7), (20, 0.9)):
            accept_u = rng.random((r, gamma)).astype(np.float32)
            sample_u = np.asarray(rng.random(r), np.float32)
            accepted, next_id = backend.accept(
                AcceptSampling(
                    slots=np.arange(r),
                    verify_length=lengths,
                    temperature=np.full(r, temperature, np.float32),
                    top_k=np.full(r, top_k),
                    top_p=np.full(r, top_p, np.float32),
                    accept_uniform=None if greedy else accept_u,
                    sample_uniform=None if greedy else sample_u,
                )
            )
            for i in range(r):
                n = lengths[i]
                p = processed_probs(
                    target_logits[starts[i] : starts[i] + n + 1], temperature, top_k, top_p
                )
                if greedy:
                    q = one_hot(ids[i, :n], p.shape[1])
                else:
                    q = processed_probs(draft_logits[i, :n], temperature)
                expected = verify_reference(p, ids[i, :n], q, accept_u[i], float(sample_u[i]))
                found = (int(accepted[i]), int(next_id[i]))
                # A draw may fall within rounding of an edge; then the neighbour is as right.
                same = found == expected or self._edge(p, q, ids[i], found, sample_u[i], n)
                self.check("accept").picks([same])
            if greedy:
                break

    def _edge(
        self,
        p: np.ndarray,
        q: np.ndarray,
        ids: np.ndarray,
        found: tuple[int, int],
        uniform: float,
        verified: int,
    ) -> bool:
        """Does the float32 draw lie within 1e-4 of the reference's interval of that token?"""
        run, token = found
        if not (0 <= run <= verified and 0 <= token < p.shape[1]):
            return False
        weights = p[run] if run == verified else np.maximum(p[run] - q[run], 0.0)
        if weights.sum() <= 0:
            weights = p[run]
        cdf = np.concatenate([[0.0], np.cumsum(weights) / weights.sum()])
        return bool(cdf[token] - 1e-4 <= uniform <= cdf[token + 1] + 1e-4)

    def _truncated(self) -> None:
        """The truncated Markov graphs equal the full one on their candidates."""
        k = self.bundle.markov_top_k or 0
        backend = OnnxRuntimeCpu(self.bundle, markov="topk")
        ids = self.prompts[0]
        n = len(ids) - 1
        backend.reserve(1, len(ids), len(ids) + self.gamma)
        backend.target(TokenBatch(np.array(ids[:n], np.int64), np.array([n]), np.array([0])))
        context = _first_context(n, ids[n])
        anchor = context.anchor
        backend.backbone(context)
        base, hidden = backend.read("base_logits")[0], backend.read("hidden")[0]
        zero = np.zeros(1, np.float32)
        draws = np.full((1, self.gamma), 0.5, np.float32)
        greedy = backend.markov(anchor, DraftSampling(zero, None))[0].copy()
        sampled = backend.markov(anchor, DraftSampling(zero, draws))[0].copy()
        check = self.check("markov_topk")
        check.picks((greedy == sampled).tolist())
        logits = backend.read("draft_logits")[0]
        candidates = np.argsort(-base, axis=-1, kind="stable")[:, :k]
        _, corrected, _ = self.drafter.markov(
            torch.from_numpy(base), torch.from_numpy(hidden), int(anchor[0]), forced_ids=sampled
        )
        tokens = self.drafter.draft_ids.numpy()[candidates]
        reference = np.take_along_axis(corrected.numpy(), tokens, -1)
        check.tensor(np.take_along_axis(logits, tokens, -1), torch.from_numpy(reference))
        kept = (logits > -1e29).sum(-1)
        check.picks((kept == k).tolist())


def _prompts(bundle: Bundle, room: int) -> list[list[int]]:
    """Three prompts of different lengths, each longer than the decode-sized chunks need."""
    tokenizer = Tokenizer(bundle)
    vocabulary = bundle.target.vocab_size
    prompts = []
    for i, text in enumerate(TEXTS):
        wanted = room + 3 + 5 * i
        if tokenizer.available:
            ids = tokenizer.encode(text)
        else:
            ids = np.random.default_rng(i).integers(0, vocabulary, wanted).tolist()
        while len(ids) < wanted:  # a large block wants longer prompts
            ids = ids + ids
        prompts.append(ids[: max(wanted, bundle.max_seq_len - room)])
    return prompts


def _long_prompts(bundle: Bundle) -> list[list[int]]:
    """LONG_TEXTS as ids, with special tokens; random ids when there is no tokenizer."""
    tokenizer = Tokenizer(bundle)
    most = min(LONG_TOKENS, bundle.max_seq_len - bundle.draft.block_size)
    if not tokenizer.available:
        vocabulary = bundle.target.vocab_size
        rng = np.random.default_rng(len(TEXTS))
        return [rng.integers(0, vocabulary, most).tolist() for _ in LONG_TEXTS]
    prompts = []
    for text in LONG_TEXTS:
        try:
            ids = tokenizer.encode([{"role": "user", "content": text}])
        except DraftgraphError:  # no template, or one that does not take a lone user message
            ids = tokenizer.encode(text)
        prompts.append(ids[:most])
    return prompts


def _first_context(count: int, anchor: int) -> ContextBatch:
    """All rows of the first target call of a single request become context."""
    return ContextBatch(
        counts=np.array([count]),
        index=np.arange(count),
        past_length=np.array([0]),
        slots=np.array([0]),
        anchor=np.array([anchor]),
    )


def _torch(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array.astype(np.float32)))


def _embedding_and_head(
    target: TargetCheckpoint, draft: DraftCheckpoint
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the drafter embeds and projects with, in float32."""
    t, d = target.contract, draft.contract
    own = draft.weights
    embed = (target.weights if d.shares_embedding else own)["embed_tokens.weight"]
    if not d.shares_head:
        head = own["lm_head.weight"]
    else:
        head = target.weights["embed_tokens.weight" if t.tied_head else "lm_head.weight"]
    return _torch(embed), _torch(head)
