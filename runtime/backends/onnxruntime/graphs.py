"""CUDA graphs of ONNX Runtime's providers: which runs are captured, and on which thread.

The provider captures a run under an id and replays it when the id comes again; it checks neither
shapes nor addresses, so every binding has an id of its own. Warm-ups and captures belong to a
thread, so all runs are made on one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import onnxruntime as ort

SKIP = -1  # the id of a run that is neither captured nor replayed
# A captured graph keeps its scratch memory; later shapes run without one.
MOST_GRAPHS = 128


class Graphs:
    """Chooses the run options of every run and counts what they lead to.

    key: the run option that carries the id. The first run of a binding is eager: most shapes of a
    ragged batch do not come again, and capturing costs several runs.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._eager = self._options(SKIP)
        self._next = 0
        self.captured = 0
        self.counts: Counter[str] = Counter(captured=0, replayed=0, eager=0)

    def options(self, binding: Any, repeats: bool) -> ort.RunOptions:
        """Run options of the next run. repeats: the binding is kept and may be captured."""
        if binding.options is not None:
            self.counts["replayed"] += 1
            return binding.options
        binding.runs += 1
        if not repeats or binding.runs < 2 or self.captured >= MOST_GRAPHS:
            self.counts["eager"] += 1
            return self._eager
        self.counts["captured"] += 1
        self.captured += 1
        binding.graph, binding.options = self._next, self._options(self._next)
        self._next += 1
        return binding.options

    def release(self, bindings: list[Any]) -> None:
        """Forget the graphs of bindings that will not run again."""
        for binding in bindings:
            if binding.options is not None:
                binding.session.release_captured_graph(binding.graph)
                binding.options = None
                self.captured -= 1

    def _options(self, number: int) -> ort.RunOptions:
        options = ort.RunOptions()
        options.add_run_config_entry(self._key, str(number))
        return options


class Worker:
    """Runs calls on one thread and waits for them, whatever interrupts the caller."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "draftgraph-device")

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        future = self._pool.submit(function, *arguments)
        try:
            return future.result()
        except BaseException:
            wait([future])  # buffers may go as soon as the caller sees the error
            raise
