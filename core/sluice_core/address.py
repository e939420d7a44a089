"""Addresses in URLs."""


def in_url(host: str) -> str:
    """`host` in the form that URLs use: an IPv6 address is put between brackets."""
    return f"[{host}]" if ":" in host else host
