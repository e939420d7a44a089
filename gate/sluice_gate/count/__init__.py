"""What an engine's answers tell: tokens, usage, and the law of its steps. Pure."""
