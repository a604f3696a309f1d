"""Do the gaps of a response's tokens add up as independent ones do? Spread by length, and autocorrelation by distance.

    verl-precision mismatch --model MODEL --max-response-tokens 4096 --output FOLDER
    python recipes/long_text/read_gaps.py FOLDER

The script reads the journal of that job. For each pair of dtypes it prints the spread over responses of the sum of
the first T gaps, beside √(2 k3 T), with the k3 of those same tokens; and the autocorrelation of the gaps within a
response, less their mean, with its standard error 1/√(number of pairs of tokens).
"""

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np

from verl_precision.mismatch.prediction import predicted_spread
from verl_precision.tools.show.tables import markdown_table

DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # tokens
SHORTEST, FEWEST = 64, 8  # tokens; responses of which a spread is printed
Gaps = list[np.ndarray]


def gaps_in(journal: Path) -> dict[str, Gaps]:
    """Return the gaps of each response, log π - log μ of its tokens in nats, by "rollout, trainer"."""
    sampled, found = {}, defaultdict(list)
    for line in journal.read_text().splitlines()[1:]:
        record = json.loads(line)
        response = record["rollout"], record["problem"], record["response"]
        log_probs = np.array(record["log_probs"])
        if "train" in record:
            found[f"{record['rollout']}, {record['train']}"].append(log_probs - sampled[response])
        else:
            sampled[response] = log_probs
    return dict(found)


def k3_of(gaps: np.ndarray) -> float:
    """Return the mean of e^g - 1 - g, in nats."""
    return float(np.mean(np.expm1(gaps) - gaps))


def growth(found: dict[str, Gaps]) -> str:
    """Return the spread by length as Markdown, ± the standard error of a normal spread."""
    columns, rows = (
        ["pair", "tokens T", "responses", "spread", "√(2 k3 T)", "measured / predicted", "effective share"],
        [],
    )
    for pair, responses in found.items():
        longest = max(map(len, responses))
        for tokens in (SHORTEST << power for power in range((longest // SHORTEST).bit_length())):
            first = np.stack([gaps[:tokens] for gaps in responses if len(gaps) >= tokens] or [np.zeros(tokens)])
            if len(first) < FEWEST:
                continue
            sums = first.sum(1)
            spread, predicted = float(sums.std(ddof=1)), predicted_spread(k3_of(first), tokens)
            weights = np.exp(sums - sums.max())
            share = weights.sum() ** 2 / (weights**2).sum() / len(weights)
            error = spread / math.sqrt(2 * (len(first) - 1))
            cells = f"{spread:.3g} ± {error:.1g}", f"{predicted:.3g}", f"{spread / predicted:.2f}", f"{share:.2f}"
            rows.append([pair, f"{tokens:,}", str(len(first)), *cells])
    return "\n".join(markdown_table(columns, rows))


def correlations(responses: Gaps) -> list[tuple[float, float]]:
    """Return for each of `DISTANCES` the autocorrelation of the gaps within a response, and its standard error."""
    mean = np.concatenate(responses).mean()
    centred = [gaps - mean for gaps in responses]
    variance = np.mean(np.concatenate(centred) ** 2)
    found = []
    for distance in DISTANCES:
        products = np.concatenate([each[distance:] * each[:-distance] for each in centred])
        if len(products):
            found.append((float(products.mean() / variance), 1 / math.sqrt(len(products))))
    return found


def autocorrelation(found: dict[str, Gaps]) -> str:
    """Return the autocorrelations as Markdown, a column for each pair of dtypes."""
    of_pair = {pair: correlations(responses) for pair, responses in found.items()}
    rows = []
    for number, distance in enumerate(DISTANCES):
        values = [each[number] if number < len(each) else None for each in of_pair.values()]
        if any(values):
            rows.append([f"{distance:,}", *(f"{value[0]:+.4f} ± {value[1]:.4f}" if value else "" for value in values)])
    return "\n".join(markdown_table(["distance", *of_pair], rows))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of a job of verl-precision mismatch")
    found = gaps_in(parser.parse_args().folder / "journal.jsonl")
    print(growth(found), autocorrelation(found), sep="\n\n")


if __name__ == "__main__":
    main()
