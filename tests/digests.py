"""The digest of one tensor, by the class that digests a stream of them."""

from torch import Tensor

from verl_precision.weight_sync.manifest import StreamDigest, TensorDigest


def digest(tensor: Tensor) -> TensorDigest:
    stream = StreamDigest()
    stream.add("", tensor)
    return stream.fetch()[""]
