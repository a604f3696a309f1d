"""The series of `patches/`, applied to a verl tree all or nothing, and taken back byte for byte.

`series.py` reads a series and its recorded hashes, `tree.py` says what a folder is and which state its files are in,
`patched.py` computes the other state's contents with `git apply`, `transaction.py` puts them in place so that a call
that dies half-way is finished by the next one, `command.py` is what `verl-precision patch` does.
"""
