"""Sequential temperature scaling of the confidence head.

Raw confidences are overconfident in a way that multiplies along the block, so each position gets a
temperature T_k, fitted left to right on the survival a_k = Π_{i≤k} σ(z_i / T_i) that the scheduler
uses (DSpark, arXiv 2607.05147, section 3.2.1). Data come from full verification with identity
temperatures: a trimmed block would hide the outcomes of the slots it dropped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..graphs.errors import DraftgraphError
from .jsonfile import check_version, read_json, write_json

SCHEMA_VERSION = 1
BINS = 15  # equal mass: the same number of samples in each
TEMPERATURES = (0.1, 10.0)  # searched range
GRID, REFINEMENTS = 41, 3  # points over log T, then finer grids around the best


@dataclass(frozen=True)
class CalibrationData:
    """Drafted blocks and what became of them.

    logits: [n, γ] raw confidence logits. survived: [n, γ] bool, token k and all before it were
    accepted. prompts: [n] int, which prompt a block comes from. sampling_temperature: of the
    decoding that made them. full_verification: all γ slots were verified in every block.
    temperatures: in force while collecting, None for identity.
    """

    logits: np.ndarray
    survived: np.ndarray
    prompts: np.ndarray
    sampling_temperature: float
    full_verification: bool = True
    temperatures: np.ndarray | None = None

    @classmethod
    def from_accepted(
        cls,
        logits: np.ndarray,
        accepted: np.ndarray,
        prompts: np.ndarray,
        sampling_temperature: float,
        **flags: Any,
    ) -> CalibrationData:
        """From the number of accepted tokens [n] of fully verified blocks."""
        survived = np.arange(np.shape(logits)[-1]) < np.asarray(accepted)[:, None]
        return cls(np.asarray(logits), survived, np.asarray(prompts), sampling_temperature, **flags)

    def check(self, gamma: int | None = None) -> None:
        """Raises `DraftgraphError` for data that must not be fitted."""
        if self.logits.ndim != 2 or self.logits.size == 0:
            raise DraftgraphError(
                f"calibration data are empty (logits {self.logits.shape}); give more prompts"
            )
        if gamma is not None and self.logits.shape[1] != gamma:
            raise DraftgraphError(
                f"calibration data have γ = {self.logits.shape[1]}, the drafter has γ = {gamma}"
            )
        if self.survived.shape != self.logits.shape or len(self.prompts) != len(self.logits):
            raise DraftgraphError(
                f"calibration data disagree: logits {self.logits.shape}, survived "
                f"{self.survived.shape}, prompts {self.prompts.shape}"
            )
        if not np.isfinite(self.logits).all():
            block = int(np.argwhere(~np.isfinite(self.logits))[0][0])
            raise DraftgraphError(
                f"confidence logits are not finite (block {block}); if the bundle is fp16, export "
                "it with --dtype bf16 or fp32"
            )
        if not self.full_verification:
            raise DraftgraphError(
                "calibration data were collected with trimmed blocks, which hides the outcomes of "
                'the slots that were cut; collect them with the scheduler "full"'
            )
        if self.temperatures is not None and not np.all(self.temperatures == 1):
            raise DraftgraphError(
                "calibration data were collected with temperatures in force; collect raw logits"
            )
        if np.any(self.survived[:, 1:] & ~self.survived[:, :-1]):
            raise DraftgraphError("calibration data: a token survived after one that did not")


@dataclass(frozen=True)
class Metrics:
    """Per position, of the survival against the outcome. auroc is None where only one outcome
    occurs."""

    ece: list[float]
    auroc: list[float | None]
    brier: list[float]

    @property
    def mean_ece(self) -> float:
        return sum(self.ece) / len(self.ece)


@dataclass(frozen=True)
class Calibration:
    """Fitted temperatures.

    temperatures: [γ], all 1 for identity. sampling_temperature: of the calibration data, None when
    unknown. fitted, held_out: blocks used for fitting and for the metrics. before, after: metrics
    on the held-out blocks. strongest, weakest: [γ], share of drafts that survived to each position,
    over the fifth of all prompts where most, or fewest, tokens were accepted; they tell the
    off-switch what to expect of a new request. curves: per position, the reliability of the
    held-out blocks, before and after, as (mean survival predicted, share survived) of each bin.
    """

    temperatures: tuple[float, ...]
    sampling_temperature: float | None = None
    fitted: int = 0
    held_out: int = 0
    bins: int = BINS
    before: Metrics | None = None
    after: Metrics | None = None
    strongest: tuple[float, ...] = ()
    weakest: tuple[float, ...] = ()
    curves: dict[str, list[list[tuple[float, float]]]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.temperatures or not all(
            isinstance(t, (int, float)) and math.isfinite(t) and t > 0 for t in self.temperatures
        ):
            raise DraftgraphError(
                f"temperatures are {list(self.temperatures)!r}, expected γ positive numbers"
            )

        for name in ("strongest", "weakest"):
            rates = getattr(self, name)
            if rates and not (len(rates) == self.gamma and all(0 <= r <= 1 for r in rates)):
                raise DraftgraphError(f"{name} is {list(rates)!r}, expected γ shares in [0, 1]")

    @property
    def gamma(self) -> int:
        return len(self.temperatures)

    def apply(self, logits: np.ndarray) -> np.ndarray:
        """[R, γ] float64 calibrated confidence σ(z_k / T_k)."""
        if logits.shape[-1] != self.gamma:
            raise DraftgraphError(
                f"the calibration is for γ = {self.gamma}, the drafter has γ = {logits.shape[-1]}; "
                "run draftgraph calibrate for this bundle"
            )
        return _sigmoid(np.asarray(logits, np.float64) / np.array(self.temperatures))

    def check_gamma(self, gamma: int) -> None:
        self.apply(np.zeros((1, gamma)))

    def save(self, path: str | Path) -> None:
        """Atomic; the old file stays whole until the new one is."""
        payload = asdict(self)
        for name in ("temperatures", "strongest", "weakest"):
            payload[name] = list(payload[name])
        write_json(path, {"schema_version": SCHEMA_VERSION, "gamma": self.gamma, **payload})

    @classmethod
    def load(cls, path: str | Path, gamma: int | None = None) -> Calibration:
        """Raises `DraftgraphError`; also when the file is for another γ."""
        payload = read_json(path, "calibration")
        check_version(payload, SCHEMA_VERSION, f"{path}")
        try:
            values = {k: v for k, v in payload.items() if k not in ("schema_version", "gamma")}
            for name in ("temperatures", "strongest", "weakest"):
                values[name] = tuple(values.get(name, ()))
            for part in ("before", "after"):
                if values.get(part) is not None:
                    values[part] = Metrics(**values[part])
            values["curves"] = {
                name: [[(float(x), float(y)) for x, y in points] for points in positions]
                for name, positions in values.get("curves", {}).items()
            }
            calibration = cls(**values)
            if payload["gamma"] != calibration.gamma:
                raise ValueError(f"gamma is {payload['gamma']!r}, temperatures {calibration.gamma}")
        except DraftgraphError as error:
            raise DraftgraphError(f"{path}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DraftgraphError(f"{path}: not a calibration ({error!r})") from error
        if gamma is not None:
            calibration.check_gamma(gamma)
        return calibration

    # Shapes of other runtimes

    @classmethod
    def read(cls, path: str | Path, gamma: int) -> Calibration:
        """A file of `save`, or in the shape of SGLang or TensorRT-LLM. Raises `DraftgraphError`."""
        payload = read_json(path, "calibration")
        if "schema_version" in payload:
            return cls.load(path, gamma)
        try:
            return cls.from_foreign(payload, gamma)
        except DraftgraphError as error:
            raise DraftgraphError(f"{path}: {error}") from error

    def to_sglang(self, dataset: str = "") -> dict[str, Any]:
        """{"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}."""
        return {
            "temperatures": list(self.temperatures),
            "dataset": dataset,
            "num_samples": self.fitted,
            "ece_before": self.before.ece if self.before else [],
            "ece_after": self.after.ece if self.after else [],
        }

    def to_tensorrt_llm(self) -> dict[str, Any]:
        """{"sts_temperatures", "max_draft_len"}."""
        return {"sts_temperatures": list(self.temperatures), "max_draft_len": self.gamma}

    @classmethod
    def from_foreign(cls, payload: Mapping[str, Any], gamma: int | None = None) -> Calibration:
        """From SGLang's shape or TensorRT-LLM's, by their keys; both may be present if they agree.

        Their files do not say at which sampling temperature they were fitted.
        """
        found = [payload[k] for k in ("sts_temperatures", "temperatures") if payload.get(k)]
        if not found:
            raise DraftgraphError(
                "the calibration has neither temperatures (SGLang) nor sts_temperatures "
                f"(TensorRT-LLM); found {sorted(payload)}"
            )
        if any(list(f) != list(found[0]) for f in found):
            raise DraftgraphError("temperatures and sts_temperatures of the calibration differ")
        try:
            temperatures = tuple(float(t) for t in found[0])
        except (TypeError, ValueError) as error:
            raise DraftgraphError(f"temperatures are {found[0]!r}, expected numbers") from error
        calibration = cls(temperatures, fitted=int(payload.get("num_samples", 0)))
        length = payload.get("max_draft_len")
        if length is not None and length != calibration.gamma:
            raise DraftgraphError(
                f"max_draft_len is {length!r}, but there are {calibration.gamma} temperatures"
            )
        if gamma is not None:
            calibration.check_gamma(gamma)
        return calibration


def identity(gamma: int) -> Calibration:
    """Leaves confidences as they are."""
    return Calibration((1.0,) * gamma)


def fit(
    data: CalibrationData,
    *,
    gamma: int | None = None,
    held_out: float = 0.25,
    bins: int = BINS,
    seed: int = 0,
) -> Calibration:
    """Fit T_1 … T_γ on part of the prompts and measure on the rest.

    Left to right, T_k minimises the expected calibration error of a_k over [0.1, 10], with the
    temperatures before it fixed; positions that no block reached keep T = 1. The split is by
    prompt, so no block of a fitted prompt is measured. Raises `DraftgraphError`.
    """
    data.check(gamma)
    train = _split(data.prompts, held_out, seed)
    logits = data.logits.astype(np.float64)
    temperatures = _fit(logits[train], data.survived[train], bins)
    test, outcome = logits[~train], data.survived[~train]
    raw = np.cumprod(_sigmoid(test), axis=1)
    scaled = np.cumprod(_sigmoid(test / temperatures), axis=1)
    weakest, strongest = _extremes(data)
    return Calibration(
        tuple(float(t) for t in temperatures),
        sampling_temperature=float(data.sampling_temperature),
        fitted=int(train.sum()),
        held_out=int((~train).sum()),
        bins=bins,
        before=metrics(raw, outcome, bins),
        after=metrics(scaled, outcome, bins),
        strongest=strongest,
        weakest=weakest,
        curves={
            "before": reliability(raw, outcome, bins),
            "after": reliability(scaled, outcome, bins),
        },
    )


def _extremes(data: CalibrationData) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean survival over the fifth of the prompts with the lowest and with the highest sums."""
    names = np.unique(data.prompts)
    means = np.stack([data.survived[data.prompts == name].mean(axis=0) for name in names])
    ranked = means[np.argsort(means.sum(axis=1), kind="stable")]
    fifth = max(1, len(names) // 5)
    low, high = ranked[:fifth].mean(axis=0), ranked[-fifth:].mean(axis=0)
    return tuple(map(float, low)), tuple(map(float, high))


def _split(prompts: np.ndarray, held_out: float, seed: int) -> np.ndarray:
    """[n] bool: the block belongs to the fitted part."""
    if not 0 < held_out < 1:
        raise DraftgraphError(f"held_out is {held_out!r}, expected a fraction in (0, 1)")
    names = np.unique(prompts)
    if len(names) < 2:
        raise DraftgraphError(
            f"calibration data come from {len(names)} prompt; at least 2 are needed, so that one "
            "can be held out"
        )
    count = min(len(names) - 1, max(1, round(held_out * len(names))))
    return ~np.isin(prompts, np.random.default_rng(seed).permutation(names)[:count])


def _fit(logits: np.ndarray, survived: np.ndarray, bins: int) -> np.ndarray:
    """[γ] temperatures."""
    count, gamma = logits.shape
    temperatures = np.ones(gamma)
    before = np.ones(count)
    for k in range(gamma):
        reached = k == 0 or survived[:, k - 1].any()
        if reached:
            temperatures[k] = _search(before, logits[:, k], survived[:, k], bins)
        before = before * _sigmoid(logits[:, k] / temperatures[k])
    return temperatures


def _search(before: np.ndarray, logits: np.ndarray, survived: np.ndarray, bins: int) -> float:
    """The T of one position: a grid over log T, then finer ones around its best point.

    The error is a step function of T, so slopes and golden sections would stop at the first dent.
    Among equals the T nearest to 1 is taken.
    """
    low, high = (math.log(t) for t in TEMPERATURES)
    best = (ece(before * _sigmoid(logits), survived, bins), 0.0, 0.0)  # T = 1
    for _ in range(REFINEMENTS):
        points = np.linspace(low, high, GRID)
        scores = [
            (ece(before * _sigmoid(logits / math.exp(p)), survived, bins), abs(p), p)
            for p in points
        ]
        best = min(best, min(scores))
        width = (high - low) / (GRID - 1)
        low = max(best[2] - width, math.log(TEMPERATURES[0]))
        high = min(best[2] + width, math.log(TEMPERATURES[1]))
    return math.exp(best[2])


# Metrics


def metrics(predicted: np.ndarray, survived: np.ndarray, bins: int = BINS) -> Metrics:
    """predicted: [n, γ] survivals; survived: [n, γ] bool."""
    columns = [(predicted[:, k], survived[:, k]) for k in range(predicted.shape[1])]
    return Metrics(
        ece=[ece(p, s, bins) for p, s in columns],
        auroc=[auroc(p, s) for p, s in columns],
        brier=[float(np.mean((p - s) ** 2)) for p, s in columns],
    )


def ece(predicted: np.ndarray, survived: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error over equal-mass bins: Σ |Σ_bin (predicted - survived)| / n."""
    order = np.argsort(predicted)
    gap = predicted[order] - survived[order]
    return float(np.abs(np.add.reduceat(gap, _edges(len(gap), bins))).sum() / len(gap))


def auroc(predicted: np.ndarray, survived: np.ndarray) -> float | None:
    """P(a surviving block is predicted above one that does not), ties counted half."""
    positive = int(survived.sum())
    negative = len(survived) - positive
    if not positive or not negative:
        return None
    _, inverse, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # average rank of each value, from 1
    total = float(ranks[inverse][survived].sum())
    return (total - positive * (positive + 1) / 2) / (positive * negative)


def reliability(
    predicted: np.ndarray, survived: np.ndarray, bins: int = BINS
) -> list[list[tuple[float, float]]]:
    """Per position, (mean prediction, share survived) of every bin."""
    result = []
    for k in range(predicted.shape[1]):
        order = np.argsort(predicted[:, k])
        edges = _edges(len(order), bins)
        counts = np.diff([*edges, len(order)])
        x = np.add.reduceat(predicted[order, k], edges) / counts
        y = np.add.reduceat(survived[order, k].astype(float), edges) / counts
        result.append(list(zip(x.tolist(), y.tolist(), strict=True)))
    return result


def _edges(count: int, bins: int) -> np.ndarray:
    """Starts of at most `bins` non-empty bins of equal size, up to one sample."""
    return np.arange(min(bins, count)) * count // min(bins, count)


def _sigmoid(z: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(z))
    return np.where(z >= 0, 1 / (1 + e), e / (1 + e))


# Reliability diagram


def reliability_svg(calibration: Calibration, title: str = "Reliability of prefix survival") -> str:
    """A panel per position: predicted survival against the share that survived."""
    if not calibration.curves or calibration.before is None or calibration.after is None:
        raise DraftgraphError("the calibration has no reliability curves; run draftgraph calibrate")
    size, gap, top, left = 190, 64, 84, 60
    columns = min(4, calibration.gamma)
    rows = -(-calibration.gamma // columns)
    width = left + columns * (size + gap)
    height = top + rows * (size + gap + 16)
    colours = {"before": "#b4530a", "after": "#1d4ed8"}
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="24" font-size="15">{html.escape(title)}</text>',
    ]
    for i, (name, metric) in enumerate(
        (("before", calibration.before), ("after", calibration.after))
    ):
        x = left + i * 210
        out += [
            f'<path d="M{x} 42h22" stroke="{colours[name]}" stroke-width="2"/>',
            f'<text x="{x + 28}" y="46">{name}: mean ECE {metric.mean_ece:.4f}</text>',
        ]
    for k in range(calibration.gamma):
        x0 = left + k % columns * (size + gap)
        y0 = top + k // columns * (size + gap + 16)
        out.append(f'<g transform="translate({x0} {y0})">')
        out.append(
            f'<text x="0" y="-8">position {k + 1} · T = {calibration.temperatures[k]:.2f} · ECE '
            f"{calibration.before.ece[k]:.3f} → {calibration.after.ece[k]:.3f}</text>"
        )
        for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
            at = tick * size
            out += [
                f'<path d="M{at:g} 0v{size}M0 {size - at:g}h{size}" stroke="#e5e5e5"/>',
                f'<text x="{at:g}" y="{size + 14}" text-anchor="middle">{tick:g}</text>',
                f'<text x="-6" y="{size - at + 4:g}" text-anchor="end">{tick:g}</text>',
            ]
        out.append(f'<rect width="{size}" height="{size}" fill="none" stroke="#888"/>')
        out.append(f'<path d="M0 {size}L{size} 0" stroke="#888" stroke-dasharray="4 4"/>')
        for name, colour in colours.items():
            points = [(size * x, size * (1 - y)) for x, y in calibration.curves[name][k]]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            out.append(
                f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
            out += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points
            ]
        if k // columns == rows - 1 or k + columns >= calibration.gamma:
            out.append(
                f'<text x="{size / 2}" y="{size + 30}" text-anchor="middle">predicted</text>'
            )
        if k % columns == 0:
            out.append(
                f'<text transform="translate(-38 {size / 2}) rotate(-90)" text-anchor="middle">'
                "survived</text>"
            )
        out.append("</g>")
    out.append("</svg>")
    return "\n".join(out) + "\n"
