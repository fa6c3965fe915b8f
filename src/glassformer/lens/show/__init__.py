"""Rendering of measurements: terminal text, SVG, HTML, matplotlib."""
