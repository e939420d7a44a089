"""The gate: a frontend before any engine that speaks HTTP. No torch, no tokenizer."""
