"""From a config to a finished record.

Belongs here: the loops of training and measuring, checkpoints, devices, signals, several processes
for one run, and the scheduler for many runs. Must not: know a figure, a table or a claim, or what a
task computes.
"""
