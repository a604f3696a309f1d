"""Every module that imports verl or vLLM.

`registration` registers this package with the hosts, verl and vLLM. `ledger` lists the host symbols that the package
needs. `resolvers` extends configs. The folders are the hosts' parts: trainer, engine, rollout, and cpu without a GPU.
"""
