from trainer.cli import leave, main

if __name__ == "__main__":
    leave(main())
