"""Every module that imports verl or vLLM.

A host is verl or vLLM. `registration` registers with host modules, `ledger` lists the host symbols that this needs,
`resolvers` adds to configs. The folders are the hosts' parts: trainer, engine, rollout, and cpu for no GPU.
"""
