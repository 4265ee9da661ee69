"""Fixtures of the whole suite: every golden pair is exported once per session and options."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import GOLDENS_ROOT, Golden, export_pair, load_golden, write_random_pair
from safetensors import safe_open
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from draftgraph.runtime import DraftgraphError, Engine
from draftgraph.runtime.backends.tensorrt.library import load_tensorrt

BundleFactory = Callable[..., Path]
EngineFactory = Callable[..., Engine]

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    """golden(name): expected.json and expected.safetensors of one directory."""
    return load_golden


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> BundleFactory:
    """bundle(name, **export options) -> directory of the exported golden pair; do not modify it."""
    made: dict[tuple[Any, ...], Path] = {}

    def make(name: str, **options: Any) -> Path:
        key = (name, *sorted(options.items()))
        if key not in made:
            golden = load_golden(name)
            out = tmp_path_factory.mktemp(name) / "bundle"
            made[key] = export_pair(golden.target, golden.draft, out, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def engine(bundle: BundleFactory) -> EngineFactory:
    """engine(name, **export options) -> the engine of that bundle, one per session."""
    loaded: dict[Path, Engine] = {}

    def load(name: str, **options: Any) -> Engine:
        path = bundle(name, **options)
        if path not in loaded:
            loaded[path] = Engine.load(path)
        return loaded[path]

    return load


@pytest.fixture(scope="session")
def trt() -> Any:
    """TensorRT-RTX; without it (extra tensorrt-rtx) the tests that need it are skipped."""
    try:
        return load_tensorrt("tensorrt-rtx")
    except DraftgraphError as error:
        pytest.skip(str(error))


def character_tokenizer() -> Tokenizer:
    """The vocabulary of the goldens: newline, printable ASCII, <|end|>, <|pad|>, one id unused."""
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {c: i for i, c in enumerate(characters)}
    vocabulary |= {"<|end|>": 96, "<|pad|>": 97, "<|free|>": 98, "<|mask|>": 99}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|free|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|end|>", "<|pad|>", "<|mask|>")]
    )
    return tokenizer


@pytest.fixture(scope="session")
def text_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen3-vanilla with a character tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("text")
    shutil.copytree(GOLDENS_ROOT / "qwen3-vanilla" / "target", folder / "target")
    character_tokenizer().save(str(folder / "target" / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|end|>"}
    (folder / "target" / "tokenizer_config.json").write_text(json.dumps(config))
    return export_pair(
        folder / "target", GOLDENS_ROOT / "qwen3-vanilla" / "draft", folder / "bundle"
    )


@pytest.fixture(scope="session")
def text_engine(text_bundle: Path) -> Engine:
    return Engine.load(text_bundle)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Token 7 has an infinite embedding: whatever attends to it has no finite logits."""
    folder = tmp_path_factory.mktemp("damaged")
    path = export_pair(*write_random_pair(folder, vocab=40, seed=4), folder / "bundle")
    file = path / "weights.safetensors"
    with safe_open(file, "np") as opened:
        row = opened.get_tensor("embed_tokens.weight")[7].tobytes()
    content = file.read_bytes()
    assert content.count(row) == 1
    file.write_bytes(content.replace(row, np.full(16, np.inf, np.float32).tobytes()))
    return Engine.load(path, verify=False)
