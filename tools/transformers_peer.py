"""transformers' `generate` as a peer of the benchmark, in a process of its own.

torch's OpenMP team and ONNX Runtime's spinning pool disturb each other inside one process, so the
peer is a worker that talks JSON lines over its stdin and stdout and idles between its turns.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..graphs.errors import DraftgraphError


@dataclass(frozen=True)
class PeerResult:
    """One greedy generation of the peer."""

    token_ids: list[int]
    ttft_ms: float
    tpot_ms: float | None  # None for a single token


class TransformersPeer:
    """The parent's side; close it to end the worker."""

    def __init__(self, path: Path, threads: int) -> None:
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "draftgraph.tools.transformers_peer", str(path), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C reaches the parent only, which closes the worker
        )
        self.facts = self._answer()

    def generate(
        self, ids: list[int], max_new_tokens: int, stop_ids: tuple[int, ...]
    ) -> PeerResult:
        assert self._worker.stdin is not None
        question = {"ids": ids, "max_new_tokens": max_new_tokens, "stop_ids": list(stop_ids)}
        self._worker.stdin.write(json.dumps(question) + "\n")
        self._worker.stdin.flush()
        return PeerResult(**self._answer())

    def close(self) -> None:
        self._worker.kill()
        self._worker.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._worker.stdout is not None
        line = self._worker.stdout.readline()
        if not line:
            code = self._worker.wait()
            raise DraftgraphError(
                f"the transformers peer ended unexpectedly (exit code {code}); its own messages "
                "are above"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self.close()
            raise DraftgraphError(f"the transformers peer cannot run: {answer['error']}")
        return answer


def check_peer(path: Path) -> None:
    """Refuse a peer that cannot start, before anything is measured."""
    missing = [m for m in ("torch", "transformers") if importlib.util.find_spec(m) is None]
    if missing:
        raise DraftgraphError(
            f"--compare transformers needs {' and '.join(missing)}; install what it needs with: "
            'pip install "draftgraph[bench]"'
        )
    if not path.exists():
        raise DraftgraphError(
            f"{path}: no such checkpoint for the peer; --target takes a checkpoint directory or a "
            ".gguf file"
        )


# The worker's side


def _load(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    gguf = {}
    if path.is_dir() and not (path / "config.json").is_file():
        path = next(iter(sorted(path.glob("*.gguf"))), path)
    if path.is_file():
        path, gguf = path.parent, {"gguf_file": path.name}
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, local_files_only=True, **gguf
    ).eval()


class _Timestamps:
    """A streamer that notes when the prompt and every token arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _generate(model: Any, question: dict[str, Any]) -> dict[str, Any]:
    import torch

    prompt = torch.tensor([question["ids"]])
    stamps = _Timestamps()
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            use_cache=True,
            max_new_tokens=question["max_new_tokens"],
            eos_token_id=question["stop_ids"] or None,
            pad_token_id=0,
            streamer=stamps,
        )
    first, *later = stamps.times[1:]  # the first stamp is the prompt's
    return {
        "token_ids": output[0, prompt.shape[1] :].tolist(),
        "ttft_ms": 1e3 * (first - start),
        "tpot_ms": 1e3 * (later[-1] - first) / len(later) if later else None,
    }


def _serve(path: Path, threads: int) -> None:
    # Answers go to the real stdout; whatever a library prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    import torch
    import transformers

    torch.set_num_threads(threads)
    try:
        model = _load(path)
    except Exception as error:  # of any library below; the parent prints it
        answer({"error": f"{path}: {' '.join(str(error).split())}"})
        return
    answer(
        {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "dtype": "fp32",
        }
    )
    for line in sys.stdin:
        answer(_generate(model, json.loads(line)))


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
