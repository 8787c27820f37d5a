"""Figures that the README quotes; `python -m benchmarks` lists the commands."""
