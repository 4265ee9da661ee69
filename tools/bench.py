"""Plain against speculative decoding on the same prompts, interleaved in one process.

`Bench.run` returns plain data: what `--json` writes and `bench_report.render` prints.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..graphs.errors import DraftgraphError
from ..runtime import Engine, Output, SamplingParams
from ..runtime.bundle import MANIFEST, sha256
from ..runtime.jsonfile import write_json
from ..runtime.machine import available_cores, processor_name
from .bench_figures import Divergence, Pair, record, summarise, summarise_peer, warnings
from .bench_steps import logit_gap, measure_steps
from .console import number
from .prompts import BenchPrompt, PromptSet
from .transformers_peer import TransformersPeer, check_peer

__all__ = ["Bench", "check_comparison", "divergence", "write_json"]

SCHEMA_VERSION = 1
WARM_UP_TOKENS = 16


class Bench:
    """The settings of one benchmark."""

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        *,
        threads: int | None = None,
        repeat: int = 1,
        chat: bool | None = None,
        peer_path: Path | None = None,
        peer_limit: int = 2,
        report: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.engine, self.params, self.repeat, self.report = engine, params, repeat, report
        self.threads = threads or available_cores()
        self.chat = engine.tokenizer.has_chat_template if chat is None else chat
        self.peer_path, self.peer_limit = peer_path, peer_limit

    def run(self, sets: Sequence[PromptSet]) -> dict[str, Any]:
        """Decode every prompt both ways and return all figures."""
        jobs, skipped = self._jobs(sets)
        peer = None if self.peer_path is None else TransformersPeer(self.peer_path, self.threads)
        try:
            self._warm_up(jobs[0][2], peer)
            load = os.getloadavg()[0]
            pairs = self._pairs(jobs, peer)
        finally:
            if peer is not None:
                peer.close()
        self.report("timing single steps")
        steps = measure_steps(self.engine, pairs[0].plain.prompt_ids)
        gamma = self.engine.gamma
        files = {
            str(s.file): summarise([p for p in pairs if p.file == s.file], gamma)
            for s in sets
            if any(p.file == s.file for p in pairs)
        }
        overall = summarise(pairs, gamma)
        return {
            "schema_version": SCHEMA_VERSION,
            "machine": self._machine(load),
            "settings": {
                "max_new_tokens": self.params.max_new_tokens,
                "repeat": self.repeat,
                "temperature": self.params.temperature,
                "scheduler": self.params.scheduler,
                "threshold": self.params.threshold,
                "chat": self.chat,
                "block_size": gamma,
            },
            "files": files,
            "overall": overall,
            "steps": steps,
            "peer": None if peer is None else summarise_peer(pairs, peer.facts, steps),
            "skipped": skipped,
            "warnings": warnings(files, overall),
            "records": [record(p) for p in pairs],
        }

    def _jobs(
        self, sets: Sequence[PromptSet]
    ) -> tuple[list[tuple[Path, BenchPrompt, list[int]]], list[dict[str, Any]]]:
        """Prompts as ids; those that do not fit the bundle's capacity are left out and listed."""
        jobs, skipped = [], []
        room = self.engine.longest - self.params.max_new_tokens
        for prompt_set in sets:
            for prompt in prompt_set.prompts:
                ids = self.engine.tokenizer.encode(prompt.formatted(self.chat))
                if len(ids) <= room:
                    jobs.append((prompt_set.file, prompt, ids))
                    continue
                where = {"file": str(prompt_set.file), "line": prompt.line, "tokens": len(ids)}
                skipped.append(where)
                self.report(
                    f"{prompt_set.file}, line {prompt.line}: left out, {len(ids)} tokens and a "
                    f"budget of {self.params.max_new_tokens} exceed the bundle's capacity"
                )
        if not jobs:
            raise DraftgraphError(
                f"no prompt fits: the bundle's capacity is {self.engine.longest} and "
                f"max_new_tokens is {self.params.max_new_tokens}; lower it, shorten the prompts or "
                "export with a larger --max-seq-len"
            )
        return jobs, skipped

    def _warm_up(self, ids: list[int], peer: TransformersPeer | None) -> None:
        self.report("warming up")
        tokens = min(WARM_UP_TOKENS, self.params.max_new_tokens)
        params = replace(self.params, max_new_tokens=tokens)
        for speculative in (False, True):
            self.engine.generate(ids, params, speculative=speculative)
        if peer is not None:
            peer.generate(ids, tokens, self.engine.bundle.target.stop_ids)

    def _pairs(
        self, jobs: list[tuple[Path, BenchPrompt, list[int]]], peer: TransformersPeer | None
    ) -> list[Pair]:
        pairs = []
        for repeat in range(self.repeat):
            turns: dict[Path, int] = {}
            for i, (file, prompt, ids) in enumerate(jobs):
                turn = turns[file] = turns.get(file, -1) + 1
                with_peer = peer if repeat == 0 and turn < self.peer_limit else None
                pair = self._pair(file, prompt, ids, repeat, (i + repeat) % 2 == 1, with_peer)
                pairs.append(pair)
                plain, fast = pair.plain.stats, pair.speculative.stats
                self.report(
                    f"{i + 1 + repeat * len(jobs)}/{len(jobs) * self.repeat} {file.name}:"
                    f"{prompt.line}: TPOT plain {number(plain.tpot_ms, '.1f')}, speculative "
                    f"{number(fast.tpot_ms, '.1f')} ms"
                    + (f", τ {fast.tau:.2f}" if fast.tau else "")
                )
        return pairs

    def _pair(
        self,
        file: Path,
        prompt: BenchPrompt,
        ids: list[int],
        repeat: int,
        speculative_first: bool,
        peer: TransformersPeer | None,
    ) -> Pair:
        outputs = {}
        for speculative in (speculative_first, not speculative_first):
            outputs[speculative] = self.engine.generate(ids, self.params, speculative=speculative)
        plain, fast = outputs[False], outputs[True]
        stops = self.engine.bundle.target.stop_ids
        return Pair(
            file=file,
            prompt=prompt,
            repeat=repeat,
            speculative_first=speculative_first,
            plain=plain,
            speculative=fast,
            greedy=self.params.greedy,
            divergence=divergence(self.engine, plain, fast) if self.params.greedy else None,
            peer=None if peer is None else peer.generate(ids, self.params.max_new_tokens, stops),
        )

    def _machine(self, load: float) -> dict[str, Any]:
        import onnxruntime

        bundle, backend = self.engine.bundle, self.engine.backend
        fingerprint = backend.fingerprint()
        return {
            "backend": fingerprint["backend"],
            "device": fingerprint["device"],
            "report": backend.report(),
            "cpu": processor_name(),
            "cpu_count": os.cpu_count(),
            "threads": self.threads,
            "load_average_at_start": load,
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "onnxruntime": onnxruntime.__version__,
            "bundle": str(bundle.path),
            "bundle_sha256": sha256(bundle.path / MANIFEST),
            "dtype": bundle.dtype,
        }


def check_comparison(name: str | None, target: Path | None) -> Path | None:
    """The peer's checkpoint from --compare and --target, which come together."""
    if name is None and target is None:
        return None
    if name not in (None, "transformers"):
        raise DraftgraphError(f"--compare is {name!r}, expected transformers")
    if name is None or target is None:
        raise DraftgraphError("--compare transformers and --target PATH come together; give both")
    check_peer(target)
    return target


def divergence(engine: Engine, plain: Output, fast: Output) -> Divergence | None:
    """The first difference, with the logit gap that decided there; None for equal ids."""
    a, b = plain.token_ids, fast.token_ids
    if a == b:
        return None
    shared = [x == y for x, y in zip(a, b, strict=False)]
    position = shared.index(False) if False in shared else len(shared)
    gap, best = logit_gap(engine, [*plain.prompt_ids, *a[:position]])
    return Divergence(
        position=position,
        plain_id=a[position] if position < len(a) else None,
        speculative_id=b[position] if position < len(b) else None,
        logit_gap=gap,
        best_ids=best,
    )
