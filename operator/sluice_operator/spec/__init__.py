"""The fields of an InferenceService: their types, rules and defaults."""
