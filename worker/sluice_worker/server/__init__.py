"""The HTTP side: routes, replies, streams, and the guards between the network and the engine.

`text`, `ledger` and `replies` are pure; `connection`, `guards` and `stream` speak ASGI; `service`
owns the engine client and what is in force; `run` binds ports and handles signals. No torch here.
"""
