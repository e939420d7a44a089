"""From a conversation to token ids, with the chat template of the checkpoint or of a flag."""

import logging
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from ..chat import Conversation
from ..errors import ConfigError, RequestError
from ..files import inside, read_json
from ..tokenizer import Tokenizer
from .template import ChatTemplate

log = logging.getLogger(__name__)
MAX_TEMPLATE_BYTES = 1 << 20
CONFIG, JINJA = "tokenizer_config.json", "chat_template.jinja"


class Renderer:
    """A model's chat templates by name; "default" unless tools ask for "tool_use"."""

    def __init__(self, directory: Path, flag: Path | None, tokenizer: Tokenizer) -> None:
        """Raises ConfigError for what the flag names; CheckpointError for unreadable files.

        A checkpoint's own template that is no template leaves completions as they are, and each
        chat is told.
        """
        self._tokenizer = tokenizer
        self._templates: dict[str, ChatTemplate] = {}
        self._problem = "this model has no chat template; start the worker with --chat-template"
        config = read_json(directory, CONFIG) if (directory / CONFIG).exists() else {}
        names = _special_tokens(config)
        try:
            for name, source in (_flag(flag) or _checkpoint(directory, config)).items():
                self._templates[name] = ChatTemplate(
                    source, special_tokens=names, control_tokens=tokenizer.control_tokens.values()
                )
        except TemplateError as error:
            if flag is not None:
                raise ConfigError(
                    [f"--chat-template {flag} is not a valid template: {error}"]
                ) from error
            self._problem = f"the chat template of this model is not a valid template: {error}"
            log.warning("chat template unusable", extra={"reason": str(error)})

    def token_ids(self, conversation: Conversation) -> list[int]:
        """The prompt of a conversation. Raises RequestError; may take milliseconds per 100 kB."""
        template = self._templates.get("tool_use") if conversation.tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise RequestError(self._problem, param="messages")
        try:
            pieces = template.render(conversation, datetime.now())
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
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ConfigError([f"--chat-template {path} is larger than 1 MiB"])
        return {"default": path.read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError([f"--chat-template {path} cannot be read: {reason}"]) from error


def _checkpoint(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """chat_template.jinja, or what tokenizer_config.json says: one template, or some by name."""
    if (directory / JINJA).exists():
        return {"default": inside(directory, JINJA).read_text(encoding="utf-8", errors="replace")}
    given = config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    named = given if isinstance(given, list) else []
    return {
        item["name"]: item["template"]
        for item in named
        if isinstance(item, dict)
        and isinstance(item.get("name"), str)
        and isinstance(item.get("template"), str)
    }


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ...: a text, or an object with the text in `content`."""
    names = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            names[name] = text
    return names
