"""From the command line to a checked config of one run.

Belongs here: the schema, composition by Hydra, building objects from `_target_`, and the wording of
errors. Must not: train, read records, or import torch; figures are redrawn without it.
"""
