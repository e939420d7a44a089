"""Models from a Hugging Face hub, brought into a local directory before the engine starts.

Pure: `reference`, `listing`. Rim: `site` speaks HTTP, `cache` is the directory, `transfer` brings
one file, `download` all of them. The operator shares the first three. No torch, and nothing of a
checkpoint is run: only the files that `listing` names are fetched, and weights only as safetensors.
"""
