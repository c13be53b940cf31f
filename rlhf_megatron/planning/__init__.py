"""What a run will cost, before it is started: layouts, batches, memory, traffic and time, on a login node.

No GPU, no process group and no torch: everything is arithmetic on the validated configuration and the models' sizes.
Bytes of parameters, gradients, optimizer state and weight sync are exact; activations, KV cache and times are estimates
whose assumptions are printed with them.
"""
