"""One reader of a model's config.json, index and headers, and the arithmetic of its memory."""
