"""Collects confidences and outcomes with the engine, for calibration and for traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..graphs.errors import DraftgraphError
from ..runtime import Engine, Output, SamplingParams
from ..runtime.calibration import CalibrationData
from ..runtime.tokenizer import Prompt


def record(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    report: Callable[[str], None] = lambda message: None,
) -> list[Output]:
    """Decode every prompt with full verification and identity temperatures."""
    if params.scheduler != "full" or params.off_switch:
        raise DraftgraphError("confidences are collected under full verification only")
    if not engine.bundle.draft.has_confidence:
        raise DraftgraphError(f"{engine.bundle.path}: the drafter has no confidence head")
    kept, engine.calibration = engine.calibration, None
    outputs: list[Output] = []
    try:
        for start in range(0, len(prompts), engine.max_requests):
            outputs += engine.generate_batch(prompts[start : start + engine.max_requests], params)
            report(f"{len(outputs)} of {len(prompts)} prompts")
    finally:
        engine.calibration = kept
    return outputs


def calibration_data(
    outputs: Sequence[Output], gamma: int, sampling_temperature: float
) -> CalibrationData:
    """Fully verified blocks of the outputs.

    Blocks that the token budget shortened or a stop id ended are left out: their outcome is cut.
    """
    logits, accepted, prompts = [], [], []
    for number, output in enumerate(outputs):
        for r in output.rounds:
            if r.verified == gamma and r.next_id is not None and r.confidence is not None:
                logits.append(r.confidence)
                accepted.append(r.accepted)
                prompts.append(number)
    confidence = np.array(logits, np.float64).reshape(-1, gamma)
    clipped = np.clip(confidence, 1e-12, 1 - 1e-12)
    return CalibrationData.from_accepted(
        np.where(np.isfinite(confidence), np.log(clipped) - np.log1p(-clipped), confidence),
        np.array(accepted, np.int64),
        np.array(prompts, np.int64),
        sampling_temperature,
    )
