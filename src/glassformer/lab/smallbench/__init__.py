"""SmallBench: an offline benchmark of small language models, with chance and oracle scores."""
