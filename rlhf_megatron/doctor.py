"""What is installed and what will be used: `python -m rlhf_megatron.doctor [--json]`.

Ends with 0 when a job can run here, with 1 when something that it needs is missing, broken or of a wrong version.
"""

import argparse
import sys


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m rlhf_megatron.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the same for programs")
    as_json = parser.parse_args().json

    from rlhf_megatron.parallel.installation import diagnose, look

    diagnosis = diagnose(look())
    print(diagnosis.to_json() if as_json else diagnosis.to_text())
    sys.exit(0 if diagnosis.can_run else 1)


if __name__ == "__main__":
    main()
