"""Time and memory of the methods, side by side in one run.

Every variant runs on its own copy of the model; the weights are shared. All variants run once in each round, and ratios
are taken within a round, so that a machine whose clock drifts slows all of them alike.
"""
