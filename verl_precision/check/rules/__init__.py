"""The rules for a config, each in the module of its subject. How to add one: CONTRIBUTING.md.

`registry` asks them. A rule is a pure function of the composed config and of what was found on the machine; none
imports verl or vLLM. A bound that a loss or an engine holds by itself stands beside that, and the rule asks there.
"""
