"""The tasks: each module holds a model, its data and a loss, and knows nothing about optimizers."""
