"""A request as it was read, once: its work, and what of it the engine gets. Pure."""
