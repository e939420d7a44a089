"""Pure: manifests of all that an InferenceService owns, and how far the cluster's differ."""
