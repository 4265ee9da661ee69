"""Sequential temperature scaling on made-up heads whose right temperatures are known."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from draftgraph.graphs.errors import DraftgraphError
from draftgraph.runtime.calibration import (
    Calibration,
    CalibrationData,
    auroc,
    ece,
    fit,
    identity,
    metrics,
    reliability_svg,
)

TRUE = np.array([2.0, 1.0, 0.5, 3.0])  # the head's logits are this much too large


def sample(count: int = 20000, gamma: int = 4, seed: int = 0) -> CalibrationData:
    rng = np.random.default_rng(seed)
    right = rng.normal(1.5, 1.2, (count, gamma))
    accepted = np.cumprod(rng.random((count, gamma)) < 1 / (1 + np.exp(-right)), axis=1).sum(axis=1)
    prompts = rng.integers(0, 40, count)
    return CalibrationData.from_accepted(right * TRUE[:gamma], accepted, prompts, 0.0)


@pytest.fixture(scope="module")
def data() -> CalibrationData:
    return sample()


@pytest.fixture(scope="module")
def fitted(data: CalibrationData) -> Calibration:
    return fit(data)


def test_finds_the_temperatures(fitted: Calibration) -> None:
    np.testing.assert_allclose(fitted.temperatures, TRUE, rtol=0.2)


def test_improves_held_out_prompts(fitted: Calibration) -> None:
    before, after = fitted.before, fitted.after
    assert before is not None and after is not None
    assert after.mean_ece <= 0.4 * before.mean_ece or after.mean_ece <= 0.02
    assert np.mean(after.brier) < np.mean(before.brier)
    # One position's temperature keeps the order of its own confidences.
    assert after.auroc[0] == pytest.approx(before.auroc[0])
    assert all(a is not None and a > 0.6 for a in after.auroc)
    assert fitted.fitted + fitted.held_out == 20000 and 0.15 < fitted.held_out / 20000 < 0.35


def test_left_to_right(data: CalibrationData, fitted: Calibration) -> None:
    """The temperatures of a shorter block are the first ones of a longer block."""
    short = replace(data, logits=data.logits[:, :2], survived=data.survived[:, :2])
    assert fit(short).temperatures == fitted.temperatures[:2]


def test_deterministic(data: CalibrationData, fitted: Calibration) -> None:
    assert fit(data) == fitted
    assert fit(data, seed=1).temperatures != fitted.temperatures


def test_apply() -> None:
    calibration = Calibration((2.0, 0.5))
    logits = np.array([[2.0, -1.0], [1000.0, -1000.0]], np.float32)
    expected = 1 / (1 + np.exp(-np.array([[1.0, -2.0], [500.0, -700.0]])))
    np.testing.assert_allclose(calibration.apply(logits), expected, atol=1e-12)
    np.testing.assert_allclose(identity(2).apply(logits)[0], 1 / (1 + np.exp([-2.0, 1.0])))
    with pytest.raises(DraftgraphError, match=r"γ = 2, the drafter has γ = 3"):
        calibration.apply(np.zeros((1, 3)))


def test_unreached_positions_keep_one() -> None:
    data = sample(500)
    data.survived[:, 1:] = False
    assert fit(data).temperatures[2:] == (1.0, 1.0)


def bad(data: CalibrationData) -> dict[str, tuple[CalibrationData, str]]:
    nan = data.logits.copy()
    nan[3, 1] = np.nan
    hole = data.survived.copy()
    hole[0] = [False, True, False, False]
    none = np.zeros((0, 4))
    return {
        "nan": (replace(data, logits=nan), "not finite"),
        "empty": (
            replace(data, logits=none, survived=none.astype(bool), prompts=none[:, 0]),
            "empty",
        ),
        "trimmed": (replace(data, full_verification=False), "trimmed blocks"),
        "scaled": (replace(data, temperatures=TRUE), "temperatures in force"),
        "hole": (replace(data, survived=hole), "survived after one that did not"),
        "shapes": (replace(data, survived=data.survived[:, :2]), "disagree"),
        "one prompt": (replace(data, prompts=np.zeros(len(data.prompts), int)), "at least 2"),
    }


@pytest.mark.parametrize(
    "case", ["nan", "empty", "trimmed", "scaled", "hole", "shapes", "one prompt"]
)
def test_refuses_bad_data(data: CalibrationData, case: str) -> None:
    broken, message = bad(data)[case]
    with pytest.raises(DraftgraphError, match=message):
        fit(broken)


def test_refuses_another_gamma(data: CalibrationData) -> None:
    with pytest.raises(DraftgraphError, match=r"γ = 4, the drafter has γ = 7"):
        fit(data, gamma=7)
    ones = replace(data, temperatures=np.ones(4))
    assert fit(ones, gamma=4).gamma == 4


def test_split_is_by_prompt() -> None:
    data = sample(400)
    data = replace(data, prompts=np.repeat([7, 9], [300, 100]))
    assert {fit(data).fitted, fit(data).held_out} == {300, 100}


def test_metrics_against_scipy() -> None:
    rng = np.random.default_rng(0)
    predicted = np.round(rng.random(400), 2)  # with ties
    survived = rng.random(400) < predicted
    u = stats.mannwhitneyu(predicted[survived], predicted[~survived]).statistic
    assert auroc(predicted, survived) == pytest.approx(u / survived.sum() / (~survived).sum())
    assert auroc(predicted, np.ones(400, bool)) is None
    found = metrics(predicted[:, None], survived[:, None], bins=400)
    assert found.ece[0] == pytest.approx(np.abs(predicted - survived).mean())  # a bin per sample
    assert ece(predicted, survived, 1) == pytest.approx(abs(predicted.mean() - survived.mean()))
    assert found.brier[0] == pytest.approx(((predicted - survived) ** 2).mean())


def test_save_and_load(fitted: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    fitted.save(path)
    assert Calibration.load(path) == fitted
    assert Calibration.load(path, gamma=4).sampling_temperature == 0.0
    with pytest.raises(DraftgraphError, match="γ = 7"):
        Calibration.load(path, gamma=7)


def test_failure_during_save_keeps_the_old_file(
    fitted: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "calibration.json"
    fitted.save(path)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            identity(4).save(path)
    assert Calibration.load(path) == fitted
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 9}, "schema_version is 9"),
        ({"temperatures": [1, -1, 1, 1]}, "positive"),
        ({"temperatures": []}, "positive"),
        ({"gamma": 5}, "gamma is 5"),
        ({"before": {"ece": []}}, "not a calibration"),
    ],
)
def test_bad_files(
    fitted: Calibration, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "calibration.json"
    fitted.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DraftgraphError, match=message):
        Calibration.load(path)


def test_shapes_of_other_runtimes(fitted: Calibration) -> None:
    sglang = json.loads(json.dumps(fitted.to_sglang("demo")))
    assert set(sglang) == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    tensorrt = json.loads(json.dumps(fitted.to_tensorrt_llm()))
    assert set(tensorrt) == {"sts_temperatures", "max_draft_len"}
    for payload in (sglang, tensorrt, sglang | tensorrt):
        assert Calibration.from_foreign(payload, 4).temperatures == fitted.temperatures


def test_reads_its_own_files_and_those_of_other_runtimes(
    fitted: Calibration, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    fitted.save(path)
    assert Calibration.read(path, 4) == fitted
    path.write_text(json.dumps(fitted.to_sglang()))
    assert Calibration.read(path, 4).temperatures == fitted.temperatures
    with pytest.raises(DraftgraphError, match=r"calibration.json: .*γ = 4, the drafter has γ = 7"):
        Calibration.read(path, 7)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({}, "neither"),
        ({"temperatures": []}, "neither"),
        ({"temperatures": ["hot"]}, "expected numbers"),
        ({"sts_temperatures": [1.0, 0.0]}, "positive"),
        ({"sts_temperatures": [1.0, 2.0], "max_draft_len": 3}, "max_draft_len is 3"),
        ({"sts_temperatures": [1.0], "temperatures": [2.0]}, "differ"),
        ({"temperatures": [1.0, 2.0]}, "γ = 2, the drafter has γ = 4"),
    ],
)
def test_malformed_foreign_files(payload: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftgraphError, match=message):
        Calibration.from_foreign(payload, 4)


def test_reliability_diagram(fitted: Calibration) -> None:
    root = ET.fromstring(reliability_svg(fitted, title="a < b"))
    text = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b" in text and sum(t.startswith("position ") for t in text) == 4
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 8  # before and after, four positions
    with pytest.raises(DraftgraphError, match="no reliability curves"):
        reliability_svg(identity(4))
