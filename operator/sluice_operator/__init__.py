"""The operator: watches InferenceServices, plans their children, tunes their cap and replicas.

Pure (observed state and `now` in, values out): `spec`, `fit`, `plan`, `children`, `drift`,
`runtime`, `status`, `events`, `observed`, `usage`, `reasons`, `tuner`. The rim that touches the
world: `handlers` (watches), `reconcile` (one task per object), `cluster` (the only writer to the
API server), `scrape` (the pods' admin ports), `checkpoint` (files under the models' directory),
`hub` (a hub, over HTTP).
"""
