"""The source documents' own names, one module each: their configuration in, their contract out."""
