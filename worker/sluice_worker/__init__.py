"""One worker: an API process that speaks HTTP and an engine process that owns the model.

The operator may import what docs/structure.md names, and nothing else here.
The API process never imports torch; only what the engine process alone imports does.
"""
