"""The records of runs and their provenance.

Belongs here: the identity and folder of a run, metrics.csv and run.json, published records, locks,
trackers, the index runs.csv, and the comparison with published runs. Does not belong here: code
that trains, draws or judges. No module of this package imports torch.
"""
