"""What is made from records: figures, tables, verdicts, the report.

Belongs here: specs, drawing, judging, the report page, publishing. Must not: import torch, tasks or
the training loop, except that `make` and `verify` ask training to run what is missing. So a figure
can be redrawn anywhere.
"""
