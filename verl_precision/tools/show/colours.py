"""The colours of all figures."""

# Each colour is distinct on white, and from its neighbours also for colour-blind readers.
COLOURS = ("#2563c9", "#d9622b", "#2a8f62", "#8a4fc2", "#b8860b", "#c2417f", "#1a8fa3", "#6b7079")
PRECISIONS = dict(zip(("bf16", "fp16"), COLOURS, strict=False))  # the same in every figure
