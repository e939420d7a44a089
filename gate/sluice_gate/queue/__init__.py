"""Places in the engine, requests that wait for them, and the clock of each."""
