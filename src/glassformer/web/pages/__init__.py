"""The pages of the explorer: one module of requests for each."""
