"""Benchmarks of this project's own speed and robustness, one make target each.

Belongs here: timing of the optimizer, the training loop and the engines, and runs that are killed
and resumed. Does not belong here: anything that another package imports. Benchmarks may import
every package of this repository.
"""
