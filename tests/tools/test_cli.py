"""The command line as a user meets it: output, wrong input, exit codes."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from helpers import run_cli as run
from helpers import run_cli_ok as ok
from typer.testing import CliRunner

from draftgraph.graphs.errors import DraftgraphError
from draftgraph.runtime import Engine, SamplingParams
from draftgraph.tools.cli import app

GOLDENS = Path(__file__).parents[1] / "goldens"
PROMPT_IDS = "--prompt-ids=5,6,7"


@pytest.fixture(scope="session")
def plain(bundle: Callable[..., Path]) -> Path:
    """A bundle without a tokenizer."""
    return bundle("qwen3-vanilla")


@pytest.fixture
def broken(plain: Path, tmp_path: Path) -> Path:
    """A copy of a bundle to damage."""
    return Path(shutil.copytree(plain, tmp_path / "broken"))


# generate


def test_without_a_tokenizer_the_ids_are_printed(plain: Path) -> None:
    expected = Engine.load(plain).generate([5, 6, 7], SamplingParams(max_new_tokens=12)).token_ids
    result = ok("generate", plain, PROMPT_IDS, "--max-new-tokens", "12")
    assert result.stdout == ",".join(map(str, expected)) + "\n"
    assert result.stderr == ""


def test_the_streamed_text_is_the_text(text_bundle: Path, text_engine: Engine) -> None:
    expected = text_engine.generate("the cat", SamplingParams(max_new_tokens=40)).text
    result = ok("generate", text_bundle, "--prompt", "the cat", "--max-new-tokens", "40")
    assert result.stdout == f"{expected}\n"


def test_json_is_one_object_with_everything(text_bundle: Path, text_engine: Engine) -> None:
    expected = text_engine.generate("the cat", SamplingParams(max_new_tokens=20))
    result = ok("generate", text_bundle, "--prompt", "the cat", "--max-new-tokens=20", "--json")
    found = json.loads(result.stdout)
    assert found["token_ids"] == expected.token_ids
    assert found["text"] == expected.text
    assert found["finish_reason"] == expected.finish_reason
    assert [r["accepted"] for r in found["rounds"]] == [r.accepted for r in expected.rounds]
    assert found["stats"]["generated_tokens"] == len(expected.token_ids)


def test_sampling_options_reach_the_engine(text_bundle: Path, text_engine: Engine) -> None:
    params = SamplingParams(
        temperature=0.9,
        top_k=20,
        top_p=0.95,
        max_new_tokens=30,
        stop_ids=(0,),
        stop=("q", "zz"),
        seed=7,
        draft_sampling="greedy",
        scheduler="threshold",
        threshold=0.3,
    )
    expected = text_engine.generate("ab", params)
    result = ok(
        *("generate", text_bundle, "--prompt", "ab", "--temperature", "0.9", "--top-k", "20"),
        *("--top-p", "0.95", "--max-new-tokens", "30", "--stop-ids", "0", "--stop", "q"),
        *("--stop", "zz", "--seed", "7", "--draft-sampling", "greedy"),
        *("--scheduler", "threshold", "--threshold", "0.3", "--json"),
    )
    found = json.loads(result.stdout)
    assert found["token_ids"] == expected.token_ids
    assert found["stats"]["verified"] == expected.stats.verified


def test_plain_decoding_gives_the_same_ids_without_rounds(plain: Path) -> None:
    arguments = ("generate", plain, PROMPT_IDS, "--max-new-tokens=20", "--json")
    fast = json.loads(ok(*arguments).stdout)
    slow = json.loads(ok(*arguments, "--no-speculative").stdout)
    assert slow["token_ids"] == fast["token_ids"]
    assert slow["rounds"] == [] and fast["rounds"] != []


def test_a_prompt_file_is_the_prompt_without_its_last_newline(
    text_bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("one\ntwo\n")
    arguments = ("generate", text_bundle, "--max-new-tokens=5", "--json")
    from_file = ok(*arguments, "--prompt-file", tmp_path / "prompt.txt")
    assert json.loads(from_file.stdout)["prompt_ids"] == Engine.load(text_bundle).tokenizer.encode(
        "one\ntwo"
    )
    from_stdin = CliRunner().invoke(
        app, [*map(str, arguments), "--prompt-file", "-"], input="one\ntwo\n"
    )
    assert json.loads(from_stdin.stdout)["prompt_ids"] == json.loads(from_file.stdout)["prompt_ids"]


def test_chat_formats_system_and_user_messages(text_bundle: Path, text_engine: Engine) -> None:
    result = ok(
        *("generate", text_bundle, "--prompt", "hi", "--chat", "--system", "be brief"),
        *("--max-new-tokens=3", "--json"),
    )
    expected = text_engine.tokenizer.encode("system: be brief\nuser: hi\nassistant: ")
    assert json.loads(result.stdout)["prompt_ids"] == expected


def test_stats_name_both_acceptance_rates_and_the_cache(plain: Path) -> None:
    result = ok("generate", plain, PROMPT_IDS, "--max-new-tokens=20", "--stats")
    for word in ("τ", "accepted/verified", "accepted/drafted", "TTFT", "TPOT", "host overhead"):
        assert word in result.stderr
    target, draft = Engine.load(plain).bundle.kv_bytes
    line = next(line for line in result.stderr.splitlines() if line.startswith("KV cache"))
    assert f"target 64 rows × {target} bytes" in line
    assert f"draft 64 rows × {draft} bytes" in line


# inspect


def test_inspect_prints_every_section(text_bundle: Path) -> None:
    text = ok("inspect", text_bundle).stdout
    for part in (
        "target contract",
        "draft contract",
        "tap_ids",
        "target.onnx",
        "past_key.0 … ",
        "[R, 2, C, 32]",
        "cache capacity in rows",
        "KV cache of one request",
        "max relative error",
        "model.safetensors",
        "chat template    yes",
    ):
        assert part in text


def test_inspect_json_holds_the_cache_sizes(plain: Path) -> None:
    facts = json.loads(ok("inspect", plain, "--json").stdout)
    target, draft = Engine.load(plain).bundle.kv_bytes
    assert facts["kv_cache"]["bytes_per_token"] == {"target": target, "draft": draft}
    by_capacity = facts["kv_cache"]["bytes_by_capacity"]
    assert by_capacity["256"]["total"] == 256 * (target + draft)
    assert str(facts["max_seq_len"]) in by_capacity
    assert facts["tokenizer"] is False and facts["chat_template"] is False
    assert facts["validation"]["checks"]["target"]["picks_compared"] > 0
    assert set(facts["provenance"]) == {"target", "draft"}


# export


def test_export_reports_steps_and_validation(tmp_path: Path) -> None:
    pair = GOLDENS / "qwen3-vanilla"
    arguments = ("export", "--target", pair / "target", "--drafter", pair / "draft")
    out = tmp_path / "made"
    result = ok(*arguments, "--out", out, "--max-seq-len=64", "--markov-top-k=0")
    assert "building target.onnx" in result.stderr
    assert str(out) in result.stdout and "max relative error" in result.stdout
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["max_seq_len"] == 64 and manifest["markov_top_k"] is None
    again = run(*arguments, "--out", out)
    assert again.exit_code == 2 and "--overwrite" in again.stderr


def test_export_takes_a_calibration_along(tmp_path: Path) -> None:
    """It is read before anything is written, and in force when the bundle is opened."""
    pair = GOLDENS / "qwen3-vanilla"
    arguments = ("export", "--target", pair / "target", "--drafter", pair / "draft")
    file, out = tmp_path / "c.json", tmp_path / "out"
    file.write_text('{"temperatures": [1.5, 2.0]}')
    result = run(*arguments, "--out", out, "--calibration", file)
    refused(result, "γ = 2, the drafter has γ = 7")
    assert not out.exists()
    file.write_text(json.dumps({"temperatures": [1.5] * 7}))
    ok(*arguments, "--out", out, "--max-seq-len=64", "--calibration", file)
    known = Engine.load(out).calibration
    assert known is not None and known.temperatures == (1.5,) * 7


def test_a_missing_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [m for m in sys.modules if m.startswith("draftgraph.export")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx", None)
    result = run("export", "--target", "a", "--drafter", "b", "--out", tmp_path / "x")
    assert result.exit_code == 2
    assert 'pip install "draftgraph[export]"' in result.stderr and "onnx" in result.stderr


# Wrong input: one paragraph on stderr, exit code 2


def refused(result: Any, *words: str) -> None:
    assert result.exit_code == 2, result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and result.stderr.splitlines()[-1] == errors[0]
    assert "Traceback" not in result.output
    for word in words:
        assert word in errors[0]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--prompt-ids", ""], "empty"),
        (["--prompt", ""], "empty"),
        (["--prompt-ids", "5,x"], "--prompt-ids"),
        (["--prompt-ids", "100"], "vocabulary of 100"),
        (["--prompt-ids", "-1"], "vocabulary of 100"),
        (["--prompt-ids", ",".join(["5"] * 1024)], "capacity is 1024"),
        ([PROMPT_IDS, "--max-new-tokens", "0"], "max_new_tokens"),
        ([PROMPT_IDS, "--max-new-tokens", "1022"], "leaves 1021"),
        ([PROMPT_IDS, "--temperature", "-1"], "temperature"),
        ([PROMPT_IDS, "--temperature", "nan"], "temperature"),
        ([PROMPT_IDS, "--top-p", "0"], "top_p"),
        ([PROMPT_IDS, "--top-p", "1.5"], "top_p"),
        ([PROMPT_IDS, "--top-k", "-1"], "top_k"),
        ([PROMPT_IDS, "--seed", "-1"], "seed"),
        ([PROMPT_IDS, "--scheduler", "magic"], "scheduler"),
        ([PROMPT_IDS, "--threshold", "2"], "threshold"),
        ([PROMPT_IDS, "--draft-sampling", "magic"], "draft_sampling"),
        ([PROMPT_IDS, "--stop", "."], "tokenizer"),
        ([PROMPT_IDS, "--stop-ids", "1;2"], "--stop-ids"),
        ([PROMPT_IDS, "--stop-ids", "100"], "vocabulary of 100"),
        ([PROMPT_IDS, "--chat"], "--chat"),
        ([PROMPT_IDS, "--prompt", "a"], "exactly one"),
        ([], "exactly one"),
        (["--prompt", "a", "--system", "b"], "--chat"),
        (["--prompt", "text"], "no tokenizer"),
        (["--prompt", "text", "--chat"], "no chat template"),
        (["--prompt-file", "no-such-file"], "cannot be read"),
    ],
)
def test_generate_refuses(plain: Path, arguments: list[str], word: str) -> None:
    refused(run("generate", plain, *arguments), word)


@pytest.mark.parametrize(
    "arguments",
    [["--threads", "0"], ["--markov", "some"], ["--top-k", "many"], ["--nonsense"]],
)
def test_usage_errors_exit_with_2(plain: Path, arguments: list[str]) -> None:
    result = run("generate", plain, PROMPT_IDS, *arguments)
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_a_missing_or_foreign_directory_is_refused(tmp_path: Path) -> None:
    refused(run("inspect", tmp_path / "none"), "no such bundle")
    refused(run("generate", tmp_path, PROMPT_IDS), "not a bundle")


def test_a_damaged_file_is_refused_and_named(broken: Path) -> None:
    file = broken / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    refused(run("generate", broken, PROMPT_IDS), "weights.safetensors", "damaged")
    ok("generate", broken, PROMPT_IDS, "--max-new-tokens=2", "--no-verify")
    (broken / "target.onnx").unlink()
    refused(run("inspect", broken), "target.onnx", "missing")


def test_a_newer_schema_is_refused(broken: Path) -> None:
    manifest = json.loads((broken / "manifest.json").read_text())
    manifest["schema_version"] = 99
    (broken / "manifest.json").write_text(json.dumps(manifest))
    refused(run("inspect", broken), "schema version 99", "upgrade")


def test_a_damaged_manifest_is_refused(broken: Path) -> None:
    (broken / "manifest.json").write_text("{")
    refused(run("inspect", broken), "not valid JSON")


def test_an_undecodable_prompt_file_is_refused(text_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    refused(run("generate", text_bundle, "--prompt-file", tmp_path / "bytes"), "UTF-8", "byte 2")


def test_export_refuses_a_missing_checkpoint(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    refused(run("export", "--target", missing, "--drafter", missing, "--out", tmp_path / "x"))


def test_other_exceptions_are_not_swallowed(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Engine, "load", fail)
    assert isinstance(run("generate", plain, PROMPT_IDS).exception, ZeroDivisionError)


def test_long_messages_stay_one_paragraph(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise DraftgraphError("first\nsecond")

    monkeypatch.setattr(Engine, "load", fail)
    refused(run("generate", plain, PROMPT_IDS), "first second")


def test_warnings_are_plain_lines(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Engine.load

    def warn(*arguments: Any, **options: Any) -> Engine:
        logging.getLogger("draftgraph.runtime").warning("look at %s", "this")
        return load(*arguments, **options)

    monkeypatch.setattr(Engine, "load", warn)
    result = ok("generate", plain, PROMPT_IDS, "--max-new-tokens=2")
    assert result.stderr == "warning: look at this\n"


# The process


def test_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from draftgraph.tools.cli import app\n"
        "from typer.testing import CliRunner\n"
        "for o in ('--help', '--version'):\n"
        "    assert CliRunner().invoke(app, [o]).exit_code == 0\n"
        "print([m for m in ('onnxruntime', 'torch', 'onnx', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
    assert ok("--version").stdout.strip() == version("draftgraph")


def test_a_closed_pipe_leaves_no_traceback(plain: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "draftgraph.tools.cli", "inspect", str(plain), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(30) == 1
    assert errors == ""


def test_ctrl_c_exits_quietly_with_130(text_bundle: Path) -> None:
    """The signal comes from within a step, so it always meets a command that is decoding. A shell's
    background job, which this test may be part of, ignores Ctrl-C unless told otherwise."""
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from draftgraph.runtime.engine import Engine\n"
        "from draftgraph.tools.cli import main\n"
        "step = Engine.step\n"
        "def interrupted(engine):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return step(engine)\n"
        "Engine.step = interrupted\n"
        "main()\n"
    )
    options = ("--prompt", "the cat", "--max-new-tokens=50", "--no-speculative")
    ended = subprocess.run(
        [sys.executable, "-c", code, "generate", str(text_bundle), *options],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 130
    assert "Traceback" not in ended.stderr
