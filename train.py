import sys

from workbench.commands import environment

if __name__ == "__main__":
    environment.prepare(sys.argv)
    from workbench.commands.main import leave, main

    leave(main())
