"""Batches: many requests of one file, and the file of their results.

`item` is a line and its result, `lines` the file of lines, `index` keeps what is known of each on
disk, `results` is the file of results, and `run` keeps many requests under way. `sluice batch` has
these, too.

The rest is OpenAI's API of batches: `routes` and `upload` in front, `files`, `records` and
`outputs` on disk, `work` on one batch, the `runner` of all, which sends lines by `inside`.
"""
