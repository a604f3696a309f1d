"""A checkpoint of verl's as a Hugging Face folder, rounded once from FP32: `verl-precision export`.

shards.py    what the ranks saved, as whole tensors, one at a time; LoRA adapters merged
card.py      the model card: dtype, the gap at that step, settings, versions; card.txt is its text
session.py   each weight looked at, rounded and written once, in a folder that appears whole or not at all
"""
