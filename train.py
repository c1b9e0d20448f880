"""Train from a clone: `python train.py` does the same as the command `stoker`."""

from stoker.__main__ import main

if __name__ == "__main__":
    main()
