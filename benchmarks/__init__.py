"""Benchmarks for maintainers, run in a checkout: `python -m benchmarks.host --help`."""
