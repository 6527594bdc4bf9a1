"""The laboratory: measures, compares and draws what the optimizers of `anon_optim` do."""
