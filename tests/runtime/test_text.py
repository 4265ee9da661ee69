"""Text in and out: tokenizer, streaming, stop strings, chat templates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from draftgraph.runtime import DraftgraphError, Engine, SamplingParams, load_bundle
from draftgraph.runtime.tokenizer import TextStream, Tokenizer

PROMPT = "def f(x):\n    return"
PARAMS = SamplingParams(max_new_tokens=60, temperature=0.8, seed=11, stop_ids=())


def stopping(*stop: str) -> SamplingParams:
    return SamplingParams(max_new_tokens=60, temperature=0.8, seed=11, stop_ids=(), stop=stop)


@pytest.fixture(scope="module")
def byte_tokenizer() -> FastTokenizer:
    """One token per byte: characters beyond ASCII span several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = FastTokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# Generation


def test_text_prompt_equals_its_ids(text_engine: Engine) -> None:
    ids = text_engine.tokenizer.encode(PROMPT)
    assert len(ids) == len(PROMPT)
    by_text = text_engine.generate(PROMPT, PARAMS)
    by_ids = text_engine.generate(ids, PARAMS)
    assert by_text.prompt_ids == ids
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.text == text_engine.tokenizer.decode(by_text.token_ids)


@pytest.mark.parametrize("speculative", [True, False])
def test_stream_is_the_text(speculative: bool, text_engine: Engine) -> None:
    pieces = list(text_engine.stream(PROMPT, PARAMS, speculative=speculative))
    assert "".join(pieces) == text_engine.generate(PROMPT, PARAMS, speculative=speculative).text
    assert all(pieces)
    assert len(pieces) > 10


def test_special_tokens_are_not_text(text_engine: Engine) -> None:
    """The end token is returned as an id; the text ends before it."""
    decode = text_engine.tokenizer.decode
    assert decode([34, 35, 96]) == decode([34, 35]) == "AB"
    output = text_engine.generate(PROMPT, PARAMS)
    stop = output.token_ids[20]
    stopped = text_engine.generate(
        PROMPT, SamplingParams(max_new_tokens=60, temperature=0.8, seed=11, stop_ids=(stop,))
    )
    assert stopped.text == decode(stopped.token_ids)


# Stop strings


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_stop_string_anywhere(length: int, speculative: bool, text_engine: Engine) -> None:
    """Each piece of the text in turn: cut before its first appearance, streamed or not."""
    whole = text_engine.generate(PROMPT, PARAMS, speculative=speculative)
    assert whole.text is not None
    for at in range(0, len(whole.text) - length, 7):
        stop = whole.text[at : at + length]
        end = whole.text.find(stop)
        output = text_engine.generate(PROMPT, stopping(stop), speculative=speculative)
        assert output.text == whole.text[:end]
        assert output.finish_reason == "stop"
        # The tokens end with the one that completed the string: one character is one token here.
        assert output.token_ids == whole.token_ids[: end + length]
        streamed = "".join(text_engine.stream(PROMPT, stopping(stop), speculative=speculative))
        assert streamed == output.text
        if speculative and end + length < 60:  # tokens that were cut are not counted
            counted = sum(r.accepted + (r.next_id is not None) for r in output.rounds)
            assert 1 + counted == len(output.token_ids) == output.stats.generated_tokens


def test_several_stop_strings(text_engine: Engine) -> None:
    text = text_engine.generate(PROMPT, PARAMS).text
    assert text is not None
    late, early = text[20:23], text[8:10]
    output = text_engine.generate(PROMPT, stopping(late, early))
    assert output.text == text[: min(text.find(late), text.find(early))]


def test_stop_string_that_never_comes(text_engine: Engine) -> None:
    """A beginning of it is held back and delivered at the end."""
    whole = text_engine.generate(PROMPT, PARAMS)
    assert whole.text is not None
    never = whole.text[-2:] + "\x00"
    output = text_engine.generate(PROMPT, stopping(never))
    assert (output.text, output.finish_reason) == (whole.text, "length")
    assert "".join(text_engine.stream(PROMPT, stopping(never))) == whole.text


def test_held_back_text(byte_tokenizer: FastTokenizer) -> None:
    """What may be the beginning of a stop string is shown only when it is decided."""
    stream = TextStream(byte_tokenizer)
    encode = byte_tokenizer.encode
    assert stream.push(encode("say <st").ids, ["<stop>"]) == ("say ", None)
    assert stream.push(encode("art> <").ids, ["<stop>"]) == ("<start> ", None)
    text, count = stream.push(encode("stop>more").ids, ["<stop>"])
    assert (text, count) == ("", 5)
    assert stream.finish() == ""
    assert stream.text == "say <start> "


def test_overlapping_stop_strings(byte_tokenizer: FastTokenizer) -> None:
    stream = TextStream(byte_tokenizer)
    stops = ["aab", "ab!"]
    assert stream.push(byte_tokenizer.encode("xaa").ids, stops) == ("x", None)
    assert stream.push(byte_tokenizer.encode("a").ids, stops) == ("a", None)
    assert stream.push(byte_tokenizer.encode("b").ids, stops) == ("", 1)
    assert stream.finish() == ""
    assert stream.text == "xa"


# Characters of several tokens


def test_characters_split_over_tokens(byte_tokenizer: FastTokenizer) -> None:
    text = "naïve €5 😀 日本"
    stream = TextStream(byte_tokenizer)
    pieces = [stream.push([i], [])[0] for i in byte_tokenizer.encode(text).ids]
    assert "".join(pieces) + stream.finish() == text
    assert "\ufffd" not in "".join(pieces)
    assert {"ï", "€", "😀", "日"} <= set(pieces)


def test_stop_string_of_split_characters(byte_tokenizer: FastTokenizer) -> None:
    ids = byte_tokenizer.encode("one€two").ids
    stream = TextStream(byte_tokenizer)
    text, count = stream.push(ids, ["€"])
    assert (text, count) == ("one", 6)
    assert stream.finish() == ""


def test_incomplete_character_at_the_end(byte_tokenizer: FastTokenizer) -> None:
    """The budget may end inside a character: shown as the replacement character, not lost."""
    ids = byte_tokenizer.encode("ok😀").ids[:-1]
    stream = TextStream(byte_tokenizer)
    pieces = "".join(stream.push([i], [])[0] for i in ids) + stream.finish()
    assert pieces.startswith("ok\ufffd")
    assert pieces == stream.text == byte_tokenizer.decode(ids)


# Chat


def test_chat_prompt(text_engine: Engine) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    assert text_engine.tokenizer.render_chat(messages) == "system: be\nuser: hi\nassistant: "
    by_chat = text_engine.generate(messages, PARAMS)
    by_text = text_engine.generate("system: be\nuser: hi\nassistant: ", PARAMS)
    assert by_chat.prompt_ids == by_text.prompt_ids
    assert by_chat.token_ids == by_text.token_ids


def test_chat_message_without_its_keys(text_engine: Engine) -> None:
    with pytest.raises(DraftgraphError, match="expected the keys role and content"):
        text_engine.generate([{"role": "user"}], PARAMS)


def with_template(source: Path, folder: Path, template: str) -> Tokenizer:
    """The tokenizer of a copy of the bundle whose chat template is another one."""
    shutil.copytree(source, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({"chat_template": template, "bos_token": {"content": "<s>"}}))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["tokenizer_config.json"]["bytes"] = file.stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return Tokenizer(load_bundle(folder, verify=False))


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
    ],
)
def test_chat_templates_run_in_a_sandbox(template: str, text_bundle: Path, tmp_path: Path) -> None:
    """A template comes with a downloaded model: it may format text and nothing else."""
    tokenizer = with_template(text_bundle, tmp_path / "bundle", template)
    try:
        rendered = tokenizer.render_chat(MESSAGES)
    except DraftgraphError as error:
        assert "chat template refused" in str(error)
    else:
        assert rendered == "", "undefined at best"


def test_what_templates_use(text_bundle: Path, tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m.content | tojson }}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    tokenizer = with_template(text_bundle, tmp_path / "bundle", template)
    assert tokenizer.render_chat(MESSAGES * 2) == '<s>"hi"4'


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ raise_exception('no system role') }}", "no system role"), ("{% for %}", "refused")],
)
def test_template_errors(template: str, message: str, text_bundle: Path, tmp_path: Path) -> None:
    tokenizer = with_template(text_bundle, tmp_path / "bundle", template)
    with pytest.raises(DraftgraphError, match=message):
        tokenizer.render_chat(MESSAGES)


# Without a tokenizer


def test_without_a_tokenizer(engine: Callable[..., Engine]) -> None:
    runner = engine("qwen3-vanilla")
    assert runner.generate([1, 2], SamplingParams(max_new_tokens=2)).text is None
    for call in (
        lambda: runner.generate("text"),
        lambda: next(runner.stream([1, 2])),
        lambda: runner.tokenizer.decode([1]),
    ):
        with pytest.raises(DraftgraphError, match=r"no tokenizer.*give the prompt as token ids"):
            call()
