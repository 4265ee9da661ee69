"""Things a long-running or unusual host meets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from draftgraph.runtime import DraftgraphError, Engine, SamplingParams
from draftgraph.runtime.backends.onnxruntime import backend as onnxruntime_backend


def test_truncation_and_padding_of_a_checkpoint_are_not_applied(
    text_bundle: Path, text_engine: Engine, tmp_path: Path
) -> None:
    """They are settings of a training run; the prompt goes in as it is."""
    folder = tmp_path / "bundle"
    shutil.copytree(text_bundle, folder)
    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    fast.enable_truncation(4)
    fast.enable_padding(length=6)
    fast.save(str(folder / "tokenizer.json"))
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    manifest["files"]["tokenizer.json"]["bytes"] = (folder / "tokenizer.json").stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))
    edited = Engine.load(folder, verify=False)
    for text in ("a", "abcdefgh"):
        assert edited.tokenizer.encode(text) == text_engine.tokenizer.encode(text)


def test_bindings_are_bounded(text_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of ever new shapes do not pile up; what is decoded does not change."""
    engine = Engine.load(text_bundle, max_requests=3)
    prompts = [[5 + i, 6, 7] for i in range(5)]
    params = SamplingParams(max_new_tokens=24, scheduler="threshold", threshold=0.6)
    expected = [o.token_ids for o in engine.generate_batch(prompts, params)]
    assert len(engine.backend._bindings) > 4  # type: ignore[attr-defined]
    monkeypatch.setattr(onnxruntime_backend, "_MOST_BINDINGS", 4)
    engine = Engine.load(text_bundle, max_requests=3)
    again = [o.token_ids for o in engine.generate_batch(prompts, params)]
    assert again == expected
    assert len(engine.backend._bindings) <= 4  # type: ignore[attr-defined]


def test_leaving_a_stream_keeps_other_requests(text_engine: Engine) -> None:
    stream = text_engine.stream([5, 6, 7], SamplingParams(max_new_tokens=20))
    next(stream)
    other = text_engine.add_request([8, 9], SamplingParams(max_new_tokens=5))
    stream.close()
    while text_engine.busy:
        text_engine.step()
    assert len(text_engine.output(other).token_ids) <= 5


@pytest.mark.parametrize("number", [-1, 2**64])
def test_request_numbers_out_of_range(text_engine: Engine, number: int) -> None:
    with pytest.raises(DraftgraphError, match="number is"):
        text_engine.add_request([1], number=number)


def test_top_k_out_of_range() -> None:
    with pytest.raises(DraftgraphError, match="top_k is"):
        SamplingParams(top_k=2**63)
