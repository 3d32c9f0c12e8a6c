"""Random models with an oracle: do they move the sum before noise by more than the clip norm?

recipes   what a model, its loss, its data and its method are: pure data, drawn by (seed, index)
layers    the building blocks, and how rows get to them
models    a recipe's model
losses    a recipe's loss
data      a recipe's micro-batches, and the records that an attacker would add
reference the sum that the library promises, in float64
oracle    the library under test on a recipe, and what of its promises holds
summary   verdicts counted by family
"""
