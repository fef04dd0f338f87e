"""`python -m flowkit` is the `flowkit` command of that Python."""

from flowkit.cli import main

if __name__ == "__main__":
    main()
