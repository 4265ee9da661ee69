"""Token choice and acceptance as small ONNX models, against float64 arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from helpers import open_model
from onnxscript import nn

from draftgraph.export.reference import inverse_cdf as reference_cdf
from draftgraph.export.reference import one_hot, processed_probs, verify_reference
from draftgraph.graphs import build, sampling
from draftgraph.graphs.accept import AcceptSample
from draftgraph.graphs.contract import DecoderSpec, DraftContract, RopeSpec

F32, I64 = ir.DataType.FLOAT, ir.DataType.INT64
SIZES = (5, 100, 1024, 1025, 49152)  # the sum is taken in two levels above 1024
LAST = 1 - 2.0**-24  # the largest uniform number there is
GAMMA = 3
Arrays = dict[str, np.ndarray]


def session(
    inputs: list[build.Port],
    output: build.Port,
    call: Callable[[Any, list[ir.Value]], ir.Value],
) -> ort.InferenceSession:
    model = build._assemble(
        "test", nn.Module(), inputs, [output], lambda op, v: [call(op, v)], lambda path: path
    )
    return open_model(ir.to_proto(model))


def run(model: ort.InferenceSession, inputs: Arrays) -> list[np.ndarray]:
    return model.run(None, inputs)


@cache
def cdf_model(size: int) -> ort.InferenceSession:
    return session(
        [build.Port("weights", F32, ("R", size)), build.Port("uniform", F32, ("R",))],
        build.Port("id", I64, ("R",)),
        lambda op, v: sampling.inverse_cdf(op, *v, size),
    )


def draw(weights: np.ndarray, uniform: Any) -> np.ndarray:
    """inverse_cdf of rows [R, V], or of one row for many uniforms."""
    uniform = np.atleast_1d(np.asarray(uniform, np.float32))
    weights = np.broadcast_to(np.asarray(weights, np.float32), (len(uniform), weights.shape[-1]))
    return run(cdf_model(weights.shape[1]), {"weights": weights.copy(), "uniform": uniform})[0]


def interval_error(weights: np.ndarray, ids: np.ndarray, uniform: np.ndarray) -> float:
    """How far each uniform lies outside its token's interval of the exact distribution."""
    worst = 0.0
    for row, i, u in zip(np.asarray(weights, np.float64), ids, uniform, strict=True):
        cdf = np.concatenate([[0.0], np.cumsum(row) / row.sum()])
        worst = max(worst, cdf[i] - u, u - cdf[i + 1])
    return worst


# inverse_cdf


@pytest.mark.parametrize("size", SIZES)
def test_draws_fall_into_their_intervals(size: int) -> None:
    rng = np.random.default_rng(size)
    rows = 200 if size < 2000 else 40
    weights = np.exp(3 * rng.standard_normal((rows, size))).astype(np.float32)
    weights[rng.random(weights.shape) < 0.3] = 0  # never to be drawn
    weights[:, size // 2] = 1
    uniform = rng.random(rows).astype(np.float32)
    uniform[:2] = 0, LAST
    ids = draw(weights, uniform)
    assert ids.dtype == np.int64
    assert ((ids >= 0) & (ids < size)).all()
    assert (weights[np.arange(rows), ids] > 0).all()
    # In two levels running sums stay accurate; a plain float32 sum over 49152 would drift.
    assert interval_error(weights, ids, uniform) < 2e-6


@pytest.mark.parametrize("size", [8, 1024, 65536])
def test_exact_boundaries(size: int) -> None:
    """The smallest index whose running sum exceeds the threshold: a boundary starts the next."""
    weights = np.ones(size)
    ids = np.array([0, 1, size // 2 - 1, size // 2, size - 1])
    np.testing.assert_array_equal(draw(weights, ids / size), ids)
    below = (ids[1:] / size).astype(np.float32)
    np.testing.assert_array_equal(draw(weights, np.nextafter(below, np.float32(0))), ids[1:] - 1)


def test_boundaries_skip_zero_weights() -> None:
    """Every second block of the two-level sum is empty; the others are 256 ones."""
    weights = np.tile(np.repeat([0.0, 1.0], 256), 64)  # 32768 entries, total 2^14
    positive = np.flatnonzero(weights)
    k = np.array([0, 1, 255, 256, 257, 8191, 8192, len(positive) - 1])
    np.testing.assert_array_equal(draw(weights, k / len(positive)), positive[k])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("where", ["first", "last"])
def test_all_mass_in_one_token(size: int, where: str) -> None:
    index = 0 if where == "first" else size - 1
    for amount in (1.0, 1e-30):
        weights = amount * one_hot(index, size)
        assert draw(weights, [0, 0.5, 1 - 2.0**-23, LAST]).tolist() == [index] * 4


@pytest.mark.parametrize("size", SIZES)
def test_extreme_uniforms_find_positive_weights(size: int) -> None:
    """0 takes the first token with mass; the largest number never runs off the end."""
    weights = np.zeros(size)
    weights[[1, size - 2]] = 1e-3, 1
    assert draw(weights, [0, LAST]).tolist() == [1, size - 2]


# pick


@cache
def pick_model(size: int) -> ort.InferenceSession:
    return session(
        [
            build.Port("logits", F32, ("R", size)),
            build.Port("temperature", F32, ("R",)),
            build.Port("uniform", F32, ("R",)),
        ],
        build.Port("id", I64, ("R",)),
        lambda op, v: sampling.pick(op, *v, size),
    )


@pytest.mark.parametrize("size", SIZES)
def test_pick(size: int) -> None:
    """Greedy rows take the argmax, others draw from softmax(logits / T); rows do not interact."""
    rng = np.random.default_rng(size)
    temperature = np.array([0, 1e-5, 0.01, 0.3, 1, 5, 100, 1, 0], np.float32)
    rows = len(temperature)
    logits = (4 * rng.standard_normal((rows, size)) + 500).astype(np.float32)
    uniform = rng.random(rows).astype(np.float32)
    inputs: Arrays = {"logits": logits, "temperature": temperature, "uniform": uniform}
    (ids,) = run(pick_model(size), inputs)
    for r in range(rows):
        one = {name: value[r : r + 1] for name, value in inputs.items()}
        assert run(pick_model(size), one)[0][0] == ids[r]
        p = processed_probs(logits[r], float(temperature[r]))
        if temperature[r] <= 1e-5:
            assert ids[r] == logits[r].argmax()
        else:
            # Logits around 500 carry 3e-5 of rounding; a cold row amplifies it.
            slack = 1e-5 + 1e-4 / float(temperature[r])
            assert interval_error(p[None], ids[r : r + 1], uniform[r : r + 1]) < slack


def test_pick_takes_the_first_of_equal_logits() -> None:
    inputs = {
        "logits": np.array([[1, 3, 3, 0, 3]], np.float32),
        "temperature": np.zeros(1, np.float32),
        "uniform": np.array([0.9], np.float32),
    }
    assert run(pick_model(5), inputs)[0][0] == 1


# Top-k and top-p


@cache
def filter_model(size: int) -> ort.InferenceSession:
    """logits [N, V] -> the processed distribution p, through the acceptance graph's own filter."""
    module = AcceptSample(1, size, filters=True)

    def call(op: Any, v: list[ir.Value]) -> ir.Value:
        logits, temperature, request, top_k, top_p = v
        z = sampling.scaled(op, logits, op.Unsqueeze(temperature, [1]))
        weights = module._filter(op, z, op.Exp(z), request, top_k, top_p)
        return op.Div(weights, op.ReduceSum(weights, op.Constant(value_ints=[-1]), keepdims=1))

    return session(
        [
            build.Port("logits", F32, ("N", size)),
            build.Port("temperature", F32, ("N",)),
            build.Port("request", I64, ("N",)),
            build.Port("top_k", I64, ("N",)),
            build.Port("top_p", F32, ("N",)),
        ],
        build.Port("p", F32, ("N", size)),
        call,
    )


def processed(logits: np.ndarray, temperature: Any, top_k: Any, top_p: Any) -> np.ndarray:
    n = len(logits)
    inputs = {
        "logits": np.asarray(logits, np.float32),
        "temperature": np.broadcast_to(np.asarray(temperature, np.float32), n).copy(),
        "request": np.arange(n),
        "top_k": np.broadcast_to(np.asarray(top_k, np.int64), n).copy(),
        "top_p": np.broadcast_to(np.asarray(top_p, np.float32), n).copy(),
    }
    return run(filter_model(logits.shape[1]), inputs)[0]


COMBINATIONS = [(k, p) for k in (0, 1, 2, 5, 50, 10**9) for p in (1.0, 0.999, 0.9, 0.5, 0.1, 1e-6)]


@pytest.mark.parametrize("size", [8, 100, 1025, 3000])
@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0])
def test_filters(size: int, temperature: float) -> None:
    """Every combination at once, one per row, against a sort in float64."""
    rng = np.random.default_rng([size, int(100 * temperature)])
    logits = (2 * rng.standard_normal((len(COMBINATIONS), size))).astype(np.float32)
    top_k, top_p = np.array(COMBINATIONS).T
    found = processed(logits, temperature, top_k, top_p)
    clear = 0
    for row, p, (k, share) in zip(logits, found, COMBINATIONS, strict=True):
        # As the graph sees them: float32 numbers.
        t, share = float(np.float32(temperature)), float(np.float32(share))
        expected = processed_probs(row, t, k, share)
        within_k = processed_probs(row, t, k)
        # Where the nucleus ends within float32 rounding of the share, its last token is open.
        sums = np.cumsum(np.sort(within_k)[::-1])
        if share < 1 and np.abs(sums - share).min() < 2e-6:
            continue
        clear += 1
        same = (p > 0) == (expected > 0)
        assert (same | (expected > 0) & (expected < 1e-37)).all(), f"top_k {k} top_p {share}"
        np.testing.assert_allclose(p, expected, rtol=1e-4, atol=1e-7)
    assert clear > 0.9 * len(COMBINATIONS)


def test_filters_keep_ties() -> None:
    """Tokens tied with the last one kept stay, in top-k and in top-p (documented)."""
    logits = np.log(np.array([[4, 2, 2, 2, 1, 1]])) + 3.0
    assert (processed(logits, 1.0, 2, 1.0) > 0).tolist() == [[True] * 4 + [False] * 2]
    assert (processed(logits, 1.0, 5, 1.0) > 0).all()
    assert (processed(logits, 1.0, 0, 0.4) > 0).tolist() == [[True] * 4 + [False] * 2]
    assert (processed(logits, 1.0, 0, 0.3) > 0).tolist() == [[True] + [False] * 5]
    flat = processed(np.zeros((1, 64)), 1.0, 3, 0.1)
    np.testing.assert_allclose(flat, np.full((1, 64), 1 / 64), rtol=1e-6)


def test_nucleus_is_taken_after_top_k() -> None:
    """0.5, 0.2, 0.2, 0.1: half of the mass that top-k leaves is the first token alone."""
    logits = np.log(np.array([[0.5, 0.21, 0.19, 0.1]]))
    assert (processed(logits, 1.0, 2, 0.7) > 0).tolist() == [[True, False, False, False]]
    assert (processed(logits, 1.0, 0, 0.7) > 0).tolist() == [[True, True, False, False]]


def test_smallest_nucleus_is_the_best_token() -> None:
    logits = np.random.default_rng(0).standard_normal((20, 300))
    p = processed(logits, 1.0, 0, 1e-6)
    np.testing.assert_array_equal(p, one_hot(logits.argmax(-1), 300))


@pytest.mark.parametrize("top_k", [0, 100, 101, 10**12])
def test_wide_top_k_is_off(top_k: int) -> None:
    logits = np.random.default_rng(1).standard_normal((4, 100)).astype(np.float32)
    np.testing.assert_allclose(
        processed(logits, 1.0, top_k, 1.0), processed_probs(logits, 1.0), rtol=1e-5
    )


# Acceptance


def contract(vocab: int) -> DraftContract:
    """Only the block size and the vocabulary matter to acceptance."""
    decoder = DecoderSpec(8, 1, 1, 1, 8, 8, 1e-6, RopeSpec("default", 1e4), qk_norm=True)
    return DraftContract(
        family="deepspec",
        layout="anchor-first",
        block_size=GAMMA,
        mask_token_id=0,
        tap_ids=(0,),
        decoder=decoder,
        vocab_size=vocab,
        markov_type="none",
        markov_rank=0,
        has_confidence=False,
        confidence_with_markov=False,
        shares_embedding=True,
        shares_head=True,
    )


@cache
def accept_model(kind: str, vocab: int) -> ort.InferenceSession:
    return open_model(ir.to_proto(build.build_accept(contract(vocab), kind)))


def problem(vocab: int, requests: int, seed: int) -> Arrays:
    """Random logits of both models for ragged verify lengths; half of the rows agree closely."""
    rng = np.random.default_rng([vocab, seed])
    lengths = rng.integers(0, GAMMA + 1, requests)
    starts = np.cumsum(lengths + 1) - lengths - 1
    n = int((lengths + 1).sum())
    target = (2 * rng.standard_normal((n, vocab))).astype(np.float32)
    cell = starts[:, None] + np.minimum(np.arange(GAMMA + 1), lengths[:, None])
    noise = rng.standard_normal((requests, GAMMA, vocab))
    draft = (target[cell[:, :GAMMA]] + 0.3 * noise).astype(np.float32)
    temperature = rng.choice([0.0, 0.5, 1.0, 1.3], requests).astype(np.float32)
    draft_temperature = np.where(rng.random(requests) < 0.3, 0, temperature).astype(np.float32)
    ids = np.empty((requests, GAMMA), np.int64)
    for r in range(requests):
        for k in range(GAMMA):
            q = processed_probs(draft[r, k], float(draft_temperature[r]))
            ids[r, k] = reference_cdf(q, rng.random())
    return {
        "target_logits": target,
        "cell_token": cell,
        "token_request": np.repeat(np.arange(requests), lengths + 1),
        "draft_ids": ids,
        "draft_logits": draft,
        "request_block": np.arange(requests),
        "verify_length": lengths,
        "accept_uniform": rng.random((requests, GAMMA)).astype(np.float32),
        "sample_uniform": rng.random(requests).astype(np.float32),
        "temperature": temperature,
        "draft_temperature": draft_temperature,
        "top_k": rng.choice([0, 1, 3, 20, 10**6], requests),
        "top_p": rng.choice([1.0, 0.95, 0.6, 0.05], requests).astype(np.float32),
    }


def accept(kind: str, inputs: Arrays) -> list[tuple[int, int]]:
    """(accepted, next id) of every request."""
    model = accept_model(kind, inputs["target_logits"].shape[1])
    names = {i.name for i in model.get_inputs()}
    results = run(model, {name: value for name, value in inputs.items() if name in names})
    return list(zip(*(r.tolist() for r in results), strict=True))


def alone(inputs: Arrays, r: int) -> Arrays:
    """One request of a batch, with the rows of its own only."""
    rows = inputs["token_request"] == r
    packed = {"target_logits": inputs["target_logits"][rows]}
    packed["token_request"] = np.zeros(rows.sum(), np.int64)
    packed["request_block"] = np.zeros(1, np.int64)
    packed["cell_token"] = inputs["cell_token"][r : r + 1] - np.flatnonzero(rows)[0]
    return {n: packed.get(n, v[r : r + 1]) for n, v in inputs.items()}


@pytest.mark.parametrize("vocab", [8, 100, 1025, 3000])
@pytest.mark.parametrize("kind", ["sample", "filtered"])
def test_acceptance_against_rejection_sampling(kind: str, vocab: int) -> None:
    inputs = problem(vocab, 100, seed=1)
    found = accept(kind, inputs)
    differ = 0
    for r, (run_length, token) in enumerate(found):
        n = int(inputs["verify_length"][r])
        rows = inputs["target_logits"][inputs["token_request"] == r]
        filters = (int(inputs["top_k"][r]), float(inputs["top_p"][r])) if kind == "filtered" else ()
        p = processed_probs(rows, float(inputs["temperature"][r]), *filters)
        q = processed_probs(inputs["draft_logits"][r, :n], float(inputs["draft_temperature"][r]))
        if inputs["draft_temperature"][r] == 0:
            q = one_hot(inputs["draft_ids"][r, :n], vocab)
        expected = verify_reference(
            p,
            inputs["draft_ids"][r, :n],
            q,
            inputs["accept_uniform"][r],
            float(inputs["sample_uniform"][r]),
        )
        if (run_length, token) != expected:  # only within rounding of the edge of an interval
            differ += 1
            assert run_length == expected[0]
            weights = p[run_length]
            if run_length < n:
                weights = np.maximum(weights - q[run_length], 0)
            uniform = inputs["sample_uniform"][r : r + 1]
            assert interval_error(weights[None], np.array([token]), uniform) < 1e-5
    assert differ <= 1
    # The case is worth something: all run lengths occur, and all kinds of requests.
    assert {a for a, _ in found} == set(range(GAMMA + 1))


@pytest.mark.parametrize("kind", ["greedy", "sample", "filtered"])
def test_mixed_batch_equals_each_alone(kind: str) -> None:
    """Greedy and sampled requests, greedy and sampled drafts, side by side."""
    inputs = problem(100, 24, seed=2)
    found = accept(kind, inputs)
    assert found == [accept(kind, alone(inputs, r))[0] for r in range(24)]


def test_greedy_requests_agree_between_graphs() -> None:
    inputs = problem(100, 40, seed=3)
    inputs["temperature"][:] = 0
    inputs["draft_temperature"][:] = 0
    expected = accept("greedy", inputs)
    assert accept("sample", inputs) == expected
    assert accept("filtered", inputs) == expected


def single(vocab: int, target: list[list[float]], ids: list[int], **changes: Any) -> Arrays:
    """One request whose drafts are all verified; the defaults accept whatever may be accepted."""
    n = len(ids)
    inputs: dict[str, Any] = {
        "target_logits": np.array(target, np.float32),
        "cell_token": np.minimum(np.arange(GAMMA + 1), n)[None],
        "token_request": np.zeros(n + 1, np.int64),
        "draft_ids": np.array([[*ids, *[0] * (GAMMA - n)]]),
        "draft_logits": np.zeros((1, GAMMA, vocab), np.float32),
        "request_block": np.zeros(1, np.int64),
        "verify_length": np.array([n]),
        "accept_uniform": np.zeros((1, GAMMA), np.float32),
        "sample_uniform": np.array([0.5], np.float32),
        "temperature": np.ones(1, np.float32),
        "draft_temperature": np.ones(1, np.float32),
        "top_k": np.zeros(1, np.int64),
        "top_p": np.ones(1, np.float32),
    }
    return inputs | changes


def test_a_token_without_probability_is_always_rejected() -> None:
    """Even by the uniform number 0, and whether top-k, top-p or the logit itself excludes it."""
    rows = [[3.0, 2.0, 1.0, 0.0], [0.0, 0.0, 0.0, 9.0]]
    for changes in ({"top_k": np.array([1])}, {"top_p": np.array([0.5], np.float32)}):
        for draft_temperature in (0.0, 1.0):
            inputs = single(4, rows, [1], **changes)
            inputs["draft_temperature"][:] = draft_temperature
            assert accept("filtered", inputs) == [(0, 0)]
    impossible = [[3.0, -1e30, 1.0, 0.0], rows[1]]
    ((accepted, token),) = accept("sample", single(4, impossible, [1]))
    assert accepted == 0
    assert token != 1


def test_zero_residual_mass_redraws_from_p() -> None:
    """p is one-hot at 0 and q as good as: nothing of p - q is left, so p decides."""
    rows = [[50.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0]]
    draft_logits = np.zeros((1, GAMMA, 4), np.float32)
    draft_logits[..., 0] = 200
    inputs = single(4, rows, [2], draft_logits=draft_logits, top_k=np.array([1]))
    assert accept("filtered", inputs) == [(0, 0)]


def test_residual_excludes_the_rejected_token() -> None:
    """After a greedy draft the residual is p without it, whatever the uniform number."""
    rows = [[2.0, 2.0, 2.0, 2.0], [0.0] * 4]
    for uniform in (0.0, 0.3, 0.6, LAST):
        inputs = single(4, rows, [1], sample_uniform=np.array([uniform], np.float32))
        inputs["draft_temperature"][:] = 0
        inputs["accept_uniform"][:] = 0.9  # p is 0.25
        ((accepted, token),) = accept("sample", inputs)
        assert accepted == 0
        assert token in (0, 2, 3)


BAD = [("nan", np.nan), ("inf", np.inf), ("-inf", -np.inf)]


@pytest.mark.parametrize("kind", ["greedy", "sample", "filtered"])
@pytest.mark.parametrize("value", [v for _, v in BAD], ids=[n for n, _ in BAD])
@pytest.mark.parametrize("column", [0, 4, 9])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite(
    kind: str, value: float, column: int, temperature: float
) -> None:
    """-1 instead of a token, wherever in the row the value is: never a silent draw."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, 10))
    rows[0, 3] = 10.0  # a clear winner that hides the damage
    rows[0, column] = value
    inputs = single(10, rows.tolist(), [3])
    for name in ("temperature", "draft_temperature"):
        inputs[name][:] = temperature
    inputs["verify_length"][:] = 0
    assert accept(kind, inputs)[0][1] == -1
    inputs["verify_length"][:] = 1
    accepted, token = accept(kind, inputs)[0]
    assert (accepted, token) == (0, -1), "a token verified by damaged logits must not pass"


@pytest.mark.parametrize("kind", ["greedy", "sample", "filtered"])
def test_one_damaged_request_leaves_the_others_alone(kind: str) -> None:
    inputs = problem(100, 8, seed=4)
    expected = accept(kind, inputs)
    damaged = 5
    inputs["target_logits"] = inputs["target_logits"].copy()
    inputs["target_logits"][inputs["token_request"] == damaged] = np.nan
    found = accept(kind, inputs)
    assert found[damaged][1] == -1
    assert found[:damaged] + found[damaged + 1 :] == expected[:damaged] + expected[damaged + 1 :]
