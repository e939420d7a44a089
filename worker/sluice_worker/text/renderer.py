"""From a conversation to token ids, with the chat template of the checkpoint or of a flag."""

import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from jinja2 import TemplateError
from sluice_core.errors import ConfigError, RequestError
from sluice_core.model.files import JINJA, TEMPLATES, Directory, is_there, read_text
from sluice_frontend.config import MAX_TEXT_BYTES, read_named
from sluice_frontend.openai.chat import Conversation

from .template import ChatTemplate
from .tokenizer import Tokenizer
from .tokenizer_config import TokenizerConfig

log = logging.getLogger(__name__)


class Renderer:
    """A model's chat templates by name; "default" unless tools ask for "tool_use"."""

    def __init__(self, directory: Path, flag: Path | None, tokenizer: Tokenizer) -> None:
        """Raises ConfigError for the flag's file; CheckpointError for unreadable files.

        If a checkpoint's own template is invalid, completions still work, and each chat gets an
        error.
        """
        self._tokenizer = tokenizer
        self._templates: dict[str, ChatTemplate] = {}
        self._problem = "this model has no chat template; start the worker with --chat-template"
        config = tokenizer.config
        sources = _flag(flag) or _checkpoint(directory, config)
        names, control = config.special_tokens, tokenizer.serve_templates(sources.values())
        try:
            for name, source in sources.items():
                self._templates[name] = ChatTemplate(
                    source, special_tokens=names, control_tokens=control
                )
        except TemplateError as error:
            if flag is not None:
                raise ConfigError(
                    [f"--chat-template {flag} is not a valid template: {error}"]
                ) from error
            self._problem = f"the chat template of this model is not a valid template: {error}"
            log.warning("chat template unusable", extra={"reason": str(error)})

    def token_ids(
        self, conversation: Conversation, check: Callable[[int], None] = lambda num_chars: None
    ) -> list[int]:
        """The prompt of a conversation. Raises RequestError, also from `check`, which gets the
        number of characters. May take milliseconds per 100 kB."""
        template = self._templates.get("tool_use") if conversation.tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise RequestError(self._problem, param="messages")
        try:
            pieces = template.render(conversation, datetime.now())
            check(sum(len(piece) for piece, _ in pieces))
            return self._tokenizer.encode_rendered(pieces)
        except UnicodeEncodeError as error:
            raise RequestError(
                "messages: a lone surrogate is no character", param="messages"
            ) from error
        except RecursionError as error:
            raise RequestError("messages are nested too deeply", param="messages") from error


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
