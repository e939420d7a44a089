"""The operator: watches InferenceServices, plans their children, tunes their cap and replicas.

`spec`, `plan`, `children`, `status` and `tuner` are pure: they take what was observed and `now`, and
return values. `handlers`, `cluster` and `scrape` are the rim that touches the world.
"""
