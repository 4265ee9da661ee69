"""The benchmark's figures as text."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from rich.console import Console

from ..runtime.results import PHASES
from .console import heading, number, table
from .stats import device_lines


def render(measured: dict[str, Any], console: Console) -> None:
    """Print all figures; warnings come last."""
    columns = {PurePath(name).name: figures for name, figures in measured["files"].items()}
    if len(columns) != len(measured["files"]):
        columns = dict(measured["files"])
    if len(columns) > 1:
        columns["overall"] = measured["overall"]
    _machine(measured, console)
    _figures(columns, console)
    _positions(columns, console)
    _phases(columns, console)
    _steps(measured["steps"], console)
    if measured["peer"] is not None:
        _peer(measured["peer"], console)
    _divergences(measured["records"], console)
    for entry in measured["skipped"]:
        console.print(f"left out: {entry['file']}, line {entry['line']}: {entry['tokens']} tokens")
    for warning in measured["warnings"]:
        console.print(f"warning: {warning}")


def _machine(measured: dict[str, Any], console: Console) -> None:
    m, s = measured["machine"], measured["settings"]
    if m["backend"] != "onnxruntime-cpu":
        console.print(f"{m['device']}, {m['backend']}")
        for line in device_lines(m["report"]):
            console.print(line, soft_wrap=True)
    console.print(
        f"{m['cpu']}, {m['threads']} threads of {m['cpu_count']} CPUs, ONNX Runtime "
        f"{m['onnxruntime']}, {m['dtype']}, bundle {m['bundle_sha256'][:12]}"
    )
    scheduler = s["scheduler"]
    if scheduler == "threshold":
        scheduler += f" {s['threshold']}"
    console.print(
        f"temperature {s['temperature']}, {s['max_new_tokens']} new tokens, scheduler {scheduler}, "
        f"block of {s['block_size']}, {'chat template' if s['chat'] else 'plain text'}, "
        f"{s['repeat']} run(s) per prompt"
    )


def _figures(columns: dict[str, dict[str, Any]], console: Console) -> None:
    heading(console, "plain → speculative")
    figures = table("", *columns)

    def row(label: str, cell: Any) -> None:
        figures.add_row(label, *(cell(f) for f in columns.values()))

    def pair(values: dict[str, Any], form: str) -> str:
        return f"{number(values['plain'], form)} → {number(values['speculative'], form)}"

    def spread(key: str) -> Any:
        return lambda f: pair({n: f["tpot_ms"][n][key] for n in f["tpot_ms"]}, ".1f")

    row("prompts", lambda f: str(f["prompts"]))
    row("tokens", lambda f: pair(f["tokens"], "d"))
    row("TTFT median (ms)", lambda f: pair(f["ttft_ms"], ".1f"))
    row("TPOT median (ms)", spread("median"))
    row("TPOT p90 (ms)", spread("p90"))
    row("tokens/s, prefill included", lambda f: pair(f["tokens_per_s"], ".1f"))
    row("speed-up, ratio of TPOT medians", lambda f: number(f["speedup"]["of_medians"]))
    row("speed-up, median of ratios", lambda f: number(f["speedup"]["median_of_runs"]))
    row("τ (tokens per round)", lambda f: number(f["tau"]))
    row("accepted/verified", lambda f: number(f["accepted_per_verified"], ".3f"))
    row("accepted/drafted", lambda f: number(f["accepted_per_drafted"], ".3f"))
    if any(f["greedy_identical"]["compared"] for f in columns.values()):
        row(
            "identical token ids",
            lambda f: "{identical} of {compared}".format_map(f["greedy_identical"]),
        )
    console.print(figures)


def _positions(columns: dict[str, dict[str, Any]], console: Console) -> None:
    heading(
        console,
        "acceptance by position: given verified / given prefix accepted / prefix survival",
    )
    positions = table("position", *columns)
    keys = ("accepted_given_verified", "accepted_given_prefix", "prefix_survival")
    for rows in zip(*(f["positions"] for f in columns.values()), strict=True):
        cells = (" / ".join(number(r[k]) for k in keys) for r in rows)
        positions.add_row(str(rows[0]["position"]), *cells)
    console.print(positions)


def _phases(columns: dict[str, dict[str, Any]], console: Console) -> None:
    heading(console, "ms per round")
    phases = table("phase", *columns)
    for phase in PHASES:
        cells = (number(f["phase_ms_per_round"][phase]) for f in columns.values())
        phases.add_row(phase, *cells)
    cells = (
        f"{number(f['host_ms_per_round'])} ({number(f['host_share'], '.1%')})"
        for f in columns.values()
    )
    phases.add_row("host overhead", *cells)
    console.print(phases)


def _steps(steps: dict[str, Any], console: Console) -> None:
    heading(console, f"steps after {steps['past_length']} rows, medians of {steps['passes']}")
    rows = table("step", "ms", "relative to width 1")
    for width, ms in steps["target_ms"].items():
        ratio = steps["target_relative_to_width_1"][width]
        rows.add_row(f"target, width {width}", number(ms), number(ratio))
    for name, ms in steps["draft_ms"].items():
        whole = name == "draft"
        ratio = steps["draft_relative_to_width_1"] if whole else None
        rows.add_row("draft, all of it" if whole else name, number(ms), number(ratio))
    console.print(rows)


def _peer(peer: dict[str, Any], console: Console) -> None:
    heading(
        console,
        f"transformers {peer['transformers']} (torch {peer['torch']}, {peer['threads']} threads, "
        f"{peer['dtype']}), {peer['prompts']} prompts",
    )
    rows = table("", "")
    rows.add_row("its TPOT median (ms)", number(peer["tpot_ms"], ".1f"))
    rows.add_row("our plain TPOT on these prompts (ms)", number(peer["plain_tpot_ms"], ".1f"))
    rows.add_row("our speculative TPOT (ms)", number(peer["speculative_tpot_ms"], ".1f"))
    rows.add_row("our width-1 step (ms)", number(peer["width_1_step_ms"], ".1f"))
    rows.add_row(
        "our width-1 step relative to its TPOT", number(peer["width_1_step_relative_to_peer"])
    )
    rows.add_row("speed-up of plain over it", number(peer["speedup_of_plain"]))
    rows.add_row("speed-up of speculative over it", number(peer["speedup_of_speculative"]))
    if peer["identical_to_plain"] is not None:
        same = f"{peer['identical_to_plain']} of {peer['prompts']}"
        rows.add_row("same token ids as our plain", same)
    console.print(rows)


def _divergences(records: list[dict[str, Any]], console: Console) -> None:
    differing = [r for r in records if r["divergence"] is not None]
    if differing:
        console.print()
    for entry in differing:
        d = entry["divergence"]
        ids = (
            "(ended)" if d[key] is None else str(d[key]) for key in ("plain_id", "speculative_id")
        )
        console.print(
            f"{entry['file']}, line {entry['line']}: first difference at token {d['position']}, "
            f"{' → '.join(ids)}; the target's two best logits there are {d['logit_gap']:.2e} apart"
        )
