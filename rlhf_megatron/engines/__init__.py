"""How a role computes: forward passes and optimizer steps over micro-batches, whatever the layout.

An engine sees only the rows of its own data-parallel shard and hands back one row for each row that it was given. It
knows nothing of the algorithm: what is computed from the model's output is a function that the role passes in.
"""
