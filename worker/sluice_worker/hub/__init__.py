"""Downloads a model into a local directory before the engine starts. API process, no torch."""
