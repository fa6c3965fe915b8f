"""One module for each family of Hugging Face architectures."""
