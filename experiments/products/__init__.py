"""Products of records: figures, tables, verdicts, the report.

Belongs here: specs, drawing, judging, the report page, publishing. Does not belong here: torch,
tasks and the training loop, so that a figure can be redrawn anywhere; only `make` and `verify`
call training, for missing runs.
"""
