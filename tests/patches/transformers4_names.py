"""What verl 0.6.1 imports from transformers 4 and transformers 5 calls by another name; loaded by `pytest -p`.

The class was merged into its neighbour: it is the same lookup from config to model. Without it nothing of verl 0.6.1
that touches a model can be imported beside transformers 5, patched or not.
"""

import sys

# transformers replaces its own module object when a model is first imported: let that happen before the name is added.
from transformers import AutoModelForImageTextToText, Qwen2ForCausalLM  # noqa: F401

sys.modules["transformers"].AutoModelForVision2Seq = AutoModelForImageTextToText
