"""One worker: an API process that speaks HTTP and an engine process that owns the model.

`sizing` and `contract` are pure and may be imported by the operator; nothing else here may be.
The API process never imports torch; only what the engine process alone imports does.
"""
