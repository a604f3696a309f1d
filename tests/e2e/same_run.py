"""Whether two runs are one run done twice: all that they measured, but for what a clock and the memory decide."""

OF_THE_MACHINE = ("timing", "weight_sync/seconds")
# What counts from the start of a process, which a resumed run has two of.
OF_THE_PROCESS = ("precision/bf16_crossings", "weight_sync/canary_bound")


def differing(one: list[dict[str, float]], other: list[dict[str, float]]) -> list[set[str]]:
    """Return the metrics of each step that differ in any bit."""
    return [
        {key for key in a.keys() | b.keys() if a.get(key) != b.get(key) and not _of_the_machine(key)}
        for a, b in zip(one, other, strict=True)
    ]


def _of_the_machine(metric: str) -> bool:
    return "perf/" in metric or metric.startswith(OF_THE_MACHINE + OF_THE_PROCESS)
