"""The recipe of the embedded pipeline, and how good what it made is; see docs/toy.md."""
