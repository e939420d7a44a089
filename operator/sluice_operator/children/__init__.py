"""Pure: manifests of everything that an InferenceService owns, and how the live objects differ."""
