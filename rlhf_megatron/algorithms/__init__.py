"""The mathematics of PPO as functions of tensors: masked statistics, KL, advantages, losses.

Nothing here knows about processes, models or configuration files. Where a number spans ranks, the caller passes in a
`reduce` callable or the global counts. Tensors are ``[B, R]`` (rows, response tokens), computed in fp32 (fp64 stays
fp64) whatever type comes in. What stands at masked positions, NaN and infinity included, never reaches a loss, a
gradient or a metric. Metrics are :data:`~rlhf_megatron.algorithms.masked.Stat` pairs (sum, count), so that adding them
over micro-batches and ranks and dividing once gives the true mean.
"""
