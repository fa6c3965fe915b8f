"""Complete models: a body and heads, built from a spec."""
