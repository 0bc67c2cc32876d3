"""The command `weightsync`. It imports nothing before it can catch a Ctrl-C."""

import sys


def main() -> int:
    """Run the command line, and return its exit status."""
    try:
        from weightsync.tools import cli

        return cli.main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


if __name__ == "__main__":  # spawned child processes import this module too
    sys.exit(main())
