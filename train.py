import sys

from trainer.cli import environment

if __name__ == "__main__":
    environment.prepare(sys.argv)
    from trainer.cli.main import leave, main

    leave(main())
