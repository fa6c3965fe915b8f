"""Display of results: characters, SVG, HTML, matplotlib, files."""
