"""Text in and out: the bundle's tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, SupportsIndex

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from ..graphs.errors import DraftgraphError
from .bundle import Bundle

Messages = Sequence[Mapping[str, str]]
Prompt = str | Sequence[int] | Messages


class Tokenizer:
    """A bundle's tokenizer; bundles of checkpoints without one run on ids only."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        text = bundle.text_file("tokenizer.json")
        config = bundle.text_file("tokenizer_config.json")
        try:
            self._fast = None if text is None else FastTokenizer.from_str(text)
            self._config: dict[str, Any] = {} if config is None else json.loads(config)
        except Exception as error:  # tokenizers raises bare exceptions
            raise DraftgraphError(
                f"{bundle.path}: the tokenizer files cannot be read ({error}); export the bundle "
                "again from a checkpoint with a working tokenizer"
            ) from None
        if self._fast is not None:  # settings of somebody's training run, not of the model
            self._fast.no_truncation()
            self._fast.no_padding()
        template = bundle.text_file("chat_template.jinja") or self._config.get("chat_template")
        if isinstance(template, list):  # several by name
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        self._template = template if isinstance(template, str) else None

    @property
    def available(self) -> bool:
        return self._fast is not None

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt: text, ids, or chat messages [{"role": ..., "content": ...}]."""
        if isinstance(prompt, str):
            return self.require().encode(prompt).ids
        items = list(prompt)
        if items and all(isinstance(m, Mapping) for m in items):
            text = self.render_chat(items)  # type: ignore[arg-type]
            return self.require().encode(text, add_special_tokens=False).ids
        ids = []
        for token in items:
            if isinstance(token, bool) or not isinstance(token, SupportsIndex):
                raise DraftgraphError(
                    f"prompt: expected text, a list of token ids or a list of chat messages, found "
                    f"a list with {token!r}"
                )
            ids.append(int(token))
        return ids

    def render_chat(self, messages: Messages) -> str:
        """The chat template applied to messages, ending where the assistant's answer begins."""
        if self._template is None:
            raise DraftgraphError(
                f"{self.bundle.path}: the bundle has no chat template; give the prompt as text"
            )
        for message in messages:
            if not {"role", "content"} <= set(message):
                raise DraftgraphError(
                    f"chat message {dict(message)!r}: expected the keys role and content"
                )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda x, **options: json.dumps(
            x, **{"ensure_ascii": False, **options}
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        specials = {
            name: token.get("content") if isinstance(token, dict) else token
            for name, token in self._config.items()
            if name.endswith("_token")
        }
        try:
            return environment.from_string(self._template).render(
                messages=[dict(m) for m in messages], add_generation_prompt=True, **specials
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise DraftgraphError(f"chat template refused the messages: {error}") from None

    def decode(self, ids: Sequence[int]) -> str:
        return self.require().decode(list(ids), skip_special_tokens=True)

    def stream(self) -> TextStream:
        return TextStream(self.require())

    def require(self) -> FastTokenizer:
        """The tokenizer; an error when the bundle has none."""
        if self._fast is None:
            raise DraftgraphError(
                f"{self.bundle.path}: the bundle has no tokenizer (the target checkpoint had no "
                "tokenizer.json), so text cannot be used; give the prompt as token ids"
            )
        return self._fast


class TextStream:
    """Decodes ids as they are committed and watches for stop strings.

    Text that could be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._text = ""  # decoded so far
        self._emitted = 0
        self._stopped = False

    def push(self, ids: Sequence[int], stop: Sequence[str]) -> tuple[str, int | None]:
        """New text that is safe to show, and how many of `ids` complete a stop string (or None)."""
        for count, token in enumerate(ids, start=1):
            self._ids.append(token)
            piece = self._decoder.step(self._fast, token)
            if not piece:
                continue
            searched = max(0, len(self._text) - max((len(s) for s in stop), default=0))
            self._text += piece
            found = [at for s in stop if (at := self._text.find(s, searched)) >= 0]
            if found:
                self._text = self._text[: min(found)]
                self._stopped = True
                return self._emit(len(self._text)), count
        held = max((_overlap(self._text, s) for s in stop), default=0)
        return self._emit(len(self._text) - held), None

    def finish(self) -> str:
        """The rest of the text: what was held back, and the end of an incomplete character."""
        whole = self._fast.decode(self._ids, skip_special_tokens=True)
        if not self._stopped and whole.startswith(self._text):
            self._text = whole
        return self._emit(len(self._text))

    @property
    def text(self) -> str:
        return self._text

    def _emit(self, end: int) -> str:
        chunk = self._text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return chunk


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)


def _raise(message: str) -> None:
    raise TemplateError(message)
