"""Addresses in URLs."""


def in_url(host: str) -> str:
    """`host` as a URL has it: an address of IPv6 between brackets."""
    return f"[{host}]" if ":" in host else host
