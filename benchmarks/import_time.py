# SPDX-License-Identifier: Apache-2.0
"""How long does `import commute` take, and how much of it is NumPy's?

    python -m benchmarks.import_time

Fresh interpreters, alternating; the median of eleven, after one that warms the file cache. The
figure: under 150 ms, NumPy included.
"""

import statistics
import subprocess
import sys

LIMIT_MS = 150.0
ROUNDS = 11
_TIMED = "import time; t = time.perf_counter(); import {0}; print((time.perf_counter() - t) * 1e3)"


def milliseconds(module: str) -> float:
    command = [sys.executable, "-c", _TIMED.format(module)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return float(done.stdout)


def main() -> int:
    samples: dict[str, list[float]] = {"numpy": [], "commute": []}
    for number in range(ROUNDS + 1):
        for module, found in samples.items():
            took = milliseconds(module)
            if number > 0:
                found.append(took)
    for module, found in samples.items():
        spread = f"[{min(found):.0f}-{max(found):.0f}]"
        print(f"import {module:<8}{statistics.median(found):7.1f} ms {spread}")
    met = statistics.median(samples["commute"]) < LIMIT_MS
    print(f"{'met' if met else 'not met'}: import commute under {LIMIT_MS:.0f} ms")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
