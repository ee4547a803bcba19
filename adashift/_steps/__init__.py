"""One module for each way to compute an AdaShift step, all sharing the same state and window.

A module here takes parameters whose options are already checked and updates them. Options, the
choice between the ways and the equations' documentation belong in adashift/optimizer.py.
"""
