"""The rules for a config, each in the module of its subject, with words in words.yaml. To add one: CONTRIBUTING.md.

`registry` calls them. A rule is a pure function of the composed config and of facts about the machine; no rule imports
verl or vLLM. A bound that a loss or an engine enforces is defined beside it, and the rule calls that function.
"""
