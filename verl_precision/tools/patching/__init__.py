"""`verl-precision patch`: the series of `patches/`, applied to a verl tree whole, and taken back byte for byte."""
