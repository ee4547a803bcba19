"""The networks: one module per architecture of the paper.

Belongs here: layers, initialization and decoding. Must not: know data sets, losses or optimizers.
"""
