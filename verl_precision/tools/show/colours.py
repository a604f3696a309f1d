"""The colours of all figures."""

# Each stands out from a white ground, and from its neighbours for the colour-blind.
COLOURS = ("#2563c9", "#d9622b", "#2a8f62", "#8a4fc2", "#b8860b", "#c2417f", "#1a8fa3", "#6b7079")
PRECISIONS = dict(zip(("bf16", "fp16"), COLOURS, strict=False))  # in every figure, beside whatever else
