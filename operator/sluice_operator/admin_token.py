"""The bearer token of an object's admin ports: made once, kept in its Secret. Never logged."""

import base64
import secrets
from collections.abc import Mapping
from typing import Any


def new_token() -> str:
    """A fresh token of 256 bits."""
    return secrets.token_urlsafe(32)


def token_of(secret: Mapping[str, Any]) -> str | None:
    """The token in a live Secret, None where a person has taken it out or spoilt it."""
    encoded = (secret.get("data") or {}).get("token")
    try:
        token = base64.b64decode(encoded, validate=True).decode("ascii").strip() if encoded else ""
    except (ValueError, TypeError):
        return None
    return token if token.isprintable() and token else None
