"""Programs that measure Muri: `python -m muri_lab.benchmarks.NAME --help`. Their results lie in `results/`."""
