"""What can be wrong with a config: every rule once, in the module of its subject. How to add one: CONTRIBUTING.md.

`registry` has all of them, and `find_faults`, which asks them. `verl-precision check` shows the faults, and the
preflight refuses the errors among them. A rule is a pure function of the composed config and of what was found on the
machine; nothing here imports verl or vLLM. Where a loss or an engine must refuse a value by itself, the bound stands
beside it (`losses/settings.py`, `engine/settings.py`), and the rule asks there.
"""
