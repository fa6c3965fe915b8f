"""Model folders: their files, weights, LoRA, export."""
