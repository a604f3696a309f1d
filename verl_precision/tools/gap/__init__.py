"""How far the probabilities of two engines are apart (`pairs`), and which cause makes the gap (`explain`)."""
