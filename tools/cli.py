"""The `draftgraph` command. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from typer.core import TyperGroup

from ..graphs.errors import DraftgraphError
from . import console

if TYPE_CHECKING:
    from ..runtime import Engine, Output, SamplingParams
    from ..runtime.tokenizer import Prompt

T = TypeVar("T")

# Distributions of draftgraph[export] by the module whose absence tells that they are missing.
_EXPORT_MODULES = {
    "torch",
    "transformers",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "ml_dtypes",
    "safetensors",
    "gguf",
    "accelerate",
}


class _Group(TyperGroup):
    """Turns the errors that a user can cause into one paragraph and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a closed pipe shows here, where typer still handles it
            return result
        except DraftgraphError as error:
            message = " ".join(str(error).split())
        print(f"error: {message}", file=sys.stderr)
        raise typer.Exit(2)


app = typer.Typer(
    name="draftgraph",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Export a target LLM and its block drafter to ONNX graphs and run speculative decoding.",
)

BundlePath = Annotated[Path, typer.Argument(help="Bundle directory.", show_default=False)]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. [default: all cores]")]
MarkovHead = Annotated[
    Literal["auto", "full", "topk"],
    typer.Option(help="Markov graph: over the full vocabulary, or over the top k base logits."),
]
Provider = Annotated[
    str,
    typer.Option(
        help="What runs the graphs: cpu, cuda, tensorrt, nv-tensorrt-rtx, tensorrt-native or "
        "tensorrt-rtx-native."
    ),
]
Device = Annotated[int, typer.Option(min=0, help="Number of the GPU.")]
Capacity = Annotated[
    int | None,
    typer.Option(
        help="Cache rows per request; the TensorRT providers need it, the others grow.",
        show_default=False,
    ),
]
CudaGraphs = Annotated[
    bool | None,
    typer.Option("--cuda-graphs/--no-cuda-graphs", help="[default: where the provider can]"),
]
StrictPlacement = Annotated[
    bool,
    typer.Option("--strict-placement", help="Refuse graphs with nodes outside of the provider."),
]
NoVerify = Annotated[
    bool, typer.Option("--no-verify", help="Do not compare the files with their hashes.")
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Scheduler = Annotated[
    str,
    typer.Option(
        help="How much of a block to verify: full, threshold (by confidence), or early-stop, "
        "lagged, live-argmax (by confidence and the cost table of `profile`)."
    ),
]
ChatTemplate = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Put prompts into the chat template. [default: when the bundle has one]",
    ),
]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")]
Threshold = Annotated[float, typer.Option(help="Confidence below which a block is cut.")]


def _requests_option(what: str, default: str) -> Any:
    """The option that `_requests` reads."""
    return typer.Option(
        help=f"{what}, as 1,4 or repeated. [default: {default}]", show_default=False
    )


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("draftgraph"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    console.show_warnings()


@app.command()
def export(
    target: Annotated[str, typer.Option(help="Checkpoint directory, .gguf file or hub id.")],
    drafter: Annotated[str, typer.Option(help="DSpark or DFlash checkpoint directory or hub id.")],
    out: Annotated[Path, typer.Option(help="Bundle directory to write.")],
    dtype: Annotated[Literal["fp32", "fp16", "bf16"], typer.Option()] = "fp32",
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of a request, prompt and generated. "
            "[default: the model's limit, at most 4096]"
        ),
    ] = None,
    markov_top_k: Annotated[
        int, typer.Option(min=0, help="Also write a Markov graph over the top k; 0: full only.")
    ] = 128,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            help="Draft only so many tokens, the first of the drafter's draft_vocab.json. "
            "[default: all]"
        ),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="Block layout, if not the checkpoint's: anchor-first.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Calibration of this drafter's confidences to put into the bundle: a file of "
            "calibrate, of SGLang or of TensorRT-LLM."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing bundle.")
    ] = False,
) -> None:
    """Write the bundle of a target and its drafter, and validate it against torch."""
    try:
        from ..export.bundle import export_bundle
        from ..export.checkpoints import read_draft, read_target
        from ..export.draft_vocab import restrict
    except ImportError as error:
        raise _missing_extra(error, "export", "export") from None
    from ..runtime.bundle import load_bundle
    from ..runtime.calibration import Calibration
    from ..runtime.engine import CALIBRATION
    from .inspect_bundle import describe, render_validation

    console.progress(f"reading target {target}")
    target_checkpoint = read_target(target)
    console.progress(f"reading drafter {drafter}")
    draft_checkpoint = read_draft(drafter, target_checkpoint, layout=layout)
    if draft_vocab is not None:
        draft_checkpoint = restrict(draft_checkpoint, draft_vocab)
    known = None
    if calibration is not None:
        if not draft_checkpoint.contract.has_confidence:
            raise DraftgraphError(f"--calibration: {drafter} has no confidence head to calibrate")
        known = Calibration.read(calibration, draft_checkpoint.contract.block_size)
    path = export_bundle(
        target_checkpoint,
        draft_checkpoint,
        out,
        dtype=dtype,
        max_seq_len=max_seq_len,
        markov_top_k=markov_top_k or None,
        overwrite=overwrite,
        report=console.progress,
    )
    if known is not None:
        known.save(path / CALIBRATION)
    facts = describe(load_bundle(path, verify=False))
    screen = console.stdout()
    screen.print(f"{path}: {console.size(facts['bytes'])}, {facts['dtype']}")
    render_validation(facts["validation"], screen)


@app.command()
def inspect(
    bundle: BundlePath,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    no_verify: NoVerify = False,
) -> None:
    """Show a bundle's contracts, graphs, tensors, cache sizes and validation figures."""
    from ..runtime.bundle import load_bundle
    from .inspect_bundle import describe, render

    facts = describe(load_bundle(bundle, verify=not no_verify))
    if as_json:
        print(json.dumps(facts, indent=1, ensure_ascii=False))
    else:
        render(facts, console.stdout())


@app.command()
def generate(
    bundle: BundlePath,
    prompt: Annotated[str | None, typer.Option(help="Prompt text.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Prompt as token ids: 5,6,7.")] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(help="File with the prompt text, - for stdin; its last newline is dropped."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the bundle's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    temperature: Temperature = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(help="Token budget.")] = 128,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop string; may be repeated.", show_default=False)
    ] = None,
    stop_ids: Annotated[
        str | None,
        typer.Option(help='Stop ids: 1,2; "" for none. [default: the checkpoint\'s]'),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    draft_sampling: Annotated[
        str, typer.Option(help='"sample" or "greedy": how drafts are drawn; outputs stay exact.')
    ] = "sample",
    scheduler: Scheduler = "full",
    threshold: Threshold = 0.5,
    no_speculative: Annotated[
        bool, typer.Option("--no-speculative", help="One token at a time, same target graph.")
    ] = False,
    provider: Provider = "cpu",
    device: Device = 0,
    capacity: Capacity = None,
    cuda_graphs: CudaGraphs = None,
    strict_placement: StrictPlacement = False,
    threads: Threads = None,
    markov: MarkovHead = "auto",
    no_verify: NoVerify = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print acceptance and timings to stderr.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode one prompt; text appears as it is committed."""
    from ..runtime import SamplingParams

    request = _prompt(prompt, prompt_ids, prompt_file, chat, system)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        stop_ids=None if stop_ids is None else _ids("--stop-ids", stop_ids),
        stop=tuple(stop or ()),
        seed=seed,
        draft_sampling=draft_sampling,  # type: ignore[arg-type]  # checked by SamplingParams
        scheduler=scheduler,
        threshold=threshold,
    )
    engine = _load(
        bundle,
        provider,
        no_verify=no_verify,
        max_requests=1,
        threads=threads,
        markov=markov,
        device_id=device,
        capacity=capacity,
        cuda_graphs=cuda_graphs,
        strict_placement=strict_placement,
    )
    if as_json:
        output = engine.generate(request, params, speculative=not no_speculative)
        print(json.dumps(_as_json(output), ensure_ascii=False))
    else:
        output = _stream(engine, request, params, speculative=not no_speculative)
    if stats:
        from .stats import render_stats

        sys.stdout.flush()
        render_stats(engine, output)


def _load(bundle: Path, provider: str, *, no_verify: bool, **options: Any) -> Engine:
    """The engine of a command; options that were not given are left to the provider."""
    from ..runtime import Engine

    given = {name: value for name, value in options.items() if value not in (None, False)}
    if options["cuda_graphs"] is False:
        given["cuda_graphs"] = False
    return Engine.load(bundle, provider, verify=not no_verify, **given)


def _prompt(
    text: str | None, ids: str | None, file: str | None, chat: bool, system: str | None
) -> Prompt:
    """The prompt from exactly one of its three options."""
    if sum(option is not None for option in (text, ids, file)) != 1:
        raise DraftgraphError("give exactly one of --prompt, --prompt-ids and --prompt-file")
    if system is not None and not chat:
        raise DraftgraphError("--system is a chat message; it needs --chat")
    if ids is not None:
        if chat:
            raise DraftgraphError("--chat formats text; with --prompt-ids leave it out")
        return _ids("--prompt-ids", ids)
    if file is not None:
        text = _read_text(file)
    assert text is not None
    if not text:
        raise DraftgraphError("the prompt is empty; give at least one character")
    if not chat:
        return text
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": text}]


def _read_text(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise DraftgraphError(f"{file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise DraftgraphError(f"{file}: not UTF-8 text (byte {error.start})") from None


def _ids(option: str, text: str) -> tuple[int, ...]:
    expected = "token ids separated by commas, for example 5,6,7"
    return _separated(option, text, int, expected) if text.strip() else ()


def _numbers(option: str, text: str) -> tuple[float, ...]:
    return _separated(option, text, float, "numbers separated by commas, for example 0,0.8")


def _requests(option: str, parts: list[str]) -> tuple[int, ...]:
    """Numbers of requests, each once, in the order in which they were given."""

    def read(part: str) -> int:
        if int(part) < 1:
            raise ValueError
        return int(part)

    expected = "numbers of requests from 1 on, separated by commas, for example 1,4"
    return tuple(dict.fromkeys(_separated(option, ",".join(parts), read, expected)))


def _separated(option: str, text: str, read: Callable[[str], T], expected: str) -> tuple[T, ...]:
    try:
        return tuple(read(part) for part in text.split(","))
    except ValueError:
        raise DraftgraphError(f"{option} is {text!r}, expected {expected}") from None


def _stream(engine: Engine, prompt: Prompt, params: SamplingParams, *, speculative: bool) -> Output:
    """Print text as it is committed, or the ids at the end when there is no tokenizer."""
    if not engine.tokenizer.available:
        output = engine.generate(prompt, params, speculative=speculative)
        print(",".join(map(str, output.token_ids)))
        return output
    pieces = engine.stream(prompt, params, speculative=speculative)
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            print()
            output = end.value
            return output
        sys.stdout.write(piece)
        sys.stdout.flush()


def _as_json(output: Output) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "prompt_ids": output.prompt_ids,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "rounds": [asdict(r) for r in output.rounds],
        "stats": output.stats.to_dict(),
    }


@app.command()
def bench(
    bundle: BundlePath,
    prompts: Annotated[
        list[Path],
        typer.Option(help="JSON lines with a prompt each, or text with one a line; repeatable."),
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Token budget.")] = 128,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of every prompt.")] = 1,
    temperature: Temperature = 0.0,
    scheduler: Scheduler = "full",
    threshold: Threshold = 0.5,
    provider: Provider = "cpu",
    device: Device = 0,
    capacity: Capacity = None,
    cuda_graphs: CudaGraphs = None,
    strict_placement: StrictPlacement = False,
    threads: Threads = None,
    markov: MarkovHead = "auto",
    no_verify: NoVerify = False,
    chat: ChatTemplate = None,
    compare: Annotated[
        str | None, typer.Option(help="Peer to run interleaved: transformers.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option(help="The peer's checkpoint: directory or .gguf file.")
    ] = None,
    compare_limit: Annotated[
        int, typer.Option(min=1, help="Prompts of each file that the peer runs.")
    ] = 2,
    json_out: JsonOut = None,
) -> None:
    """Measure plain against speculative decoding on the same prompts, interleaved."""
    from ..runtime import SamplingParams
    from .bench import Bench, check_comparison, write_json
    from .bench_report import render
    from .prompts import read_prompts

    params = SamplingParams(
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        scheduler=scheduler,
        threshold=threshold,
    )
    sets = [read_prompts(file, limit) for file in prompts]
    peer_path = check_comparison(compare, target)
    _check_output(json_out)
    engine = _load(
        bundle,
        provider,
        no_verify=no_verify,
        max_requests=1,
        threads=threads,
        markov=markov,
        device_id=device,
        capacity=capacity,
        cuda_graphs=cuda_graphs,
        strict_placement=strict_placement,
    )
    measured = Bench(
        engine,
        params,
        threads=threads,
        repeat=repeat,
        chat=chat,
        peer_path=peer_path,
        peer_limit=compare_limit,
        report=console.progress,
    ).run(sets)
    if json_out is not None:
        write_json(json_out, measured)
    render(measured, console.stdout())


@app.command()
def sweep(
    bundle: BundlePath,
    prompts: Annotated[
        list[Path],
        typer.Option(help="JSON lines with a prompt each, or text with one a line; repeatable."),
    ],
    schedule: Annotated[
        list[str],
        typer.Option(
            help="full, full:WIDTH, threshold:VALUE, early-stop, lagged or live-argmax; repeatable."
        ),
    ],
    batch: Annotated[
        list[str] | None, _requests_option("Numbers of requests decoded together", "1")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Token budget.")] = 128,
    repeat: Annotated[int, typer.Option(help="Passes; speeds are their medians.")] = 5,
    chat: ChatTemplate = None,
    provider: Provider = "cpu",
    device: Device = 0,
    capacity: Capacity = None,
    cuda_graphs: CudaGraphs = None,
    strict_placement: StrictPlacement = False,
    threads: Threads = None,
    no_verify: NoVerify = False,
    json_out: JsonOut = None,
) -> None:
    """Compare schedules with plain greedy decoding, in turns, by batch size and prompt file."""
    from ..runtime import SamplingParams
    from ..runtime.jsonfile import write_json
    from .prompts import read_prompts
    from .sweep import Sweep, parse_schedule, render, twin

    params = SamplingParams(max_new_tokens=max_new_tokens)
    schedules = [parse_schedule(text, params) for text in schedule]
    batches = _requests("--batch", batch or ["1"])
    sets = [read_prompts(file, limit) for file in prompts]
    _check_output(json_out)
    engine = _load(
        bundle,
        provider,
        no_verify=no_verify,
        max_requests=max(batches),
        threads=threads,
        device_id=device,
        capacity=capacity,
        cuda_graphs=cuda_graphs,
        strict_placement=strict_placement,
    )
    measured = Sweep(
        engine,
        schedules,
        another=partial(twin, engine) if provider == "cpu" else None,
        max_new_tokens=max_new_tokens,
        repeat=repeat,
        chat=chat,
        report=console.progress,
    ).run(sets, batches)
    if json_out is not None:
        write_json(json_out, measured)
    render(measured, console.stdout())


@app.command()
def compare(
    bundle: BundlePath,
    reference: Annotated[
        Path, typer.Argument(help="Bundle to compare it with, as a rule fp32.", show_default=False)
    ],
    prompts: Annotated[
        list[Path],
        typer.Option(help="JSON lines with a prompt each, or text with one a line; repeatable."),
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Token budget.")] = 64,
    chat: ChatTemplate = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests decoded together.")] = 8,
    threads: Threads = None,
    no_verify: NoVerify = False,
    json_out: JsonOut = None,
) -> None:
    """Compare a bundle's logits and greedy output with those of another; both are loaded."""
    from ..runtime import Engine
    from ..runtime.jsonfile import write_json
    from .compare import Comparison, render
    from .prompts import read_prompts

    sets = [read_prompts(file, limit) for file in prompts]
    _check_output(json_out)
    engines = [
        Engine.load(path, verify=not no_verify, threads=threads, max_requests=batch)
        for path in (bundle, reference)
    ]
    compared = Comparison(
        *engines, max_new_tokens=max_new_tokens, chat=chat, report=console.progress
    ).run(sets)
    if json_out is not None:
        write_json(json_out, compared)
    render(compared, console.stdout())


def _check_output(file: Path | None) -> None:
    """Refuse a file that cannot be written before anything is measured."""
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise DraftgraphError(f"{file}: give a file name in an existing directory for --json")


@app.command()
def profile(
    bundle: BundlePath,
    batch: Annotated[
        list[str] | None, _requests_option("Numbers of requests to measure", "1,2,4,8")
    ] = None,
    context: Annotated[int, typer.Option(help="Committed tokens of every request.")] = 256,
    repeat: Annotated[int, typer.Option(help="Timed passes; medians are kept.")] = 11,
    provider: Provider = "cpu",
    device: Device = 0,
    capacity: Capacity = None,
    cuda_graphs: CudaGraphs = None,
    strict_placement: StrictPlacement = False,
    threads: Threads = None,
    markov: MarkovHead = "auto",
    no_verify: NoVerify = False,
) -> None:
    """Measure what a step costs on this machine; the cost-based schedulers need it."""
    from ..runtime.costs import fingerprint_name
    from ..runtime.engine import COSTS
    from .profile import profile as measure

    batches = _requests("--batch", batch or ["1,2,4,8"])
    engine = _load(
        bundle,
        provider,
        no_verify=no_verify,
        max_requests=max(batches),
        threads=threads,
        markov=markov,
        device_id=device,
        capacity=capacity,
        cuda_graphs=cuda_graphs,
        strict_placement=strict_placement,
    )
    table = measure(
        engine, batches=batches, context=context, repeat=repeat, report=console.progress
    )
    folder = bundle / COSTS
    folder.mkdir(exist_ok=True)
    file = folder / f"{fingerprint_name(table.fingerprint)}.json"
    table.save(file)
    show = console.table("requests", "tokens", "step ms", "draft ms", left=0)
    for (requests, tokens), ms in sorted(table.cells.items()):
        draft = f"{table.draft_ms[requests]:.1f}" if tokens == requests else ""
        show.add_row(str(requests), str(tokens), f"{ms:.1f}", draft)
    out = console.stdout()
    out.print(show)
    out.print(f"wrote {file}")


@app.command()
def calibrate(
    bundle: BundlePath,
    prompts: Annotated[
        list[Path],
        typer.Option(help="JSON lines with a prompt each, or text with one a line; repeatable."),
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Token budget.")] = 128,
    temperature: Temperature = 0.0,
    held_out: Annotated[
        float, typer.Option(help="Share of the prompts that is measured on and not fitted to.")
    ] = 0.25,
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    chat: ChatTemplate = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests decoded together.")] = 4,
    trace: Annotated[
        Path | None, typer.Option(help="Also write the rounds here, for simulate.")
    ] = None,
    provider: Provider = "cpu",
    device: Device = 0,
    capacity: Capacity = None,
    cuda_graphs: CudaGraphs = None,
    strict_placement: StrictPlacement = False,
    threads: Threads = None,
    no_verify: NoVerify = False,
) -> None:
    """Fit the confidence temperatures (STS) under full verification, into the bundle."""
    from ..runtime import SamplingParams
    from ..runtime.calibration import fit, reliability_svg
    from ..runtime.engine import CALIBRATION
    from ..runtime.jsonfile import write_text
    from ..runtime.simulate import save_trace, trace_from_rounds
    from .calibrate import calibration_data, record
    from .prompts import read_prompts

    if not 0 < held_out < 1:
        raise DraftgraphError(f"--held-out is {held_out}, expected a share between 0 and 1")
    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    sets = [read_prompts(file, limit) for file in prompts]
    engine = _load(
        bundle,
        provider,
        no_verify=no_verify,
        max_requests=batch,
        threads=threads,
        device_id=device,
        capacity=capacity,
        cuda_graphs=cuda_graphs,
        strict_placement=strict_placement,
    )
    wrap = engine.tokenizer.has_chat_template if chat is None else chat
    asked = [p.formatted(wrap) for s in sets for p in s.prompts]
    outputs = record(engine, asked, params, console.progress)
    data = calibration_data(outputs, engine.gamma, temperature)
    console.progress(f"fitting on {len(data.logits)} blocks")
    fitted = fit(data, gamma=engine.gamma, held_out=held_out)
    fitted.save(bundle / CALIBRATION)
    write_text(bundle / "calibration.svg", reliability_svg(fitted))
    if trace is not None:
        save_trace(trace, trace_from_rounds([o.rounds for o in outputs], engine.gamma))
    show = console.table("position", "T", "ECE before", "after", "AUROC", "Brier before", "after")
    assert fitted.before is not None and fitted.after is not None
    for k, t in enumerate(fitted.temperatures):
        show.add_row(
            str(k + 1),
            f"{t:.3f}",
            f"{fitted.before.ece[k]:.4f}",
            f"{fitted.after.ece[k]:.4f}",
            console.number(fitted.after.auroc[k], ".3f"),
            f"{fitted.before.brier[k]:.4f}",
            f"{fitted.after.brier[k]:.4f}",
        )
    out = console.stdout()
    out.print(show)
    out.print(
        f"mean ECE on held-out prompts {fitted.before.mean_ece:.4f} -> "
        f"{fitted.after.mean_ece:.4f} ({fitted.fitted} blocks fitted, {fitted.held_out} held out)"
    )
    out.print(f"wrote {bundle / CALIBRATION} and calibration.svg")


@app.command()
def simulate(
    trace: Annotated[Path, typer.Option(help="Rounds, from calibrate --trace.")],
    costs: Annotated[Path, typer.Option(help="A cost table (profile, or of another machine).")],
    concurrency: Annotated[
        list[str] | None, _requests_option("Numbers of requests", "what the table covers")
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks replayed for each point.")] = 2000,
    threshold: Threshold = 0.5,
    sampled: Annotated[
        bool, typer.Option("--sampled", help="The trace comes from sampled drafts.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Order of the requests.")] = 0,
    svg: Annotated[Path | None, typer.Option(help="Also draw both figures here.")] = None,
) -> None:
    """Replay recorded rounds against a cost table: every policy at every concurrency."""
    from ..runtime.costs import CostTable
    from ..runtime.jsonfile import write_text
    from ..runtime.scheduler import POLICIES
    from ..runtime.simulate import CONCURRENCY, PLAIN, load_trace, plot_svg, table_text
    from ..runtime.simulate import simulate as replay

    traces, table = load_trace(trace), CostTable.load(costs)
    width = traces[0].confidence.shape[1] + 1
    if concurrency:
        levels = list(_requests("--concurrency", concurrency))
    else:
        levels = [r for r in CONCURRENCY if table.covers(r, r * width)]
    points = replay(
        traces,
        table,
        concurrency=levels,
        policies=[PLAIN, *(p for p in POLICIES if not (sampled and p == "live-argmax"))],
        threshold=threshold,
        sampled=sampled,
        blocks=blocks,
        seed=seed,
    )
    print(table_text(points), end="")
    if svg is not None:
        write_text(svg, plot_svg(points))


@app.command()
def build(
    bundle: BundlePath,
    backend: Annotated[Literal["tensorrt", "tensorrt-rtx"], typer.Option()] = "tensorrt-rtx",
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(
            help="Device to build for, TensorRT-RTX only; repeatable. [default: 8.6, 8.9, 12.0]",
            show_default=False,
        ),
    ] = None,
    capacity: Annotated[
        int | None, typer.Option(help="Cache rows per request, fixed in the engine. Required.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Most requests of one call.")] = 8,
    prefill_len: Annotated[int, typer.Option(help="Most prompt tokens of one call.")] = 1024,
    workspace: Annotated[
        int | None, typer.Option(min=1, help="Limit of scratch memory in MiB.")
    ] = None,
    graph: Annotated[
        list[str] | None, typer.Option(help="Only this graph; repeatable.", show_default=False)
    ] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Build even where the engine is there.")
    ] = False,
) -> None:
    """Compile the graphs of an fp16 or bf16 bundle into TensorRT engines."""
    try:
        from ..export.engines import EngineOptions
    except ImportError as error:
        raise _missing_extra(error, "build", "export") from None
    from .build import build as run

    options = EngineOptions(
        backend,
        capacity,
        tuple(compute_capability or ()),
        max_batch=max_batch,
        prefill_len=prefill_len,
        workspace_mib=workspace,
    )
    run(bundle, options, graphs=graph, rebuild=rebuild)


@app.command()
def doctor(
    bundle: Annotated[
        Path | None,
        typer.Argument(help="Try this bundle instead of a tiny random pair.", show_default=False),
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Show what is installed, which providers can run here and why not, and try those that can.

    Exit code 1 when one that can run fails, or the bundle is broken.
    """
    from ..runtime.jsonfile import write_json
    from .doctor import doctor as examine
    from .doctor import render

    _check_output(json_out)
    found = examine(bundle, console.progress)
    if json_out is not None:
        write_json(json_out, found)
    render(found, console.stdout())
    if not found["ok"]:
        raise typer.Exit(1)


@app.command()
def fit(
    target: Annotated[str, typer.Option(help="Checkpoint directory, .gguf file or hub id.")],
    out: Annotated[Path, typer.Option(help="Directory of the run; the same call goes on in it.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON lines with a prompt each, or text with one a line; repeatable. Files take "
            "turns, so each has an equal share.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        list[Path] | None,
        typer.Option(
            help="Texts this target sampled earlier (.npz: tokens, lengths, starts, temps).",
            show_default=False,
        ),
    ] = None,
    init: Annotated[
        Path | None, typer.Option(help="Drafter to go on from; it gives the shape too.")
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(help="Bundle whose target graph is used, and whose drafter's shape."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Data folder to use and add to. [default: OUT/data]")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to sample from the target.")] = 120_000,
    anchors: Annotated[int, typer.Option(help="Blocks to train on.")] = 400_000,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    temperatures: Annotated[
        str, typer.Option(help="Sampling temperatures, taking turns.")
    ] = "0,0.6,0.8,1",
    self_written: Annotated[
        float, typer.Option(help="Share of prompts that the target writes itself.")
    ] = 0.12,
    held_out: Annotated[float, typer.Option(help="Share of prompts kept for measuring.")] = 0.06,
    chat: ChatTemplate = None,
    block_size: Annotated[int, typer.Option(help="Drafted tokens of a round, γ.")] = 7,
    layers: Annotated[int, typer.Option(help="Layers of the drafter.")] = 2,
    intermediate: Annotated[
        int | None, typer.Option(min=1, help="Width of its MLP. [default: the target's]")
    ] = None,
    taps: Annotated[
        str | None,
        typer.Option(help="Target layers it reads: 1,8,15. [default: five, evenly spaced]"),
    ] = None,
    mask_id: Annotated[
        int | None, typer.Option(help="Token of empty slots. [default: an unused special token]")
    ] = None,
    markov: Annotated[
        Literal["none", "vanilla", "gated", "rnn"],
        typer.Option(help="Markov head; none is DFlash."),
    ] = "vanilla",
    markov_rank: Annotated[int, typer.Option(help="Rank of the Markov head.")] = 64,
    confidence: Annotated[
        bool, typer.Option("--confidence/--no-confidence", help="Train a confidence head.")
    ] = True,
    vocab: Annotated[
        int,
        typer.Option(
            help="Tokens with a column of their own in the training softmax: those of the step's "
            "targets, then the most frequent; 0: all."
        ),
    ] = 4096,
    sampled: Annotated[
        int, typer.Option(min=0, help="Further columns, drawn to stand for all other tokens.")
    ] = 1024,
    short_slots: Annotated[
        int,
        typer.Option(min=0, help="Slots of the blocks in the first part of training; 0: γ."),
    ] = 0,
    short_share: Annotated[
        float, typer.Option(min=0, max=1, help="How long that part is, as a share of the steps.")
    ] = 0.75,
    sequences_per_step: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 4,
    anchors_per_sequence: Annotated[int, typer.Option(min=1, help="Blocks of each.")] = 64,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1.2e-3,
    weight_decay: Annotated[float, typer.Option(min=0, help="Of matrices.")] = 0.01,
    precision: Annotated[
        Literal["auto", "fp32", "bf16"],
        typer.Option(help="Of the matrix products; auto: bf16 where it is measured to be faster."),
    ] = "auto",
    checkpoints: Annotated[int, typer.Option(help="How often to measure and report.")] = 8,
    cache_gib: Annotated[
        float, typer.Option(help="Disk for target features; beyond it they are recomputed.")
    ] = 8.0,
    requests: Annotated[int, typer.Option(help="Texts sampled together.")] = 16,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each file.")] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(help="Of the bundle. [default: the model's limit, at most 4096]")
    ] = None,
    with_embeddings: Annotated[
        bool,
        typer.Option("--with-embeddings", help="Also store the target's embedding and head."),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything.")] = 0,
    threads: Threads = None,
) -> None:
    """Fit a DSpark or DFlash drafter to a target, from texts that the target writes."""
    try:
        from .fit_drafter import DataOptions, FitOptions, Shape, TrainOptions
        from .fit_drafter import fit as run
    except ImportError as error:
        raise _missing_extra(error, "fit", "export") from None
    from .fit_report import render

    options = FitOptions(
        target=target,
        out=out,
        prompts=tuple(prompts or ()),
        samples=tuple(samples or ()),
        init=init,
        bundle=bundle,
        data_dir=data,
        shape=Shape(
            block_size=block_size,
            layers=layers,
            intermediate_size=intermediate,
            taps=None if taps is None else _ids("--taps", taps),
            mask_token_id=mask_id,
            markov=markov,
            markov_rank=markov_rank,
            confidence=confidence,
        ),
        data=DataOptions(
            tokens=tokens,
            max_new_tokens=max_new_tokens,
            temperatures=_numbers("--temperatures", temperatures),
            self_written=self_written,
            held_out=held_out,
            chat=chat,
            requests=requests,
            cache_gib=cache_gib,
        ),
        train=TrainOptions(
            anchors=anchors,
            sequences_per_step=sequences_per_step,
            anchors_per_sequence=anchors_per_sequence,
            learning_rate=lr,
            weight_decay=weight_decay,
            vocab=vocab,
            sampled=sampled,
            short_slots=short_slots,
            short_share=short_share,
            precision=precision,
            checkpoints=checkpoints,
        ),
        seed=seed,
        limit=limit,
        max_seq_len=max_seq_len,
        with_embeddings=with_embeddings,
        threads=threads,
    )
    render(run(options, console.progress), console.stdout())


@app.command()
def fit_compare(
    target: Annotated[str, typer.Option(help="The target that the data was sampled from.")],
    data: Annotated[Path, typer.Option(help="Data folder of a fit.")],
    families: Annotated[
        str, typer.Option(help="Of dspark, dflash, eagle3, mtp, medusa.")
    ] = "dspark,dflash,eagle3,mtp,medusa",
    anchors: Annotated[int, typer.Option(min=1, help="Blocks to train each on.")] = 50_000,
    block_size: Annotated[int, typer.Option(min=1, help="Drafted tokens of a round, γ.")] = 7,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the block drafters.")] = 2,
    markov_rank: Annotated[int, typer.Option(min=1, help="Rank of DSpark's Markov head.")] = 64,
    vocab: Annotated[int, typer.Option(min=0, help="Own columns of the training softmax.")] = 4096,
    sequences_per_step: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 4,
    anchors_per_sequence: Annotated[int, typer.Option(min=1, help="Blocks of each.")] = 64,
    lr: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = 1.2e-3,
    drafter: Annotated[
        list[Path] | None, typer.Option(help="Finished drafters to measure beside them.")
    ] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(help="Held-out prompts: greedy τ by file.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First prompts of each file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens for each prompt.")] = 96,
    out: Annotated[
        Path | None,
        typer.Option(help="Keep checkpoints here: the same call goes on after an interruption."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything.")] = 0,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Train small drafters of several families on the same data and compare them."""
    try:
        from .fit_compare import compare, render
        from .fit_drafter import Shape, TrainOptions
    except ImportError as error:
        raise _missing_extra(error, "fit-compare", "export") from None
    from ..runtime.jsonfile import write_json
    from .prompts import read_prompts

    rows = compare(
        target,
        data,
        [family for family in families.split(",") if family],
        Shape(block_size=block_size, layers=layers, markov_rank=markov_rank),
        TrainOptions(
            anchors=anchors,
            sequences_per_step=sequences_per_step,
            anchors_per_sequence=anchors_per_sequence,
            learning_rate=lr,
            vocab=vocab,
        ),
        drafters=drafter or [],
        prompts=[read_prompts(file, limit) for file in prompts or []],
        max_new_tokens=max_new_tokens,
        out=out,
        seed=seed,
        threads=threads,
        report=console.progress,
    )
    if json_out is not None:
        write_json(json_out, {"schema_version": 1, "rows": rows})
    render(rows, console.stdout())


def _missing_extra(error: ImportError, command: str, extra: str) -> Exception:
    """The error of a command whose extra is not installed; any other import error as it is."""
    module = (error.name or "").split(".")[0]
    if module not in _EXPORT_MODULES:
        return error
    return DraftgraphError(
        f"`draftgraph {command}` needs {module}, which is not installed; install what it needs "
        f'with: pip install "draftgraph[{extra}]"'
    )


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
