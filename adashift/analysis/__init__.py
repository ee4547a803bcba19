"""Theory, fast trajectories and correlations of adaptive optimizers; install adashift[analysis].

Modules here explain or measure optimizers and may need numpy and scipy. Nothing that a training
needs belongs here: the optimizers and the probe depend on torch alone.
"""
