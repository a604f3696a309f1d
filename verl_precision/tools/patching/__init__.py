"""The series of `patches/`, applied to a verl tree whole, and taken back byte for byte.

`series.py` reads a series and its recorded hashes and says what a tree is and which of its files a call has to change,
`change.py` does what `verl-precision patch` promises: it makes these files beside the tree and puts each in
place by one rename.
"""
