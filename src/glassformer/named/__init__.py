"""The five source documents' own names, one module each, as thin layers over the library."""
