"""How results are displayed: characters, SVG, HTML, matplotlib, files."""
