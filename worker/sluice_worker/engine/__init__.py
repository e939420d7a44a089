"""The engine process: its start, its loop, and its client in the API process."""
