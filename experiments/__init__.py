"""How the experiments of the paper are run: from a config to records, and from records to results.

Belongs here: problems, networks and data, their training, records, and what is made of them. Must
not: contain the optimizer, which is in adashift/ and can be installed alone, or name a figure or a
value of the paper, which are in conf/.
"""
