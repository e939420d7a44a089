"""The operator: watches InferenceServices, plans their children, tunes their cap and replicas.

docs/structure.md lists its rooms. Pure: `tuner`, `spec`, `children`, and what `plan` decides.
"""
