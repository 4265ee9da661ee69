"""The output follows the target's distribution exactly, whatever the drafter proposes.

A vocabulary of 8 lets torch enumerate the distribution of the next two tokens (64 outcomes). The
graphs draw them 200,000 times per setting, thousands of requests per batch, and a chi-square test
compares the counts. Seeds are fixed, so a result never changes between runs; deliberately wrong
acceptance rules show that the test would notice.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from helpers import export_pair, open_model, p_value, write_random_pair
from scipy import stats

from draftgraph.export.bundle import export_bundle
from draftgraph.export.checkpoints import read_draft, read_target
from draftgraph.export.draft_vocab import restrict, write_draft_vocab
from draftgraph.export.reference import ReferenceTarget, inverse_cdf, processed_probs
from draftgraph.runtime import Engine, SamplingParams, load_bundle
from draftgraph.runtime.backends.base import (
    AcceptSampling,
    ContextBatch,
    DraftSampling,
    TokenBatch,
)
from draftgraph.runtime.backends.onnxruntime import backend as onnxruntime_backend
from draftgraph.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu
from draftgraph.runtime.sampling import Purpose, uniforms

VOCAB, GAMMA = 8, 3
PROMPT = [3, 1, 4, 1, 5]
REQUESTS, REPEATS = 5000, 40  # 200,000 draws per setting
FEW = 6  # repeats that are enough to notice a wrong rule
FILTERS = ((0, 1.0), (3, 1.0), (0, 0.8))  # (top_k, top_p)
PASS, FAIL = 1e-3, 1e-6

# (first position [R], count, purpose) -> float32 [R, count]
Draw = Callable[[np.ndarray, int, Purpose], np.ndarray]


@dataclass(frozen=True)
class Setting:
    head: str
    draft_sampling: str
    temperature: float
    top_k: int
    top_p: float
    width: int  # drafted tokens verified per round

    def __str__(self) -> str:
        return (
            f"{self.head}-{self.draft_sampling}-T{self.temperature}"
            f"-k{self.top_k}-p{self.top_p}-w{self.width}"
        )

    @property
    def draft_temperature(self) -> float:
        return self.temperature if self.draft_sampling == "sample" else 0.0


Pairs = dict[str, tuple[Path, ReferenceTarget]]  # Markov head -> bundle, torch target


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    made: Pairs = {}
    for seed, head in enumerate(("vanilla", "rnn")):
        folder = tmp_path_factory.mktemp(head)
        target, draft = write_random_pair(
            folder, vocab=VOCAB, gamma=GAMMA, markov=head, sharpness=1.5, seed=seed
        )
        path = export_pair(target, draft, folder / "bundle", markov_top_k=3)
        made[head] = path, ReferenceTarget(target, [-1])
    return made


@pytest.fixture(scope="module", autouse=True)
def small_caches() -> Iterator[None]:
    """Capacity in steps of 16 rows: thousands of requests fit and attention is cheap."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime_backend, "capacity_step", lambda rows: -(-rows // 16) * 16)
        yield


def full_head(path: Path) -> OnnxRuntimeCpu:
    """A backend that drafts from the whole vocabulary."""
    return OnnxRuntimeCpu(load_bundle(path), markov="full")


class Lockstep:
    """R requests of one prompt decoded round by round, as the engine does for one request."""

    def __init__(
        self, backend: OnnxRuntimeCpu, prompt: list[int], requests: int, rounds: int = 2
    ) -> None:
        """Prefill; the last prompt token is left to be the anchor of the first round."""
        self.backend, self.requests = backend, requests
        self.prompt = prompt
        rows = len(prompt) - 1
        end = rows + rounds * (GAMMA + 1)
        backend.reserve(requests, end, end + GAMMA + 1)
        ids = np.tile(np.array(prompt[:-1], np.int64), requests)
        lengths = np.full(requests, rows)
        backend.target(TokenBatch(ids, lengths, np.zeros(requests, np.int64)))
        anchor, self.slots = np.full(requests, prompt[-1]), np.arange(requests)
        none = np.zeros(requests, np.int64)
        backend.backbone(ContextBatch(lengths, np.arange(len(ids)), none, self.slots, anchor))
        self.rewind()

    def rewind(self) -> None:
        """Back to the state after the prefill. Both caches keep stale rows; lengths hide them."""
        r, p = self.requests, len(self.prompt)
        self.length = np.full(r, p)  # committed ids, the anchor included
        self.anchor = np.full(r, self.prompt[-1])
        self.draft_rows = np.full(r, p - 1)
        self.index, self.count = np.zeros(0, np.int64), np.zeros(r, np.int64)

    def round(
        self,
        setting: Setting,
        draw: Draw,
        *,
        active: np.ndarray | None = None,
        scored_as: float | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [R, GAMMA + 1] of one round and how many of them each request committed.

        `active` [R]: the others verify nothing. `scored_as` replaces the draft temperature that
        acceptance is told.
        """
        r = self.requests
        widths = np.full(r, setting.width)
        if active is not None:
            widths[~active] = 0

        def every(value: float) -> np.ndarray:
            return np.full(r, value, np.float32)

        self.backend.backbone(
            ContextBatch(self.count, self.index, self.draft_rows, self.slots, self.anchor)
        )
        self.draft_rows = self.draft_rows + self.count
        draft_temperature = every(setting.draft_temperature)
        draws = draw(self.length, GAMMA, Purpose.DRAFT)
        drafts = self.backend.markov(self.anchor, DraftSampling(draft_temperature, draws))
        tokens = np.concatenate([self.anchor[:, None], drafts], axis=1)
        verified = tokens[np.arange(GAMMA + 1) <= widths[:, None]]
        self.backend.target(TokenBatch(verified, widths + 1, self.length - 1))
        if scored_as is not None:
            self.backend._draft_temperature = every(scored_as)
        accepted, next_id = self.backend.accept(
            AcceptSampling(
                slots=self.slots,
                verify_length=widths,
                temperature=every(setting.temperature),
                top_k=np.full(r, setting.top_k),
                top_p=every(setting.top_p),
                accept_uniform=draw(self.length, GAMMA, Purpose.ACCEPT),
                sample_uniform=draw(self.length, 1, Purpose.TARGET)[:, 0],
            )
        )
        new = np.concatenate([drafts, np.zeros((r, 1), np.int64)], axis=1)
        new[np.arange(r), accepted] = next_id
        self.count = accepted + 1
        starts = np.cumsum(widths + 1) - widths - 1
        columns = np.arange(setting.width + 1)
        self.index = (starts[:, None] + columns)[columns <= accepted[:, None]]
        self.length = self.length + self.count
        self.anchor = next_id.copy()
        return new, self.count


def enumerated(target: ReferenceTarget, setting: Setting) -> np.ndarray:
    """p(x1, x2 | prompt) of every pair of tokens, [V, V] float64."""

    def after(ids: list[int]) -> np.ndarray:
        logits = target(torch.tensor(ids))[0][-1]
        return processed_probs(logits, setting.temperature, setting.top_k, setting.top_p)

    first = after(PROMPT)
    return np.stack([first[x] * after([*PROMPT, x]) for x in range(VOCAB)])


def sampled(
    backend: OnnxRuntimeCpu,
    setting: Setting,
    *,
    scored_as: float | None = None,
    repeats: int = REPEATS,
) -> np.ndarray:
    """Counts of the two tokens after the prompt over all draws, [V, V]."""
    rng = np.random.default_rng(zlib.crc32(str(setting).encode()))

    def draw(positions: np.ndarray, count: int, purpose: Purpose) -> np.ndarray:
        return rng.integers(0, 2**24, (len(positions), count)).astype(np.float32) * 2.0**-24

    batch = Lockstep(backend, PROMPT, REQUESTS)
    counts = np.zeros(VOCAB * VOCAB, np.int64)
    for _ in range(repeats):
        batch.rewind()
        tokens, count = batch.round(setting, draw, scored_as=scored_as)
        first, second = tokens[:, 0], tokens[:, 1]
        pending = count < 2  # these take their second token from a second round
        if pending.any():
            again, _ = batch.round(setting, draw, active=pending, scored_as=scored_as)
            second = np.where(pending, again[:, 0], second)
        counts += np.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB)
    return counts.reshape(VOCAB, VOCAB)


ALL = [
    Setting(head, sampling, temperature, *filters, width)
    for head, sampling, temperature, filters, width in product(
        ("vanilla", "rnn"), ("sample", "greedy"), (0.7, 1.0), FILTERS, (1, 2, 3)
    )
]
# Both values of every axis; the full product, and a width of 0, are marked slow.
QUICK = [
    Setting("vanilla", "sample", 1.0, 0, 1.0, 3),
    Setting("rnn", "sample", 0.7, 0, 1.0, 1),
    Setting("vanilla", "greedy", 1.0, 0, 1.0, 2),
    Setting("rnn", "greedy", 0.7, 4, 0.9, 2),
]
SLOW = [s for s in ALL if s not in QUICK] + [Setting("rnn", "sample", 1.0, 0, 1.0, 0)]


@pytest.mark.parametrize(
    "setting",
    [*QUICK, *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW)],
    ids=str,
)
def test_distribution_of_the_output(setting: Setting, pairs: Pairs) -> None:
    path, target = pairs[setting.head]
    backend = full_head(path)
    assert p_value(sampled(backend, setting), enumerated(target, setting)) > PASS


def test_a_sampled_draft_scored_as_deterministic_stays_exact(pairs: Pairs) -> None:
    """A one-hot q is a valid description of any single draft: only the acceptance suffers."""
    path, target = pairs["vanilla"]
    setting = Setting("vanilla", "sample", 1.0, 0, 1.0, 2)
    counts = sampled(full_head(path), setting, scored_as=0.0)
    assert p_value(counts, enumerated(target, setting)) > PASS


def test_a_truncated_markov_head_stays_exact(pairs: Pairs) -> None:
    """It proposes 3 of the 8 tokens only; the others come from the residual."""
    path, target = pairs["vanilla"]
    setting = Setting("vanilla", "sample", 1.0, 0, 1.0, 2)
    counts = sampled(OnnxRuntimeCpu(load_bundle(path), markov="topk"), setting)
    assert p_value(counts, enumerated(target, setting)) > PASS


def test_a_draft_vocabulary_stays_exact(pairs: Pairs, tmp_path: Path) -> None:
    """As above, but the same 4 tokens are left out of every draft."""
    target, draft = write_random_pair(
        tmp_path, vocab=VOCAB, gamma=GAMMA, markov="vanilla", sharpness=1.5, seed=0
    )
    write_draft_vocab(draft, np.array([6, 1, 4, 3]))
    checkpoint = read_target(target)
    restricted = restrict(read_draft(draft, checkpoint), 4)
    path = export_bundle(checkpoint, restricted, tmp_path / "bundle")
    setting = Setting("vanilla", "sample", 1.0, 0, 1.0, 2)
    counts = sampled(full_head(path), setting)
    assert p_value(counts, enumerated(pairs["vanilla"][1], setting)) > PASS


# The chi-square test notices wrong acceptance rules.


@pytest.mark.parametrize(
    ("sampling", "scored_as"),
    [
        pytest.param("greedy", 1.0, id="softmax q for a greedy draft"),
        pytest.param("sample", 0.6, id="q at another temperature than the draft's"),
    ],
)
def test_power_wrong_q(sampling: str, scored_as: float, pairs: Pairs) -> None:
    path, target = pairs["vanilla"]
    setting = Setting("vanilla", sampling, 1.0, 0, 1.0, 2)
    counts = sampled(full_head(path), setting, scored_as=scored_as, repeats=FEW)
    assert p_value(counts, enumerated(target, setting)) < FAIL


def without_residual(graph: onnx.GraphProto) -> None:
    """A rejected token is redrawn from p, not from max(p - q, 0)."""
    by_output = {o: n for n in graph.node for o in n.output}
    (choice,) = [
        n for n in graph.node if n.op_type == "Where" and by_output[n.input[0]].op_type == "And"
    ]
    choice.input[1] = choice.input[2]


def with_q_of_one(graph: onnx.GraphProto) -> None:
    """A sampled token is accepted with probability p, as if q had been 1."""
    by_output = {o: n for n in graph.node for o in n.output}
    (test,) = [n for n in graph.node if n.op_type == "Mul" and "accept_uniform" in n.input]
    (q,) = [by_output[i] for i in test.input if i != "accept_uniform"]
    assert q.op_type == "Where"
    q.input[2] = q.input[1]


@pytest.mark.parametrize("break_graph", [without_residual, with_q_of_one])
def test_power_broken_graph(break_graph: Callable[[onnx.GraphProto], None], pairs: Pairs) -> None:
    path, target = pairs["vanilla"]
    setting = Setting("vanilla", "sample", 1.0, 0, 1.0, 2)
    backend = full_head(path)
    model = onnx.load(path / "accept_sample.onnx")
    break_graph(model.graph)
    backend._sessions["accept_sample"] = open_model(model)
    counts = sampled(backend, setting, repeats=FEW)
    assert p_value(counts, enumerated(target, setting)) < FAIL


# The engine draws in the same way.


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
@pytest.mark.parametrize("sampling", ["sample", "greedy"])
def test_engine_makes_the_draws_of_the_batch(head: str, sampling: str, pairs: Pairs) -> None:
    """The same seeds through `Engine.generate`, one by one, and through the lockstep batch."""
    path, target = pairs[head]
    setting = Setting(head, sampling, 0.9, 5, 0.95, GAMMA)
    seeds = range(8)
    engine = Engine.load(path, markov="full")
    outputs = [
        engine.generate(
            PROMPT,
            SamplingParams(
                temperature=setting.temperature,
                top_k=setting.top_k,
                top_p=setting.top_p,
                draft_sampling=sampling,  # type: ignore[arg-type]
                max_new_tokens=24,
                stop_ids=(),
                seed=seed,
            ),
        )
        for seed in seeds
    ]

    # The first token: drawn from p by the number of its position.
    p = processed_probs(target(torch.tensor(PROMPT))[0][-1], 0.9, 5, 0.95)
    first = [
        inverse_cdf(p, float(uniforms(seed, 0, len(PROMPT), 1, Purpose.TARGET)[0]))
        for seed in seeds
    ]
    assert [o.token_ids[0] for o in outputs] == first

    def draw(positions: np.ndarray, count: int, purpose: Purpose) -> np.ndarray:
        return np.stack(
            [uniforms(s, 0, int(a), count, purpose) for s, a in zip(seeds, positions, strict=True)]
        )

    rounds = 4
    backend = full_head(path)
    batch = Lockstep(backend, [*PROMPT, 0], len(seeds), rounds)
    batch.anchor = np.array(first)
    found = [[token] for token in first]
    for _ in range(rounds):
        tokens, count = batch.round(setting, draw)
        for ids, new, n in zip(found, tokens, count, strict=True):
            ids += new[:n].tolist()
    assert len({tuple(ids) for ids in found}) > 1
    for output, ids in zip(outputs, found, strict=True):
        assert output.token_ids[: len(ids)] == ids


def test_uniform_numbers() -> None:
    """Uniform in [0, 1), without a trace of seed, position or purpose in common."""
    table = np.array(
        [
            [[uniforms(seed, 0, p, 1, purpose)[0] for purpose in Purpose] for p in range(40)]
            for seed in range(50)
        ]
    )
    assert table.dtype == np.float32
    assert ((table >= 0) & (table < 1)).all()
    assert len(np.unique(table)) > table.size - 10  # 24 bits: about one pair of equals by chance
    assert stats.kstest(table.ravel(), "uniform").pvalue > PASS
    for axis in range(3):  # neighbours along each key are uncorrelated
        moved = np.moveaxis(table, axis, 0)
        assert stats.pearsonr(moved[:-1].ravel(), moved[1:].ravel()).pvalue > PASS


def test_uniform_numbers_belong_to_their_round() -> None:
    """A shorter block draws the same numbers; a position that is drafted again draws fresh ones."""
    whole = uniforms(7, 0, 100, 8, Purpose.DRAFT)
    np.testing.assert_array_equal(whole[:3], uniforms(7, 0, 100, 3, Purpose.DRAFT))
    assert not set(whole[3:]) & set(uniforms(7, 0, 103, 5, Purpose.DRAFT))


def philox_word(key: tuple[int, int], counter: tuple[int, int, int, int]) -> int:
    """First word of Philox 4x64-10, from its definition (Salmon et al. 2011)."""
    word, (k0, k1), c = (1 << 64) - 1, key, counter
    for _ in range(10):
        a, b = c[0] * 0xD2E7470EE14C6C93, c[2] * 0xCA5A826395121157
        c = ((b >> 64) ^ c[1] ^ k0, b & word, (a >> 64) ^ c[3] ^ k1, a & word)
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & word, (k1 + 0xBB67AE8584CAA73B) & word
    return c[0]


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 1, 2**64 - 1])
def test_uniform_numbers_are_the_documented_ones(seed: int) -> None:
    """A host in another language draws the same: docs/bundle.md, "Random numbers"."""
    found = uniforms(seed, 3, 50, 4, Purpose.TARGET)
    expected = [(philox_word((seed, 3), (1, k, 50, 2)) >> 40) * 2.0**-24 for k in range(4)]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
