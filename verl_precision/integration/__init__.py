"""Every module that imports verl or vLLM.

`registration` says what is registered at whose import, `ledger` which host symbols that needs, `resolvers` what configs
find. The folders are verl's and vLLM's parts: trainer, engine, rollout, and cpu for a machine without GPU.
"""
