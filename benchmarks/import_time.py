"""What the plugin adds to `import verl`: CPU seconds with and without it, alternating, in clean interpreters.

python benchmarks/import_time.py --repeats 7
"""

import argparse
import os
import statistics
import subprocess
import sys

SCRIPT = "import time; start = time.process_time(); import verl; print(time.process_time() - start)"


def seconds(policy: str) -> float:
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": policy}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="interpreters started for each of the two")
    repeats = parser.parse_args().repeats
    seconds("auto")  # fill the page cache
    pairs = [(seconds("none"), seconds("auto")) for _ in range(repeats)]
    without, with_plugin = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"import verl: {without:.2f} s without the plugin, {with_plugin:.2f} s with it (median of {repeats})")
    print(f"added: {(with_plugin - without) * 1000:.0f} ms CPU time, ratio {with_plugin / without:.3f}")


if __name__ == "__main__":
    main()
