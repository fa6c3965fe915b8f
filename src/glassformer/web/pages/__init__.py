"""The pages: one module each, which lists its own ROUTES."""
