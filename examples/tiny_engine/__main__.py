"""``python -m examples.tiny_engine``."""

from examples.tiny_engine.run import main

if __name__ == "__main__":
    main()
