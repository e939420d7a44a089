"""Routes, reply formats, streams and the published document; binds ports. API process, no torch."""
