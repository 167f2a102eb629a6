"""Measurements: `python -m benchmarks.NAME`. What they gave is in RESULTS.md."""
