"""The fields of a batch in verl's transfer queue, by key."""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor


def real_rows(batch: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Return keys and tags of the responses that are no padding."""
    rows = [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
    return [batch.keys[row] for row in rows], [batch.tags[row] for row in rows]


def fetch(batch: Any, *fields: str) -> list[Any]:
    """Return fields of a batch, nested: padded, a batch of long responses would take gigabytes in the driver."""
    rows = fetch_rows(real_rows(batch)[0], batch.partition_id, *fields)
    return [torch.nested.as_nested_tensor(rows[name], layout=torch.jagged) for name in fields]


def fetch_rows(keys: list[str], partition: str, *fields: str) -> dict[str, list[Tensor]]:
    """Return fields, name -> one tensor for each key."""
    import transfer_queue as tq

    data = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=list(fields))
    return {name: list(data[name].unbind()) for name in fields}


def put(batch: Any, field: str, values: Tensor) -> None:
    """Give the workers one more field of a batch."""
    import transfer_queue as tq

    fields = TensorDict({field: values}, batch_size=len(values))
    batch.fields = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields).fields
