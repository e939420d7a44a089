"""The frontend of any engine: HTTP, OpenAI's types, admission, live limits and evidence.

It imports only the core, and no torch. docs/structure.md lists its rooms.
"""
