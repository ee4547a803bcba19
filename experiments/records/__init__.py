"""What a run leaves behind, and where it came from.

Belongs here: the identity and folder of a run, metrics.csv and run.json, published records, locks,
trackers, the index runs.csv, and the comparison with published runs. Must not: train, draw or
judge. Nothing here imports torch.
"""
