"""`python -m replay` is the command `rotaradix`."""

from replay.cli import main

if __name__ == "__main__":
    main(prog_name="rotaradix")
