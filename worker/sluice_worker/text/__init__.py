"""Tokenizers, chat templates and output text. API process, no torch."""
