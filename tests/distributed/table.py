"""What becomes of runs over two nodes that are struck: ``python -m tests.distributed.table``."""

from __future__ import annotations

from tests.support.nodes import FAULTS, strike


def main() -> None:
    """Print the table."""
    print("| fault | longest publish | of | node 0 delivers after | node 1 after | left |")
    print("|---|---:|---:|---:|---:|---|")
    for fault in FAULTS:
        found = strike(fault)
        back = " | ".join(f"{seconds:.1f} s" for _, seconds in sorted(found.back.items()))
        left = ", ".join(found.left) or "nothing"
        milliseconds = f"{found.longest * 1e3:.1f} ms | {found.publishes:,}"
        print(f"| {fault} | {milliseconds} | {back} | {left} |", flush=True)


if __name__ == "__main__":
    main()
