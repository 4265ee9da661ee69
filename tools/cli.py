"""The `draftgraph` command. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from ..graphs.errors import DraftgraphError
from . import console

if TYPE_CHECKING:
    from ..runtime import Engine, Output, SamplingParams
    from ..runtime.tokenizer import Prompt

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
NoVerify = Annotated[
    bool, typer.Option("--no-verify", help="Do not compare the files with their hashes.")
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Scheduler = Annotated[
    str, typer.Option(help='"full" verifies the whole block, "threshold" cuts it by confidence.')
]
Threshold = Annotated[float, typer.Option(help="Confidence below which a block is cut.")]


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
        typer.Option(help="Cache rows of a request. [default: the model's limit, at most 4096]"),
    ] = None,
    markov_top_k: Annotated[
        int, typer.Option(min=0, help="Also write a Markov graph over the top k; 0: full only.")
    ] = 128,
    layout: Annotated[
        str | None, typer.Option(help="Block layout, if not the checkpoint's: anchor-first.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing bundle.")
    ] = False,
) -> None:
    """Write the bundle of a target and its drafter, and validate it against torch."""
    try:
        from ..export.bundle import export_bundle
        from ..export.checkpoints import read_draft, read_target
    except ImportError as error:
        raise _missing_extra(error, "export", "export") from None
    from ..runtime.bundle import load_bundle
    from .inspect_bundle import describe, render_validation

    console.progress(f"reading target {target}")
    target_checkpoint = read_target(target)
    console.progress(f"reading drafter {drafter}")
    draft_checkpoint = read_draft(drafter, target_checkpoint, layout=layout)
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
    threads: Threads = None,
    markov: MarkovHead = "auto",
    no_verify: NoVerify = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print acceptance and timings to stderr.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode one prompt; text appears as it is committed."""
    from ..runtime import Engine, SamplingParams

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
    engine = Engine.load(bundle, verify=not no_verify, threads=threads, markov=markov)
    if as_json:
        output = engine.generate(request, params, speculative=not no_speculative)
        print(json.dumps(_as_json(output), ensure_ascii=False))
    else:
        output = _stream(engine, request, params, speculative=not no_speculative)
    if stats:
        from .stats import render_stats

        sys.stdout.flush()
        render_stats(engine, output)


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
    try:
        return tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        raise DraftgraphError(
            f"{option} is {text!r}, expected token ids separated by commas, for example 5,6,7"
        ) from None


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
    threads: Threads = None,
    markov: MarkovHead = "auto",
    no_verify: NoVerify = False,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put prompts into the chat template. [default: when the bundle has one]",
        ),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Peer to run interleaved: transformers.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option(help="The peer's checkpoint: directory or .gguf file.")
    ] = None,
    compare_limit: Annotated[
        int, typer.Option(min=1, help="Prompts of each file that the peer runs.")
    ] = 2,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
) -> None:
    """Measure plain against speculative decoding on the same prompts, interleaved."""
    from ..runtime import Engine, SamplingParams
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
    if json_out is not None and (json_out.is_dir() or not json_out.absolute().parent.is_dir()):
        raise DraftgraphError(f"{json_out}: give a file name in an existing directory for --json")
    engine = Engine.load(bundle, verify=not no_verify, threads=threads, markov=markov)
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
