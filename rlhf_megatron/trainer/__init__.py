"""When: the loop of online RL, the loop of supervised fine-tuning, and what they are made of."""
