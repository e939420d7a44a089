"""One worker: an API process that speaks HTTP and an engine process that owns the model.

docs/structure.md says which room runs in which process. The API process never imports torch.
"""
