import sys

from trainer import environment

if __name__ == "__main__":
    environment.check(sys.argv)
    from trainer.cli import leave, main

    leave(main())
