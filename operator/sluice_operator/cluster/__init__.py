"""The API server: its client, and objects as observed."""
