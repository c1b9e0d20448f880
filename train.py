"""Train from a clone: `python train.py model=cnn` does what the command `stoker model=cnn` does
anywhere.
"""

from stoker.__main__ import main

if __name__ == "__main__":
    main()
