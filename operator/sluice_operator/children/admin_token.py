"""Tokens in Secrets, never logged: an object's admin token (made once) and a hub's token."""

import base64
from collections.abc import Mapping
from typing import Any

from .manifests import MANAGED_BY, MANAGED_BY_LABEL


def token_of(secret: Mapping[str, Any], key: str = "token") -> str | None:
    """The token in a live Secret, None if a person has removed or spoilt it."""
    encoded = (secret.get("data") or {}).get(key)
    try:
        token = base64.b64decode(encoded, validate=True).decode("ascii").strip() if encoded else ""
    except (ValueError, TypeError):
        return None
    return token if token.isprintable() and token else None


def may_be_sent(secret: Mapping[str, Any]) -> bool:
    """True if a hub and a pod may have what it holds: no service account's token, nor ours."""
    labels = secret.get("metadata", {}).get("labels") or {}
    return secret.get("type", "Opaque") == "Opaque" and labels.get(MANAGED_BY_LABEL) != MANAGED_BY
