"""Training data from the target itself: sampled answers, tapped features, next-token distributions.

Everything comes from one pass of the runtime: while the engine decodes a batch, the backend keeps
what the target graph puts out anyway. Any bundle's target graph works, so a drafter can be fitted
to exactly the graph (and the quantisation) that will be served.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...graphs.errors import DraftgraphError
from ...runtime import Bundle, Engine, SamplingParams
from ...runtime.backends.base import TokenBatch
from ...runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu
from ...runtime.engine import PREFILL_CHUNK
from ..prompts import PromptSet

TOP_K = 128  # tokens of the target's distribution that are kept for every position
PART_SEQUENCES = 64  # sequences of one file
USER_SEED = 2**32  # added to the seed for self-written user turns
SHORTEST = 8  # generated tokens below which a sequence is not worth its prompt
Report = Callable[[str], None]


@dataclass(frozen=True)
class Record:
    """Where a sequence comes from. number: of the job, keys its random draws with the seed."""

    number: int
    source: str
    temperature: float
    prompt_length: int
    length: int
    held_out: bool


@dataclass
class Sample:
    """One sampled text: tokens [L]; features [L-1, m·d] bf16 or None; of the positions
    prompt_length-1 … L-2 the target's next-token distribution, its K best: ids and probs [·, K]."""

    record: Record
    tokens: Tensor
    features: Tensor | None
    target_ids: Tensor
    target_probs: Tensor


# Recording


def top_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable tokens of [n, V] logits at temperature 1: ids i32 and probabilities f16.

    Their sum is below 1 by the mass of the rest.
    """
    total = torch.logsumexp(logits, -1, keepdim=True)
    if not torch.isfinite(total).all():
        raise DraftgraphError(
            "the target's logits are not finite; check the checkpoint, or give a bundle in bf16 or "
            "fp32 if this one is fp16"
        )
    best = logits.topk(min(k, logits.shape[-1]), -1)
    return best.indices.int(), (best.values - total).exp().half()


class RecordingBackend(OnnxRuntimeCpu):
    """The CPU backend, keeping features and next-token distributions of every slot's request.

    `finished[slot]` is what the request that left the slot last has left behind.
    """

    def __init__(self, bundle: Bundle, *, features: bool, threads: int | None = None) -> None:
        super().__init__(bundle, threads=threads)
        self._with_features = features
        self._kept: dict[int, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}
        self.finished: dict[int, tuple[Tensor | None, Tensor, Tensor]] = {}

    def target(self, batch: TokenBatch) -> None:
        super().target(batch)
        ids, probs = top_tokens(torch.from_numpy(self.read("logits")), TOP_K)
        counts = [int(n) for n in batch.lengths]
        features = torch.from_numpy(self.read("features")) if self._with_features else None
        row = logit = 0
        for slot, count in enumerate(counts, batch.first_slot):
            if not count:
                continue
            kept = self._kept.setdefault(slot, ([], [], []))
            if features is not None:
                kept[0].append(features[row : row + count].bfloat16())
            logits = 1 if batch.last_only else count
            kept[1].append(ids[logit : logit + logits])
            kept[2].append(probs[logit : logit + logits])
            row, logit = row + count, logit + logits

    def release(self, slot: int) -> None:
        super().release(slot)
        features, ids, probs = self._kept.pop(slot)
        # Of a prompt in several chunks only the last row of the last one is a position to learn.
        self.finished[slot] = (
            torch.cat(features) if features else None,
            torch.cat(ids),
            torch.cat(probs),
        )

    def reset(self, slots: int) -> None:
        super().reset(slots)
        self._kept.clear()


def open_engine(bundle: Bundle, requests: int, *, features: bool, threads: int | None) -> Engine:
    """An engine that records. Its tokens are those of any other engine."""
    backend = RecordingBackend(bundle, features=features, threads=threads)
    return Engine(bundle, backend, max_requests=requests)


def run_target(
    backend: OnnxRuntimeCpu, tokens: Sequence[int], first_target: int | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Features [L-1, m·d] bf16 of given tokens, and the distributions from position
    `first_target` on (none when it is None)."""
    rows = np.array(tokens[:-1], np.int64)
    backend.reset(1)
    backend.reserve(1, len(rows), 0)
    features, ids, probs = [], [], []
    for start in range(0, len(rows), PREFILL_CHUNK):
        chunk = rows[start : start + PREFILL_CHUNK]
        last_only = first_target is None or start + len(chunk) <= first_target
        OnnxRuntimeCpu.target(
            backend,
            TokenBatch(chunk, np.array([len(chunk)]), np.array([start]), last_only=last_only),
        )
        features.append(torch.from_numpy(backend.read("features")).bfloat16())
        if not last_only and first_target is not None:
            logits = torch.from_numpy(backend.read("logits"))[max(0, first_target - start) :]
            best = top_tokens(logits, TOP_K)
            ids.append(best[0])
            probs.append(best[1])
    if first_target is None:
        return torch.cat(features), None, None
    return torch.cat(features), torch.cat(ids), torch.cat(probs)


# Prompts


@dataclass(frozen=True)
class Prompt:
    """Token ids of one prompt, chat template included, and its origin."""

    ids: tuple[int, ...]
    source: str
    held_out: bool


def held_out(ids: Iterable[int], share: float) -> bool:
    """A split by prompt that does not depend on the other prompts."""
    digest = hashlib.sha256(np.array(list(ids), np.int64).tobytes()).digest()
    return int.from_bytes(digest[:8], "little") < share * 2**64


def prepare_prompts(
    engine: Engine,
    sets: Sequence[PromptSet],
    written: Sequence[str],
    *,
    chat: bool,
    share: float,
    room: int,
    seed: int,
    report: Report = lambda message: None,
) -> list[Prompt]:
    """Encoded, deduplicated and shuffled; files (and the self-written turns) take turns, so each
    has an equal share until it runs out. Prompts without `room` for an answer are left out."""
    longest = engine.bundle.max_seq_len - room
    groups: list[list[Prompt]] = []
    seen: set[tuple[int, ...]] = set()
    twice = long = 0
    texts = [[(p.formatted(chat), p.source or s.file.name) for p in s.prompts] for s in sets]
    if written:
        texts.append([([{"role": "user", "content": t}], "self-written") for t in written])
    for group in texts:
        prompts = []
        for prompt, source in group:
            ids = tuple(engine.tokenizer.encode(prompt))
            if ids in seen:
                twice += 1
            elif len(ids) > longest:
                long += 1
            else:
                seen.add(ids)
                prompts.append(Prompt(ids, source, held_out(ids, share)))
        order = np.random.default_rng([seed, len(groups)]).permutation(len(prompts))
        groups.append([prompts[i] for i in order])
    if twice or long:
        report(f"left out {twice} prompts that appear twice, {long} longer than {longest} tokens")
    mixed = [
        group[i]
        for i in range(max((len(g) for g in groups), default=0))
        for group in groups
        if i < len(group)
    ]
    if sum(p.held_out for p in mixed) == 0 or all(p.held_out for p in mixed):
        raise DraftgraphError(
            f"{len(mixed)} prompts, of which {sum(p.held_out for p in mixed)} are held out "
            f"(share {share}); give more prompts or another --held-out share"
        )
    return mixed


def write_user_turns(
    engine: Engine, count: int, *, temperature: float, seed: int, report: Report
) -> list[str]:
    """User turns that the target writes itself: sampling goes on where the chat template puts the
    user's text."""
    before, after = user_slot(engine)
    fast = engine.tokenizer.require()
    prefix = fast.encode(before, add_special_tokens=False).ids
    visible = fast.decode(fast.encode(after, add_special_tokens=False).ids)
    room = engine.bundle.max_seq_len - len(prefix)
    params = SamplingParams(
        temperature=temperature,
        max_new_tokens=min(128, room),
        seed=seed + USER_SEED,
        stop=(visible,) if visible.strip() else (),
    )
    report(f"sampling {count} user turns")
    outputs = engine.generate_batch([prefix] * count, params, speculative=False)
    texts = [(o.text or "").strip() for o in outputs if o.finish_reason == "stop"]
    kept = list(dict.fromkeys(t for t in texts if len(t.split()) >= 3))
    report(f"kept {len(kept)} of {count} user turns (complete, distinct, three words or more)")
    return kept


def user_slot(engine: Engine) -> tuple[str, str]:
    """What the chat template puts before and after a user's text."""
    mark = "\u2042user\u2042"
    before, found, after = engine.tokenizer.render_chat(
        [{"role": "user", "content": mark}]
    ).partition(mark)
    if not found:
        raise DraftgraphError(
            f"{engine.bundle.path}: the chat template does not show the user's text as it is, so "
            "no user turns can be sampled; set --self-written to 0"
        )
    return before, after


# Sampling


@dataclass(frozen=True)
class SamplingPlan:
    """How much to sample and how. tokens: generated ones, over all sequences."""

    tokens: int
    max_new_tokens: int
    temperatures: tuple[float, ...]
    seed: int

    def temperature(self, number: int, prompts: int) -> float:
        """Temperatures take turns; a prompt that comes again gets the next one."""
        again, prompt = divmod(number, prompts)
        return self.temperatures[(prompt + again) % len(self.temperatures)]

    def jobs(self, prompts: int) -> Iterator[int]:
        """Numbers of the texts to sample. A prompt is decoded at temperature 0 once: it would say
        the same again."""
        greedy: set[int] = set()
        for number in itertools.count() if any(self.temperatures) else range(prompts):
            prompt = number % prompts
            if self.temperature(number, prompts) == 0:
                if prompt in greedy:
                    continue
                greedy.add(prompt)
            yield number


def sample(
    engine: Engine, prompts: list[Prompt], plan: SamplingPlan, folder: Path, report: Report
) -> None:
    """Sample answers until the plan's tokens are reached, into part files; goes on where an earlier
    call was interrupted."""
    backend = engine.backend
    assert isinstance(backend, RecordingBackend)
    done = {r.number: r for r in records(folder)}
    generated = sum(r.length - r.prompt_length for r in done.values())
    before, start, told = generated, time.perf_counter(), time.perf_counter()
    jobs = (n for n in plan.jobs(len(prompts)) if n not in done)
    pending: list[Sample] = []
    running: dict[int, int] = {}
    more = True
    while (more and generated < plan.tokens) or engine.busy:
        free = engine.max_requests - len(running) if generated < plan.tokens else 0
        numbers = list(itertools.islice(jobs, free))
        more = len(numbers) == free
        for number in numbers:
            prompt = prompts[number % len(prompts)]
            request = engine.add_request(
                prompt.ids,
                SamplingParams(
                    temperature=plan.temperature(number, len(prompts)),
                    max_new_tokens=plan.max_new_tokens,
                    seed=plan.seed,
                ),
                speculative=False,
                number=number,
            )
            running[id(request)] = number
        for request in engine.step():
            number = running.pop(id(request))
            prompt = prompts[number % len(prompts)]
            features, ids, probs = backend.finished.pop(request.slot)
            record = Record(
                number,
                prompt.source,
                request.params.temperature,
                request.prompt_length,
                len(request.ids),
                prompt.held_out,
            )
            # A prompt in several chunks leaves a distribution for each; the last one counts.
            count = record.length - record.prompt_length
            tokens = torch.tensor(request.ids, dtype=torch.int32)
            pending.append(Sample(record, tokens, features, ids[-count:], probs[-count:]))
            generated += count
        if len(pending) >= PART_SEQUENCES or (pending and not engine.busy):
            write_part(folder, pending)
            pending = []
        if time.perf_counter() - told > 20:
            told = time.perf_counter()
            rate = (generated - before) / (told - start)
            report(f"{generated} of {plan.tokens} tokens sampled, {rate:.0f} a second")
    if generated < plan.tokens:
        report(
            f"every prompt was decoded at temperature 0: {generated} of {plan.tokens} tokens; more "
            "prompts or temperatures above 0 would give more"
        )


def import_samples(
    backend: OnnxRuntimeCpu, file: Path, folder: Path, share: float, report: Report
) -> None:
    """Take over texts that this target sampled earlier: an .npz with `tokens` (all sequences, one
    after the other), `lengths`, `starts` (where the answer begins) and `temps`."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            tokens, lengths, starts, temps = (
                arrays[name] for name in ("tokens", "lengths", "starts", "temps")
            )
    except (OSError, ValueError, KeyError) as error:
        raise DraftgraphError(
            f"{file}: not an .npz file with tokens, lengths, starts and temps ({error})"
        ) from None
    vocab, longest = backend.bundle.target.vocab_size, backend.bundle.max_seq_len
    if (
        not (len(lengths) == len(starts) == len(temps) and lengths.sum() == len(tokens))
        or (starts < 1).any()
        or (starts >= lengths).any()
        or (lengths > longest).any()
        or not (tokens.min() >= 0 and tokens.max() < vocab)
    ):
        raise DraftgraphError(
            f"{file}: expected sequences of at most {longest} ids below {vocab}, each with a start "
            "of the answer inside; the arrays do not fit together"
        )
    ends = np.cumsum(lengths)
    done = {r.number for r in records(folder)}
    pending: list[Sample] = []
    for i, (end, length, first, t) in enumerate(zip(ends, lengths, starts, temps, strict=True)):
        number = -1 - i  # jobs count from 0
        if number not in done:
            ids = [int(x) for x in tokens[end - length : end]]
            features, best, probs = run_target(backend, ids, int(first) - 1)
            assert best is not None and probs is not None
            record = Record(
                number, file.name, float(t), int(first), int(length), held_out(ids[:first], share)
            )
            pending.append(
                Sample(record, torch.tensor(ids, dtype=torch.int32), features, best, probs)
            )
        if len(pending) == PART_SEQUENCES or (pending and i + 1 == len(ends)):
            write_part(folder, pending)
            pending = []
            report(f"{i + 1} of {len(ends)} sequences of {file.name} taken over")


# Files


def write_part(folder: Path, sequences: list[Sample]) -> None:
    """One part file, atomically: safetensors, the records in its metadata."""
    tensors = {
        "tokens": torch.cat([s.tokens for s in sequences]),
        "target_ids": torch.cat([s.target_ids for s in sequences]),
        "target_probs": torch.cat([s.target_probs for s in sequences]),
    }
    features = [s.features for s in sequences if s.features is not None]
    if features:
        tensors["features"] = torch.cat(features)
    folder.mkdir(parents=True, exist_ok=True)
    number = len(part_files(folder))
    file = folder / f"part-{number:05}.safetensors"
    temporary = file.with_name(f".{file.name}.partial")
    metadata = {"records": json.dumps([asdict(s.record) for s in sequences])}
    save_file(tensors, temporary, metadata)
    os.replace(temporary, file)


def part_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.safetensors"))


def _open(file: Path) -> tuple[Any, list[Record]]:
    try:
        handle = safe_open(str(file), framework="pt")
        return handle, [Record(**r) for r in json.loads(handle.metadata()["records"])]
    except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
        raise DraftgraphError(
            f"{file}: this part of the data cannot be read ({error}); remove the file, and what it "
            "held is sampled again"
        ) from None


def records(folder: Path) -> list[Record]:
    """Of all sequences in the part files."""
    return [record for file in part_files(folder) for record in _open(file)[1]]


@dataclass(frozen=True)
class _Place:
    part: int
    record: Record
    token: int  # first token, feature row and distribution in the part's tensors
    feature: int
    target: int


class Dataset:
    """The sequences of all part files by job number; tensors are read from disk when asked for.

    features_of: computes the features of tokens where the files hold none.
    """

    def __init__(
        self, folder: Path, features_of: Callable[[Sequence[int]], Tensor] | None = None
    ) -> None:
        self.folder = folder
        self._handles: list[Any] = []
        self._features_of = features_of
        places: list[_Place] = []
        for number, file in enumerate(part_files(folder)):
            handle, found = _open(file)
            token = feature = target = 0
            for record in found:
                places.append(_Place(number, record, token, feature, target))
                token += record.length
                feature += record.length - 1
                target += record.length - record.prompt_length
            self._handles.append(handle)
            if features_of is None and "features" not in handle.keys():  # noqa: SIM118
                raise DraftgraphError(f"{file}: holds no features")
        self._places = sorted(places, key=lambda p: p.record.number)
        self.checks = Checks()
        self._places = self._check()

    def __len__(self) -> int:
        return len(self._places)

    def record(self, index: int) -> Record:
        return self._places[index].record

    def split(self, held_out: bool) -> list[int]:
        return [i for i, p in enumerate(self._places) if p.record.held_out == held_out]

    def tokens(self, index: int) -> Tensor:
        """[L] i64."""
        p = self._places[index]
        return self._slice(p, "tokens", p.token, p.record.length).long()

    def features(self, index: int, rows: int) -> Tensor:
        """Of positions 0 … rows-1: [rows, m·d] float32."""
        p = self._places[index]
        if self._features_of is not None:
            return self._features_of(self.tokens(index)[: rows + 1].tolist()).float()
        return self._slice(p, "features", p.feature, rows).float()

    def targets(self, index: int) -> tuple[Tensor, Tensor]:
        """ids [L - prompt, K] i64 and probs f32: row j is the distribution of token prompt + j."""
        p = self._places[index]
        count = p.record.length - p.record.prompt_length
        ids = self._slice(p, "target_ids", p.target, count).long()
        return ids, self._slice(p, "target_probs", p.target, count).float()

    def _slice(self, place: _Place, name: str, start: int, count: int) -> Tensor:
        return self._handles[place.part].get_slice(name)[start : start + count]

    def _check(self) -> list[_Place]:
        """Leave out sequences that would teach nothing; `checks` counts them."""
        kept, seen = [], set()
        for index, place in enumerate(self._places):
            tokens, record = self.tokens(index), place.record
            answer = tokens[record.prompt_length :].tolist()
            reason = degenerate(answer)
            key = tokens.numpy().tobytes()
            if reason is None and key in seen:
                reason = "the same text again"
            seen.add(key)
            if reason is not None:
                self.checks.dropped[reason] += 1
                continue
            self.checks.add(answer, record.temperature, *self.targets(index))
            kept.append(place)
        return kept


# Sanity


def degenerate(answer: Sequence[int]) -> str | None:
    """Why an answer is of no use, or None."""
    if len(answer) < SHORTEST:
        return f"an answer of fewer than {SHORTEST} tokens"
    if repeated_share(answer) > 0.5:
        return "mostly one token repeated"
    if len(answer) >= 32 and distinct_ngrams(answer) < 0.15:
        return "a loop"
    return None


def repeated_share(tokens: Sequence[int]) -> float:
    """Share of tokens equal to the one before."""
    return sum(a == b for a, b in itertools.pairwise(tokens)) / max(1, len(tokens) - 1)


def distinct_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Distinct n-grams over all n-grams."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


@dataclass
class Checks:
    """Figures that tell whether the data is what it should be, before any training."""

    sequences: int = 0
    tokens: int = 0
    repeated: float = 0.0  # sums over sequences
    distinct: float = 0.0
    probability: float = 0.0  # sums over tokens
    expected_probability: float = 0.0
    mass: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, answer: Sequence[int], temperature: float, ids: Tensor, probs: Tensor) -> None:
        """Whether the answer looks as if it was drawn from the distributions: the sampled token has
        on average the probability Σ p², p at the sampling temperature (1 for the best token at 0).
        """
        self.sequences += 1
        self.tokens += len(answer)
        self.repeated += repeated_share(answer)
        self.distinct += distinct_ngrams(answer)
        self.mass += float(probs.sum())
        if temperature < 1e-5:
            p = torch.zeros_like(probs)
            p[:, 0] = 1
        else:
            p = probs.clamp(min=1e-30).log().div(temperature).softmax(-1)
        self.probability += float((p * (ids == torch.tensor(answer)[:, None])).sum())
        self.expected_probability += float(p.square().sum())

    def lines(self) -> list[str]:
        n, t = max(1, self.sequences), max(1, self.tokens)
        lines = [
            f"{self.sequences} sequences, {self.tokens} sampled tokens; repeated tokens "
            f"{self.repeated / n:.1%}, distinct 4-grams {self.distinct / n:.1%}",
            f"sampled tokens have probability {self.probability / t:.3f} on average, their "
            f"distributions expect {self.expected_probability / t:.3f}; the {TOP_K} best tokens "
            f"hold {self.mass / t:.1%} of the mass",
        ]
        lines += [f"left out {count}: {why}" for why, count in self.dropped.most_common()]
        return lines

    def verify(self) -> None:
        """Refuse data that nothing good can come from."""
        lost = sum(self.dropped.values())
        if lost > self.sequences:
            worst = self.dropped.most_common(1)[0][0]
            raise DraftgraphError(
                f"{lost} of {lost + self.sequences} sampled sequences are of no use (most: "
                f"{worst}); look at them (part files of the data folder), and check the target, "
                "the chat template and the temperatures"
            )
        found, expected = (
            x / max(1, self.tokens) for x in (self.probability, self.expected_probability)
        )
        if abs(found - expected) > 0.1 * expected + 3 / max(1, self.tokens) ** 0.5:
            raise DraftgraphError(
                f"the sampled tokens have probability {found:.3f} on average where the target's "
                f"distributions expect {expected:.3f}: the texts were not sampled from this target "
                "at the stated temperatures"
            )
