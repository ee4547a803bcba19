"""The problems: one module per family of tasks or measurements.

Belongs here: losses, steps, evaluations and simulations, built from a config. Must not: read a
config, write a record or know an optimizer's name.
"""
