"""Frequencies against the Hugging Face implementation, from configs in both of its dialects."""

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftgraph.export.checkpoints.config import Config
from draftgraph.export.checkpoints.rope_config import read_rope
from draftgraph.graphs.contract import RopeSpec
from draftgraph.graphs.errors import DraftgraphError
from draftgraph.graphs.rope import inverse_frequencies

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES = {
    "default": ({"rope_type": "default"}, 1e4, 64),
    "default, large theta": ({"rope_type": "default"}, 1e6, 128),
    "linear": ({"rope_type": "linear", "factor": 2.5}, 1e4, 64),
    "llama3.1": (LLAMA31, 5e5, 128),
    "llama3.2": (LLAMA31 | {"factor": 32.0}, 5e5, 64),
    "llama3, narrow band": (LLAMA31 | {"low_freq_factor": 2.0, "high_freq_factor": 3.0}, 1e4, 32),
    "yarn": (YARN, 1e6, 128),
    "yarn, betas": (YARN | {"beta_fast": 16.0, "beta_slow": 2.0}, 1e4, 64),
    "yarn, not truncated": (YARN | {"truncate": False}, 1e6, 128),
    "yarn, mscale": (YARN | {"mscale": 1.0, "mscale_all_dim": 0.707, "factor": 40.0}, 1e4, 64),
    "yarn, mscale alone": (YARN | {"mscale": 0.5}, 1e4, 64),
    "yarn, attention factor": (YARN | {"attention_factor": 0.75}, 1e4, 64),
    "yarn, factor below 1": (YARN | {"factor": 0.5}, 1e4, 64),
    "yarn, no factor": (YARN | {"factor": None}, 1e4, 64),
    "yarn, no original length": ({"rope_type": "yarn", "factor": 4.0}, 1e6, 64),
    "llama3, no original length": (
        {k: v for k, v in LLAMA31.items() if k != "original_max_position_embeddings"},
        5e5,
        64,
    ),
}
MAX_POSITIONS = 32768


@pytest.mark.parametrize("dialect", ["rope_parameters", "rope_scaling with type"])
@pytest.mark.parametrize("case", CASES)
def test_as_transformers(case: str, dialect: str) -> None:
    fields, theta, head_dim = CASES[case]
    reference = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": theta, **fields},
    )
    if fields["rope_type"] == "default":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(reference)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[fields["rope_type"]](reference, "cpu")

    if dialect == "rope_parameters":
        written = {"rope_parameters": {"rope_theta": theta, **fields}}
    else:
        old = {"type" if k == "rope_type" else k: v for k, v in fields.items()}
        written = {"rope_theta": theta, "rope_scaling": old}
    spec = read_rope(
        Config(written, "config.json"), default_theta=None, max_position_embeddings=MAX_POSITIONS
    )
    found, found_factor = inverse_frequencies(spec, head_dim, MAX_POSITIONS)

    assert found.dtype == np.float32 and found.shape == (head_dim // 2,)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
    assert found_factor == pytest.approx(factor, rel=1e-6)


def test_types_differ() -> None:
    """The comparison above would pass with a scaling that is never applied to these pairs."""
    plain = inverse_frequencies(RopeSpec("default", 5e5), 128, None)[0]
    scaled = inverse_frequencies(
        RopeSpec(
            "llama3",
            5e5,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        128,
        None,
    )[0]
    assert np.array_equal(plain[:20], scaled[:20])  # fast pairs are kept
    np.testing.assert_allclose(scaled[-10:], plain[-10:] / 8, rtol=1e-6)


@pytest.mark.parametrize(
    ("spec", "head_dim", "message"),
    [
        (RopeSpec("default", 1e4), 15, "must be even"),
        (RopeSpec("linear", 1e4), 16, "factor is missing"),
        (RopeSpec("llama3", 1e4, factor=8.0), 16, "low_freq_factor is missing"),
        (
            RopeSpec(
                "llama3",
                1e4,
                factor=8.0,
                low_freq_factor=4.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
            16,
            "must be greater",
        ),
        (RopeSpec("yarn", 1e4, factor=2.0), 16, "original_max_position_embeddings is missing"),
        (
            RopeSpec("yarn", 1e4, original_max_position_embeddings=64),
            16,
            "factor is missing and cannot be derived",
        ),
        (RopeSpec("dynamic", 1e4), 16, "'dynamic' is not supported"),  # type: ignore[arg-type]
    ],
)
def test_refusals(spec: RopeSpec, head_dim: int, message: str) -> None:
    with pytest.raises(DraftgraphError, match=message):
        inverse_frequencies(spec, head_dim, None)
