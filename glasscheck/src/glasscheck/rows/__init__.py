"""The rows of a certificate: each is a claim about a module, and how it is measured."""
