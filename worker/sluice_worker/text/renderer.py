"""From a conversation to a prompt's text, with the chat template of a checkpoint or a flag."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from jinja2 import TemplateError
from sluice_core.errors import ConfigError, RequestError
from sluice_core.model.files import JINJA, TEMPLATES, Directory, is_there, read_text
from sluice_frontend.api.chat import Conversation
from sluice_frontend.config import MAX_TEXT_BYTES, read_named

from .template import ChatTemplate, Pieces
from .tokenizer import Tokenizer
from .tokenizer_config import TokenizerConfig

log = logging.getLogger(__name__)
NO_TEMPLATE = "this model has no chat template; start the worker with --chat-template"
MAX_PIECES = 1 << 16
"""Each control token in a client's text makes two, of a hundred bytes."""


@dataclass(frozen=True)
class Templates:
    """A model's chat templates by name; "default" unless tools ask for "tool_use".

    They are texts, so that another process can have them; each compiles them for itself.
    `problem`: what is said where there is none.
    """

    sources: Mapping[str, str]
    special_tokens: tuple[tuple[str, str], ...]
    control_tokens: tuple[str, ...]
    problem: str

    @classmethod
    def of(cls, directory: Path, flag: Path | None, tokenizer: Tokenizer) -> "Templates":
        """Those of a checkpoint, or the flag's file.

        Raises ConfigError for the flag's file; CheckpointError for unreadable files. If a
        checkpoint's own template is invalid, completions still work, and each chat gets an error.
        """
        sources = _flag(flag) or _checkpoint(directory, tokenizer.config)
        names = tuple(tokenizer.config.special_tokens.items())
        control = tuple(tokenizer.serve_templates(sources.values()))
        valid, problem = dict[str, str](), NO_TEMPLATE
        try:
            for name, source in sources.items():
                _compiled(source, names, control)
                valid[name] = source
        except TemplateError as error:
            if flag is not None:
                raise ConfigError(
                    [f"--chat-template {flag} is not a valid template: {error}"]
                ) from error
            problem = f"the chat template of this model is not a valid template: {error}"
            log.warning("chat template unusable", extra={"reason": str(error)})
        return cls(valid, names, control, problem)

    def render(self, conversation: Conversation) -> Pieces:
        """The prompt's text. Raises RequestError. May take milliseconds per 100 kB."""
        source = self.sources.get("tool_use") if conversation.tools else None
        source = source or self.sources.get("default")
        if source is None:
            raise RequestError(self.problem, param="messages")
        template = _compiled(source, self.special_tokens, self.control_tokens)
        try:
            pieces = template.render(conversation, datetime.now())
            for piece, _ in pieces:
                piece.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "messages: a lone surrogate is no character", param="messages"
            ) from error
        except RecursionError as error:
            raise RequestError("messages are nested too deeply", param="messages") from error
        if len(pieces) > MAX_PIECES:
            raise RequestError(
                f"messages: the texts hold more than {MAX_PIECES // 2} control tokens",
                param="messages",
            )
        return pieces


@lru_cache(maxsize=4)
def _compiled(
    source: str, special_tokens: tuple[tuple[str, str], ...], control_tokens: tuple[str, ...]
) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=dict(special_tokens), control_tokens=control_tokens)


def _flag(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        return {"default": read_named(path)}
    except ConfigError as error:
        raise ConfigError([f"--chat-template {problem}" for problem in error.problems]) from error


def _checkpoint(directory: Path, config: TokenizerConfig) -> dict[str, str]:
    """The templates in files, else those in tokenizer_config.json, as in transformers 5.23. So
    chat_template.json, which belongs to processors, is not read."""
    files = {JINJA: "default"} if is_there(directory, JINJA) else {}
    more = Directory(directory / TEMPLATES).names() if is_there(directory, TEMPLATES) else ()
    named = sorted(name for name in more if name.endswith(".jinja"))
    files |= {f"{TEMPLATES}/{name}": name.removesuffix(".jinja") for name in named}
    read = {name: read_text(directory, file, MAX_TEXT_BYTES) for file, name in files.items()}
    return read or config.chat_templates
