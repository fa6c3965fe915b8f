"""Fine-tuning: the base model, its data, the recipe."""
