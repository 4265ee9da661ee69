"""Checkpoints to break: copies of a real one (tests/goldens) with a single thing changed."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

GOLDENS = Path(__file__).parents[1] / "goldens"
REMOVE = "REMOVE"  # in place of a value: take the key or tensor away


def _edit(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**values, **changes}
    return {k: v for k, v in merged.items() if not (isinstance(v, str) and v == REMOVE)}


@pytest.fixture(scope="session")
def goldens() -> Path:
    return GOLDENS


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """edited("qwen3-vanilla/draft", config={...}, tensors={...}) -> directory of the copy.

    `config` and `tensors` replace or add entries, or take them away with the value "REMOVE";
    `change` maps all tensors at once. `generation` is written as generation_config.json.
    """

    def make(
        source: str,
        *,
        config: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | None = None,
        change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None,
        generation: Mapping[str, Any] | None = None,
    ) -> Path:
        directory = tmp_path / source.replace("/", "-")
        directory.mkdir()
        original = json.loads((GOLDENS / source / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(_edit(original, config or {})))
        arrays = load_file(GOLDENS / source / "model.safetensors")
        arrays = _edit(arrays, tensors or {})
        save_file(change(arrays) if change else arrays, directory / "model.safetensors")
        if generation is not None:
            (directory / "generation_config.json").write_text(json.dumps(generation))
        return directory

    return make
