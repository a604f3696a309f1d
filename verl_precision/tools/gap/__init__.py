"""The size of the gap between two engines (`pairs`), and its causes (`explain`)."""
