"""Looking inside a model: what it attends to, predicts after each layer, and depends on.

Start at `inspection`: one pass with everything kept. Below it, `capture` (the pass, edits of taps)
and `heads` (names of attention heads); `measure/` holds what is computed (attention, logit lens,
norms, ablation, patching, roles, probes of a training run), `show/` how results are displayed
(text, SVG, HTML, matplotlib).
"""
