"""The readable report of `gpu_check`: Markdown from its JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def markdown(found: dict[str, Any]) -> str:
    """Sections, then parity, goldens, CUDA graphs, times and tracebacks."""
    counts = [s["status"] for s in found["sections"]]
    lines = [
        "# GPU check",
        "",
        f"{'Passed' if found['ok'] else 'NOT passed'}: "
        + ", ".join(f"{counts.count(w)} {w}" for w in ("passed", "failed", "skipped"))
        + f" sections in {found['seconds']:.0f} s.",
    ]
    if found["dry_run"]:
        lines += ["", "**Dry run on the CPU: nothing here was measured on a GPU.**"]
    lines += ["", *_environment(found["environment"]), "", "## Sections", ""]
    lines += _table(
        ("section", "status", "seconds", "estimate", "reason"),
        (
            (
                s["name"] + (" (an earlier run)" if s["earlier"] else ""),
                s["status"],
                f"{s['seconds']:.1f}",
                f"{s['estimate']:.0f}",
                s["reason"] or "",
            )
            for s in found["sections"]
        ),
    )
    for kind, render in (
        ("doctor", _doctor),
        ("golden", _goldens),
        ("parity", _parity),
        ("graphs", _graphs),
        ("latency", _latency),
    ):
        chosen = [s for s in found["sections"] if s["name"].split(":")[0] == kind and s["result"]]
        if chosen:
            lines += ["", *render(chosen)]
    for section in found["sections"]:
        if section["traceback"]:
            lines += ["", f"## Traceback of {section['name']}", "", "```"]
            lines += [*section["traceback"].rstrip().splitlines(), "```"]
    return "\n".join(lines) + "\n"


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(columns)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + [
        "| " + " | ".join(" ".join(c.replace("|", "\\|").split()) for c in r) + " |" for r in rows
    ]


def _number(value: Any, form: str) -> str:
    """A figure; a dash where there is none, and NaN as the JSON has it."""
    return "–" if value is None else value if isinstance(value, str) else format(value, form)


def _environment(facts: dict[str, Any]) -> list[str]:
    gpus = [
        f"{g['name']}, compute capability {g['compute_capability']}, {g['memory'] / 2**30:.0f} GiB"
        for g in facts["gpus"]
    ]
    packages = [
        f"{name} {version}"
        for group in facts["packages"].values()
        for name, version in group.items()
        if version is not None
    ]
    driver = facts["driver"]
    return [
        f"- GPUs: {'; '.join(gpus) or 'none'}",
        f"- driver: {driver['version'] or 'none'}, serves CUDA {driver['cuda'] or 'none'}",
        f"- processor: {facts['system']['processor']}, {facts['system']['cores_available']} cores",
        f"- Python {facts['system']['python']}; {', '.join(packages)}",
    ]


def _doctor(sections: list[dict[str, Any]]) -> list[str]:
    backends = sections[0]["result"]["backends"]
    rows = (
        (b["provider"], b["status"], b["problem"] or "", str(len(b["differences"])))
        for b in backends
    )
    return ["## Providers", "", *_table(("provider", "status", "problem", "near ties"), rows)]


def _goldens(sections: list[dict[str, Any]]) -> list[str]:
    lines = ["## Goldens", "", "Greedy decoding of the official traces, speculative and plain.", ""]
    rows = []
    for s in sections:
        for name, r in s["result"]["pairs"].items():
            ties = sum(d["near_tie"] for d in r["differences"])
            error = r["max_trace_error"]
            rows.append(
                (
                    s["name"],
                    name,
                    r["dtype"],
                    f"{r['sequences'] - len(r['differences'])} of {r['sequences']}",
                    f"{ties} of {len(r['differences'])}",
                    f"{r['wrong_rounds']} of {r['rounds']}",
                    f"{_number(error, '.1e')} ({r['tolerance']:.0e})",
                )
            )
    columns = (
        "section",
        "pair",
        "dtype",
        "identical",
        "near ties",
        "wrong rounds",
        "trace error (allowed)",
    )
    return lines + _table(columns, rows)


def _parity(sections: list[dict[str, Any]]) -> list[str]:
    lines = ["## Parity with the CPU provider", ""]
    lines += ["Errors relative to max(1, largest value of the CPU's tensor); same inputs.", ""]
    rows = []
    for s in sections:
        for name, f in s["result"]["outputs"].items():
            rows.append(
                (
                    s["name"],
                    s["result"]["dtype"],
                    name,
                    _number(f["max_abs"], ".1e"),
                    f"{_number(f['max_rel'], '.1e')} ({f['tolerance']:.0e})",
                    f"{f['agree']} of {f['compared']}" if f["compared"] else "–",
                    "yes" if f["passed"] else "NO",
                )
            )
        for name in s["result"]["graphs_not_run"]:
            rows.append((s["name"], s["result"]["dtype"], name, "–", "not run", "–", "NO"))
    columns = ("section", "dtype", "output", "max abs", "max rel (allowed)", "picks", "passed")
    return lines + _table(columns, rows)


def _graphs(sections: list[dict[str, Any]]) -> list[str]:
    lines = ["## CUDA graphs against eager runs", "", "The same calls, output by output.", ""]
    rows = []
    for s in sections:
        r = s["result"]
        passes = [("eager again", r["eager_twice"])]
        passes += [(f"with graphs, pass {i + 1}", p) for i, p in enumerate(r["passes"])]
        for what, p in passes:
            rows.append(
                (
                    s["name"],
                    what,
                    "yes" if p["ids_equal"] else "NO",
                    f"{p['bit_equal']} of {p['tensors']}",
                    _number(p["max_difference"], ".1e"),
                )
            )
        counts = ", ".join(f"{n} {what}" for what, n in r["runs"].items()) or "none"
        rows.append((s["name"], f"runs: {counts}", "", "", ""))
        for graph, why in r["without_cuda_graphs"].items():
            rows.append((s["name"], f"{graph} without graphs: {why}", "", "", ""))
    return lines + _table(("section", "", "ids equal", "bit-equal", "largest difference"), rows)


def _latency(sections: list[dict[str, Any]]) -> list[str]:
    lines = ["## Times in ms: median / p90 / p99", ""]
    rows = []
    clocks = set()
    for s in sections:
        r = s["result"]
        clocks.add(f"{s['name']}: {r['clock']}")
        for requests, phases in r["requests"].items():
            rows.append(
                (
                    s["name"],
                    r["dtype"],
                    requests,
                    *(
                        " / ".join(f"{phases[p][q]:.2f}" for q in ("median", "p90", "p99"))
                        for p in ("draft", "verify", "accept", "round", "plain", "host")
                    ),
                    str(phases["round"]["n"]),
                    f"{phases['break_even_tau']:.2f}",
                )
            )
    columns = (
        "section",
        "dtype",
        "R",
        "draft",
        "verify",
        "accept",
        "round",
        "plain step",
        "host",
        "rounds",
        "break-even τ",
    )
    lines += _table(columns, rows)
    return [*lines, "", "Clocks: " + "; ".join(sorted(clocks)) + "."]
