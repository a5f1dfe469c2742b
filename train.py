import sys

from trainer import environment

if __name__ == "__main__":
    environment.prepare(sys.argv)
    from trainer.cli import leave, main

    leave(main())
